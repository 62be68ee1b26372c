"""One rank's files of a native ZeRO-3 checkpoint, rigid or elastic, as graphs whose payload is yet to be moved.

What DeepSpeed's stage 3 would have written at this world size: the layout is rebuilt from the optimizer groups and
``sub_group_size``, as ``_create_fp16_sub_groups`` does, and everything that is not partitioned is taken over from the
files of the save as it stands, objects of unknown classes included. Source: ``DeepSpeedEngine._save_checkpoint``,
``_save_zero_checkpoint`` and ``DeepSpeedZeroOptimizer_Stage3._rigid_state_dict`` (DeepSpeed 0.19.8), docs/format.md.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from zeroelastic.digest import ScalarValue
from zeroelastic.errors import CheckpointError, UnsupportedError
from zeroelastic.layout import Layout, Param, layout_from_sub_groups, pack_sub_groups, unpacked_layout
from zeroelastic.picklegraph import (
    Node,
    Storage,
    entry,
    new_storage,
    ordered_dict,
    pairs_of,
    read_graph,
    tensor,
    torch_size,
)
from zeroelastic.record import CheckpointFormat, CommitRecord
from zeroelastic.shard import CARRIED, ELASTIC_VERSION, FP32, FROZEN, Shard, configured_batch, scalar_bytes
from zeroelastic.state import SavedPart, SavedState
from zeroelastic.storage import FilePath

_DEFAULT_SUB_GROUP_SIZE = 1_000_000_000
_STATE_KEYS = frozenset(
    {
        "zero_stage",
        "loss_scaler",
        "dynamic_loss_scale",
        "overflow",
        "partition_count",
        "ds_zero_partition_groups",
        "optimizer_state_dict",
        "fp32_flat_groups",
        "base_optimizer_state",
        "zeroelastic",
    }
)
"""What stage 3 keeps in a file's optimizer_state_dict, and what the elastic format adds."""


@dataclass(frozen=True, slots=True)
class Group:
    """One optimizer group: its hyper-parameters as the files have them, its parameters, and how often each is listed.

    ``repeats`` is 1 but for optimizers such as DeepSpeed's Adagrad, whose groups list every flat buffer twice.
    """

    options: Mapping[object, object]
    params: tuple[str, ...]
    repeats: int


@dataclass(frozen=True, slots=True)
class NativeSource:
    """What native files are made from: the saved tensors, and the graphs of files to take everything else from.

    ``parts`` are as of ``SavedState``. ``optim_root`` is an optimizer file's graph; ``model_root(rank)`` the module
    states that target rank ``rank`` takes over.
    """

    parts: tuple[SavedPart, ...]
    groups: tuple[Group, ...]
    optim_root: Mapping[object, object]
    model_root: Callable[[int], Mapping[object, object]]
    sub_group_size: int
    train_batch_size: int | None
    bf16_names: bool

    @property
    def trained(self) -> SavedPart:
        """The trained parameters."""
        return self.parts[0]

    @property
    def frozen(self) -> SavedPart | None:
        """The frozen parameters, where they were saved."""
        return self.parts[1] if len(self.parts) > 1 else None


@dataclass(frozen=True, slots=True)
class NativeTarget:
    """Where everything goes: the layouts at the target's world size and how its optimizer groups refer to sub-groups.

    ``keys[i]`` and ``scalars[i]`` are what sub-group i has: the dtype of each state key, "fp32" first, and the values
    beside them. ``group_of[i]`` is the optimizer group that it belongs to.
    """

    format: CheckpointFormat
    layout: Layout
    frozen: Layout | None
    keys: tuple[Mapping[str, str], ...]
    scalars: tuple[Mapping[str, ScalarValue], ...]
    group_of: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RankFiles:
    """The two graphs of one rank, and which of their storages are filled from where.

    ``flats[i, key]`` is the storage of sub-group i's flat buffer of a state key, ``fragments[p]`` that of frozen
    parameter p's part; ``known`` are storages whose bytes are known; ``digests`` takes int64 by parameter, in elastic
    files; every other storage of the graphs has an ``extent`` to be copied.
    """

    optim: dict[object, object]
    model: dict[object, object]
    flats: Mapping[tuple[int, str], Storage]
    fragments: tuple[Storage, ...]
    known: Mapping[Storage, bytes]
    digests: Storage | None


