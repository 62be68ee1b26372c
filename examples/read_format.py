"""Read an elastic checkpoint with numpy alone, and check it as docs/concepts/format.md specifies.

    python examples/read_format.py ckpt/global_step100
    python examples/read_format.py --vectors docs/assets/digest-vectors.json

It imports neither torch nor zeroelastic: it shows that the specification suffices. Every tensor of every rank is read,
digested and compared with the commit record, and so is the content root. Saves of ZeRO stage 3 are read. Of frozen
weights that were left out of the files, the record alone has the digests, which are taken from there.
"""

from __future__ import annotations

import hashlib
import json
import math
import pickle
import sys
import zipfile
from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import numpy as np

GOLDEN, FIRST, SECOND, BLOCK = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 1024
STORAGES = {
    "Double": ("float64", 8), "Float": ("float32", 4), "Half": ("float16", 2), "BFloat16": ("bfloat16", 2),
    "Long": ("int64", 8), "Int": ("int32", 4), "Short": ("int16", 2), "Char": ("int8", 1), "Byte": ("uint8", 1),
    "Bool": ("bool", 1),
}  # fmt: skip
"""The dtype and the bytes of an element of torch's storage classes."""
NUMPY = {"float32": "<f4", "float64": "<f8", "int64": "<i8", "int32": "<i4"}
"""The dtypes that a scalar may have, as numpy calls them."""

Streams = dict[tuple[str, str], tuple[str, int]]
"""The dtype and the digest of each tensor, by the name of its parameter and its state key."""


def mix(v: np.ndarray) -> np.ndarray:
    """The output function of splitmix64."""
    v = (v ^ (v >> np.uint64(30))) * np.uint64(FIRST)
    v = (v ^ (v >> np.uint64(27))) * np.uint64(SECOND)
    return v ^ (v >> np.uint64(31))


def odd_weights(seed: int, first: int, count: int) -> np.ndarray:
    """The weights of places ``first`` to ``first + count``."""
    places = np.arange(first + 1, first + count + 1, dtype=np.uint64)
    return mix(np.uint64(seed) + places * np.uint64(GOLDEN)) | np.uint64(1)


