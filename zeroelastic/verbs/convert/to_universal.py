"""Convert a checkpoint to DeepSpeed's Universal format, one file per parameter and state, for any world size.

    TAG/zero/PARAM/fp32.pt, exp_avg.pt, ...     the whole tensor: flattened, or at stages 1 and 2 {"param": tensor}
    TAG/zero/PARAM/step.pt                      at stages 1 and 2
    TAG/zero/optimizer_state.pt                 scalars such as step, hyper-parameters, loss scale
    TAG/*_model_states.pt                       as saved
    latest_universal                            TAG

Source: ``deepspeed/checkpoint/ds_to_universal.py`` and the loaders in ``DeepSpeedZeroOptimizer_Stage3``
(``load_hp_checkpoint_state_from_checkpoint_dir_stage3``) and ``ZeROOptimizer``
(``load_hp_checkpoint_state_from_checkpoint_dir``, stages 1 and 2), DeepSpeed 0.19.8. The archives are written in one
pass from all ranks' files, without a temporary copy and without torch. State keys beyond Adam's get files too, which
DeepSpeed's loader reads at stages 1 and 2. What is made of stage 1 or 2 also has what its loader wants at stage 3.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from zeroelastic.checkpoint.extents import stream_seeds
from zeroelastic.checkpoint.one_save import check_one_save
from zeroelastic.checkpoint.optimizer_file import FP32, zero_option
from zeroelastic.checkpoint.saved_state import SavedState
from zeroelastic.checkpoint.tag_files import model_file_name
from zeroelastic.core.layout import Param
from zeroelastic.errors import CheckpointError, UnsupportedError
from zeroelastic.executors.dispatch import CopyTable, DigestRows, move_segments
from zeroelastic.executors.progress import ProgressFunction
from zeroelastic.io.atomic import write_at
from zeroelastic.runs.names import LATEST_UNIVERSAL
from zeroelastic.torch_file.graph import Archive, Storage, entry, new_storage, pairs_of, read_graph, tensor, write_graph
from zeroelastic.verbs.convert.copy_tensors import (
    TensorCopy,
    compare_digest,
    copy_tensors,
    one_row,
    recorded_digests,
)
from zeroelastic.verbs.convert.model_tensors import ModelTensor
from zeroelastic.verbs.convert.universal_files import rest_of_module, write_module
from zeroelastic.verbs.new_directory import new_directory, reserve_file
from zeroelastic.verbs.reshard.rank_files import scalar_node
from zeroelastic.verbs.reshard.source import no_hyper_parameters
from zeroelastic.verbs.verify.payload_scan import RankRows, cover

ZERO_FOLDER = "zero"
OPTIMIZER_STATE = "optimizer_state.pt"

READ_BY_DEEPSPEED = (FP32, "exp_avg", "exp_avg_sq")
"""The state keys that DeepSpeed's loader requires of every trained parameter."""

_FILES_AT_ONCE = 4096
_MOST_KEPT_BYTES = 1 << 20
_REBUILT = (
    "fp32_flat_groups",
    "base_optimizer_state",
    "zeroelastic",
    "optimizer_state_dict",
    "param_groups",
    "single_partition_of_fp32_groups",
    "param_slice_mappings",
)


@dataclass(frozen=True, slots=True)
class UniversalPlan:
    """What to write: ``tag`` is the directory below the target; ``notes`` say what DeepSpeed will not restore.

    ``known`` has the bytes of those storages of ``optimizer_state`` that are not copied from a file; ``module`` are
    the entries of a whole module that are not trained.
    """

    state: SavedState
    tag: str
    optimizer_state: object
    known: Mapping[Storage, bytes]
    module: tuple[ModelTensor, ...]
    notes: tuple[str, ...]

    @property
    def num_tensors(self) -> int:
        """Number of tensors, each in a file of its own."""
        return sum(map(len, self.state.parts[0].dtypes)) + len(self.module)

    @property
    def nbytes(self) -> int:
        """Bytes that are read: the tensors of trained parameters, the module states of all ranks, ``module``."""
        trained = sum(saved.nbytes for saved in self.state.parts[0].tensors())
        return trained + sum(model.size for model in self.state.models) + sum(entry.nbytes for entry in self.module)


