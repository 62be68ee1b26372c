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
Tensors that ranks had slices of are whole, in the shape that the loaders slice them by.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from zeroelastic.checkpoint.extents import stream_seeds
from zeroelastic.checkpoint.optimizer_file import FP32, zero_option
from zeroelastic.checkpoint.saved_state import SavedState
from zeroelastic.checkpoint.tag_files import model_file_name
from zeroelastic.core.copies import first_copies, strips_of_runs
from zeroelastic.distributed.processes import Processes
from zeroelastic.errors import CheckpointError, UnsupportedError
from zeroelastic.executors.dispatch import CopyTable, DigestRows, move_segments
from zeroelastic.runs.names import LATEST_UNIVERSAL
from zeroelastic.torch_file.graph import Storage, entry, new_storage, pairs_of, read_graph, tensor, write_graph
from zeroelastic.torch_file.header import TensorRef, read_torch_file
from zeroelastic.verbs.model_tensors import ModelTensor, Place, optimizer_tensors, stored_tensor
from zeroelastic.verbs.new_directory import reserve_file
from zeroelastic.verbs.new_files import Archives, Reading, TensorCopy, convertible, copy_tensors, write_archive
from zeroelastic.verbs.reshard.files import scalar_node
from zeroelastic.verbs.reshard.sidecar_files import link_or_copy
from zeroelastic.verbs.reshard.slicing import Slicing
from zeroelastic.verbs.reshard.source import no_hyper_parameters, slicing_of
from zeroelastic.verbs.verify.payload_scan import RankRows, cover

ZERO_FOLDER = "zero"
OPTIMIZER_STATE = "optimizer_state.pt"

_READ_BY_DEEPSPEED = (FP32, "exp_avg", "exp_avg_sq")
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

    ``module`` are the entries of a whole module that are not trained. ``slicing`` says which slices of tensors ranks
    had.
    """

    state: SavedState
    tag: str
    optimizer_state: object
    module: tuple[ModelTensor, ...]
    slicing: Slicing
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

    def write(self, directory: Path, reading: Reading, processes: Processes) -> None:
        """Write the files, by one process; those of tensors in batches, which keep the tables small."""
        trained, whole = self.state.parts[0], self.state.checkpoint.whole_model
        tag_dir = directory / self.tag
        zero = tag_dir / ZERO_FOLDER
        zero.mkdir(parents=True)
        params, scalars = trained.params, trained.scalars
        tensors = [*optimizer_tensors(self.state), *self.module]
        for begin in range(0, len(tensors), _FILES_AT_ONCE):
            some = tensors[begin : begin + _FILES_AT_ONCE]
            graphs: dict[Path, object] = {}
            storages: list[Storage] = []
            for one in some:
                place = one.source
                name, key = (params[place.param].name, place.key) if isinstance(place, Place) else (one.name, FP32)
                dtype = one.dtype if isinstance(place, Place) else "float32"
                (zero / name).mkdir(exist_ok=True)
                storages.append(new_storage(dtype, one.numel))
                graphs[zero / name / f"{key}.pt"] = self._state_file(name, one, storages[-1])
            archives = Archives(graphs)
            slots = archives.slots(storages).tolist()
            columns = zip(some, storages, slots, strict=True)
            copies = [TensorCopy(one, storage.dtype, slot) for one, storage, slot in columns]
            copy_tensors(archives, copies, reading)
            archives.finish()
        for param, own in zip(params, scalars, strict=True):
            if whole and "step" in own:
                write_archive(zero / param.name / "step.pt", scalar_node(own["step"]))
        write_archive(zero / OPTIMIZER_STATE, self.optimizer_state)
        _copy_models(tag_dir, reading)
        for tensor_rank, model in enumerate(self.state.models if whole else ()):  # a run of stage 3 looks for its name
            link_or_copy(tag_dir / model.path.name, tag_dir / model_file_name(0, tensor_rank, whole=False))
        (directory / LATEST_UNIVERSAL).write_text(self.tag)

    def _state_file(self, name: str, saved: ModelTensor, storage: Storage) -> object:
        """What a state file holds: the flat tensor, or what the loaders want that slice it, and that of stages 1, 2."""
        if not self.state.checkpoint.whole_model and not self.slicing.has_slices:
            return tensor(storage, 0, (storage.numel,))
        if not isinstance(saved.source, Place):
            return {"param": tensor(storage, 0, saved.shape)}
        found: dict[str, object] = {"cat_dim": 0, "param": tensor(storage, 0, saved.shape or (1,))}
        if self.slicing.is_expert(name) and not self.slicing.has_own_experts:
            found |= {"is_expert_param": True, "ep_num_experts": saved.shape[0]}
        return found


def plan_universal(state: SavedState, *, tag: str) -> UniversalPlan:
    """Collect what to write. Raises UnsupportedError naming what the format cannot represent."""
    trained = state.parts[0]
    folders: set[str] = {OPTIMIZER_STATE}
    for param, dtypes in zip(trained.params, trained.dtypes, strict=True):
        check_file_name(param.name, "a parameter")
        if param.name in folders:
            raise UnsupportedError(f"{param.name}: a Universal checkpoint has no place for a parameter of this name.")
        for key, dtype in dtypes.items():
            check_file_name(f"{key}.pt", "a state key")
            new_storage(dtype, 0)
    root, left_out = _optimizer_state(state)
    module: list[ModelTensor] = []
    slicing = slicing_of(state.checkpoint)
    if state.checkpoint.whole_model:
        frozen = state.parts[1].params if len(state.parts) > 1 and slicing.topology.tensor_size > 1 else ()
        module, more = _rest_of_module(state, {param.name for param in (*trained.params, *frozen)})
        left_out += more
        for entry in module:
            check_file_name(entry.name, "an entry of the module")
    notes = _notes(state)
    if slicing.has_own_experts:
        notes.append(
            "load it with expert parallel size 1: DeepSpeed's loader finds experts of its own MoE layers by their "
            "numbers on a rank, and gives every expert parallel rank those of the first, without an error"
        )
    return UniversalPlan(state, tag, root, tuple(module), slicing, (*left_out, *notes))


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
    missing = [key for key in _READ_BY_DEEPSPEED if any(key not in dtypes for dtypes in trained.dtypes)]
    if missing or (head.scalars and "step" not in head.scalars[0]):
        what = ", ".join([*missing, *(["step"] if head.scalars and "step" not in head.scalars[0] else [])])
        notes.append(
            f"the optimizer has no {what} of every parameter, which {loader} asks for: load with "
            "load_optimizer_states=False, which takes the weights"
        )
    extra = [key for key in keys if key not in _READ_BY_DEEPSPEED]
    if extra:
        notes.append(f"{loader} reads {', '.join(_READ_BY_DEEPSPEED)} only, not {', '.join(extra)}")
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


def _optimizer_state(state: SavedState) -> tuple[object, list[str]]:
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
        {
            **{key: value for key, value in pairs_of(options).items() if key != "name" or not _is_of_experts(value)},
            "params": sorted({sub_group[name] for name in group.params if name in sub_group}),
        }
        for options, group in zip(groups, state.head.groups, strict=True)
    ]
    scalars = {i: {key: scalar_node(value) for key, value in of.items()} for i, of in enumerate(state.head.scalars)}
    root["optimizer_state_dict"] = {"state": scalars, "param_groups": numbered}
    root["param_groups"] = numbered
    return root, left_out


def _is_of_experts(name: object) -> bool:
    """Whether a group's name is one of experts, ``ep_size_4``: a run of another size keeps its own."""
    return isinstance(name, str) and name.startswith("ep_size_")


