"""DeepSpeed's Universal checkpoints, which its own loader takes at any world size: one file per parameter and state.

    TAG/zero/PARAM/fp32.pt, exp_avg.pt, ...     the whole tensor, flattened
    TAG/zero/optimizer_state.pt                 scalars such as step, hyper-parameters, loss scale
    TAG/*_model_states.pt                       as saved
    latest_universal                            TAG

Source: ``deepspeed/checkpoint/ds_to_universal.py`` (stage 3) and the loader in ``DeepSpeedZeroOptimizer_Stage3``
(``load_hp_checkpoint_state_from_checkpoint_dir_stage3``), DeepSpeed 0.19.8. Written here in one pass, from all ranks'
files straight into the archives, without a temporary copy and without torch; state keys beyond Adam's get files of
their own, which DeepSpeed's loader does not look at.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from zeroelastic.archive import Archive
from zeroelastic.digest import ScalarValue
from zeroelastic.errors import CheckpointError, UnsupportedError
from zeroelastic.executors import DigestRows, SegmentTable, join_crc32, move_segments
from zeroelastic.layout import Int64Array
from zeroelastic.one_save import check_one_save
from zeroelastic.picklegraph import Storage, entry, new_storage, pairs_of, read_graph, tensor, walk_storages
from zeroelastic.publish import reserve_file
from zeroelastic.rows import stream_seeds
from zeroelastic.shard import FP32
from zeroelastic.staging import new_directory
from zeroelastic.state import SavedState
from zeroelastic.tag_names import LATEST_UNIVERSAL
from zeroelastic.transfer import Advance, Delivery, compare_digest, deliver, recorded_digests

ZERO_FOLDER = "zero"
OPTIMIZER_STATE = "optimizer_state.pt"

READ_BY_DEEPSPEED = (FP32, "exp_avg", "exp_avg_sq")
"""The state keys that DeepSpeed's loader asks for, all three of every trained parameter."""

_FILES_AT_ONCE = 4096
_MOST_KEPT_BYTES = 1 << 20
_REBUILT = ("fp32_flat_groups", "base_optimizer_state", "zeroelastic", "optimizer_state_dict", "param_groups")
_PACKED = {
    "float64": "<d",
    "float32": "<f",
    "float16": "<e",
    "int64": "<q",
    "int32": "<i",
    "int16": "<h",
    "int8": "<b",
    "uint8": "<B",
    "bool": "<?",
}


@dataclass(frozen=True, slots=True)
class UniversalPlan:
    """What is written: ``tag`` is the directory below the target; ``notes`` say what DeepSpeed will not restore."""

    state: SavedState
    tag: str
    optimizer_state: object
    notes: tuple[str, ...]

    @property
    def num_tensors(self) -> int:
        """Tensors that get files of their own."""
        return sum(map(len, self.state.parts[0].dtypes))

    @property
    def nbytes(self) -> int:
        """Bytes that are read: the tensors of trained parameters and the module states of all ranks."""
        trained = sum(saved.nbytes for saved in self.state.parts[0].tensors())
        return trained + sum(model.size for model in self.state.models)


def plan_universal(state: SavedState, *, tag: str) -> UniversalPlan:
    """Look at what there is to write. Raises UnsupportedError for what has no place in the layout, by name."""
    trained = state.parts[0]
    folders: set[str] = {OPTIMIZER_STATE}
    for param, dtypes in zip(trained.layout.params, trained.dtypes, strict=True):
        check_file_name(param.name, "a parameter")
        if param.name in folders:
            raise UnsupportedError(f"{param.name}: a Universal checkpoint has no place for a parameter of this name.")
        for key, dtype in dtypes.items():
            check_file_name(f"{key}.pt", "a state key")
            new_storage(dtype, 0)
    root, left_out = _optimizer_state(state)
    return UniversalPlan(state, tag, root, (*left_out, *_notes(state)))


def write_universal(
    plan: UniversalPlan, target: Path, *, max_memory: int = 1 << 30, advance: Advance | None = None
) -> int:
    """Write the new directory ``target``; returns how many digests agreed with the commit record.

    Raises UsageError where the target exists, DigestMismatchError for state that is not what was saved, OSError; then
    nothing is left.
    """
    with new_directory(target) as directory:
        tag_dir = directory / plan.tag
        zero = tag_dir / ZERO_FOLDER
        zero.mkdir(parents=True)
        compared = _write_params(plan, zero, max_memory, advance)
        _write_graph(plan.optimizer_state, zero / OPTIMIZER_STATE)
        compared += _copy_models(plan.state, tag_dir, advance)
        (directory / LATEST_UNIVERSAL).write_text(plan.tag)
        check_one_save(plan.state.checkpoint.tag_dir)
    return compared


