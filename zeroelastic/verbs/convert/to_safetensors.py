"""A checkpoint's weights as safetensors files that Hugging Face's libraries load: planned from headers, then streamed.

The files are laid out here: 8 bytes of header length, a JSON header padded to 8 bytes, and the tensors' bytes without
gaps (safetensors 0.8). Larger elements come first in a file, so each tensor is aligned to its elements. Names, the
order of shards and the index are those of ``huggingface_hub.save_torch_state_dict``; a tied weight is stored once and
its other names are in the metadata, as ``safetensors.torch.save_model`` keeps them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from zeroelastic.checkpoint.one_save import check_one_save
from zeroelastic.checkpoint.optimizer_file import FP32, OptionValue
from zeroelastic.checkpoint.saved_state import SavedState
from zeroelastic.distributed.processes import Processes
from zeroelastic.errors import CheckpointError, UnsupportedError
from zeroelastic.executors.dispatch import move_segments, write_segments
from zeroelastic.executors.progress import ProgressFunction
from zeroelastic.io.atomic import start_writeback
from zeroelastic.io.paths import FilePath
from zeroelastic.io.storage import file_size, file_sizes, read_whole
from zeroelastic.torch_file.header import DTYPE_BYTES, DType
from zeroelastic.verbs.convert.copy_tensors import TensorCopy, check_cast, convert_elements, copy_tensors, one_row
from zeroelastic.verbs.convert.model_tensors import (
    Buffer,
    ModelTensor,
    Place,
    model_tensors,
    optimizer_tensors,
    read_buffer,
)
from zeroelastic.verbs.new_directory import EarlyFlush, new_directory, reserve_file

ExportDtype = Literal["fp32", "bf16", "fp16"]
Tied = Literal["once", "all"]

DTYPES: dict[ExportDtype, str] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}

HF_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
)
"""What the Hugging Face Trainer leaves beside the tag that ``from_pretrained`` asks for."""

_SAFETENSORS_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "complex64": "C64",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
_MOST_HEADER_BYTES = 100_000_000  # safetensors reads no larger one
_MOST_COPIED_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file: its name there, what it is made of, its dtype there, and its place behind the header."""

    name: str
    tensor: ModelTensor
    dtype: str
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.tensor.numel * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class SafetensorsFile:
    """One file to be: ``header`` with its length in front, then the entries without gaps."""

    name: str
    header: bytes
    entries: tuple[Entry, ...]

    @property
    def nbytes(self) -> int:
        """Size of the file in bytes."""
        return len(self.header) + sum(entry.nbytes for entry in self.entries)


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """What an export writes; ``texts`` are its small JSON files by name, ``copied`` are files taken as they are."""

    state: SavedState
    files: tuple[SafetensorsFile, ...]
    texts: Mapping[str, bytes]
    copied: tuple[FilePath, ...]
    tied: Mapping[str, str]
    left_out: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        copied = sum(file_size(path) or 0 for path in self.copied)
        return sum(file.nbytes for file in self.files) + sum(map(len, self.texts.values())) + copied

    @property
    def source_nbytes(self) -> int:
        """Bytes of tensors that are read."""
        return sum(entry.tensor.nbytes for file in self.files for entry in file.entries)

    def tensors(self, *kinds: str) -> list[Entry]:
        """The entries of tensors of some kinds: "trained", "frozen", "buffer" or "state"."""
        return [entry for file in self.files for entry in file.entries if entry.tensor.kind in kinds]


def plan_export(
    state: SavedState,
    *,
    dtype: ExportDtype | None = None,
    max_shard_size: int = 5 * 10**9,
    optimizer: bool = False,
    tied: Tied = "once",
    model_dir: FilePath | None = None,
) -> ExportPlan:
    """Lay out every file of an export.

    Without ``dtype`` parameters keep the dtype in which they were saved and 16-bit buffers become float32, as
    ``zero_to_fp32`` gives them; with it all floating-point tensors of the model are converted. Optimizer state never
    is; where trained weights are, it includes the master weights. ``model_dir`` is where ``HF_FILES`` are taken from.

    Raises CheckpointError, UnsupportedError naming the tensor that cannot be written.

    Example::

        plan = plan_export(open_state(open_checkpoint("ckpt/global_step4")), dtype="bf16")
        run_export(plan, Path("weights"))
    """
    model = model_tensors(state)
    others = [t for t in model.tensors if t.kind == "buffer" and t.dtype not in _SAFETENSORS_DTYPES]
    left_out = (*model.left_out, *(f"buffer {t.name}: safetensors files cannot hold {t.dtype}" for t in others))
    wanted = [(tensor.name, tensor, _export_dtype(tensor, dtype)) for tensor in model.tensors if tensor not in others]
    if tied == "all":
        by_name = {name: (tensor, to) for name, tensor, to in wanted}
        wanted += [(alias, *by_name[name]) for alias, name in model.tied.items()]
    aliases = model.tied if tied == "once" else {}
    files, texts = _lay_out("model", wanted, aliases, max_shard_size)
    if optimizer:
        masters = all(to == tensor.dtype for _, tensor, to in wanted if tensor.kind == "trained")
        keys = frozenset(key for dtypes in state.parts[0].dtypes for key in dtypes if key != FP32 or not masters)
        tensors = optimizer_tensors(state, keys=keys)
        if len({tensor.name for tensor in tensors}) != len(tensors):
            raise UnsupportedError(
                "two tensors of optimizer state have the same name PARAM.STATE_KEY. Export without them."
            )
        more, index = _lay_out("optimizer", [(t.name, t, t.dtype) for t in tensors], {}, max_shard_size)
        files, texts = files + more, {**texts, **index, "optimizer.json": _text(optimizer_document(state))}
    return ExportPlan(state, tuple(files), texts, _model_files(model_dir), model.tied, left_out)