def _copy_models(tag_dir: Path, reading: Reading) -> None:
    """Copy every rank's module states; compare the digests of frozen parameters with the record in the same pass."""
    state, digests = reading.state, reading.digests
    frozen = state.parts[1] if digests.known and len(state.parts) > 1 else None
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
            target, slices = rows.target, frozen.layout.slices
            if slices is not None:  # what several tensor parallel ranks have copies of counts once
                strip = strips_of_runs(slices, rows.param, rows.start)
                target = np.where(first_copies(slices)[strip] == strip, target, len(tensors))
            runs = RankRows(rows.file_offset, rows.nbytes, target, rows.start, rows.itemsize)
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
            progress=reading.progress,
        )
        totals += 0 if found is None else found
    digests.compare(tensors, totals[: len(tensors)].tolist())


def _rest_of_module(state: SavedState, trained: Collection[str]) -> tuple[list[ModelTensor], list[str]]:
    """The entries of the module's state that are not trained; and a sentence for each that is not written.

    Raises CheckpointError for a file without a module.
    """
    file = read_torch_file(state.checkpoint.model_files[0], foreign="inert")
    module = file.root.get("module") if isinstance(file.root, dict) else None
    if not isinstance(module, dict):
        raise CheckpointError(f"{file.path}: holds no module. It is not a file of ZeRO stage 1 or 2.")
    rest = {str(name): value for name, value in module.items() if name not in trained}
    file.locate(value.storage.key for value in rest.values() if isinstance(value, TensorRef))
    found: list[ModelTensor] = []
    left_out: list[str] = []
    for name, value in rest.items():
        if isinstance(value, TensorRef) and convertible(value.dtype, "float32"):
            found.append(stored_tensor(name, value, file))
        else:
            what = value.dtype if isinstance(value, TensorRef) else "no tensor"
            left_out.append(f"{name} of the module: it is {what}, which has no float32 file; the module states have it")
    return found, left_out