def plan_universal(state: SavedState, *, tag: str) -> UniversalPlan:
    """Collect what to write. Raises UnsupportedError naming what the format cannot represent."""
    trained = state.parts[0]
    folders: set[str] = {OPTIMIZER_STATE}
    for param, dtypes in zip(trained.layout.params, trained.dtypes, strict=True):
        check_file_name(param.name, "a parameter")
        if param.name in folders:
            raise UnsupportedError(f"{param.name}: a Universal checkpoint has no place for a parameter of this name.")
        for key, dtype in dtypes.items():
            check_file_name(f"{key}.pt", "a state key")
            new_storage(dtype, 0)
    known: dict[Storage, bytes] = {}
    root, left_out = _optimizer_state(state, known)
    module: list[ModelTensor] = []
    if state.checkpoint.whole_model:
        module, more = rest_of_module(state, {param.name for param in trained.layout.params})
        left_out += more
        for entry in module:
            check_file_name(entry.name, "an entry of the module")
    return UniversalPlan(state, tag, root, known, tuple(module), (*left_out, *_notes(state)))


def write_universal(
    plan: UniversalPlan, target: Path, *, max_memory: int = 1 << 30, progress: ProgressFunction | None = None
) -> int:
    """Write the new directory ``target``; return how many digests agreed with the commit record.

    Raises UsageError where the target exists, DigestMismatchError for state that is not what was saved, OSError. A
    failure leaves nothing behind.
    """
    with new_directory(target) as directory:
        tag_dir = directory / plan.tag
        zero = tag_dir / ZERO_FOLDER
        zero.mkdir(parents=True)
        compared = _write_params(plan, zero, max_memory, progress)
        write_module(plan.module, zero, max_memory=max_memory)
        _write_graph(plan.optimizer_state, plan.known, zero / OPTIMIZER_STATE)
        compared += _copy_models(plan.state, tag_dir, progress)
        if plan.state.checkpoint.whole_model:  # a run of stage 3 looks for its own name
            os.link(tag_dir / plan.state.models[0].path.name, tag_dir / model_file_name(0, 0, whole=False))
        (directory / LATEST_UNIVERSAL).write_text(plan.tag)
        check_one_save(plan.state.checkpoint.tag_dir)
    return compared


def check_file_name(name: str, what: str) -> None:
    """Raise UnsupportedError for a name that cannot be a file name."""
    try:
        encoded = name.encode()
    except UnicodeEncodeError:
        encoded = b""
    if not 0 < len(encoded) <= 255 or "/" in name or "\0" in name or name in (".", ".."):
        raise UnsupportedError(
            f"{name!r}: {what} of this name cannot be a file, as a Universal checkpoint has it. `zeroelastic convert "
            "--to dcp` and `zeroelastic export` take any name; or rename it in the model, and save again."
        )


def _notes(state: SavedState) -> list[str]:
    """What is written but not restored by DeepSpeed's loader."""
    trained, head, whole = state.parts[0], state.head, state.checkpoint.whole_model
    loader = "DeepSpeed's loader" + (" at stage 3" if whole else "")
    notes = _order_notes(state)
    keys = dict.fromkeys(key for dtypes in trained.dtypes for key in dtypes)
    missing = [key for key in READ_BY_DEEPSPEED if any(key not in dtypes for dtypes in trained.dtypes)]
    if missing or (head.scalars and "step" not in head.scalars[0]):
        what = ", ".join([*missing, *(["step"] if head.scalars and "step" not in head.scalars[0] else [])])
        notes.append(
            f"the optimizer has no {what} of every parameter, which {loader} asks for: load with "
            "load_optimizer_states=False, which takes the weights"
        )
    extra = [key for key in keys if key not in READ_BY_DEEPSPEED]
    if extra:
        notes.append(f"{loader} reads {', '.join(READ_BY_DEEPSPEED)} only, not {', '.join(extra)}")
    if len({repr(sorted(group.options.items())) for group in head.groups}) > 1:
        notes.append(f"{loader} gives every optimizer group the hyper-parameters of the first one")
    steps = {scalars["step"].canonical() for scalars in head.scalars if "step" in scalars}
    if len(steps) > 1:
        notes.append(f"{loader} gives every parameter the step of the first one; here they differ")
    unread = sorted({key for scalars in head.scalars for key in scalars if key != "step"})
    if unread and whole:
        notes.append(f"DeepSpeed's loader does not read {', '.join(unread)} of the optimizer, which is no tensor")
    notes.append("DeepSpeed's loader restores neither frozen parameters nor buffers; they are in the module states")
    return notes