def run_export(
    plan: ExportPlan,
    target: Path,
    *,
    max_memory: int = 1 << 30,
    progress: ProgressFunction | None = None,
    processes: Processes | None = None,
) -> int:
    """Write what was planned into the new directory ``target``; returns how many digests were compared.

    Several ``processes`` share the tensors, on a file system that all of them see. Collective.

    Raises UsageError where the target exists, DigestMismatchError for state that is not what was saved, OSError; then
    nothing is left.
    """
    processes = processes or Processes()
    with new_directory(target, processes) as directory:
        processes.run_on_rank0(lambda: _write_small(plan, directory))
        mine = _share(plan, processes)
        compared = processes.all_or_raise(lambda: _write_tensors(plan, directory, max_memory, progress, mine))
        tag_dir = plan.state.checkpoint.tag_dir
        processes.all_or_raise(lambda: check_one_save(tag_dir, alone=processes.size == 1))
        return sum(processes.all_gather(compared))


def _write_small(plan: ExportPlan, directory: Path) -> None:
    """Everything but tensors, whose files get their headers and their size."""
    for file in plan.files:
        reserve_file(directory / file.name, file.nbytes)
        with open(directory / file.name, "r+b", buffering=0) as opened:
            opened.write(file.header)
    for name, text in plan.texts.items():
        (directory / name).write_bytes(text)
    for path in plan.copied:
        (directory / path.name).write_bytes(read_whole(path, limit=_MOST_COPIED_BYTES))


def _share(plan: ExportPlan, processes: Processes) -> set[str]:
    """The names of the tensors that this process writes: about as many bytes as every other one."""
    loads = [0] * processes.size
    mine: set[str] = set()
    for file in plan.files:
        for entry in file.entries:
            least = loads.index(min(loads))
            loads[least] += entry.nbytes
            if least == processes.rank:
                mine.add(f"{file.name} {entry.name}")
    return mine


def optimizer_document(state: SavedState) -> dict[str, object]:
    """What is not a tensor: groups with the names of their parameters, scalars by parameter, step, loss scale.

    Numbers that JSON does not have are the texts "NaN", "Infinity" and "-Infinity".
    """
    head = state.head
    trained = state.parts[0]
    scaler = head.scaler
    attributes = {} if scaler is None else scaler.attributes
    return {
        "format_version": 1,
        "global_steps": state.models[0].global_steps,
        "groups": [
            {"params": list(group.params), "options": {key: _plain(value) for key, value in group.options.items()}}
            for group in head.groups
        ],
        "scalars": {
            param.name: {key: {"kind": value.kind, "value": _plain(value.value)} for key, value in scalars.items()}
            for param, scalars in zip(trained.layout.params, trained.scalars, strict=True)
        },
        "loss_scaler": None
        if scaler is None
        else {
            "class": scaler.class_name,
            "dynamic": scaler.dynamic,
            "overflow": scaler.overflow,
            "attributes": {k: v.name if isinstance(v, DType) else _plain(v) for k, v in attributes.items()},
        },
    }


