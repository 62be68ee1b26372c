"""The files of new ranks as DeepSpeed writes them: the layout of their buffers, and the trees of each rank's files.

``NativeSink`` has everything that is the same at all ZeRO stages, ``Stage3Sink`` the rest of stage 3; that of the
others is in ``stage_1_2``.

Source (DeepSpeed 0.19.8): ``DeepSpeedEngine._save_checkpoint``, ``DeepSpeedZeroOptimizer_Stage3._rigid_state_dict``
and ``torch.optim.Optimizer.state_dict``. docs/concepts/format.md.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, TypeAlias

import numpy as np

from zeroelastic.checkpoint.commit_record import CheckpointFormat
from zeroelastic.checkpoint.model_states import client_state_keys
from zeroelastic.checkpoint.optimizer_file import FP32, FROZEN, scalar_bytes
from zeroelastic.checkpoint.rank_layout import SAME_ON_ALL_RANKS, elastic_table
from zeroelastic.checkpoint.saved_state import TensorSet
from zeroelastic.checkpoint.tag_files import SAVE_ID, model_file_name
from zeroelastic.checkpoint.topology import Topology
from zeroelastic.core.digest import ScalarValue
from zeroelastic.core.layout import Layout, Param
from zeroelastic.core.slices import Strip
from zeroelastic.errors import UnsupportedError, rank_list
from zeroelastic.torch_file.tree import (
    Dict,
    Size,
    Storage,
    TensorRef,
    entry,
    instance,
    new_global,
    new_storage,
    pairs_of,
    storage_of,
    tensor,
)
from zeroelastic.verbs.reshard.new_run import ReshardOptions, described
from zeroelastic.verbs.reshard.slicing import Slicing, any_slices
from zeroelastic.verbs.reshard.source import ReshardSource, model_ranks, names_in_module, refuse_own_weights

Root: TypeAlias = dict[object, object]
Flats: TypeAlias = Mapping[tuple[int, str], Storage]
"""The storages of flat buffers, by the number of the buffer and the state key."""

ZERO_STAGE = new_global("deepspeed.runtime.zero.config", "ZeroStageEnum")
LOSS_SCALER = new_global("deepspeed.runtime.fp16.loss_scaler", "LossScaler")
APART = "--sub-group-size that keeps them apart; 1 gives each parameter a sub-group of its own."


class Weight(NamedTuple):
    """A weight that is made of master weights: those in the ``strips`` of a whole tensor, and where it goes."""

    tensor: Param
    strips: tuple[Strip, ...]
    storage: Storage


@dataclass(slots=True)
class RankFiles:
    """One rank's files: their trees, in the order of ``file_names``, and from where their storages are filled.

    ``layout`` and ``frozen_layout`` are of the rank alone. ``flats[i, key]`` is the storage of flat buffer i of a
    state key, ``frozen[p, "frozen"]`` that of the rank's part of frozen parameter p, and ``weights`` are those of whole
    modules and of experts; ``digests`` takes int64 by parameter, in elastic files; every other storage of the trees has
    its ``data``, or an ``extent`` to be copied.
    """

    rank: int
    save_id: str
    layout: Layout
    frozen_layout: Layout
    flats: Flats
    frozen: Flats
    trees: list[Root] = field(default_factory=list)
    weights: list[Weight] = field(default_factory=list)
    digests: Storage | None = None


class NativeSink(ABC):
    """The files of the ranks that ``slicing`` is of, at one ZeRO stage, with the state of ``source``.

    A flat buffer is a sub-group at stage 3, an optimizer group at stages 1 and 2. ``layout`` has the trained parameters
    over all ranks, ``frozen`` the frozen ones over the ranks that write module states (``models``). ``keys[i]`` is the
    dtype of each state key of flat buffer i, "fp32" first; ``scalars[i]`` its scalars; ``members[g]`` the buffers of
    optimizer group g. ``format`` is that of the files, ``weights`` the dtypes of the trained weights that are made from
    master weights.

    Raises UnsupportedError when parameters that share a flat ``buffer`` were saved with different kinds of state.
    """

    format: CheckpointFormat
    weights: Mapping[str, str]
    times_listed: ClassVar[bool]
    """Whether an optimizer group lists its flat buffers as often as the saved one does."""

    def __init__(
        self, source: ReshardSource, slicing: Slicing, stage: int, layout: Layout, *, buffer: str, advice: str
    ) -> None:
        self.source, self.slicing, self.stage, self.layout = source, slicing, stage, layout
        self.models = model_ranks(slicing.topology, stage)
        self.frozen = slicing.frozen_layout(source.frozen.params, self.models)
        part, number = source.trained, {param.name: i for i, param in enumerate(source.trained.params)}
        firsts: dict[int, int] = {}  # the first parameter of each flat buffer
        for param, i in zip(layout.params, layout.sub_group.tolist(), strict=True):
            first, other = firsts.setdefault(i, number[param.name]), number[param.name]
            if differ := _differing(part, first, other):
                raise UnsupportedError(
                    f"{part.params[first].name} and {param.name} share {buffer} but were saved with different "
                    f"optimizer state ({', '.join(differ)}). {advice}"
                )
        of_buffer = [firsts[i] for i in range(layout.num_sub_groups)]
        owner = {name: g for g, group in enumerate(source.groups) for name in group.params}
        owners = [owner[part.params[first].name] for first in of_buffer]
        self.keys = [part.dtypes[first] for first in of_buffer]
        self.scalars = [part.scalars[first] for first in of_buffer]
        self.members = [[i for i, g in enumerate(owners) if g == group] for group in range(len(source.groups))]

    @property
    def topology(self) -> Topology:
        """How the ranks are grouped."""
        return self.slicing.topology

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self.topology.world_size

    @property
    def num_files(self) -> int:
        """The files of all ranks."""
        return self.world_size + self.models.world_size

    @property
    def nbytes(self) -> int:
        """Bytes that are written: tensor parallel ranks have copies, and weights may be made."""
        numel, of_state = sum(tensor.numel for tensor in self.layout.whole_tensors), self.source.nbytes
        return round(of_state * (int(self.layout.numel.sum()) / numel)) if numel else of_state

    def writes_model(self, rank: int) -> bool:
        """Return whether a rank writes module states."""
        return self.topology.place(rank)[0] < self.models.data_size

    def frozen_rank(self, rank: int) -> int:
        """The rank of ``frozen`` that a rank is, or the one that writes them for its tensor parallel rank."""
        data_rank, tensor_rank = self.topology.place(rank)
        return self.models.rank(min(data_rank, self.models.data_size - 1), tensor_rank)

    def file_names(self, rank: int) -> tuple[str, ...]:
        """DeepSpeed's names of one rank's files: of the optimizer, of module states, where it writes them, and more."""
        prefix = "bf16_" if self.source.bf16_names else ""
        data_rank, tensor_rank = self.topology.place(rank)
        optim = f"{prefix}zero_pp_rank_{data_rank}_mp_rank_{tensor_rank:02d}_optim_states.pt"
        model = model_file_name(data_rank, tensor_rank, whole=self.stage != 3)
        return (optim, model) if self.writes_model(rank) else (optim,)

    def files(self, rank: int, *, save_id: str) -> RankFiles:
        """One rank's files."""
        own, frozen = self.layout.on_rank(rank), self.frozen.on_rank(self.frozen_rank(rank))
        saved = self.source.frozen
        dtypes = {param.name: keys[FROZEN] for param, keys in zip(saved.params, saved.dtypes, strict=True)}
        parts = enumerate(zip(frozen.params, frozen.part.tolist(), strict=True)) if self.writes_model(rank) else ()
        files = RankFiles(
            rank,
            save_id,
            own,
            frozen,
            flats={
                (i, key): new_storage(dtype, int(own.sub_group_numel[i]))
                for i, keys in enumerate(self.keys)
                for key, dtype in keys.items()
            },
            frozen={(p, FROZEN): new_storage(dtypes[param.name], numel) for p, (param, numel) in parts},
        )
        state = self.optimizer_state(files)
        files.trees.append({**self.source.optim_root, "optimizer_state_dict": state, SAVE_ID: save_id})
        if self.writes_model(rank):
            files.trees.append({**self.model_states(files), SAVE_ID: save_id})
        return files

    @abstractmethod
    def optimizer_state(self, files: RankFiles) -> Root:
        """The state dict of DeepSpeed's optimizer."""

    @abstractmethod
    def model_states(self, files: RankFiles) -> Root:
        """The module states of a rank."""

    def torch_state(self, files: RankFiles, scalars: Sequence[Root]) -> Root:
        """Return ``torch.optim.Optimizer.state_dict`` of the flat buffers."""
        states: dict[int, Root] = {}
        for i, keys in enumerate(self.keys):
            if own := scalars[i] | {key: flat(files.flats[i, key]) for key in keys if key != FP32}:
                states[i] = own
        groups = [
            {**group.options, "params": [*members] * (group.repeats if self.times_listed else 1)}
            for group, members in zip(self.source.groups, self.members, strict=True)
        ]
        return {"state": states, "param_groups": groups}

    def scalar_nodes(self) -> list[Root]:
        """The scalars of each flat buffer."""
        return [{key: _scalar_node(value) for key, value in scalars.items()} for scalars in self.scalars]

    def model_root(self, files: RankFiles) -> Root:
        """Return the module states that every stage of ZeRO has."""
        rank, layout, names = files.rank, files.layout, self.slicing.file_names()
        root = dict(self.source.model_root_for(*self.topology.place(rank)))
        if any_slices(self.source.slicing, self.slicing):
            root = described(self.slicing, root, rank, self.stage)
        if rank > 0 and root.get("shared_params"):
            root["shared_params"] = {}  # rank 0 alone has them
        root["dp_world_size"] = self.topology.data_size
        root["param_shapes"] = [
            Dict(
                (names.get(name := layout.params[p].name, name), Size(layout.params[p].shape))
                for p in np.flatnonzero(layout.sub_group == i).tolist()
            )
            for i in range(layout.num_sub_groups)
        ]
        return root

    def notes(self, given: Sequence[str]) -> list[str]:
        """Sentences on the stage, on the ``given`` options of the run that loads it, and on state that is left out."""
        saved, notes = self.source, list[str]()
        if saved.stage != self.stage:
            notes.append(f"saved with ZeRO stage {saved.stage}; the result is of stage {self.stage}")
        notes += self.order_notes(given)
        left = range(self.models.data_size, saved.models.data_size)
        root = saved.model_root(0)
        users = {*client_state_keys(root)} - {"zeroelastic"}  # the position in the data, the same on all
        there = {"buffers": root.get("buffer_names"), "client state": users}
        if left and (what := " and ".join(name for name, found in there.items() if found)):
            notes.append(f"not carried: {what} of saved {rank_list(left)}")
        return notes

    def order_notes(self, given: Sequence[str]) -> list[str]:
        """Sentences on the order of parameters in the buffers."""
        return []


