"""The layout of safetensors files: which tensors are in which file under which names, headers, and the index.

Shards are ordered and indexed as by ``huggingface_hub.save_torch_state_dict``. An adapter's weights get the names of
PEFT's own files, which it loads by ``from_pretrained``: a parameter of PEFT has the adapter's name behind that of the
tuner, ``q_proj.lora_A.default.weight``; in the file it has not, ``q_proj.lora_A.weight``. A trained copy of a module
loses ``modules_to_save`` as well, and the embedding of a prompt is ``prompt_embeddings``. Source:
``get_peft_model_state_dict``, ``_get_adapter_state_dict`` of the tuners (DoRA, VeRA) and ``save_pretrained`` (peft
0.19).
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from zeroelastic.errors import UnsupportedError, printable
from zeroelastic.torch_file.header import DTYPE_BYTES
from zeroelastic.verbs.model_tensors import ModelTensor
from zeroelastic.verbs.new_files import TensorCopy

DTYPE_NAMES = {
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
"""The names that safetensors has for dtypes of torch."""

_METADATA = "__metadata__"
_MAX_HEADER_BYTES = 100_000_000  # safetensors reads no larger one


@dataclass(frozen=True, slots=True)
class SafetensorsFile:
    """One file to be: ``header`` with its length in front, then the entries without gaps."""

    name: str
    header: bytes
    entries: tuple[TensorCopy, ...]

    @property
    def nbytes(self) -> int:
        """Size of the file in bytes."""
        return len(self.header) + sum(entry.nbytes for entry in self.entries)


def lay_out(
    base: str, wanted: Sequence[tuple[ModelTensor, str]], aliases: Mapping[str, str], max_shard_size: int
) -> tuple[list[SafetensorsFile], dict[str, bytes]]:
    """The files that hold some tensors, and the index where there are more than one."""
    for tensor, _ in wanted:
        _check_name(tensor.name)
        if tensor.dtype not in DTYPE_NAMES:
            raise UnsupportedError(f"{tensor.name}: safetensors files cannot hold {tensor.dtype}.")
    for alias in aliases:
        _check_name(alias)
        if alias == "format":
            raise UnsupportedError(f"{alias} is a tied name that the metadata of safetensors files has no place for.")
    shards: list[list[tuple[ModelTensor, str]]] = [[]]
    filled = 0
    for tensor, dtype in wanted:
        nbytes = tensor.numel * DTYPE_BYTES[dtype]
        if shards[-1] and filled + nbytes > max_shard_size:
            shards.append([])
            filled = 0
        shards[-1].append((tensor, dtype))
        filled += nbytes
    files: list[SafetensorsFile] = []
    for number, shard in enumerate(shards, start=1):
        of = f"-{number:05d}-of-{len(shards):05d}" if len(shards) > 1 else ""
        names = {tensor.name for tensor, _ in shard}
        metadata = {alias: name for alias, name in aliases.items() if name in names}
        files.append(_one_file(f"{base}{of}.safetensors", shard, metadata))
    if len(shards) == 1:
        return files, {}
    index = {
        "metadata": {"total_size": sum(entry.nbytes for file in files for entry in file.entries), **aliases},
        "weight_map": {entry.tensor.name: file.name for file in files for entry in file.entries},
    }
    return files, {f"{base}.safetensors.index.json": json_text(index)}


def _one_file(name: str, shard: Sequence[tuple[ModelTensor, str]], metadata: Mapping[str, str]) -> SafetensorsFile:
    """One file: header length in 8 bytes, JSON header padded to 8 bytes, tensors without gaps (safetensors 0.8).

    Larger elements come first, so that each tensor is aligned to its elements. Raises UnsupportedError for a header
    that safetensors refuses to read.
    """
    header: dict[str, object] = {_METADATA: {**metadata, "format": "pt"}}
    entries: list[TensorCopy] = []
    end = 0
    for tensor, dtype in sorted(shard, key=lambda one: -DTYPE_BYTES[one[1]]):
        entries.append(entry := TensorCopy(tensor, dtype, len(entries)))
        offsets = [end, end := end + entry.nbytes]
        header[tensor.name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(tensor.shape), "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _MAX_HEADER_BYTES:
        raise UnsupportedError(f"{name}: its header would have {len(text)} bytes, which safetensors refuses to read.")
    return SafetensorsFile(name, len(text).to_bytes(8, "little") + text, tuple(entries))


def _check_name(name: str) -> None:
    """Raise UnsupportedError for a name that no tensor of a file can have."""
    try:
        name.encode()
    except UnicodeEncodeError:
        raise UnsupportedError(f"{name!r} is not Unicode text, so no safetensors file can hold it.") from None
    if name == _METADATA:
        raise UnsupportedError(f"{name} is a name that safetensors files keep for themselves.")


def json_text(document: object) -> bytes:
    return (json.dumps(document, indent=2, allow_nan=False) + "\n").encode()


WEIGHTS_NAME = "adapter_model"
CONFIG_NAME = "adapter_config.json"
DEFAULT = "default"
"""The adapter whose files PEFT writes into the directory itself; those of others are in folders of their names."""

_TUNERS = (
    *("lora", "ia3", "hada", "lokr", "boft", "oft", "vera", "ln_tuning", "fourierft", "miss", "hra", "randlora", "c3a"),
    *("road", "gralora", "waveft", "osf", "delora"),
)
"""The methods of PEFT whose files have what the model has, under these names."""

_OTHER_TUNERS = (
    *("vblora", "shira", "pvera", "frod", "tinylora", "unilora", "supertuning", "deft", "glora", "poly", "adamss"),
    *("peanut", "hira", "psoft", "beft", "shadow", "lily", "bone"),
)
"""The methods whose files have something else as well, or may have."""


def _of(tuners: str) -> re.Pattern[str]:
    return re.compile(rf"^(?P<module>.+)\.(?P<tuner>{tuners})\.(?P<adapter>[^./]+)(?P<rest>(\.[^/]+)?)$")


_OF_ADAPTER = _of(rf"(?:{'|'.join(_TUNERS)})_\w+|trainable_tokens_delta|modules_to_save")
_OF_OTHER = _of(rf"(?:{'|'.join(_OTHER_TUNERS)})_\w+")
_OF_PROMPT = re.compile(r"^prompt_encoder\.(?P<adapter>[^./]+)\.(?P<rest>[^/]+)$")
_ADAPTION_PROMPT = re.compile(r"\.adaption_(gate|prompt)$")
"""Parameters of an adaption prompt do not have the adapter's name."""

