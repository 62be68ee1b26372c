"""The report of ``inspect``: what a checkpoint is; a field is None or empty where its value is not known."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from zeroelastic.errors import counted
from zeroelastic.verbs.interface import Format, Framework, Number, Part, Report
from zeroelastic.verbs.view import TensorPlace

ParamKind = Literal["trained", "frozen", "tied"]


class SavedVersions(Part):
    """The versions that saved."""

    zeroelastic: str | None = None
    deepspeed: str | None = None
    torch: str | None = None


class InspectedRecord(Part):
    """The commit record: whether there is one, and its content root."""

    state: Literal["present", "absent", "damaged", "unknown"] = "absent"
    content_root: str | None = None


class InspectedTotals(Part):
    """Counts over all parameters and files. ``state_bytes`` are of all tensors, padding excluded."""

    params: int = 0
    numel: int = 0
    trained_params: int = 0
    trained_numel: int = 0
    frozen_params: int = 0
    frozen_numel: int = 0
    tied_params: int = 0
    state_bytes: int | None = None
    files: int = 0
    disk_bytes: int = 0


class StateKey(Part):
    """One state key over all parameters: the dtypes it is kept in, parameters that have it, and bytes."""

    dtypes: list[str]
    num_params: int
    bytes: int


class Scalar(Part):
    """A scalar of optimizer state: its type as saved and its value."""

    kind: str
    value: Any


class InspectedGroup(Part):
    """An optimizer group: its hyper-parameters, and how many parameters and elements it has."""

    options: dict[str, Any]
    num_params: int
    numel: int


class LossScaler(Part):
    """DeepSpeed's loss scaler as saved."""

    class_name: str
    dynamic: bool
    overflow: bool
    attributes: dict[str, Any]


class InspectedParam(Part):
    """A parameter. ``bytes`` is the size of all its tensors: None where no header was read, 0 where it is tied.

    ``dtypes`` is by state key; ``group`` is the number of its optimizer group. ``sub_group`` and ``offset`` are its
    place in the layout (SavedLayout), None where it has none or no header was read.
    """

    name: str
    kind: ParamKind
    shape: list[int]
    numel: int
    bytes: int | None
    group: int | None = None
    dtypes: dict[str, str] = Field(default={})
    tied_to: str | None = None
    sub_group: int | None = None
    offset: int | None = None


class SavedLayout(Part):
    """How the trained parameters are cut over the ranks, all numbers in elements.

    ``split`` "param": each rank has ``ceil(numel / world_size)`` elements of every parameter, at the parameter's
    ``offset`` in the rank's buffer ``sub_group``. "group": the parameters of an optimizer group lie end to end, each
    from its ``offset`` on, and the ranks have equal parts of that. ``sub_group_numel`` are the elements of each of one
    rank's buffers, padding included.
    """

    split: Literal["param", "group"]
    sub_group_numel: list[int]


class InspectedBuffer(Part):
    """A buffer of the module, whole in every rank's model states file."""

    name: str
    shape: list[int]
    dtype: str


class TagFiles(Part):
    """The files that stand out: missing ones, and others that no rank of this save has written."""

    num_missing: int = 0
    missing: list[str] = Field(default=[])
    stale: list[str] = Field(default=[])
    odd: list[str] = Field(default=[])
    leftovers: list[str] = Field(default=[])
    folders: list[str] = Field(default=[])


class ExpertLayer(Part):
    """A mixture-of-experts layer: a module that AutoEP replaced, or DeepSpeed's own ``MoE``."""

    name: str
    kind: Literal["autoep", "deepspeed"]
    num_experts: int


