"""A checkpoint's weights as safetensors files that Hugging Face's libraries load: planned from headers, then streamed.

Names are chosen as by ``huggingface_hub.save_torch_state_dict``; a tied weight is stored once and the other names are
in the metadata, as ``safetensors.torch.save_model`` keeps them.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from zeroelastic.checkpoint.optimizer_file import FP32, OptionValue
from zeroelastic.checkpoint.saved_state import SavedState
from zeroelastic.errors import CheckpointError, UnsupportedError, UsageError, counted, printable, some
from zeroelastic.executors.tables import ProgressFunction
from zeroelastic.io.atomic import start_writeback
from zeroelastic.io.paths import FilePath
from zeroelastic.io.storage import file_size, file_sizes, folders, read_whole
from zeroelastic.torch_file.header import DType
from zeroelastic.verbs.convert.safetensors_files import (
    CONFIG_NAME,
    DTYPE_NAMES,
    WEIGHTS_NAME,
    SafetensorsFile,
    adapters_of,
    base_weights,
    folder_of,
    json_text,
    lay_out,
)
from zeroelastic.verbs.interface import Part
from zeroelastic.verbs.model_tensors import ModelTensor, ModelTensors, model_tensors, part_tensors
from zeroelastic.verbs.new_directory import reserve_file
from zeroelastic.verbs.new_files import NewFiles, convertible, copy_tensors
from zeroelastic.verbs.reading import Reading

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
"""The files that the Hugging Face Trainer leaves beside the tag and ``from_pretrained`` asks for."""

_MOST_COPIED_BYTES = 1 << 30
_FLUSH_EVERY = 128 << 20


class ExportedFile(Part):
    """One file of an export."""

    name: str
    bytes: int
    tensors: int


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """The files of an export; ``texts`` are its small JSON files by name, ``copied`` are files taken as they are.

    Names of files may begin with a folder.
    """

    state: SavedState
    files: tuple[SafetensorsFile, ...]
    texts: Mapping[str, bytes]
    copied: Mapping[str, FilePath]
    tied: Mapping[str, str]
    left_out: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of tensors that are read."""
        return sum(entry.tensor.nbytes for file in self.files for entry in file.entries)

    def kinds(self) -> Counter[str]:
        """How many tensors there are of each kind."""
        return Counter(entry.tensor.kind for file in self.files for entry in file.entries)

    def written_files(self) -> tuple[ExportedFile, ...]:
        """All files of the result."""
        files = [(file.name, file.nbytes, len(file.entries)) for file in self.files]
        files += [(name, len(text), 0) for name, text in self.texts.items()]
        files += [(name, file_size(path) or 0, 0) for name, path in self.copied.items()]
        return tuple(ExportedFile(name=name, bytes=nbytes, tensors=count) for name, nbytes, count in files)

    def write(self, directory: Path, reading: Reading) -> None:
        """Write the files."""
        self._write_headers(directory)
        progress = reading.progress
        for file in self.files:
            path = directory / file.name
            reading.progress = _flush_early(path, progress)
            ends = itertools.accumulate((entry.nbytes for entry in file.entries), initial=len(file.header))
            files = NewFiles([path], [(0, begin) for begin in ends])
            copies = [entry for entry in file.entries if entry.nbytes]
            copy_tensors(files, copies, reading)
            start_writeback(path)

    def _write_headers(self, directory: Path) -> None:
        """Everything but tensors, whose files get their headers and their size."""
        for file in self.files:
            (directory / file.name).parent.mkdir(exist_ok=True)
            reserve_file(directory / file.name, file.nbytes)
            with open(directory / file.name, "r+b", buffering=0) as opened:
                opened.write(file.header)
        for name, text in self.texts.items():
            (directory / name).write_bytes(text)
        for name, path in self.copied.items():
            (directory / name).write_bytes(read_whole(path, limit=_MOST_COPIED_BYTES))


def _flush_early(path: Path, progress: ProgressFunction | None) -> ProgressFunction:
    """Passes progress on, and lets the device begin with what has been written since it last did."""
    waiting = 0

    def on_progress(nbytes: int) -> None:
        nonlocal waiting
        waiting += nbytes
        if waiting >= _FLUSH_EVERY:
            waiting = 0
            start_writeback(path)
        if progress is not None:
            progress(nbytes)

    return on_progress


