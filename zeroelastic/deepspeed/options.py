"""The "zeroelastic" block of the DeepSpeed configuration, and the arguments of saves and loads."""

from __future__ import annotations

import difflib
import json
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from zeroelastic.errors import ConfigError, without_pydantic
from zeroelastic.executors.build_info import is_usable
from zeroelastic.executors.dispatch import Executor, host_executor
from zeroelastic.io.paths import FilePath, as_path
from zeroelastic.io.retries import Retries
from zeroelastic.torch_file.safe_unpickler import split_global

logger = logging.getLogger(__name__)

Verify = Literal["off", "quick", "read", "full"]
VERIFY_LEVELS: tuple[Verify, ...] = get_args(Verify)
"""How much a load verifies, the least first."""

OnMismatch = Literal["error", "initialize"]

SavedFormat = Literal["elastic", "rigid"]

_BLOCK = "zeroelastic"
_ELASTIC = "elastic_checkpoint"
_ELASTIC_PLACE = 'move it into "zero_optimization"'

KEEP_GLOBAL_BATCH = "ZEROELASTIC_KEEP_GLOBAL_BATCH"
"""An environment variable: ``keep_global_batch`` where the DeepSpeed configuration is out of reach."""


class MemoryOptions(BaseModel):
    """Checkpoints in the memory of the nodes: how often, and how a node's part survives the loss of the node."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    every: Annotated[int, Field(ge=1)] = 1
    """Every how many optimizer steps."""
    copies: Annotated[int, Field(ge=0, le=8)] = 1
    """On how many other nodes each node's part is too; 0: it survives the loss of processes, not of a node."""


