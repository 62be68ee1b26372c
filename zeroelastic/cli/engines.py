"""The engines as `zeroelastic doctor` finds them: built, loadable, for which machines, and which one "auto" takes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import zeroelastic
from zeroelastic.cli.probe import Probe, ProbeFailed

ENGINES: tuple[Literal["native", "cuda"], ...] = ("native", "cuda")
LIMIT_S = 120.0


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine's library.

    "not built" is a choice or a missing compiler, "broken" a library that is there and cannot be used; ``reason`` and
    ``remedy`` are empty for one that is "usable". ``compiler`` and ``targets`` say what made it, and for what;
    ``instruction_set`` and ``threads`` what a call would use (native only).
    """

    name: Literal["native", "cuda"]
    state: Literal["usable", "not built", "broken"]
    path: str
    log: str | None
    compiler: str
    targets: str
    instruction_set: str | None
    threads: int | None
    reason: str
    remedy: str


def describe_engine(name: Literal["native", "cuda"]) -> Engine:
    """Load an engine's library and look at it. Run by a Probe: loading a damaged one may kill the process."""
    from zeroelastic.errors import ConfigError
    from zeroelastic.executors import describe_build
    from zeroelastic.executors.native_executor import default_threads, instruction_set

    info = describe_build(name)
    log = None if info.log is None else str(info.log)
    path = str(info.path)
    if not info.usable:
        state: Literal["not built", "broken"] = "broken" if info.path.exists() else "not built"
        return Engine(name, state, path, log, "", "", None, None, info.reason, info.remedy)
    compiler, _, targets = info.compiler.partition(", ")
    if name != "native":
        return Engine(name, "usable", path, log, compiler, targets, None, None, "", "")
    try:
        return Engine(name, "usable", path, log, compiler, targets, instruction_set(), default_threads(), "", "")
    except ConfigError as error:
        remedy = "Unset it, or set it to the number of threads that one read may use."
        return Engine(name, "broken", path, log, compiler, targets, instruction_set(), None, str(error), remedy)


def engine_answer(probe: Probe, name: Literal["native", "cuda"]) -> Engine:
    """The answer of a Probe of ``describe_engine``, or what it means that there is none."""
    try:
        return probe.answer(Engine, limit_s=LIMIT_S)
    except ProbeFailed as failure:
        path = Path(zeroelastic.__file__).parent / f"_{name}.so"
        return Engine(
            name,
            "broken" if path.exists() else "not built",
            str(path),
            None,
            "",
            "",
            None,
            None,
            f"looking at {path} failed: {failure}",
            f"If the file is damaged or was made for another machine, delete it and reinstall with "
            f"ZEROELASTIC_BUILD_{name.upper()}=1 pip install --force-reinstall --no-deps .",
        )


def choose_auto() -> str:
    """The engine that "auto" stands for. Run by a Probe, as it loads the library."""
    from zeroelastic.executors import choose_executor

    return choose_executor("auto")
