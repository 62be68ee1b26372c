"""The description of a checkpoint as plain data; a field is None or empty where its value is not known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal

from zeroelastic.checkpoint.marks import Quarantine
from zeroelastic.checkpoint.optimizer_file import OptionValue, ScalerState
from zeroelastic.core.digest import ScalarValue

ParamKind = Literal["trained", "frozen", "tied"]
KINDS: tuple[ParamKind, ...] = ("trained", "frozen", "tied")


@dataclass(frozen=True, slots=True)
class ParamInfo:
    """A parameter. ``nbytes`` is the size of all its tensors: None where no header was read, 0 where it is tied.

    ``dtypes`` is by state key; ``group`` is the number of its optimizer group. ``sub_group`` and ``offset`` are its
    place in the layout (LayoutInfo), None where it has none or no header was read.
    """

    name: str
    kind: ParamKind
    shape: tuple[int, ...]
    numel: int
    nbytes: int | None
    group: int | None
    dtypes: Mapping[str, str]
    tied_to: str | None = None
    sub_group: int | None = None
    offset: int | None = None


@dataclass(frozen=True, slots=True)
class LayoutInfo:
    """How the trained parameters are cut over the ranks, all numbers in elements.

    ``split`` "param": each rank has ``ceil(numel / world_size)`` elements of every parameter, at the parameter's
    ``offset`` in the rank's buffer ``sub_group``. "group": the parameters of an optimizer group lie end to end, each
    from its ``offset`` on, and the ranks have equal parts of that. ``sub_group_numel`` are the elements of each of one
    rank's buffers, padding included.
    """

    split: Literal["param", "group"]
    sub_group_numel: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BufferInfo:
    """A buffer of the module, whole in every rank's model states file."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class GroupInfo:
    """An optimizer group: its hyper-parameters, and how many parameters and elements it has."""

    options: Mapping[str, OptionValue]
    num_params: int
    numel: int


@dataclass(frozen=True, slots=True)
class StateInfo:
    """One state key over all parameters: the dtypes it is kept in, parameters that have it, and bytes."""

    dtypes: tuple[str, ...]
    num_params: int
    nbytes: int


@dataclass(slots=True, kw_only=True)
class Inspection:
    """The description of a checkpoint.

    ``problems`` make it invalid; ``unsupported`` says why zeroelastic cannot load it; ``notes`` are for information.
    """

    problems: list[str] = field(default_factory=list)
    unsupported: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    path: str
    tag: str
    framework: str = "deepspeed"
    kind: str = "zero-3"
    latest: str | None = None
    format: str | None = None
    stage: int | None = None
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
    layout: LayoutInfo | None = None
    state: dict[str, StateInfo] = field(default_factory=dict)
    scalars: dict[str, tuple[ScalarValue, ...]] = field(default_factory=dict)
    groups: tuple[GroupInfo, ...] = ()
    scaler: ScalerState | None = None
    params: tuple[ParamInfo, ...] = ()
    buffers: tuple[BufferInfo, ...] = ()
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
    remedy: str | None = None

    def count(self, kind: ParamKind) -> tuple[int, int]:
        """How many parameters of a kind there are, and their elements."""
        numels = [param.numel for param in self.params if param.kind == kind]
        return len(numels), sum(numels)

    @property
    def state_bytes(self) -> int | None:
        """Bytes of all tensors, padding excluded; None where the size of one is not known."""
        sizes = [param.nbytes for param in self.params]
        return None if not sizes or None in sizes else sum(size for size in sizes if size is not None)

    def matching(self, pattern: str) -> tuple[ParamInfo, ...]:
        """The parameters whose names match a glob, or contain a text without ``*``, ``?`` and ``[``."""
        if any(sign in pattern for sign in "*?["):
            return tuple(param for param in self.params if fnmatchcase(param.name, pattern))
        return tuple(param for param in self.params if pattern in param.name)