class Options(BaseModel):
    """The options that users can set in the "zeroelastic" block. Every option has a safe default.

    The descriptions are the cells of the table in docs/reference/options.md (``options_table``).
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    format: SavedFormat | None = Field(
        default=None,
        description='`"elastic"`: saves at ZeRO stage 3 say themselves which parameter lies where; `"rigid"`: they are '
        "as DeepSpeed writes them. If it is not set, DeepSpeed's own key decides: `elastic_checkpoint` under "
        "`zero_optimization`",
    )
    verify: Verify = Field(
        default="read",
        description="how much a load verifies, [see here](loading.md#what-a-load-verifies); where the state is on a "
        'GPU, the default is `"full"`',
    )
    fallback: bool = Field(
        default=False,
        description="`true`: a load without a tag passes over a damaged newest tag, with a warning, for the newest "
        "older one that loads, [see here](loading.md#falling-back)",
    )
    required: bool = Field(
        default=False,
        description="`true`: a load that finds no checkpoint (a missing directory, a mistyped path) is an error that "
        "names what is there instead. By default the run begins from scratch, as with DeepSpeed, with a warning",
    )
    strict: bool = Field(
        default=False,
        description="`true`: a resume that changes the global batch, or continues with another base model, is an error "
        "and not a warning",
    )
    keep_global_batch: bool = Field(
        default=False,
        description="a Hugging Face Trainer, and every front end on top of it, resumes with the micro batch and the "
        "accumulation that give the saved global batch at its number of ranks, "
        "[see here](../guides/front-ends.md#the-batch); other resumes that change the global batch are refused. The "
        "environment variable `ZEROELASTIC_KEEP_GLOBAL_BATCH=1` does the same",
    )
    on_mismatch: OnMismatch = Field(
        default="error",
        description='`"error"`: the parameters and optimizer groups of the run must be those of the save; the error '
        'lists everything that differs. `"initialize"`: what both have is restored, the rest keeps its initial values '
        "and is named, [see here](../guides/lora.md#train-other-parameters)",
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
    frozen: Literal["include", "exclude"] = Field(
        default="include",
        description='`"exclude"`: frozen weights are not written to checkpoints, their digests are. A load keeps the '
        "run's own frozen weights, and refuses those of another base model, "
        "[see here](../guides/lora.md#save-no-frozen-weights)",
    )
    async_save: bool = Field(
        default=False,
        description="`save_checkpoint` returns when the state is copied to host memory; the files are written and "
        "committed while training continues, [see here](../guides/background-saves.md)",
    )
    memory: MemoryOptions | None = Field(
        default=None,
        description='`{"every": 1, "copies": 1}`: under `preemption()`, every `every` steps each node keeps the state '
        "of its ranks in its own memory, and in that of `copies` other nodes, "
        "[see here](../guides/memory-checkpoints.md)",
    )
    save_timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(
        default=900.0,
        description="how many seconds the ranks of a save wait for one another before it fails and names the ranks "
        "that did not arrive",
    )
    keep: Annotated[int, Field(ge=1)] | None = Field(
        default=None,
        description="how many checkpoints are kept: after each commit, older ones beyond the newest `keep` are "
        "removed, [see here](../guides/keeping.md#keeping-few-checkpoints)",
    )
    keep_every: Annotated[int, Field(ge=1)] | None = Field(
        default=None,
        description="with `keep`: checkpoints whose step is a multiple of this stay as well",
    )
    upload: str | None = Field(
        default=None,
        description="a URL such as `s3://bucket/run`: each checkpoint is uploaded there when it is committed, while "
        "training continues, [see here](../guides/storage.md#uploads)",
    )
    store_retries: Annotated[int, Field(ge=0, le=100)] = Field(
        default=4,
        description="how often a request to an object store that failed for a passing reason (a broken connection, a "
        "busy or failing server) is made again, with growing random pauses, "
        "[see here](../guides/storage.md#object-stores)",
    )
    store_timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(
        default=300.0, description="how many seconds a request to an object store may go without an answer"
    )
    io_engine: Executor = Field(
        default="auto",
        description='the engine that reads and writes payload: `"numpy"` or `"native"` for files and host memory, '
        '`"cuda"` for a GPU\'s memory. `"auto"` takes the fastest that is built, and logs which; '
        "`zeroelastic doctor` says why one is not built",
    )
    keep_gradient_scale: bool = Field(
        default=True,
        description="under Lightning: a resume with another accumulation keeps the scale of gradients, "
        "[see here](../guides/lightning.md#what-is-corrected)",
    )

    @property
    def refuses_other_batch(self) -> bool:
        """Whether a load that changes the global batch is an error."""
        return self.strict or self.keep_global_batch

    @property
    def verifies_content(self) -> bool:
        """Whether a load compares the digests of all that it restores."""
        return self.verify in ("read", "full")

    def verify_level(self, *, on_gpu: bool) -> Verify:
        """How much a load verifies: as asked for, or by the memory that it fills.

        Digests of a GPU's memory cost less than digests of the bytes that the host reads into it, and show more.
        """
        if "verify" in self.model_fields_set or not (on_gpu and is_usable("cuda")):
            return self.verify
        return "full"

    @property
    def retries(self) -> Retries:
        """How requests to an object store are repeated."""
        return Retries(self.store_retries, timeout_s=self.store_timeout_s)

    @property
    def host_io_engine(self) -> Executor:
        """The engine for files and host memory: "auto" where ``io_engine`` names one for a GPU."""
        return host_executor(self.io_engine)

    @field_validator("allow_globals")
    @classmethod
    def _are_names(cls, names: list[str]) -> list[str]:
        for name in names:
            split_global(name)
        return names

    @field_validator("upload")
    @classmethod
    def _is_url(cls, url: str | None) -> str | None:
        if url is not None and "://" not in url:
            raise ValueError("it is no URL such as s3://bucket/run or file:///mnt/run")
        if url is not None:
            as_path(url)  # its package may not be installed
        return url

    @field_validator("verify", mode="before")
    @classmethod
    def _verify_flag(cls, value: object) -> object:
        if isinstance(value, bool):
            return "full" if value else "off"
        return value


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """The arguments of DeepSpeed's ``load_checkpoint``, by its names, and the ``options`` that hold on all ranks."""

    load_dir: str
    tag: str | None = None
    load_module_strict: bool = True
    load_optimizer_states: bool = True
    load_lr_scheduler_states: bool = True
    load_module_only: bool = False
    custom_load_fn: Callable[..., Any] | None = None
    options: Options = field(default_factory=Options)

    @property
    def directory(self) -> FilePath:
        """The directory of the run; it may be a URL."""
        return as_path(self.load_dir)

    @property
    def weights_only(self) -> bool:
        """Whether optimizer state, hyper-parameters and loss scale stay as the run has them."""
        return self.load_module_only or not self.load_optimizer_states

    @property
    def strict_module(self) -> bool:
        """Whether the module's own entries have to be those of the checkpoint."""
        return self.load_module_strict and self.custom_load_fn is None

    def flags(self) -> dict[str, Any]:
        """The keyword arguments after ``load_dir`` and ``tag``, for DeepSpeed's own methods."""
        return {name: getattr(self, name) for name in _FLAGS}