_PROJECTIONS = ("vera_A", "vera_B")
"""Of VeRA: every layer has these of the model."""

_EMBEDDINGS = ("embed_tokens", "lm_head")
"""Modules that PEFT saves with their base weights if they have an adapter (``EMBEDDING_LAYER_NAMES``)."""


def adapters_of(trained: Iterable[str], others: Collection[str] = ()) -> dict[str, dict[str, str]]:
    """By adapter: the name in its file of each parameter, and buffer, of it. Empty where none is one of PEFT.

    An adapter has a trained parameter, and what there is of it among ``others``, the parameters that are frozen and
    the buffers. A trained parameter that belongs to no adapter, such as a bias, is in the files of all, under its own
    name. Raises UnsupportedError for methods of PEFT whose files are not known, and where a part of an adapter is
    lacking.
    """
    found: dict[str, dict[str, str]] = {}
    of_none: dict[str, str] = {}
    for name in trained:
        place = _place(name)
        if place is None:
            of_none[name] = name
        else:
            found.setdefault(place[0], {})[name] = place[1]
    for name in others:
        match = _OF_ADAPTER.match(name)
        if match is not None and match["adapter"] in found and (in_file := _in_file(match)):
            found[match["adapter"]][name] = in_file
    for adapter, own in found.items():
        base = base_weights(own)
        own.update({name: name for name in others if name in base})
        _require_pairs(adapter, own.values())
    return {adapter: {**of_none, **own} for adapter, own in found.items()}


def base_weights(names: Iterable[str]) -> set[str]:
    """The base weights that PEFT saves with an adapter of these parameters: of embeddings alone."""
    modules = {match["module"] for name in names if (match := _OF_ADAPTER.match(name)) and _is_tuner(match)}
    return {f"{module}.base_layer.weight" for module in modules if module.rpartition(".")[2] in _EMBEDDINGS}


def _place(name: str) -> tuple[str, str] | None:
    """The adapter that a trained parameter belongs to, and its name in the file."""
    other = _OF_OTHER.match(name)
    if other is not None:
        raise _unknown(name, f"{other['tuner'].partition('_')[0]} of PEFT, whose files have more than the weights")
    prompt = _OF_PROMPT.match(name)
    if prompt is not None:
        if prompt["rest"] != "embedding.weight":
            raise _unknown(name, "a prompt that a network computes, and PEFT's file has what it gives")
        return prompt["adapter"], "prompt_embeddings"
    if _ADAPTION_PROMPT.search(name):
        return DEFAULT, name
    match = _OF_ADAPTER.match(name)
    return None if match is None else (match["adapter"], _in_file(match))


def _unknown(name: str, what: str) -> UnsupportedError:
    return UnsupportedError(
        f"{printable(name)} belongs to {what}. Write this adapter by save_pretrained of PEFT, in the script; without "
        "--adapters, export writes the whole model."
    )


def _require_pairs(adapter: str, names: Collection[str]) -> None:
    """Raise UnsupportedError where one of the two matrices of a LoRA is lacking, as a frozen one that was not saved."""
    for name in names:
        other = re.sub(r"\.lora_(embedding_)?(A|B)\b", lambda m: f".lora_{m[1] or ''}{'BA'['AB'.index(m[2])]}", name)
        if other not in names and not name.endswith(".bias"):
            raise UnsupportedError(
                f"adapter {printable(adapter)} has {printable(name)} without {printable(other)}: the checkpoint was "
                "saved without frozen weights. Write this adapter by save_pretrained of PEFT, in the script."
            )


def _is_tuner(match: re.Match[str]) -> bool:
    return match["tuner"] not in ("modules_to_save", "trainable_tokens_delta")


def _in_file(match: re.Match[str]) -> str:
    """The name in the file: empty if it is not there."""
    module, tuner, rest = match["module"], match["tuner"], match["rest"]
    if tuner == "modules_to_save":
        return module + rest
    if tuner in _PROJECTIONS and module != "base_model":
        return ""
    return f"{module}.{tuner}" if tuner == "lora_magnitude_vector" else f"{module}.{tuner}{rest}"


def folder_of(adapter: str) -> str:
    """Where an adapter's files are, relative to the directory: with a slash at the end, or empty."""
    return "" if adapter == DEFAULT else f"{adapter}/"