def _order_notes(state: SavedState) -> list[str]:
    """What ``round_robin_gradients`` breaks in DeepSpeed: its places of parameters are those of another order.

    They are right in a group in which ``parameter_alignment`` leaves a gap, or on one rank. Source:
    ``DeepSpeedZeroOptimizer._link_all_hp_params`` (DeepSpeed 0.19.8).
    """
    head, layout = state.head, state.head.layout
    # BF16_Optimizer, which has no loss scaler, does not know the option.
    if head.stage == 3 or head.scaler is None or not zero_option(head.ds_config, "round_robin_gradients"):
        return []
    notes: list[str] = []
    index = layout.index()
    for i, group in enumerate(head.groups):
        members = np.flatnonzero(layout.sub_group == i)
        gaps = layout.origin[members][1:] != (layout.origin + layout.numel)[members][:-1]
        listed = [index[name] for name in group.params if name in index]
        if not gaps.any() and members.tolist() != listed and not notes:
            notes.append(
                "saved with round_robin_gradients: DeepSpeed's ds_to_universal.py gives parameters of such a "
                "checkpoint the values of others, without an error; here each has its own"
            )
    return [
        *notes,
        "load it at stage 3, or without round_robin_gradients: with it, DeepSpeed's loader at stages 1 and 2 gives "
        "parameters the values of others, without an error",
    ]


def _optimizer_state(state: SavedState, known: dict[Storage, bytes]) -> tuple[object, list[str]]:
    """The tree of ``optimizer_state.pt``: rank 0's optimizer state without the tensors that have files of their own."""
    path = state.head.path
    saved = pairs_of(entry(read_graph(path), "optimizer_state_dict"))
    root: dict[object, object] = {}
    left_out: list[str] = []
    for key, value in saved.items():
        if key in _REBUILT:
            continue
        if sum(storage.nbytes for storage in write_graph(value)[1]) > _MOST_KEPT_BYTES:
            left_out.append(f"{key} of the optimizer state: it holds tensors that belong to no parameter")
        else:
            root[key] = value
    own_state = "base_optimizer_state" if state.checkpoint.whole_model else "optimizer_state_dict"
    groups = entry(saved, own_state, "param_groups")
    if groups is None:
        groups = entry(saved.get("zeroelastic"), "param_groups")
    if groups is None and state.checkpoint.whole_model:
        raise no_hyper_parameters(path)
    if not isinstance(groups, list) or len(groups) != len(state.head.groups):
        raise CheckpointError(f"{path}: holds no optimizer groups. The file is damaged.")
    sub_group = dict(zip((p.name for p in state.head.layout.params), state.head.layout.sub_group.tolist(), strict=True))
    numbered = [
        {**pairs_of(options), "params": sorted({sub_group[name] for name in group.params if name in sub_group})}
        for options, group in zip(groups, state.head.groups, strict=True)
    ]
    scalars = {
        i: {key: scalar_node(value, known) for key, value in of.items()} for i, of in enumerate(state.head.scalars)
    }
    root["optimizer_state_dict"] = {"state": scalars, "param_groups": numbered}
    root["param_groups"] = numbered
    return root, left_out


