"""What is told of a checkpoint: plain data, every part of it None or empty where it cannot be known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal

from zeroelastic.digest import ScalarValue
from zeroelastic.quarantine import Quarantine
from zeroelastic.shard import OptionValue, ScalerState

ParamKind = Literal["trained", "frozen", "tied"]


@dataclass(frozen=True, slots=True)
class ParamView:
    """One line of the parameter table. ``nbytes`` are over all its state, None where no header tells; 0 where tied.

    ``dtypes`` are those of its tensors by state key, ``group`` the optimizer's.
    """

    name: str
    kind: ParamKind
    shape: tuple[int, ...]
    numel: int
    nbytes: int | None
    group: int | None
    dtypes: Mapping[str, str]
    tied_to: str | None = None


@dataclass(frozen=True, slots=True)
class BufferView:
    """A buffer of the module, whole in every rank's model states file."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class GroupView:
    """An optimizer group: its hyper-parameters, and how many parameters and elements it has."""

    options: Mapping[str, OptionValue]
    num_params: int
    numel: int


@dataclass(frozen=True, slots=True)
class StateView:
    """One state key over all parameters: the dtypes it is kept in, parameters that have it, and bytes."""

    dtypes: tuple[str, ...]
    num_params: int
    nbytes: int


@dataclass(slots=True)
class Inspection:
    """Everything that was found out. None and empty values are what could not be, or is not there.

    ``problems`` make the checkpoint invalid; ``unsupported`` is what zeroelastic does not do with it; ``notes`` are
    worth knowing.
    """

    path: str
    tag: str
    framework: str = "deepspeed"
    kind: str = "zero-3"
    latest: str | None = None
    format: str | None = None
    world_size: int | None = None
    tp_size: int | None = None
    step: int | None = None
    skipped_steps: int | None = None
    samples: int | None = None
    save_id: str | None = None
    versions: dict[str, str | None] = field(
        default_factory=lambda: {"zeroelastic": None, "deepspeed": None, "torch": None}
    )
    model_dtype: str | None = None
    master_dtype: str | None = None
    train_batch_size: int | None = None
    sub_group_size: int | None = None
    num_sub_groups: int | None = None
    state: dict[str, StateView] = field(default_factory=dict)
    scalars: dict[str, tuple[ScalarValue, ...]] = field(default_factory=dict)
    groups: tuple[GroupView, ...] = ()
    scaler: ScalerState | None = None
    params: tuple[ParamView, ...] = ()
    buffers: tuple[BufferView, ...] = ()
    scheduler: bool | None = None
    client_state: tuple[str, ...] | None = None
    record: str = "absent"
    content_root: str | None = None
    num_files: int = 0
    disk_bytes: int = 0
    num_missing: int = 0
    missing: tuple[str, ...] = ()
    stale: tuple[str, ...] = ()
    odd: tuple[str, ...] = ()
    leftovers: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    headers_read: int = 0
    quarantine: Quarantine | None = None
    notes: list[str] = field(default_factory=list)
    unsupported: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def count(self, kind: ParamKind) -> tuple[int, int]:
        """How many parameters of a kind there are, and their elements."""
        numels = [param.numel for param in self.params if param.kind == kind]
        return len(numels), sum(numels)

    @property
    def state_bytes(self) -> int | None:
        """Bytes of all tensors, padding excluded; None where the size of one is not known."""
        sizes = [param.nbytes for param in self.params]
        return None if not sizes or None in sizes else sum(size for size in sizes if size is not None)

    def matching(self, pattern: str) -> tuple[ParamView, ...]:
        """The parameters whose names match a glob, or contain a text without ``*``, ``?`` and ``[``."""
        if any(sign in pattern for sign in "*?["):
            return tuple(param for param in self.params if fnmatchcase(param.name, pattern))
        return tuple(param for param in self.params if pattern in param.name)