def plan_export(
    state: SavedState,
    *,
    dtype: ExportDtype | None = None,
    max_shard_size: int = 5 * 10**9,
    optimizer: bool = False,
    tied: Tied = "once",
    adapters: bool | str = False,
    model_dir: FilePath | None = None,
) -> ExportPlan:
    """Lay out every file of an export.

    Without ``dtype`` parameters keep the dtype in which they were saved and 16-bit buffers become float32, as
    ``zero_to_fp32`` gives them; with it all floating-point tensors of the model are converted. Optimizer state never
    is; where trained weights are, it includes the master weights. ``adapters`` chooses the trained weights alone, in
    PEFT's files and names where they are those of PEFT, or the adapter of a name. ``model_dir`` is where ``HF_FILES``
    are taken from.

    Raises CheckpointError, UsageError for an adapter that is not there, UnsupportedError naming the tensor that cannot
    be written.

    Example::

        plan = plan_export(open_state(open_checkpoint("ckpt/global_step4")), dtype="bf16")
        write_plan(plan, Path("weights"))
    """
    model = _trained_alone(model_tensors(state)) if adapters else model_tensors(state)
    if not adapters:
        _refuse_excluded(state)
    unwritable = [t for t in model.tensors if t.kind == "buffer" and t.dtype not in DTYPE_NAMES]
    left_out = (*model.left_out, *(f"buffer {t.name}: safetensors files cannot hold {t.dtype}" for t in unwritable))
    model = model.only(tensor for tensor in model.tensors if tensor not in unwritable)
    of_peft = _adapters(model) if adapters else {}
    notes = (_NO_ADAPTER,) if adapters and not of_peft else ()
    if blocks := model.autoep_blocks:
        notes = (*notes, _AUTOEP.format(counted(len(blocks), "layer"), printable(blocks[0])))
    if isinstance(adapters, str) and adapters not in of_peft:
        raise UsageError(
            f"{state.checkpoint.tag_dir}: there is no adapter {printable(adapters)}. "
            + (f"There are {some(map(printable, of_peft))}." if of_peft else "Its trained weights are not PEFT's.")
        )
    tensors: Sequence[ModelTensor] = model.tensors
    if tied == "all" or of_peft:  # PEFT writes a tied weight under each name, and looks for each
        tensors = [replace(tensor, name=name) for name, tensor in model.by_name().items()]
    wanted = [(tensor, _export_dtype(tensor, dtype)) for tensor in tensors]
    copied = _model_files(model_dir)
    files: list[SafetensorsFile] = []
    texts: dict[str, bytes] = {}
    for adapter in [adapters] if isinstance(adapters, str) else of_peft:
        own, base = of_peft[adapter], f"{folder_of(adapter)}{WEIGHTS_NAME}"
        left_out += tuple(_NO_BASE.format(printable(name)) for name in sorted(base_weights(own) - own.keys()))
        renamed = [(replace(one, name=own[one.name]), to) for one, to in wanted if one.name in own]
        more, index = lay_out(base, renamed, {}, max_shard_size)
        files, texts = files + more, {**texts, **index}
        copied = {**copied, **_model_files(model_dir, folder_of(adapter), (CONFIG_NAME,))}
    if not of_peft:
        files, texts = lay_out("model", wanted, model.tied if tied == "once" else {}, max_shard_size)
    if optimizer:
        masters = all(to == tensor.dtype for tensor, to in wanted if tensor.kind == "trained")
        more, index = lay_out("optimizer", _optimizer_tensors(state, masters), {}, max_shard_size)
        files, texts = files + more, {**texts, **index, "optimizer.json": json_text(optimizer_document(state))}
    return ExportPlan(state, tuple(files), texts, copied, model.tied, left_out, notes)


def _trained_alone(model: ModelTensors) -> ModelTensors:
    """The trained weights, and what belongs to the adapters that they are of."""
    trained = {tensor.name for tensor in model.tensors if tensor.kind == "trained"}
    others = [tensor.name for tensor in model.tensors if tensor.name not in trained]
    names = trained.union(*adapters_of(trained, others).values())
    return replace(model.only(tensor for tensor in model.tensors if tensor.name in names), left_out=())