def digest(bits: np.ndarray, name: str, key: str, start: int) -> int:
    """The partial digest of elements that begin at ``start`` of the flattened tensor; ``bits`` are unsigned."""
    seed = int.from_bytes(hashlib.blake2b(f"{key}\0{name}".encode(), digest_size=8).digest(), "little")
    lead, blocks = start % BLOCK, -(-(start % BLOCK + len(bits)) // BLOCK)
    padded = np.zeros(blocks * BLOCK, dtype=np.uint64)
    padded[lead : lead + len(bits)] = bits
    sums = padded.reshape(blocks, BLOCK) @ odd_weights(0, 0, BLOCK)
    return int((sums * odd_weights(seed, start // BLOCK, blocks)).sum(dtype=np.uint64))


class Tensor:
    """A tensor of an archive: its dtype, and its elements as unsigned integers, flattened."""

    def __init__(self, storage: Any, offset: int, shape: tuple[int, ...], stride: tuple[int, ...], *_: Any) -> None:
        self.dtype, bits = storage
        steps = [step * bits.itemsize for step in stride]
        self.bits = np.lib.stride_tricks.as_strided(bits[offset:], shape, steps).reshape(-1)


KNOWN: dict[str, Any] = {
    "torch._utils._rebuild_tensor_v2": Tensor,
    "torch._utils._rebuild_parameter": lambda data, *_: data,
    "torch._tensor._rebuild_from_type_v2": lambda make, kind, arguments, state: make(*arguments),
    "torch.Size": tuple,
    "collections.OrderedDict": OrderedDict,
}
"""What pickles of these files may call."""


class Reader(pickle.Unpickler):
    """Makes tensors, dicts and lists; everything else that a pickle names becomes an inert stand-in."""

    archive: zipfile.ZipFile

    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" in KNOWN:
            return KNOWN[f"{module}.{name}"]
        kind = name.removesuffix("Storage")
        return kind if module == "torch" and kind in STORAGES else type(name, (), {"__init__": lambda self, *_: None})

    def persistent_load(self, pid: Any) -> tuple[str, np.ndarray]:
        _, kind, key, _, numel = pid
        folder = self.archive.namelist()[0].split("/")[0]
        data = self.archive.read(f"{folder}/data/{key}")  # which checks the CRC-32
        dtype, itemsize = STORAGES[kind]
        return dtype, np.frombuffer(data, dtype=f"<u{itemsize}")[:numel]


def load(path: Path) -> dict[str, Any]:
    """The object of an archive of ``torch.save``."""
    with zipfile.ZipFile(path) as archive:
        name = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
        with archive.open(name) as file:
            reader = Reader(file)
            reader.archive = archive
            return reader.load()


def scalar(value: Any) -> dict[str, Any]:
    """A replicated value of optimizer state, as the record has it."""
    if isinstance(value, Tensor):
        return {"kind": value.dtype, "value": value.bits.view(NUMPY[value.dtype])[0].item()}
    return {"kind": "none" if value is None else f"py{type(value).__name__}", "value": value}


def read_state(tag: Path, record: dict[str, Any]) -> tuple[dict[str, Any], Streams]:
    """The shape and the scalars of each parameter, and what its tensors are, over all ranks."""
    found: dict[str, Any] = {}
    streams: Streams = defaultdict(lambda: ("", 0))

    def add(name: str, key: str, dtype: str, bits: np.ndarray, start: int) -> None:
        streams[name, key] = dtype, (streams[name, key][1] + digest(bits, name, key, start)) % 2**64

    world_size = record["world_size"]
    for rank in range(world_size):
        (path,) = tag.glob(f"*zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        state = load(path)["optimizer_state_dict"]
        if state["zeroelastic"]["save_id"] != record["save_id"]:
            raise SystemExit(f"{path}: is of another save")
        columns = state["zeroelastic"]["sub_groups"], state["base_optimizer_state"], state["fp32_flat_groups"]
        for table, entry, flat in zip(*columns, strict=True):
            at = 0
            scalars = {key: scalar(value) for key, value in entry.items() if not isinstance(value, list)}
            rows = zip(table["names"], table["shapes"], table["offsets"], table["numels"], strict=True)
            for i, (name, shape, start, numel) in enumerate(rows):
                found[name] = list(shape), scalars
                add(name, "fp32", flat.dtype, flat.bits[at : at + numel], start)
                at += -(-math.prod(shape) // world_size)
                for key in entry.keys() - scalars.keys():
                    add(name, key, entry[key][i].dtype, entry[key][i].bits, start)
        model = load(tag / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        for name, shape in (model["frozen_param_shapes"] or {}).items():
            found[name] = list(shape), {}
            numel, part = math.prod(shape), -(-math.prod(shape) // world_size)
            fragment, start = model["frozen_param_fragments"][name], min(rank * part, numel)
            add(name, "frozen", fragment.dtype, fragment.bits[: min(part, numel - start)], start)
    return found, dict(streams)


def recorded(record: dict[str, Any]) -> Streams:
    """What each tensor is by the commit record."""
    found: Streams = {}
    for group in record["params"]:
        keys = sorted(group["tensors"])
        for name, _, texts in group["rows"]:
            found |= {
                (name, key): (group["tensors"][key], int(text, 16)) for key, text in zip(keys, texts, strict=True)
            }
    return found


def add_excluded(record: dict[str, Any], found: dict[str, Any], streams: Streams) -> None:
    """Add the frozen weights that are in no file."""
    for group in record["params"] if "excluded_by" in record else ():
        if not group["trainable"]:
            for name, shape, (text,) in group["rows"]:
                found[name] = shape, {}
                streams[name, "frozen"] = group["tensors"]["frozen"], int(text, 16)


def root_of(found: dict[str, Any], streams: Streams) -> str:
    """The content root of what was read."""
    tensors: dict[str, list[list[Any]]] = defaultdict(list)
    for (name, key), (dtype, total) in sorted(streams.items()):
        tensors[name].append([key, dtype, f"{total:016x}"])
    lines = []
    for name, (shape, scalars) in found.items():
        texts = []
        for key, each in sorted(scalars.items()):
            value = each["value"].hex() if isinstance(each["value"], float) else each["value"]
            texts.append([key, f"{each['kind']}:{value}"])
        lines.append(json.dumps([name, shape, tensors[name], texts]) + "\n")
    return hashlib.sha256("".join(sorted(lines)).encode()).hexdigest()


def check(tag: Path) -> list[str]:
    """What is wrong with a checkpoint: nothing, for one that is as it was saved."""
    text = (tag / "zeroelastic.json").read_text()
    record, (body, _, _) = json.loads(text), text.rpartition(',\n "checksum"')
    problems = ["the record was changed"] if hashlib.sha256(body.encode()).hexdigest() != record["checksum"] else []
    try:
        found, streams = read_state(tag, record)
    except (zipfile.BadZipFile, pickle.UnpicklingError, OSError) as error:
        return [*problems, str(error)]
    add_excluded(record, found, streams)
    wanted = recorded(record)
    wrong = [one for one in streams.keys() | wanted if streams.get(one) != wanted.get(one)]
    problems += [f"{name}: {key} is not what was saved" for name, key in sorted(wrong)]
    if root_of(found, streams) != record["content_root"]:
        problems.append("the content root is another")
    return problems


def check_vectors(path: Path) -> list[str]:
    """The test vectors that this implementation of the digest does not give."""
    wrong = []
    for vector in json.loads(path.read_text())["vectors"]:
        bits = mix(np.arange(1, vector["numel"] + 1, dtype=np.uint64)).astype(f"<u{vector['itemsize']}")
        found = digest(bits, vector["name"], vector["key"], vector["start"])
        wrong += [] if f"{found:016x}" == vector["digest"] else [f"{vector}: this gives {found:016x}"]
    return wrong


if __name__ == "__main__":
    *flags, place = sys.argv[1:]
    found = check_vectors(Path(place)) if flags == ["--vectors"] else check(Path(place))
    print("\n".join(found) or f"{place}: as the specification says")
    sys.exit(bool(found))