def check_file_name(name: str, what: str) -> None:
    """Raise UnsupportedError for a name that cannot be that of a file in a folder."""
    try:
        encoded = name.encode()
    except UnicodeEncodeError:
        encoded = b""
    if not 0 < len(encoded) <= 255 or "/" in name or "\0" in name or name in (".", ".."):
        raise UnsupportedError(f"{name!r}: {what} of this name cannot be a file, as a Universal checkpoint has it.")


def _notes(state: SavedState) -> list[str]:
    """What the layout holds and DeepSpeed's loader does not restore."""
    trained, head = state.parts[0], state.head
    notes: list[str] = []
    keys = dict.fromkeys(key for dtypes in trained.dtypes for key in dtypes)
    missing = [key for key in READ_BY_DEEPSPEED if any(key not in dtypes for dtypes in trained.dtypes)]
    if missing or (head.scalars and "step" not in head.scalars[0]):
        what = ", ".join([*missing, *(["step"] if head.scalars and "step" not in head.scalars[0] else [])])
        notes.append(
            f"the optimizer has no {what} of every parameter, which DeepSpeed's loader asks for: load with "
            "load_optimizer_states=False, which takes the weights"
        )
    extra = [key for key in keys if key not in READ_BY_DEEPSPEED]
    if extra:
        notes.append(f"DeepSpeed's loader reads {', '.join(READ_BY_DEEPSPEED)} only, not {', '.join(extra)}")
    if len({repr(sorted(group.options.items())) for group in head.groups}) > 1:
        notes.append("DeepSpeed's loader gives every optimizer group the hyper-parameters of the first one")
    steps = {scalars["step"].canonical() for scalars in head.scalars if "step" in scalars}
    if len(steps) > 1:
        notes.append("DeepSpeed's loader gives every parameter the step of the first one; here they differ")
    notes.append("DeepSpeed's loader restores neither frozen parameters nor buffers; they are in the module states")
    return notes


def _optimizer_state(state: SavedState) -> tuple[object, list[str]]:
    """The tree of ``optimizer_state.pt``: rank 0's optimizer state without the tensors that have files of their own."""
    path = state.head.path
    saved = pairs_of(entry(read_graph(path), "optimizer_state_dict"))
    root: dict[object, object] = {}
    left_out: list[str] = []
    for key, value in saved.items():
        if key in _REBUILT:
            continue
        if sum(storage.nbytes for storage in walk_storages(value)) > _MOST_KEPT_BYTES:
            left_out.append(f"{key} of the optimizer state: it holds tensors that belong to no parameter")
        else:
            root[key] = value
    nested = pairs_of(saved.get("optimizer_state_dict"))
    groups = nested.get("param_groups", entry(saved.get("zeroelastic"), "param_groups"))
    if not isinstance(groups, list) or len(groups) != len(state.head.groups):
        raise CheckpointError(f"{path}: holds no optimizer groups. The file is damaged.")
    sub_group = dict(zip((p.name for p in state.head.layout.params), state.head.layout.sub_group.tolist(), strict=True))
    numbered = [
        {**pairs_of(options), "params": sorted({sub_group[name] for name in group.params if name in sub_group})}
        for options, group in zip(groups, state.head.groups, strict=True)
    ]
    scalars = {i: {key: _scalar(value) for key, value in of.items()} for i, of in enumerate(state.head.scalars)}
    root["optimizer_state_dict"] = {"state": scalars, "param_groups": numbered}
    root["param_groups"] = numbered
    return root, left_out


class _Known(Storage):
    """A storage whose bytes are at hand."""

    __slots__ = ("data",)

    def __init__(self, data: bytes, dtype: str, numel: int) -> None:
        super().__init__(new_storage(dtype, numel).kind, numel)
        self.data = data


def _scalar(value: ScalarValue) -> object:
    """A 0-dim tensor, or the Python value that it was."""
    if value.value is None or value.kind.startswith("py"):
        return value.value
    if value.kind == "bfloat16":
        data = struct.pack("<f", value.value)[2:]
    else:
        data = struct.pack(_PACKED[value.kind], value.value)
    return tensor(_Known(data, value.kind, 1), 0, ())