_FLAGS = (
    *("load_module_strict", "load_optimizer_states", "load_lr_scheduler_states", "load_module_only"),
    "custom_load_fn",
)


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """The arguments of one call of ``save_checkpoint``.

    ``save_dir`` is absolute; ``named`` is the tag directory in the caller's own words, the same on all ranks.
    """

    save_dir: str
    tag: str
    named: str
    client_state: Any
    save_latest: bool
    excluded_by: Literal["option", "argument"] | None

    @property
    def directory(self) -> Path:
        """The directory that is saved to."""
        return Path(self.save_dir)

    @property
    def tag_dir(self) -> Path:
        """The directory of the tag."""
        return self.directory / self.tag

    @property
    def excludes_frozen(self) -> bool:
        """Whether frozen weights are left out of the files."""
        return self.excluded_by is not None

    def call_deepspeed(self, original: Callable[..., Any], engine: Any) -> Any:
        """Call DeepSpeed's own method with these arguments."""
        args = (self.save_dir, self.tag, self.client_state, self.save_latest, self.excludes_frozen)
        return original(engine, *args)


def parse_options(config: Mapping[str, object]) -> Options:
    """The options of a DeepSpeed configuration. Raises ConfigError that names the mistake and the known options."""
    _refuse_misplaced(config)
    block = config.get("zeroelastic", {})
    if not isinstance(block, Mapping):
        raise ConfigError(
            f'"zeroelastic" in the DeepSpeed configuration is {block!r}, not a block of options. Write '
            f'{{"zeroelastic": {{...}}}}.'
        )
    known = ", ".join(sorted(Options.model_fields))
    unknown = sorted(set(block) - set(Options.model_fields))
    if unknown:
        named = ", ".join(repr(name) + _meant(name) for name in unknown)
        raise ConfigError(f'"zeroelastic" has no option {named}. Known options: {known}.')
    try:
        options = Options.model_validate({**_from_environment(), **block})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        wrong = without_pydantic(first["msg"])
        raise ConfigError(f'"zeroelastic": {where} is {first["input"]!r}: {wrong}. Change it.') from None
    _refuse_contradictions(options, config)
    return options


def _refuse_contradictions(options: Options, config: Mapping[str, object]) -> None:
    """Raise ConfigError for options that contradict one another, or DeepSpeed's own key."""
    zero = config.get("zero_optimization")
    flag = zero.get(_ELASTIC) if isinstance(zero, Mapping) else None
    if options.format is not None and flag is not None and bool(flag) != (options.format == "elastic"):
        raise ConfigError(
            f'"zeroelastic": format is "{options.format}", and "{_ELASTIC}" under "zero_optimization" is {flag!r}: '
            "they ask for different formats. Leave one of them out."
        )


def _from_environment() -> dict[str, bool]:
    """The options that environment variables set; the block of the configuration overrides them. Raises ConfigError."""
    value = os.environ.get(KEEP_GLOBAL_BATCH, "")
    if value not in ("", "0", "1"):
        raise ConfigError(f"{KEEP_GLOBAL_BATCH} is {value!r}; it can be 1 (on) or 0 (off). Change it, or leave it out.")
    return {"keep_global_batch": True} if value == "1" else {}


def _refuse_misplaced(config: Mapping[str, object]) -> None:
    """Raise ConfigError for our block under another name, and for our options outside of it."""
    for name in config:
        if name != _BLOCK and difflib.get_close_matches(name.lower(), [_BLOCK], cutoff=0.85):
            raise ConfigError(f'"{name}" in the DeepSpeed configuration: the block is called "{_BLOCK}". Rename it.')
        if name in Options.model_fields or name == _ELASTIC:
            place = _ELASTIC_PLACE if name == _ELASTIC else f'move it into the block "{_BLOCK}"'
            raise ConfigError(f'"{name}" at the top level of the DeepSpeed configuration has no effect: {place}.')


def _meant(name: str) -> str:
    """The option that an unknown one was meant to be, in brackets."""
    if name == _ELASTIC:
        return f' ({_ELASTIC_PLACE}, or write "format": "elastic")'
    near = difflib.get_close_matches(name.lower(), Options.model_fields, 1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def warn_of_slow_verification(options: Options) -> None:
    """Log a warning where loads verify content by default and the native engine, which makes that fast, is missing."""
    if "verify" not in options.model_fields_set and not is_usable("native"):
        logger.warning(
            "the native engine is not built: verifying what a load reads takes longer than reading it. Build it "
            '(`zeroelastic doctor` explains), or set "verify" in the "zeroelastic" block: "read" accepts this, "quick" '
            "verifies less."
        )


def options_table() -> str:
    """The options as the Markdown table of docs/reference/options.md."""
    rows = ["| option | default | meaning |", "|---|---|---|"]
    for name, option in Options.model_fields.items():
        default = json.dumps(option.get_default(call_default_factory=True)).removesuffix(".0")
        rows.append(f"| `{name}` | `{default}` | {option.description} |")
    return "\n".join(rows) + "\n"