def _plain(value: OptionValue | object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _export_dtype(tensor: ModelTensor, dtype: ExportDtype | None) -> str:
    if "float" not in tensor.dtype:
        return tensor.dtype
    if dtype is not None:
        to = DTYPES[dtype]
    else:
        to = "float32" if tensor.kind == "buffer" and tensor.dtype in ("float16", "bfloat16") else tensor.dtype
    check_cast(tensor.dtype, to, f"{tensor.kind} tensor {tensor.name}")
    return to


def _lay_out(
    base: str, wanted: Sequence[tuple[str, ModelTensor, str]], aliases: Mapping[str, str], max_shard_size: int
) -> tuple[list[SafetensorsFile], dict[str, bytes]]:
    """The files that hold some tensors, and the index where there are more than one."""
    for name, tensor, _ in wanted:
        _check_name(name)
        if tensor.dtype not in _SAFETENSORS_DTYPES:
            raise UnsupportedError(f"{name}: safetensors files cannot hold {tensor.dtype}.")
    for alias in aliases:
        _check_name(alias)
        if alias == "format":
            raise UnsupportedError(f"{alias} is a tied name that the metadata of safetensors files has no place for.")
    shards: list[list[tuple[str, ModelTensor, str]]] = [[]]
    filled = 0
    for name, tensor, dtype in wanted:
        nbytes = tensor.numel * DTYPE_BYTES[dtype]
        if shards[-1] and filled + nbytes > max_shard_size:
            shards.append([])
            filled = 0
        shards[-1].append((name, tensor, dtype))
        filled += nbytes
    files: list[SafetensorsFile] = []
    for number, shard in enumerate(shards, start=1):
        of = f"-{number:05d}-of-{len(shards):05d}" if len(shards) > 1 else ""
        names = {name for name, _, _ in shard}
        metadata = {alias: name for alias, name in aliases.items() if name in names}
        files.append(_one_file(f"{base}{of}.safetensors", shard, metadata))
    if len(shards) == 1:
        return files, {}
    index = {
        "metadata": {"total_size": sum(entry.nbytes for file in files for entry in file.entries), **aliases},
        "weight_map": {entry.name: file.name for file in files for entry in file.entries},
    }
    return files, {f"{base}.safetensors.index.json": _text(index)}


def _one_file(name: str, shard: Sequence[tuple[str, ModelTensor, str]], metadata: Mapping[str, str]) -> SafetensorsFile:
    header: dict[str, object] = {"__metadata__": {**metadata, "format": "pt"}}
    entries: list[Entry] = []
    offset = 0
    for tensor_name, tensor, dtype in sorted(shard, key=lambda item: -DTYPE_BYTES[item[2]]):
        entry = Entry(tensor_name, tensor, dtype, offset)
        header[tensor_name] = {
            "dtype": _SAFETENSORS_DTYPES[dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + entry.nbytes],
        }
        offset += entry.nbytes
        entries.append(entry)
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _MOST_HEADER_BYTES:
        raise UnsupportedError(f"{name}: its header would have {len(text)} bytes, which safetensors refuses to read.")
    return SafetensorsFile(name, len(text).to_bytes(8, "little") + text, tuple(entries))


def _check_name(name: str) -> None:
    try:
        name.encode()
    except UnicodeEncodeError:
        raise UnsupportedError(f"{name!r} is not Unicode text, so no safetensors file can hold it.") from None
    if name == "__metadata__":
        raise UnsupportedError(f"{name} is a name that safetensors files keep for themselves.")


def _text(document: object) -> bytes:
    return (json.dumps(document, indent=2, allow_nan=False) + "\n").encode()


def _model_files(model_dir: FilePath | None) -> tuple[FilePath, ...]:
    if model_dir is None:
        return ()
    sizes = file_sizes(model_dir)
    found = [name for name in HF_FILES if name in sizes]
    for name in found:
        if sizes[name] > _MOST_COPIED_BYTES:
            raise CheckpointError(
                f"{model_dir / name}: has more than {_MOST_COPIED_BYTES} bytes, which such a file never has."
            )
    return tuple(model_dir / name for name in found)


def _write_tensors(
    plan: ExportPlan, directory: Path, max_memory: int, progress: ProgressFunction | None, mine: Collection[str]
) -> int:
    paths = [directory / file.name for file in plan.files]
    copies: dict[tuple[int, int], list[TensorCopy]] = {}
    compared = 0
    for number, file in enumerate(plan.files):
        for entry in file.entries:
            if f"{file.name} {entry.name}" not in mine:
                continue
            offset = len(file.header) + entry.offset
            source = entry.tensor.source
            if isinstance(source, Buffer):
                _write_buffer(entry, source, paths[number], offset, max_memory)
                if progress is not None:
                    progress(entry.tensor.nbytes)
            elif entry.nbytes:
                copy = TensorCopy(source.param, source.key, entry.dtype, number, offset)
                copies.setdefault((number, source.part), []).append(copy)
            else:
                assert isinstance(source, Place)
    for number, path in enumerate(paths):
        flushing = EarlyFlush([path], progress)
        for p, part in enumerate(plan.state.parts):
            some = copies.get((number, p), [])
            saved = plan.state.checkpoint
            copied = copy_tensors(part, some, paths, source=saved, max_memory=max_memory, progress=flushing.on_progress)
            compared += copied.num_compared
        start_writeback(path)
    return compared


def _write_buffer(entry: Entry, buffer: Buffer, path: Path, offset: int, max_memory: int) -> None:
    """One buffer of the module, converted where its dtype changes; one that is not a single run goes through memory."""
    tensor = entry.tensor
    if not entry.nbytes:
        return
    if buffer.stride is None and entry.dtype == tensor.dtype:
        move_segments(one_row(buffer.extent.offset, offset, tensor.nbytes), [buffer.extent.path], [path])
        return
    data = read_buffer(tensor, limit=max_memory // 4)
    made = np.ascontiguousarray(convert_elements(data, tensor.dtype, entry.dtype))
    write_segments(one_row(0, offset, len(made)), [made], [path])