def _differing(part: TensorSet, first: int, other: int) -> list[str]:
    """In what the optimizer state of two parameters differs: each key, with both values."""
    states = [
        {**part.dtypes[p], **{key: value.canonical() for key, value in part.scalars[p].items()}} for p in (first, other)
    ]
    keys = [key for key in dict.fromkeys([*states[0], *states[1]]) if states[0].get(key) != states[1].get(key)]
    return [f"{key}: {_shown(part, first, key)} and {_shown(part, other, key)}" for key in keys]


def _shown(part: TensorSet, param: int, key: str) -> str:
    if key in part.scalars[param]:
        return f"{part.scalars[param][key].value} ({part.scalars[param][key].kind})"
    return f"a {part.dtypes[param][key]} tensor" if key in part.dtypes[param] else "none"


def _scalar_node(value: ScalarValue) -> object:
    """A scalar as it was saved: a Python value, or a 0-dim tensor."""
    data = scalar_bytes(value)
    return value.value if data is None else tensor(new_storage(value.kind, 1, data), 0, ())


def flat(storage: Storage, numel: int | None = None, *, requires_grad: bool = False) -> TensorRef:
    """The first elements of a storage as a tensor, by default all of them."""
    return tensor(storage, 0, (storage.numel if numel is None else numel,), requires_grad=requires_grad)


