"""The "zeroelastic" block of the DeepSpeed configuration, validated when the engine is built."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from zeroelastic.errors import ConfigError
from zeroelastic.executors import OPERATIONS, Executor

Verify = Literal["full", "quick", "off"]
MissingState = Literal["error", "fresh"]


class Options(BaseModel):
    """What users can say in the "zeroelastic" block; every option has a safe default.

    ``verify``: "full" (or true) recomputes the content digests after a load and compares them with the commit record;
    "quick" checks headers, sizes and save ids only; "off" (or false) does not report a content root either.
    ``strict``: refuse a resume that changes the global batch. ``missing_state``: "error" refuses a checkpoint whose
    parameters or optimizer groups are not those of the run; "fresh" restores what both have and names what becomes of
    the rest. ``safe_load``: unpickle ``*_model_states.pt`` through torch's allow-list too. ``fsync``: make files
    durable before the commit record names them. ``save_timeout_s``: how many seconds the ranks of a save wait for one
    another before it fails, naming those that did not arrive. ``executor``: the engine that reads and writes payload:
    "numpy" or "native" for host memory and files, "cuda" for a GPU's memory, or "torch" for it by way of host memory;
    what is not named, "auto" chooses.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    verify: Verify = "full"
    strict: bool = False
    missing_state: MissingState = "error"
    safe_load: bool = False
    fsync: bool = True
    save_timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 900.0
    executor: Executor = "auto"

    @property
    def host_executor(self) -> Executor:
        """The engine for files and host memory: "auto" where ``executor`` names one for a GPU."""
        return self.executor if "write" in OPERATIONS.get(self.executor, ("write",)) else "auto"

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