def _write_params(plan: UniversalPlan, zero: Path, max_memory: int, advance: Advance | None) -> int:
    """All state files of all trained parameters, so many at once that their tables stay small."""
    trained, record = plan.state.parts[0], plan.state.checkpoint.record
    wanted = [(i, key, dtype) for i, dtypes in enumerate(trained.dtypes) for key, dtype in dtypes.items()]
    compared = 0
    for begin in range(0, len(wanted), _FILES_AT_ONCE):
        archives: list[tuple[Archive, Storage]] = []
        deliveries: list[Delivery] = []
        for i, key, dtype in wanted[begin : begin + _FILES_AT_ONCE]:
            param = trained.layout.params[i]
            folder = zero / param.name
            folder.mkdir(exist_ok=True)
            storage = new_storage(dtype, param.numel)
            archive = Archive(folder / f"{key}.pt", tensor(storage, 0, (param.numel,)))
            deliveries.append(Delivery(i, key, dtype, len(archives), archive.offsets[storage]))
            archives.append((archive, storage))
        delivered = deliver(
            trained,
            deliveries,
            [archive.path for archive, _ in archives],
            record=record,
            max_memory=max_memory,
            checksums=True,
            advance=advance,
        )
        assert delivered.crc32 is not None
        for (archive, storage), checksum in zip(archives, delivered.crc32.tolist(), strict=True):
            archive.finish({storage: checksum})
        compared += delivered.num_compared
    return compared


def _write_graph(root: object, path: Path) -> None:
    """A small torch.save file: payload that comes from another file is moved, the rest is at hand."""
    archive = Archive(path, root)
    checksums: dict[Storage, int] = {}
    for storage in archive.storages:
        offset = archive.offsets[storage]
        if isinstance(storage, _Known):
            with open(path, "r+b", buffering=0) as file:
                file.seek(offset)
                file.write(storage.data)
            checksums[storage] = zlib.crc32(storage.data)
        elif storage.nbytes:
            extent = storage.extent
            assert extent is not None
            crc32 = np.zeros(1, dtype=np.uint32)
            columns = (0, extent.offset, 0, offset, storage.nbytes)
            table = SegmentTable(*(np.array([value], dtype=np.int64) for value in columns))
            move_segments(table, [extent.path], [path], crc32=crc32)
            checksums[storage] = int(join_crc32(crc32, table.nbytes))
    archive.finish(checksums)


def _copy_models(state: SavedState, tag_dir: Path, advance: Advance | None) -> int:
    """Every rank's module states as they are; the digests of frozen parameters are compared in the same pass."""
    paths = [tag_dir / model.path.name for model in state.models]
    for model, path in zip(state.models, paths, strict=True):
        reserve_file(path, model.size)
    record = state.checkpoint.record
    if record is None or len(state.parts) < 2:
        for model, path in zip(state.models, paths, strict=True):
            table = _gaps({}, model.size)[0]
            move_segments(table, (model.path,), [path], progress=advance)
        return 0
    frozen, totals = state.parts[1], np.zeros(0, dtype=np.uint64)
    for model, path in zip(state.models, paths, strict=True):
        tensors, rows = frozen.rank_rows(model.rank)
        pieces = {
            int(offset): (int(nbytes), i)
            for i, (offset, nbytes) in enumerate(zip(rows.file_offset, rows.nbytes, strict=True))
        }
        if (np.diff(rows.file_offset) < rows.nbytes[:-1]).any():
            raise CheckpointError(f"{model.path}: parts of two frozen parameters overlap. The file is damaged.")
        table, row = _gaps(pieces, model.size)
        known = row >= 0
        none = len(tensors)
        zeros = np.zeros(len(row), dtype=np.int64)
        stream, start, itemsize = zeros + none, zeros.copy(), zeros + 1
        stream[known], start[known] = rows.target[row[known]], rows.start[row[known]]
        itemsize[known] = rows.itemsize[row[known]]
        seeds = stream_seeds([*((saved.param.name, saved.key) for saved in tensors), ("", "")])
        found = move_segments(
            table,
            (model.path,),
            [path],
            digest=DigestRows(seeds, stream, start, itemsize),
            progress=advance,
        )
        assert found is not None
        totals = found if len(totals) == 0 else totals + found
    digests = recorded_digests(record)
    for saved, digest in zip(frozen.tensors(), totals.tolist(), strict=False):  # the last one is of the gaps
        compare_digest(digests, saved.param.name, saved.key, saved.dtype, digest)
    return len(frozen.tensors())


def _gaps(pieces: Mapping[int, tuple[int, int]], size: int) -> tuple[SegmentTable, Int64Array]:
    """A whole file as rows to the same place: its pieces (offset -> bytes and number), and -1 for what lies between."""
    rows: list[tuple[int, int, int]] = []
    at = 0
    for offset, (nbytes, number) in sorted(pieces.items()):
        if offset > at:
            rows.append((at, offset - at, -1))
        rows.append((offset, nbytes, number))
        at = offset + nbytes
    if size > at:
        rows.append((at, size - at, -1))
    offset_of, nbytes_of, number_of = (np.array([row[i] for row in rows], dtype=np.int64) for i in range(3))
    zeros = np.zeros(len(rows), dtype=np.int64)
    return SegmentTable(zeros, offset_of, zeros, offset_of, nbytes_of), number_of