def native_source(state: SavedState, *, sub_group_size: int | None = None) -> NativeSource:
    """Take a ZeRO-3 checkpoint apart for rewriting. ``sub_group_size`` overrides the saved configuration's.

    Raises UnsupportedError when the saved sub-groups are not what the configuration implies, or when an optimizer file
    holds something that is not known to be the same at every world size.
    """
    root = pairs_of(read_graph(state.head.path))
    inner = pairs_of(root.get("optimizer_state_dict"))
    unknown = sorted(str(key) for key in inner if key not in _STATE_KEYS)
    if unknown:
        raise UnsupportedError(
            f"{state.head.path}: optimizer_state_dict holds {', '.join(unknown)}, which is not known to be the same at "
            "another world size. Load it with zeroelastic in the training job, which restores what it knows."
        )
    groups = _groups(state, inner)
    if sub_group_size is None:
        head = state.head.layout
        saved = [
            [head.params[p] for p in np.flatnonzero(head.sub_group == i).tolist()] for i in range(head.num_sub_groups)
        ]
        sub_group_size = configured_sub_group_size(
            state.head.ds_config, groups, saved, world_size=head.world_size, path=state.head.path
        )
    return NativeSource(
        parts=state.parts,
        groups=groups,
        optim_root=root,
        model_root=model_roots(state.checkpoint.model_files),
        sub_group_size=sub_group_size,
        train_batch_size=train_batch_size(state.checkpoint.record, state.head, state.checkpoint.world_size),
        bf16_names=state.head.path.name.startswith("bf16_"),
    )


def train_batch_size(record: CommitRecord | None, head: Shard, world_size: int) -> int | None:
    """The global batch of a save by ``world_size`` ranks, where its record, files or configuration say it."""
    if record is not None:
        return record.train_batch_size
    if head.train_batch_size is not None:
        return head.train_batch_size
    return configured_batch(head.ds_config, world_size)


def model_roots(files: Sequence[FilePath]) -> Callable[[int], Mapping[object, object]]:
    """The module states that each target rank takes over, given the saved ones by rank: its own, or rank 0's.

    Each file is read once: rank 0's stays in memory for the ranks that the save did not have.
    """
    read_first = functools.cache(lambda: pairs_of(read_graph(files[0])))
    return lambda rank: pairs_of(read_graph(files[rank])) if 0 < rank < len(files) else read_first()


def configured_sub_group_size(
    config: Mapping[str, object],
    groups: Sequence[Group],
    saved: Sequence[Sequence[Param]],
    *,
    world_size: int,
    path: FilePath,
) -> int:
    """What the saved configuration says. Raises UnsupportedError when the saved sub-groups are not what it implies."""
    block = config.get("zero_optimization")
    size = block.get("sub_group_size", _DEFAULT_SUB_GROUP_SIZE) if isinstance(block, dict) else None
    sub_group_size = int(size) if isinstance(size, (int, float)) and size >= 1 else _DEFAULT_SUB_GROUP_SIZE
    table = {param.name: param for members in saved for param in members}
    implied = pack_sub_groups(
        [[table[name] for name in group.params if name in table] for group in groups],
        world_size=world_size,
        sub_group_size=sub_group_size,
    )
    if [list(members) for members in implied] != [list(members) for members in saved]:
        raise UnsupportedError(
            f"{path}: has {len(saved)} sub-groups; a sub_group_size of {sub_group_size}, as in its "
            f"configuration, gives {len(implied)} others. Give the one of the run that will load the result, with "
            "--sub-group-size."
        )
    return sub_group_size


def _groups(state: SavedState, inner: Mapping[object, object]) -> tuple[Group, ...]:
    """Hyper-parameters as the file's own objects, so that nothing about them changes."""
    nested = entry(inner, "optimizer_state_dict", "param_groups")
    ours = entry(inner, "zeroelastic", "param_groups")
    raw = nested if state.head.format == "rigid" else ours
    listed = nested if isinstance(nested, list) else []
    if not isinstance(raw, list) or len(raw) != len(state.head.groups) or len(listed) not in (0, len(raw)):
        raise CheckpointError(f"{state.head.path}: its optimizer groups contradict each other. The file is damaged.")
    repeats = [_repeats(entry(group, "params")) for group in listed] or [1] * len(raw)
    return tuple(
        make_group(pairs_of(options), group.params, repeats=times)
        for options, group, times in zip(raw, state.head.groups, repeats, strict=True)
    )