class CutTensor(Part):
    """A trained parameter of which ranks have a slice: ``slices`` different ones, on ``ranks`` ranks together.

    ``by`` says which ranks differ: tensor or expert parallel ones. ``dim`` is the dimension that is cut, None where it
    is none alone, or where an expert is whole on some ranks. A slice is of ``pieces`` pieces of the whole parameter.
    """

    name: str
    shape: list[int]
    by: Literal["tensor", "expert"]
    dim: int | None
    slices: int
    pieces: int
    ranks: int

    @property
    def sentence(self) -> str:
        """How it is cut."""
        if self.slices == 1:
            return f"whole on {counted(self.ranks, 'rank')}"
        along = "" if self.dim is None else f" of dimension {self.dim}"
        pieces = f", each of {self.pieces} pieces," if self.pieces > 1 else ""
        return f"{self.slices} slices{along}{pieces} over {self.by} parallel ranks"


class InspectedTopology(Part):
    """How the ranks of a run with tensor or expert parallelism share its trained parameters.

    ``expert_parallel`` are the sizes of the groups of ranks that have all experts of a layer together. ``cuts`` are the
    parameters that are cut; each tensor parallel rank has the ``num_whole`` others as a whole.
    """

    data_parallel: int
    tensor_parallel: int
    expert_parallel: list[int]
    experts: list[ExpertLayer]
    num_whole: int
    cuts: list[CutTensor]

    @property
    def sizes(self) -> str:
        """The sizes as a text."""
        experts = [f"{size} expert parallel" for size in self.expert_parallel]
        tensor = [f"{self.tensor_parallel} tensor parallel"] if self.tensor_parallel > 1 else []
        return ", ".join([f"{self.data_parallel} data parallel", *tensor, *experts])


class StoredTensor(Part):
    """A tensor as the files have it under a state key; ``min``, ``max`` and ``mean`` are those of finite elements."""

    key: str
    dtype: str
    bytes: int
    min: Number | None
    max: Number | None
    mean: Number | None
    nans: int
    first: list[Number]
    places: list[TensorPlace]


class InspectedTensor(Part):
    """A parameter or buffer with all that the files have of it; ``scalars`` are the optimizer's, such as ``step``."""

    name: str
    kind: str
    shape: list[int]
    tied_to: str | None
    stored: list[StoredTensor]
    scalars: dict[str, Any] = Field(default={})


class InspectReport(Report):
    """What a checkpoint is; ``params`` are the parameters that were asked for.

    ``problems`` make it invalid, and ``remedy`` says what to do about them; ``unsupported`` says why zeroelastic cannot
    load it; ``notes`` are for information. It is ``ok`` where it is whole as far as was looked, and supported.
    ``topology`` is there for a run with tensor or expert parallelism, ``tensor`` where one was asked for.
    """

    problems: list[str]
    remedy: str | None = None
    unsupported: list[str] = Field(default=[])
    notes: list[str] = Field(default=[])
    path: str
    tag: str
    latest: str | None = None
    framework: Framework = "deepspeed"
    format: Format | None = None
    stage: int | None = None
    world_size: int | None = None
    tp_size: int | None = None
    step: int | None = None
    skipped_steps: int | None = None
    samples: int | None = None
    save_id: str | None = None
    versions: SavedVersions = SavedVersions()
    model_dtype: str | None = None
    master_dtype: str | None = None
    train_batch_size: int | None = None
    sub_group_size: int | None = None
    num_sub_groups: int | None = None
    layout: SavedLayout | None = None
    record: InspectedRecord = InspectedRecord()
    totals: InspectedTotals = InspectedTotals()
    topology: InspectedTopology | None = None
    state: dict[str, StateKey] = Field(default={})
    scalars: dict[str, list[Scalar]] = Field(default={})
    groups: list[InspectedGroup] = Field(default=[])
    loss_scaler: LossScaler | None = None
    params: list[InspectedParam] = Field(default=[])
    buffers: list[InspectedBuffer] = Field(default=[])
    scheduler: bool | None = None
    client_state: list[str] | None = None
    files: TagFiles = TagFiles()
    headers_read: int = 0
    tensor: InspectedTensor | None = None

    only_where_given: ClassVar[frozenset[str]] = frozenset({"topology", "tensor"})