def loss_scaler(source: ReshardSource) -> Root:
    """The loss scaler as it was saved, with its flags; a save of a ``BF16_Optimizer`` has none and gets one."""
    keys = ("loss_scaler", "dynamic_loss_scale", "overflow")
    found: Root = {key: source.inner[key] for key in keys if key in source.inner}
    return {**NO_LOSS_SCALER} if source.whole_model and "loss_scaler" not in found else found


NO_LOSS_SCALER: Root = {
    "loss_scaler": instance(LOSS_SCALER, {"cur_scale": 1.0, "dynamic": False}),
    "dynamic_loss_scale": False,
    "overflow": False,
}
"""The entries of a run that scales no loss."""


def shapes_of(params: Sequence[Param]) -> Dict:
    """The shapes of parameters by name."""
    return Dict((param.name, Size(param.shape)) for param in params)


class Stage3Sink(NativeSink):
    """The files of stage 3."""

    times_listed = True

    def __init__(self, source: ReshardSource, slicing: Slicing, options: ReshardOptions) -> None:
        refuse_own_weights(source)
        groups = source.grouped(source.trained.params)
        size = options.sub_group_size
        layout, _ = slicing.layout(groups, 3, source.config, itemsizes=(), sub_group_size=size)
        buffer, advice = f"a sub-group on {slicing.topology.world_size} ranks", f"Choose a {APART}"
        super().__init__(source, slicing, 3, layout, buffer=buffer, advice=advice)
        self.format, self.weights = options.format or "elastic", {}

    def optimizer_state(self, files: RankFiles) -> Root:
        """The state dict of DeepSpeed's optimizer, elastic or rigid."""
        source, inner, scalars = self.source, self.source.inner, self.scalar_nodes()
        state: Root = {"zero_stage": inner.get("zero_stage")} if "zero_stage" in inner else {}
        if source.whole_model:
            state["zero_stage"] = ZERO_STAGE(3)
        state |= loss_scaler(source)
        state["partition_count"] = self.topology.data_size
        if (shared := _partition_groups(self.slicing, files.layout, files.rank)) is not None:
            state["ds_zero_partition_groups"] = shared
        state["optimizer_state_dict"] = self.torch_state(files, scalars)
        state["fp32_flat_groups"] = [
            flat(files.flats[i, FP32], requires_grad=keys[FP32].startswith(("float", "bfloat")))
            for i, keys in enumerate(self.keys)
        ]
        return state | self._elastic(files, scalars) if self.format == "elastic" else state

    def _elastic(self, files: RankFiles, scalars: list[Root]) -> Root:
        """The entries that the elastic format adds; ``digests`` are filled later."""
        source, layout, rank, topology = self.source, files.layout, files.rank, self.topology
        files.digests = new_storage("int64", layout.num_params)
        offset, length = layout.offset.tolist(), layout.owned(rank)[1].tolist()
        members = [np.flatnonzero(layout.sub_group == i).tolist() for i in range(layout.num_sub_groups)]

        def lean(i: int, key: str) -> list[TensorRef]:
            return [tensor(files.flats[i, key], offset[p], (length[p],)) for p in members[i]]

        base = [
            {**scalars[i], **{key: lean(i, key) for key in keys if key != FP32}} for i, keys in enumerate(self.keys)
        ]
        tp = {} if topology.tensor_size == 1 else {"tp_rank": topology.place(rank)[1], "tp_size": topology.tensor_size}
        rest: dict[str, object] = {
            **tp,
            "digests": tensor(files.digests, 0, (layout.num_params,)),
            "param_groups": [{**group.options, "params": list(group.params)} for group in source.groups],
            **{k: value for k in SAME_ON_ALL_RANKS if (value := entry(source.inner, "zeroelastic", k)) is not None},
        }
        batch = source.train_batch_size
        table = elastic_table(layout, rank, save_id=files.save_id, train_batch_size=batch, rest=rest, topology=topology)
        return {"base_optimizer_state": base, "zeroelastic": table}

    def model_states(self, files: RankFiles) -> Root:
        """The module states: parameters without elements, and the rank's parts of frozen ones."""
        root, source = self.model_root(files), self.source
        trained = set(files.layout.index())
        if source.whole_model:
            _shard_module(root, source, trained)
        for key in ("frozen_param_shapes", "frozen_param_fragments"):
            if (listed := pairs_of(root.get(key))) and trained & listed.keys():  # frozen after deepspeed.initialize
                root[key] = Dict([(name, value) for name, value in listed.items() if name not in trained])
        if params := files.frozen_layout.params:
            parts = zip(params, files.frozen.values(), strict=True)
            root["frozen_param_fragments"] = Dict((param.name, flat(storage)) for param, storage in parts)
            root["frozen_param_shapes"] = shapes_of(params)
        return root


