"""Everything a checkpoint saved, from all its headers: which ranks' files hold which elements of which tensor.

A load needs the headers of a few ranks; the verbs of the command line need all of them, found to belong together.

Files of stages 1 and 2 have the weights of the module, too, which are compared with the master weights
(``compare_weights``) that they are rounded from in each optimizer step. A job may change single weights after the step,
by a mask or a limit: weights of zero, and the largest of a tensor, are not compared. Schedule-free optimizers leave
other weights in ``eval()``: where the optimizer has as many steps as the module states count, weights that differ are
no contradiction.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from zeroelastic.checkpoint.contradictions import MIXED, check_frozen, check_same_models, check_same_save, steps_agree
from zeroelastic.checkpoint.extents import ExtentTable, TensorExtents, TensorSlot, extent_table, extents_over_ranks
from zeroelastic.checkpoint.model_states import ModuleHeader
from zeroelastic.checkpoint.open import Checkpoint
from zeroelastic.checkpoint.optimizer_file import FP32, FROZEN, OptimizerHeader, ParamGroup
from zeroelastic.checkpoint.saved_layout import FrozenExperts
from zeroelastic.core.digest import ParamContent, ScalarValue
from zeroelastic.core.layout import Int64Array, Layout, Param, unpacked_layout
from zeroelastic.core.plan import identity_plan, make_plan
from zeroelastic.errors import CheckpointError, brief, counted, some
from zeroelastic.io.paths import FilePath, local_path
from zeroelastic.io.storage import Blocks, open_blocks
from zeroelastic.torch_file.header import DTYPE_BYTES


class SavedTensor(NamedTuple):
    """One tensor of a checkpoint: all of a parameter's elements of one state key."""

    param: Param
    key: str
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.param.numel * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class TensorSet:
    """The trained or the frozen parameters of a save.

    ``params`` are the whole parameters, each once, and ``layout`` says which rank has which of their elements: of a
    layout with slices, the parameters are the slices. ``dtypes`` and ``scalars`` run parallel to ``params``: the dtype
    of each state key, and the replicated values. ``extents[rank][key]`` says where that saved rank's files
    have its parts of the layout's parameters.
    """

    layout: Layout
    params: tuple[Param, ...]
    dtypes: tuple[Mapping[str, str], ...]
    scalars: tuple[Mapping[str, ScalarValue], ...]
    extents: Mapping[int, Mapping[str, TensorExtents]]

    def numbers(self) -> Int64Array:
        """Which of ``params`` each parameter of the layout is, or is a slice of: shape ``(layout.num_params,)``."""
        return whole_numbers(self.layout, self.params)

    def holders(self, param: int) -> list[int]:
        """The ranks that have elements of one of ``params``, ascending."""
        ranks = (self.layout_holders(p) for p in np.flatnonzero(self.numbers() == param).tolist())
        return sorted({rank for some in ranks for rank in some})

    def layout_holders(self, param: int) -> list[int]:
        """The ranks that have elements of a parameter of the layout."""
        layout = self.layout
        begin, cut = int(layout.origin[param]), int(layout.part[param])
        parts = range(begin // cut, -(-(begin + int(layout.numel[param])) // cut)) if cut else ()
        numbers = np.array(parts, dtype=np.int64)
        ranks: list[int] = layout.rank_of(np.full_like(numbers, param), numbers).tolist()
        return ranks

    def tensors(self) -> list[SavedTensor]:
        """The tensors by parameter and then by state key as saved."""
        both = zip(self.params, self.dtypes, strict=True)
        return [SavedTensor(param, key, dtype) for param, dtypes in both for key, dtype in dtypes.items()]

    def rank_rows(self, rank: int) -> tuple[list[SavedTensor], ExtentTable]:
        """Return the rows of one saved rank's files; ``rows.target`` is an index into the tensors returned with them.

        ``rows.start`` is where a row begins in its whole parameter, and ``rows.param`` the parameter of the layout that
        it is of; padding is in no row. What several ranks have copies of is in the rows of each of them.
        """
        layout, numbers = self.layout, self.numbers()
        targets: list[TensorSlot] = []
        position: list[int] = []  # of a target's key among those of its parameters
        for sub_group in range(layout.num_sub_groups):
            first = int(np.argmax(layout.sub_group == sub_group))
            for number, (key, dtype) in enumerate(self.dtypes[numbers[first]].items()):
                targets.append(TensorSlot(key, sub_group, dtype))
                position.append(number)
        rows = extent_table(identity_plan(layout, rank), self.extents, targets)
        counts = np.array([len(dtypes) for dtypes in self.dtypes], dtype=np.int64)
        first_tensor = np.cumsum(counts) - counts
        number_of = np.array(position, dtype=np.int64)
        return self.tensors(), replace(rows, target=first_tensor[numbers[rows.param]] + number_of[rows.target])

    def tensor_rows(self, param: int, key: str, start: int = 0, stop: int | None = None) -> ExtentTable:
        """The elements of one tensor from ``start`` to ``stop``; ``rows.target_offset`` counts from ``start``.

        Only extents of saved ranks that hold some of them are looked up.
        """
        stop = self.params[param].numel if stop is None else stop
        plan = make_plan(self.layout, unpacked_layout([self.params[param]], 1), 0).run_by_run()
        begin, end = np.maximum(plan.start, start), np.minimum(plan.start + plan.length, stop)
        src_offset = plan.src_offset + begin - plan.start
        plan = replace(plan, start=begin, length=end - begin, src_offset=src_offset, dst_offset=begin - start)
        return extent_table(plan.take(end > begin), self.extents, [TensorSlot(key, 0, self.dtypes[param][key])])

    def whole_rows(
        self, params: Sequence[int], *, keys: Collection[str] | None = None
    ) -> tuple[list[SavedTensor], ExtentTable]:
        """All elements of some parameters, over all saved ranks: ``rows.target`` is an index into the tensors.

        ``keys`` chooses among their state keys. ``rows.target_offset`` is the position in the flattened tensor.
        """
        chosen = [self.params[p] for p in params]
        tensors: list[SavedTensor] = []
        targets: list[TensorSlot] = []
        for i, p in enumerate(params):
            for key, dtype in self.dtypes[p].items():
                if keys is None or key in keys:
                    tensors.append(SavedTensor(self.params[p], key, dtype))
                    targets.append(TensorSlot(key, i, dtype))
        plan = make_plan(self.layout, unpacked_layout(chosen, 1), 0).run_by_run()
        return tensors, extent_table(plan, self.extents, targets)


@dataclass(frozen=True, slots=True)
class SavedState:
    """All headers of one checkpoint. Invariant: every rank says the same of what all ranks share.

    ``head`` is rank 0's optimizer header; ``models`` are the model states of every rank, at stages 1 and 2 of each
    tensor parallel rank. ``parts`` are the trained and the frozen parameters; each has its own layout.
    """

    checkpoint: Checkpoint
    head: OptimizerHeader
    models: tuple[ModuleHeader, ...]
    parts: tuple[TensorSet, TensorSet]

    @property
    def groups(self) -> tuple[ParamGroup, ...]:
        """The optimizer groups with the parameters of all ranks."""
        return self.checkpoint.groups(self.head)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, padding excluded."""
        return sum(tensor.nbytes for part in self.parts for tensor in part.tensors())


def contents_of(parts: Iterable[TensorSet], digests: Mapping[tuple[str, str], int] | None = None) -> list[ParamContent]:
    """Each parameter of some parts, given the digest of each (parameter, state key); without them, with 0 for all."""
    return [
        ParamContent(
            param,
            {key: (dtype, 0 if digests is None else digests[param.name, key]) for key, dtype in part.dtypes[p].items()},
            part.scalars[p],
        )
        for part in parts
        for p, param in enumerate(part.params)
    ]


def open_state(checkpoint: Checkpoint, *, resizable: bool = True) -> SavedState:
    """Open every rank's headers and check that they are of one save.

    Raises CheckpointError naming two files that disagree, and as ``Checkpoint.shard`` and ``model_states`` do. Where
    values differ between ranks that follow from a rank's own part of the weights (``values_by_rank``), raises
    UnsupportedError if ``resizable``; else the values of the first rank stand for all.
    """
    models = tuple(checkpoint.model_states(rank) for rank in range(len(checkpoint.model_files)))
    shards = {rank: checkpoint.shard(rank) for rank in range(checkpoint.world_size)}
    head = shards[0]
    check_same_save(shards, head, checkpoint.inventory, resizable=resizable)
    check_same_models(models, head, checkpoint.inventory)
    return SavedState(checkpoint, head, models, saved_parts(checkpoint, shards, models))


def saved_parts(
    checkpoint: Checkpoint, shards: Mapping[int, OptimizerHeader], models: Iterable[ModuleHeader]
) -> tuple[TensorSet, TensorSet]:
    """The trained and the frozen parameters, with the extents of the ranks whose headers are given."""
    trained = trained_part(shards, next(iter(shards.values())), checkpoint.layout)
    layout, experts = checkpoint.frozen
    frozen = frozen_part({model.rank: model for model in models}, layout) if experts is None else experts_part(experts)
    return trained, frozen


def trained_part(
    shards: Mapping[int, OptimizerHeader], head: OptimizerHeader, layout: Layout | None = None
) -> TensorSet:
    """The trained parameters in the files of some ranks, whose headers say the same as ``head``.

    ``layout`` is that of all ranks, by default that of ``head``.
    """
    layout = head.layout if layout is None else layout
    params = layout.whole_tensors
    numbers = whole_numbers(layout, params)
    first = np.empty(len(params), dtype=np.int64)  # slice of each tensor
    first[numbers[::-1]] = np.arange(len(numbers))[::-1]
    sub_groups = layout.sub_group[first].tolist()
    return TensorSet(
        layout=layout,
        params=params,
        dtypes=tuple(
            {key: head.extents[key].dtype[sub_group] for key in head.tensor_keys[sub_group]} for sub_group in sub_groups
        ),
        scalars=tuple(head.scalars[sub_group] for sub_group in sub_groups),
        extents={rank: extents_over_ranks(layout, rank, shard.extents) for rank, shard in shards.items()},
    )


def frozen_part(models: Mapping[int, ModuleHeader], layout: Layout | None = None) -> TensorSet:
    """The frozen parameters in the files of some ranks.

    ``layout`` is that of all ranks, by default that of each of them. Raises CheckpointError naming two files that
    disagree on them.
    """
    layout = next(iter(models.values())).frozen if layout is None else layout
    extents: dict[int, Mapping[str, TensorExtents]] = {}
    for model in models.values():
        check_frozen(model, layout.on_rank(model.rank))
        extents[model.rank] = extents_over_ranks(layout, model.rank, {FROZEN: model.frozen_extents})
    return _frozen(layout, extents)


def _frozen(layout: Layout, extents: Mapping[int, Mapping[str, TensorExtents]]) -> TensorSet:
    """Frozen parameters. Raises CheckpointError where the files of two ranks differ in the dtype of one."""
    dtype_of: dict[str, str] = {}
    for rank, places in extents.items():
        own, dtypes = layout.on_rank(rank), places[FROZEN].dtype
        for param, buffer in zip(own.params, own.sub_group.tolist(), strict=True):
            if dtype_of.setdefault(param.name, dtypes[buffer]) != dtypes[buffer]:
                raise CheckpointError(
                    f"{places[FROZEN].path}: {brief(param.name)} is {dtypes[buffer]}, and {dtype_of[param.name]} in "
                    f"files of other ranks. {MIXED}"
                )
    params = layout.whole_tensors
    dtypes_by_param = tuple({FROZEN: dtype_of[param.name]} for param in params)
    return TensorSet(layout, params, dtypes_by_param, tuple({} for _ in params), extents)


def experts_part(experts: FrozenExperts) -> TensorSet:
    """The frozen parameters of a save with frozen experts; opens their files. Raises CheckpointError."""
    ranks = range(experts.layout.world_size)
    return _frozen(experts.layout, {rank: {FROZEN: experts.extents(rank)} for rank in ranks})


def whole_numbers(layout: Layout, params: Sequence[Param]) -> Int64Array:
    """The number of the whole tensor, among ``params``, that each parameter of a layout is, or is a slice of."""
    if layout.slices is None:
        return np.arange(layout.num_params, dtype=np.int64)
    number = {param.name: i for i, param in enumerate(params)}
    return np.array([number[tensor.name] for tensor in layout.tensors], dtype=np.int64)


SAMPLE = 64
"""How many elements of each parameter a load compares."""

_WINDOW = 1 << 20
_ROUNDING = {"float32": 0.0, "float16": 2.0**-10, "bfloat16": 2.0**-7}
"""By how much of its master weight a weight of a dtype differs at most."""
_LEAST = 2.0**-24  # the difference of two float16 next to zero


class ComparedWeights(NamedTuple):
    """The names of parameters whose weights were compared, and of the ones whose weights differ."""

    compared: frozenset[str] = frozenset()
    differing: frozenset[str] = frozenset()


def compare_weights(
    part: TensorSet, ranks: Iterable[int], model: ModuleHeader, *, sample: int | None = None
) -> ComparedWeights:
    """Compare the weights in a file of the whole module with the master weights in the files of some ranks.

    ``sample`` is the number of elements of each rank's part of a parameter, by default all. Files behind a URL, and
    layouts with slices, are left out. Raises CheckpointError for a file that ends early, UnreadableError.
    """
    compared: set[str] = set()
    differing: set[str] = set()
    if part.layout.slices is not None or local_path(model.path) is None:
        return ComparedWeights()
    with ExitStack() as stack:
        files: dict[FilePath, Blocks] = {}

        def read(path: FilePath, dtype: str, offset: int, numel: int) -> npt.NDArray[np.float32]:
            if path not in files:
                files[path] = stack.enter_context(open_blocks(path))
            data = files[path].read(offset, numel * DTYPE_BYTES[dtype])
            if len(data) != numel * DTYPE_BYTES[dtype]:
                raise CheckpointError(f"{path}: ends at byte {offset + len(data)}. The file is truncated.")
            return _as_float32(data, dtype)

        for rank in ranks:
            tensors, rows = part.rank_rows(rank)
            columns = (column.tolist() for column in (rows.target, rows.file, rows.file_offset, rows.numel, rows.start))
            for number, file, offset, numel, start in zip(*columns, strict=True):
                tensor = tensors[number]
                dtype, weight = model.weight_places.get(tensor.param.name, ("", 0))
                if tensor.key != FP32 or {tensor.dtype, dtype} - _ROUNDING.keys():
                    continue
                first = 0 if sample is None or numel <= sample else (numel - sample) // 2
                end = numel if sample is None else min(numel, first + sample)
                for at in range(first, end, _WINDOW):
                    count = min(_WINDOW, end - at)
                    master = read(rows.paths[file], tensor.dtype, offset + at * DTYPE_BYTES[tensor.dtype], count)
                    place = weight + (start + at) * DTYPE_BYTES[dtype]
                    comparable, differs = _differ(read(model.path, dtype, place, count), master, dtype)
                    compared |= {tensor.param.name} if comparable else set()
                    differing |= {tensor.param.name} if differs else set()
    return ComparedWeights(frozenset(compared), frozenset(differing))


def other_weights(model: ModuleHeader, shard: OptimizerHeader, found: ComparedWeights) -> str | None:
    """Whether the weights of the module and the master weights are of two saves."""
    differing, compared = len(found.differing), len(found.compared)
    if not differing or 2 * differing < compared or steps_agree(model, shard):
        return None
    return (
        f"{model.path}: the weights of {differing} of {counted(compared, 'parameter')} are not what the master weights "
        f"in the optimizer files are rounded to, such as {some(sorted(found.differing), 2)}. {MIXED} (If the job "
        'changes weights after each step: "verify": "off" in the "zeroelastic" block loads the master weights.)'
    )


@np.errstate(invalid="ignore", over="ignore")
def _differ(weight: npt.NDArray[np.float32], master: npt.NDArray[np.float32], dtype: str) -> tuple[bool, bool]:
    """Whether any weights can be compared, and whether one of these is not what its master weight is rounded to."""
    size = np.abs(weight)
    comparable = (size > 0) & (size < size.max(initial=0)) & np.isfinite(weight) & np.isfinite(master)
    rounding = _ROUNDING[dtype]
    allowed = np.abs(master) * rounding + (_LEAST if rounding else 0)
    return bool(comparable.any()), bool((comparable & (np.abs(weight - master) > allowed)).any())


def _as_float32(data: bytes, dtype: str) -> npt.NDArray[np.float32]:
    if dtype == "bfloat16":
        bits: npt.NDArray[np.uint32] = np.frombuffer(data, dtype="<u2").astype(np.uint32) << np.uint32(16)
        return bits.view(np.float32)
    return np.frombuffer(data, dtype={"float32": "<f4", "float16": "<f2"}[dtype]).astype(np.float32)