def make_group(options: Mapping[object, object], params: tuple[str, ...], *, repeats: int | None = None) -> Group:
    """A group from what a file says of it; ``repeats`` is counted in its own list of flat buffers by default."""
    kept = {key: value for key, value in options.items() if key != "params"}
    return Group(kept, params, _repeats(options.get("params")) if repeats is None else repeats)


def _repeats(listed: object) -> int:
    """How often each flat buffer is listed."""
    return max(1, len(listed) // len(set(map(str, listed)))) if isinstance(listed, list) and listed else 1


def native_target(source: NativeSource, world_size: int, format: CheckpointFormat) -> NativeTarget:
    """The layout at another world size.

    Raises UnsupportedError when parameters that share a sub-group there were saved with different kinds of state.
    """
    part = source.trained
    number = part.layout.index()
    table = {param.name: param for param in part.layout.params}
    sub_groups = pack_sub_groups(
        [[table[name] for name in group.params if name in table] for group in source.groups],
        world_size=world_size,
        sub_group_size=source.sub_group_size,
    )
    layout = layout_from_sub_groups(sub_groups, world_size)
    group_number = {name: g for g, group in enumerate(source.groups) for name in group.params}
    keys: list[Mapping[str, str]] = []
    scalars: list[Mapping[str, ScalarValue]] = []
    for members in sub_groups:
        first = number[members[0].name]
        for param in members[1:]:
            other = number[param.name]
            if part.dtypes[other] != part.dtypes[first] or _canonical(part.scalars[other]) != _canonical(
                part.scalars[first]
            ):
                raise UnsupportedError(
                    f"{members[0].name} and {param.name} share a sub-group on {world_size} ranks but were saved with "
                    "different optimizer state or steps. Choose a --sub-group-size that keeps them apart."
                )
        keys.append(part.dtypes[first])
        scalars.append(part.scalars[first])
    return NativeTarget(
        format=format,
        layout=layout,
        frozen=None if source.frozen is None else unpacked_layout(source.frozen.layout.params, world_size),
        keys=tuple(keys),
        scalars=tuple(scalars),
        group_of=tuple(group_number[members[0].name] for members in sub_groups),
    )


def _canonical(scalars: Mapping[str, ScalarValue]) -> dict[str, str]:
    return {key: value.canonical() for key, value in scalars.items()}


def file_names(source: NativeSource, rank: int) -> tuple[str, str]:
    """DeepSpeed's names of one rank's optimizer and module states files."""
    prefix = "bf16_" if source.bf16_names else ""
    stem = f"zero_pp_rank_{rank}_mp_rank_00"
    return f"{prefix}{stem}_optim_states.pt", f"{stem}_model_states.pt"


def rank_files(source: NativeSource, target: NativeTarget, rank: int, *, save_id: str) -> RankFiles:
    """The graphs of one target rank's files."""
    flats = {
        (i, key): new_storage(dtype, int(target.layout.sub_group_numel[i]))
        for i, keys in enumerate(target.keys)
        for key, dtype in keys.items()
    }
    known: dict[Storage, bytes] = {}
    digests = new_storage("int64", target.layout.num_params) if target.format == "elastic" else None
    optim = _optim_root(source, target, rank, flats, known, digests, save_id)
    fragments: list[Storage] = []
    model = _model_root(source, target, rank, fragments)
    return RankFiles(optim, model, flats, tuple(fragments), known, digests)


def _optim_root(
    source: NativeSource,
    target: NativeTarget,
    rank: int,
    flats: Mapping[tuple[int, str], Storage],
    known: dict[Storage, bytes],
    digests: Storage | None,
    save_id: str,
) -> dict[object, object]:
    layout = target.layout
    inner = pairs_of(source.optim_root["optimizer_state_dict"])
    values: list[dict[object, object]] = []
    for i in range(layout.num_sub_groups):
        values.append({key: _scalar_node(value, known) for key, value in target.scalars[i].items()})

    def flat(i: int, key: str, *, requires_grad: bool = False) -> Node:
        storage = flats[i, key]
        return tensor(storage, 0, (storage.numel,), requires_grad=requires_grad)

    nested = {
        "state": {
            i: {**values[i], **{key: flat(i, key) for key in keys if key != FP32}}
            for i, keys in enumerate(target.keys)
            if len(keys) > 1 or values[i]
        },
        "param_groups": [
            {**group.options, "params": [i for i, owner in enumerate(target.group_of) if owner == g] * group.repeats}
            for g, group in enumerate(source.groups)
        ],
    }
    state: dict[object, object] = {
        key: value
        for key, value in inner.items()
        if key in ("zero_stage", "loss_scaler", "dynamic_loss_scale", "overflow")
    }
    state["partition_count"] = layout.world_size
    state["optimizer_state_dict"] = nested
    state["fp32_flat_groups"] = [
        flat(i, FP32, requires_grad=keys[FP32].startswith(("float", "bfloat"))) for i, keys in enumerate(target.keys)
    ]
    if target.format == "elastic":
        assert digests is not None
        start, length = layout.owned(rank)
        members = [np.flatnonzero(layout.sub_group == i).tolist() for i in range(layout.num_sub_groups)]
        state["base_optimizer_state"] = [
            {
                **values[i],
                **{
                    key: [tensor(flats[i, key], int(layout.offset[p]), (int(length[p]),)) for p in members[i]]
                    for key in keys
                    if key != FP32
                },
            }
            for i, keys in enumerate(target.keys)
        ]
        state["zeroelastic"] = {
            "format_version": ELASTIC_VERSION,
            "save_id": save_id,
            "world_size": layout.world_size,
            "rank": rank,
            "train_batch_size": source.train_batch_size,
            "sub_groups": [
                {
                    "names": [layout.params[p].name for p in own],
                    "shapes": [layout.params[p].shape for p in own],
                    "offsets": [int(start[p]) for p in own],
                    "numels": [int(length[p]) for p in own],
                }
                for own in members
            ],
            "digests": tensor(digests, 0, (layout.num_params,)),
            "param_groups": [{**group.options, "params": list(group.params)} for group in source.groups],
            **{key: value for key in CARRIED if (value := entry(inner, "zeroelastic", key)) is not None},
        }
    return {**source.optim_root, "optimizer_state_dict": state}


def _scalar_node(value: ScalarValue, known: dict[Storage, bytes]) -> object:
    """A replicated value as it was saved: a Python value, or a 0-dim tensor with a storage of its own."""
    data = scalar_bytes(value)
    if data is None:
        return value.value
    storage = new_storage(value.kind, 1)
    known[storage] = data
    return tensor(storage, 0, ())


def _model_root(
    source: NativeSource, target: NativeTarget, rank: int, fragments: list[Storage]
) -> dict[object, object]:
    layout = target.layout
    root = dict(source.model_root(rank))
    if "dp_world_size" not in root:
        raise CheckpointError("a module states file has no dp_world_size. It is not one of ZeRO-3.")
    root["dp_world_size"] = layout.world_size
    root["param_shapes"] = [
        ordered_dict(
            (layout.params[p].name, torch_size(layout.params[p].shape))
            for p in np.flatnonzero(layout.sub_group == i).tolist()
        )
        for i in range(layout.num_sub_groups)
    ]
    if rank > 0 and root.get("shared_params"):
        root["shared_params"] = {}  # rank 0 alone has them
    trained = set(layout.index())
    for key in ("frozen_param_shapes", "frozen_param_fragments"):
        if (listed := pairs_of(root.get(key))) and trained & listed.keys():  # frozen after deepspeed.initialize
            root[key] = ordered_dict([(name, value) for name, value in listed.items() if name not in trained])
    if target.frozen is not None and source.frozen is not None:
        part = target.frozen.part
        pieces: list[tuple[object, object]] = []
        for p, param in enumerate(target.frozen.params):
            storage = new_storage(source.frozen.dtypes[p][FROZEN], int(part[p]))
            fragments.append(storage)
            pieces.append((param.name, tensor(storage, 0, (storage.numel,))))
        root["frozen_param_fragments"] = ordered_dict(pieces)
    return root