def _shard_module(root: Root, source: ReshardSource, trained: Collection[str]) -> None:
    """Turn module states of stages 1 and 2 into those of stage 3, with frozen parameters listed."""
    frozen = source.frozen.params
    tied = names_in_module(source, source.model_root(0)).tied
    names = {*trained, *(param.name for param in frozen), *tied}
    empty: dict[str, TensorRef] = {}

    def without_elements(name: str, value: object) -> object:
        """Return one tensor without elements for all names of a tensor."""
        storage = storage_of(value)
        if storage is None:
            return value
        return empty.setdefault(tied.get(name, name), tensor(new_storage(storage.dtype, 0), 0, (0,)))

    root["module"] = Dict(
        (name, without_elements(str(name), value) if name in names else value)
        for name, value in pairs_of(root.get("module")).items()
    )
    shared = pairs_of(root.get("shared_params"))
    root["shared_params"] = {alias: name for alias, name in shared.items() if alias in tied}
    root["frozen_param_shapes"] = shapes_of(frozen) if frozen else None
    root["frozen_param_fragments"] = None


def _partition_groups(run: Slicing, own: Layout, rank: int) -> list[dict[str, object]] | None:
    """``ds_zero_partition_groups`` of a rank with the layout ``own``; None for a run without AutoEP."""
    if own.slices is None or not run.has_experts:
        return None
    first, step, count, number = (
        column.tolist()
        for column in (own.slices.first_rank, own.slices.rank_step, own.slices.num_parts, own.slices.part_number(rank))
    )
    found: list[dict[str, object]] = []
    for i, p in enumerate(np.unique(own.sub_group, return_index=True)[1].tolist()):
        is_expert = run.is_expert(own.params[p].name)
        found.append(
            {
                "sub_group": i,
                "partition_count": count[p],
                "partition_rank": number[p],
                "partition_ranks": [*range(first[p], first[p] + step[p] * count[p], step[p])],
                "families": ["autoep_expert" if is_expert else "replicated"],
                "group_names": [f"ep_size_{run.expert_size}" if is_expert else "replicated"],
            }
        )
    return found