def _write_params(plan: UniversalPlan, zero: Path, max_memory: int, progress: ProgressFunction | None) -> int:
    """Write the state files of all trained parameters, in batches that keep the tables small."""
    trained = plan.state.parts[0]
    whole = plan.state.checkpoint.whole_model
    wanted = [(i, key, dtype) for i, dtypes in enumerate(trained.dtypes) for key, dtype in dtypes.items()]
    compared = 0
    for begin in range(0, len(wanted), _FILES_AT_ONCE):
        archives: list[tuple[Archive, Storage]] = []
        copies: list[TensorCopy] = []
        for i, key, dtype in wanted[begin : begin + _FILES_AT_ONCE]:
            param = trained.layout.params[i]
            folder = zero / param.name
            folder.mkdir(exist_ok=True)
            storage = new_storage(dtype, param.numel)
            archive = Archive(folder / f"{key}.pt", _param_root(storage, param, whole=whole))
            copies.append(TensorCopy(i, key, dtype, len(archives), archive.offsets[storage]))
            archives.append((archive, storage))
        copied = copy_tensors(
            trained,
            copies,
            [archive.path for archive, _ in archives],
            source=plan.state.checkpoint,
            max_memory=max_memory,
            checksums=True,
            progress=progress,
        )
        assert copied.crc32 is not None
        for (archive, storage), checksum in zip(archives, copied.crc32.tolist(), strict=True):
            archive.finish({storage: checksum})
        compared += copied.num_compared
    if whole:
        for param, scalars in zip(trained.layout.params, trained.scalars, strict=True):
            if "step" in scalars:
                known: dict[Storage, bytes] = {}
                step = scalar_node(scalars["step"], known)
                _write_graph(step, known, zero / param.name / "step.pt")
    return compared


def _param_root(storage: Storage, param: Param, *, whole: bool) -> object:
    """What a state file holds: the flat tensor, or what the loader of stages 1 and 2 wants."""
    if not whole:
        return tensor(storage, 0, (param.numel,))
    return {"cat_dim": 0, "param": tensor(storage, 0, param.shape or (1,))}


def _write_graph(root: object, known: Mapping[Storage, bytes], path: Path) -> None:
    """Write a small torch.save file, with payload from ``known`` or copied from other files."""
    archive = Archive(path, root)
    checksums: dict[Storage, int] = {}
    for storage in archive.storages:
        offset = archive.offsets[storage]
        if storage in known:
            write_at(path, known[storage], offset)
            checksums[storage] = zlib.crc32(known[storage])
        elif storage.nbytes:
            extent = storage.extent
            assert extent is not None
            crc32 = np.zeros(1, dtype=np.uint32)
            move_segments(one_row(extent.offset, offset, storage.nbytes), [extent.path], [path], crc32=crc32)
            checksums[storage] = int(crc32[0])
    archive.finish(checksums)


def _copy_models(state: SavedState, tag_dir: Path, progress: ProgressFunction | None) -> int:
    """Copy every rank's module states; compare the digests of frozen parameters with the record in the same pass.

    Returns the number of digests that were compared.
    """
    digests = recorded_digests(state.checkpoint)
    frozen = state.parts[1] if digests is not None and len(state.parts) > 1 else None
    tensors = [] if frozen is None else frozen.tensors()
    seeds = stream_seeds([*((saved.param.name, saved.key) for saved in tensors), ("", "")])  # the last is of the gaps
    totals = np.zeros_like(seeds)
    paths = [tag_dir / model.path.name for model in state.models]
    for model, path in zip(state.models, paths, strict=True):
        reserve_file(path, model.size)
    for model, path in zip(state.models, paths, strict=True):
        runs = RankRows(*np.empty((5, 0), dtype=np.int64))
        if frozen is not None:
            _, rows = frozen.rank_rows(model.rank)
            runs = RankRows(rows.file_offset, rows.nbytes, rows.target, rows.start, rows.itemsize)
        table = cover(np.array([0]), np.array([model.size]), runs)
        if (table.record < 0).any():
            raise CheckpointError(f"{model.path}: parts of two frozen parameters overlap. The file is damaged.")
        stream = np.where(table.tensor < 0, len(tensors), table.tensor)
        zeros = np.zeros_like(table.offset)
        found = move_segments(
            CopyTable(zeros, table.offset, zeros, table.offset, table.nbytes),
            (model.path,),
            [path],
            digest=None if frozen is None else DigestRows(seeds, stream, table.start, table.itemsize),
            progress=progress,
        )
        totals += 0 if found is None else found
    if digests is not None:
        for saved, digest in zip(tensors, totals.tolist(), strict=False):
            compare_digest(digests, saved.param.name, saved.key, saved.dtype, digest)
    return len(tensors)
