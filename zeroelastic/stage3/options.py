"""The "zeroelastic" block of the DeepSpeed configuration, validated when the engine is built."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from zeroelastic.errors import ConfigError
from zeroelastic.executors import OPERATIONS, Executor
from zeroelastic.executors.build_info import describe_build
from zeroelastic.safepickle import split_global

Verify = Literal["full", "quick", "off"]
MissingState = Literal["error", "fresh"]


def _verify_default() -> Verify:
    """Digests in numpy take longer than the load that they prove."""
    return "full" if describe_build("native").usable else "quick"


class Options(BaseModel):
    """What users can say in the "zeroelastic" block; every option has a safe default.

    ``verify``: "full" (or true) digests what was loaded and compares it with the commit record, and compares the
    CRC-32 of the module states' records; "quick" looks at no payload, but holds the headers against the record's
    digests of them; "off" (or false) leaves that out too, for files that were changed on purpose. The default is "full"
    where the native engine is built, else "quick". ``fallback``: a load without a tag goes on to the newest tag that
    verifies, and marks damaged ones (zeroelastic.quarantine). ``required``: a load that finds no checkpoint is an
    error, not a fresh start. ``strict``: refuse a resume that changes the global batch. ``missing_state``: "error"
    refuses a checkpoint whose parameters or optimizer groups are not those of the run; "fresh" restores what both have
    and names what becomes of the rest. ``safe_load``: unpickle ``*_model_states.pt`` through torch's allow-list too.
    ``allow_globals``: classes, such as "package.module.Class", that a file may name beyond the allow-lists: they are
    inert stand-ins in optimizer files; under ``safe_load``, torch makes objects of them. ``fsync``: make files durable
    before the commit record names them. ``background_save``: copy what is saved to host memory, and write and commit it
    while training goes on.
    ``save_timeout_s``: how many seconds the ranks of a save wait for one another before it fails, naming those that did
    not arrive. ``executor``: the engine that reads and writes payload: "numpy" or "native" for host memory and files,
    "cuda" for a GPU's memory, or "torch" for it by way of host memory; what is not named, "auto" chooses.
    ``keep_gradient_scale``: under Lightning, where gradients are divided by the accumulation twice, go on dividing by
    that of the saved run when it changed; nothing else here changes gradients.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    verify: Verify = Field(default_factory=_verify_default)
    fallback: bool = False
    required: bool = False
    strict: bool = False
    missing_state: MissingState = "error"
    safe_load: bool = False
    allow_globals: list[str] = Field(default_factory=list)
    fsync: bool = True
    background_save: bool = False
    save_timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 900.0
    executor: Executor = "auto"
    keep_gradient_scale: bool = True

    @property
    def host_executor(self) -> Executor:
        """The engine for files and host memory: "auto" where ``executor`` names one for a GPU."""
        return self.executor if "write" in OPERATIONS.get(self.executor, ("write",)) else "auto"

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
    """The options of a DeepSpeed configuration. Raises ConfigError naming what is wrong and what is known."""
    block = config.get("zeroelastic", {})
    if not isinstance(block, Mapping):
        raise ConfigError(f'"zeroelastic" in the DeepSpeed configuration is {block!r}, not a block of options.')
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
