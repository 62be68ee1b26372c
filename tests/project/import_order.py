"""The order of the packages: each imports only from the levels below it."""

from __future__ import annotations

LEVELS = [
    {"errors", "_version"},
    {"activation", "byte_sizes"},
    {"report", "observers"},
    {"core"},
    {"distributed"},
    {"io"},
    {"executors"},
    {"torch_file"},
    {"checkpoint"},
    {"runs", "dcp"},
    {"verbs"},
    {"deepspeed"},
    {"elastic"},
    {""},
    {"run", "integrations", "testing"},
    {"cli"},
    {"__main__"},
]
"""The packages from the ground up; each imports only from levels below. "" is the package itself."""


ROOMS = {
    "verbs": ["report", "options", "new_directory", "model_tensors", "reading", "new_files", "elements", "verify",
              "diff", "reshard", "plan", "convert"],
    "deepspeed": ["patching", "options", "engine_state", "engine", "client_state",
                  "live", "fill", "node_local", "load", "save", "install"],
    "elastic": ["memory"],
    "cli": ["terminal", "figures", "tables", "page", "app", "options", "doctor", "documents"],
}  # fmt: skip
"""The rooms of a package that has some, in the same order; other modules of it stand above them."""
