"""The "zeroelastic" block of the DeepSpeed configuration, validated when the engine is built."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Annotated, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from zeroelastic.errors import ConfigError
from zeroelastic.executors.build_info import describe_build
from zeroelastic.executors.dispatch import OPERATIONS, Executor
from zeroelastic.torch_file.safe_unpickler import split_global

logger = logging.getLogger(__name__)

Verify = Literal["off", "quick", "read", "full"]
VERIFY_LEVELS: tuple[Verify, ...] = get_args(Verify)
"""How much a load verifies, the least first."""

OnMismatch = Literal["error", "initialize"]

_RENAMED = {
    "background_save": '"async_save"',
    "executor": '"io_engine"',
    "missing_state": '"on_mismatch", which takes "initialize" in place of "fresh"',
    "safe_load": '"weights_only_load"',
    "strict": '"strict_batch"',
}
"""Options of earlier versions -> what they are called now."""


class Options(BaseModel):
    """The options that users can set in the "zeroelastic" block. Every option has a safe default.

    The descriptions are the cells of the table in docs/quickstart.md (``options_table``).
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    verify: Verify = Field(default="full", description="how much a load verifies, [see below](#what-a-load-verifies)")
    fallback: bool = Field(
        default=False,
        description="`true`: a load without a tag goes back to the newest tag that verifies, and marks damaged ones, "
        "[see below](#falling-back)",
    )
    required: bool = Field(
        default=False,
        description="`true`: a load that finds no checkpoint (a missing directory, a mistyped path) is an error that "
        "names what is there instead. By default the run begins from scratch, as with DeepSpeed, with a warning",
    )
    strict_batch: bool = Field(
        default=False, description="refuse a resume that changes the global batch, instead of only warning of it"
    )
    on_mismatch: OnMismatch = Field(
        default="error",
        description='`"error"`: the parameters and optimizer groups of the run must be those of the save; the error '
        'lists everything that differs. `"initialize"`: what both have is restored, the rest keeps its initial values '
        "and is named, [see below](#when-other-parameters-are-trained)",
    )
    weights_only_load: bool = Field(
        default=False,
        description="read `*_model_states.pt` through torch's allow-list too (client state may then hold plain values "
        "and tensors only)",
    )
    allow_globals: list[str] = Field(
        default_factory=list,
        description='classes (`"package.module.Class"`) that files may name beyond the allow-lists: in optimizer files '
        "they become inert stand-ins; under `weights_only_load`, torch makes objects of them",
    )
    fsync: bool = Field(
        default=True,
        description="make files durable before the commit record names them; `false` leaves it, the record and "
        "`latest` to the system",
    )
    async_save: bool = Field(
        default=False,
        description="`save_checkpoint` returns when the state is copied to host memory; the files are written and "
        "committed while training goes on, [see here](elastic.md#saving-in-the-background)",
    )
    save_timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(
        default=900.0,
        description="how many seconds the ranks of a save wait for one another before it fails and names the ranks "
        "that did not arrive",
    )
    io_engine: Executor = Field(
        default="auto",
        description='the engine that reads and writes payload: `"numpy"` or `"native"` for files and host memory, '
        '`"cuda"` or `"torch"` for a GPU\'s memory. `"auto"` takes the fastest that is built, and logs which; '
        "`zeroelastic doctor` says why one is not built",
    )
    keep_gradient_scale: bool = Field(
        default=True,
        description="under Lightning: a resume with another accumulation keeps the scale of gradients, "
        "[see here](lightning.md#what-is-corrected)",
    )

    @property
    def verifies_content(self) -> bool:
        """Whether a load compares the digests of all that it restores."""
        return self.verify in ("read", "full")

    @property
    def host_io_engine(self) -> Executor:
        """The engine for files and host memory: "auto" where ``io_engine`` names one for a GPU."""
        return self.io_engine if "write" in OPERATIONS.get(self.io_engine, ("write",)) else "auto"

    @field_validator("allow_globals")
    @classmethod
    def _are_names(cls, names: list[str]) -> list[str]:
        for name in names:
            split_global(name)
        return names

    @field_validator("verify", mode="before")
    @classmethod
    def _verify_flag(cls, value: object) -> object:
        if isinstance(value, bool):
            return "full" if value else "off"
        return value


def parse_options(config: Mapping[str, object]) -> Options:
    """The options of a DeepSpeed configuration. Raises ConfigError that names the mistake and the known options."""
    block = config.get("zeroelastic", {})
    if not isinstance(block, Mapping):
        raise ConfigError(f'"zeroelastic" in the DeepSpeed configuration is {block!r}, not a block of options.')
    renamed = [f'"{old}" is now {new}' for old, new in _RENAMED.items() if old in block]
    if renamed:
        raise ConfigError(f'"zeroelastic": {"; ".join(renamed)}. Change the DeepSpeed configuration.')
    known = ", ".join(sorted(Options.model_fields))
    unknown = sorted(set(block) - set(Options.model_fields))
    if unknown:
        raise ConfigError(f'"zeroelastic" has no option {", ".join(map(repr, unknown))}. Known options: {known}.')
    try:
        return Options.model_validate(dict(block))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f'"zeroelastic": {where} is {first["input"]!r}: {first["msg"]}.') from None


def warn_of_slow_verification(options: Options) -> None:
    """Log a warning where loads verify in full by default and the native engine, which makes that fast, is missing."""
    if "verify" not in options.model_fields_set and not describe_build("native").usable:
        logger.warning(
            "the native engine is not built: verifying a load in full takes longer than reading it. Build it "
            '(`zeroelastic doctor` explains), or set "verify" in the "zeroelastic" block to accept "full" or choose '
            '"quick".'
        )


def options_table() -> str:
    """The options as the Markdown table of docs/quickstart.md."""
    rows = ["| option | default | meaning |", "|---|---|---|"]
    for name, field in Options.model_fields.items():
        default = json.dumps(field.get_default(call_default_factory=True)).removesuffix(".0")
        rows.append(f"| `{name}` | `{default}` | {field.description} |")
    return "\n".join(rows) + "\n"