def _optimizer_tensors(state: SavedState, masters: bool) -> list[tuple[ModelTensor, str]]:
    """The tensors of the optimizer's state; unless ``masters``, where weights are these, without master weights."""
    keys = {key for dtypes in state.parts[0].dtypes for key in dtypes if key != FP32 or not masters}
    tensors = part_tensors(state.parts[0], keys)
    if len({tensor.name for tensor in tensors}) != len(tensors):
        raise UnsupportedError(
            "two tensors of optimizer state have the same name PARAM.STATE_KEY. Export without them."
        )
    return [(tensor, tensor.dtype) for tensor in tensors]


def _refuse_excluded(state: SavedState) -> None:
    """Raise UnsupportedError for the whole weights of a save that has no frozen ones."""
    saved = state.checkpoint.inventory
    if excluded := saved.excluded():
        raise UnsupportedError(
            f"{state.checkpoint.tag_dir}: the weights of {counted(len(excluded), 'frozen parameter')} "
            f"({some(content.param.name for content in excluded)}) are not in the checkpoint, which was saved with "
            f"{saved.excluded_how}. Export the trained weights alone with --adapters, and put them on the base model; "
            'or resume with the base model, and save with "frozen": "include".'
        )


_NO_ADAPTER = (
    "no adapter of PEFT was recognised: the trained weights are in model.safetensors, under the names of the module"
)

_NO_BASE = (
    "frozen parameter {}: the checkpoint was saved without it. PEFT saves it with the adapter, and where the file has "
    "none takes that of the base model, which has to be the same"
)

_AUTOEP = "the experts of {} have DeepSpeed's names and shapes, as in {}.experts.w1: AutoEP replaced those of the model"


def _adapters(model: ModelTensors) -> dict[str, dict[str, str]]:
    """``adapters_of`` a model, with the further names of tied weights."""
    trained = {tensor.name for tensor in model.tensors if tensor.kind == "trained"}
    names = [*(tensor.name for tensor in model.tensors), *model.tied]
    are_trained = [name in trained or model.tied.get(name) in trained for name in names]
    return adapters_of(
        [name for name, is_trained in zip(names, are_trained, strict=True) if is_trained],
        [name for name, is_trained in zip(names, are_trained, strict=True) if not is_trained],
    )


def optimizer_document(state: SavedState) -> dict[str, object]:
    """Return the rest of the state: groups with the names of their parameters, scalars by parameter, step, loss scale.

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
            for group in state.groups
        ],
        "scalars": {
            param.name: {key: {"kind": value.kind, "value": _plain(value.value)} for key, value in scalars.items()}
            for param, scalars in zip(trained.params, trained.scalars, strict=True)
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
    return [_plain(item) for item in value] if isinstance(value, (tuple, list)) else value


def _export_dtype(tensor: ModelTensor, dtype: ExportDtype | None) -> str:
    if "float" not in tensor.dtype:
        return tensor.dtype
    if dtype is not None:
        to = DTYPES[dtype]
    else:
        to = "float32" if tensor.kind == "buffer" and tensor.dtype in ("float16", "bfloat16") else tensor.dtype
    if not convertible(tensor.dtype, to):
        raise UnsupportedError(
            f"{tensor.kind} tensor {tensor.name} is {tensor.dtype}, which is not converted to {to}. Export it in the "
            "dtype it has."
        )
    return to


def _model_files(model_dir: FilePath | None, folder: str = "", names: Sequence[str] = HF_FILES) -> dict[str, FilePath]:
    """Return the files that are in a folder of ``model_dir``, by their names with the folder."""
    inside = folder.removesuffix("/")
    if model_dir is None or (inside and inside not in folders(model_dir)):
        return {}
    directory = model_dir / inside if inside else model_dir
    sizes = file_sizes(directory)
    found = [name for name in names if name in sizes]
    for name in found:
        if sizes[name] > _MOST_COPIED_BYTES:
            raise CheckpointError(
                f"{directory / name}: has more than {_MOST_COPIED_BYTES} bytes, which such a file never has."
            )
    return {f"{folder}{name}": directory / name for name in found}
