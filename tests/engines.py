"""The executors as tests see them: a name, and memory of the kind that it moves, put there and looked at.

``staged`` is a host engine for memory that it does not reach; tensors on the CPU stand for such memory. ``cuda`` needs
a GPU. ``fake-cuda`` is the same library, compiled for the host on the fake runtime in csrc/tests/cuda/fake: it shows on
any machine with a compiler that what Python hands over arrives.

Also tables that any executor must run alike: drawn at random, with what they make of which bytes; and tensors that say
that they are on a GPU, whose memory is the fake runtime's.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import os
import shutil
import subprocess
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from zeroelastic.core.digest import UInt64Array, combine, digest_range
from zeroelastic.executors import build_info, cuda_executor, dispatch, staged
from zeroelastic.executors.build_info import describe_build
from zeroelastic.executors.dispatch import (
    OPERATIONS,
    Buffer,
    Cast,
    CopyTable,
    DeviceBuffer,
    DigestRows,
    Operation,
    Ranges,
    copy_segments,
    move_segments,
    read_segments,
    scan_segments,
    sum_segments,
    write_segments,
)
from zeroelastic.executors.tables import CASTS, cast_itemsizes

REPOSITORY = Path(__file__).resolve().parent.parent
ENGINES = ("numpy", "staged", "native", pytest.param("cuda", marks=pytest.mark.gpu), "fake-cuda")


@dataclass
class Engine:
    """One executor; memory given out is valid until ``free``."""

    label: str
    fake: ctypes.CDLL | None = None
    held: list[object] = field(default_factory=list)

    @property
    def name(self) -> str:
        """What calls it: the executor's own name."""
        return "numpy" if self.label == "staged" else self.label.removeprefix("fake-")

    @property
    def on_device(self) -> bool:
        return self.name == "cuda"

    def can(self, operation: str) -> bool:
        return operation in OPERATIONS["cuda" if self.label == "staged" else self.name]

    def put(self, data: np.ndarray, misaligned: int = 0) -> Buffer:
        """A copy of these bytes where the engine moves them, that many bytes behind an aligned address."""
        if self.label == "fake-cuda":
            assert self.fake is not None
            base = self.fake.fake_cuda_malloc(len(data) + misaligned)
            assert base
            self.held.append(base)
            ctypes.memmove(base + misaligned, data.ctypes.data, len(data))
            return DeviceBuffer(base + misaligned, len(data))
        room = np.zeros(len(data) + misaligned, dtype=np.uint8)
        view = room[misaligned:]
        view[:] = data
        if self.label == "cuda":
            tensor = torch.from_numpy(room).cuda()[misaligned:]
            self.held.append(tensor)
            return tensor
        return torch.from_numpy(view) if self.label == "staged" else view

    def get(self, buffer: Buffer) -> np.ndarray:
        """The bytes that are there now."""
        if isinstance(buffer, DeviceBuffer):
            return np.frombuffer(ctypes.string_at(buffer.address, buffer.nbytes), dtype=np.uint8)
        return buffer.cpu().numpy() if isinstance(buffer, torch.Tensor) else buffer

    def free(self) -> None:
        for base in self.held:
            if self.fake is not None:
                self.fake.fake_cuda_free(base)
        self.held.clear()


@contextlib.contextmanager
def open_engine(label: str) -> Iterator[Engine]:
    """An engine, or a skipped test that says why there is none here."""
    if label in ("native", "cuda") and not describe_build(label).usable:  # type: ignore[arg-type]
        pytest.skip(f"the {label} engine is not built: {describe_build(label).reason}")  # type: ignore[arg-type]
    if label == "staged":
        with mock.patch.object(dispatch, "_kind", lambda buffer: "host" if isinstance(buffer, np.ndarray) else "other"):
            yield Engine(label)
        return
    if label != "fake-cuda":
        yield Engine(label)
        return
    library = _fake_library()
    patch = pytest.MonkeyPatch()
    found = build_info._load
    patch.setattr(build_info, "_load", lambda name: (library, "") if name == "cuda" else found(name))
    cuda_executor._library.cache_clear()
    library.fake_cuda_put_copies_off()
    try:
        yield Engine(label, library)
    finally:
        patch.undo()
        cuda_executor._library.cache_clear()


@functools.cache
def _fake_library() -> ctypes.CDLL:
    compiler = os.environ.get("CXX", sysconfig.get_config_var("CXX") or "c++").split()[0]
    if not (shutil.which(compiler) and shutil.which("make")):
        pytest.skip("there is no compiler to build the fake with")
    command = ["make", "-s", "-j2", "-C", str(REPOSITORY / "csrc"), "build/fake/_cuda.so"]
    with (REPOSITORY / "csrc" / "Makefile").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another worker of pytest-xdist builds the same files
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    library = ctypes.CDLL(str(REPOSITORY / "csrc" / "build" / "fake" / "_cuda.so"))
    library.ze_abi_version.restype = ctypes.c_int32
    assert library.ze_abi_version() == build_info.ABI_VERSION
    library.ze_build_info.restype = ctypes.c_char_p
    library.fake_cuda_malloc.restype = ctypes.c_void_p
    library.fake_cuda_malloc.argtypes = [ctypes.c_size_t]
    library.fake_cuda_free.argtypes = [ctypes.c_void_p]
    return library


UNTOUCHED = 0xA5
DTYPES: dict[Cast, tuple[torch.dtype, torch.dtype]] = {
    "float32->bfloat16": (torch.float32, torch.bfloat16),
    "float32->float16": (torch.float32, torch.float16),
    "bfloat16->float32": (torch.bfloat16, torch.float32),
    "float16->float32": (torch.float16, torch.float32),
}


@dataclass(frozen=True)
class Case:
    src: tuple[np.ndarray, ...]
    dst_sizes: tuple[int, ...]
    misaligned: int
    rows: CopyTable
    digest: DigestRows
    cast: Cast


@st.composite
def cases(draw: st.DrawFn, *, aligned: bool = False, casts: tuple[Cast, ...] = CASTS) -> Case:
    """Sources, destinations, and rows that do not overlap in the destinations; sources may overlap.

    ``aligned``: with a conversion, elements are aligned to their size on both sides.
    """
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    cast: Cast = draw(st.sampled_from(casts))
    src_itemsize, dst_itemsize = cast_itemsizes(cast)
    itemsize = draw(st.sampled_from([1, 2, 4, 8])) if cast == "none" else src_itemsize
    src_step, dst_step = (src_itemsize, dst_itemsize) if aligned else (1, 1)
    # Finite values in every type: which NaN it is, is a test of its own.
    src = tuple(
        rng.integers(0, 64 if cast != "none" else 256, size, dtype=np.uint8)
        for size in draw(st.lists(st.integers(0, 40_000), min_size=1, max_size=4))
    )
    filled = [0] * draw(st.integers(1, 4))
    rows = []
    shape = st.tuples(
        st.integers(0, len(src) - 1),
        st.integers(0, 40_000),
        st.one_of(st.just(0), st.just(1), st.integers(0, 40), st.integers(0, 10_000)),
        st.integers(0, len(filled) - 1),
        st.integers(0, 9),
    )
    for number, offset, count, buffer, gap in draw(st.lists(shape, max_size=40)):
        offset = min(offset, len(src[number])) // src_step * src_step
        nbytes = min(count * itemsize, (len(src[number]) - offset) // itemsize * itemsize)
        rows.append((number, offset, buffer, filled[buffer] + gap * dst_step, nbytes))
        filled[buffer] += gap * dst_step + nbytes // src_itemsize * dst_itemsize
    rows.sort()
    table = np.array(rows, dtype=np.int64).reshape(len(rows), 5)
    streams = draw(st.integers(1, 3))
    return Case(
        src=src,
        dst_sizes=tuple(size + draw(st.integers(0, 5)) for size in filled),
        misaligned=draw(st.integers(0, 20)) * max(src_step, dst_step),
        rows=CopyTable(*(np.ascontiguousarray(column) for column in table.T)),
        digest=DigestRows(
            seeds=rng.integers(0, 2**64, streams, dtype=np.uint64),
            stream=rng.integers(0, streams, len(rows)),
            start=rng.integers(0, 2**40, len(rows)),
            itemsize=np.full(len(rows), itemsize, dtype=np.int64),
        ),
        cast=cast,
    )


def patterns(cast: Cast) -> np.ndarray:
    """Every sign, exponent and upper significand; of float32 at, below and above where rounding turns."""
    if not cast.startswith("float32"):
        return np.arange(1 << 16, dtype=np.uint16).view(np.uint8)
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    lower = [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF]
    lower += [high | low for high in (0x2000, 0x4000, 0xE000) for low in (0, 1, 0xFFF, 0x1000, 0x1001, 0x1FFF)]
    some = np.random.default_rng(5).integers(0, 2**32, 1 << 20, dtype=np.uint32)
    return np.concatenate([*(upper | np.uint32(bits) for bits in lower), some]).view(np.uint8)


def convert(cast: Cast, data: np.ndarray) -> np.ndarray:
    """The bytes that torch makes of these bytes on the CPU, with one NaN in bfloat16 whatever the vector unit."""
    if cast == "none" or len(data) == 0:
        return data
    src, dst = DTYPES[cast]
    values = torch.from_numpy(data.copy()).view(src)
    made = torch.empty(len(values), dtype=dst).copy_(values)
    if cast == "float32->bfloat16":
        made.view(torch.int16)[values.isnan()] = 0x7FC0
    return made.view(torch.uint8).numpy()


def expected(case: Case) -> tuple[list[np.ndarray], list[int]]:
    """The destinations and the digests, one row after the other."""
    made = [np.full(size, UNTOUCHED, dtype=np.uint8) for size in case.dst_sizes]
    digests = [0] * len(case.digest.seeds)
    table = case.rows
    columns = (table.src, table.src_offset, table.dst, table.dst_offset, table.nbytes)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    for i, (number, offset, buffer, buffer_offset, nbytes) in enumerate(rows):
        data = case.src[number][offset : offset + nbytes]
        converted = convert(case.cast, data)
        made[buffer][buffer_offset : buffer_offset + len(converted)] = converted
        stream = int(case.digest.stream[i])
        part = digest_range(
            data, int(case.digest.itemsize[i]), seed=int(case.digest.seeds[stream]), start=int(case.digest.start[i])
        )
        digests[stream] = combine(digests[stream], part)
    return made, digests


def checksums(case: Case) -> list[int]:
    """The checksum of what each row becomes."""
    rows = zip(*(c.tolist() for c in (case.rows.src, case.rows.src_offset, case.rows.nbytes)), strict=True)
    made = (convert(case.cast, case.src[number][offset : offset + nbytes]) for number, offset, nbytes in rows)
    return [zlib.crc32(bytes(part)) for part in made]


def shuffled(case: Case, order: np.ndarray) -> Case:
    """The same rows in another order."""
    rows = case.digest
    digest = DigestRows(rows.seeds, rows.stream[order], rows.start[order], rows.itemsize[order])
    return replace(case, rows=case.rows.rows(order), digest=digest)


READS_FILES: tuple[Operation, ...] = ("read", "move", "scan")
FILLS_MEMORY: tuple[Operation, ...] = ("read", "copy")
WRITES_FILES: tuple[Operation, ...] = ("write", "move")


def run_case(
    operation: Operation, engine: Engine, case: Case, folder: Path, **options: Any
) -> tuple[list[bytes] | None, UInt64Array | None]:
    """Run an operation on a case; what is in its destinations then, if it has any, and the digests."""
    sources: Sequence[Any] = write_files(folder, case.src) if operation in READS_FILES else ()
    sources = sources or [engine.put(part, case.misaligned) for part in case.src]
    targets: Sequence[Any] = untouched(engine, case) if operation in FILLS_MEMORY else untouched_files(folder, case)
    options = {"executor": engine.name, "digest": None, **options}
    if operation not in ("scan", "sum"):
        options["cast"] = case.cast
    if operation == "read":
        result = read_segments(case.rows, sources, targets, **options)
        assert result.bytes_read == int(case.rows.nbytes.sum())
        assert result.files == tuple(sources[i] for i in sorted(set(case.rows.src.tolist())))
        totals = result.digests
    elif operation == "copy":
        totals = copy_segments(case.rows, sources, targets, **options)
    elif operation == "write":
        totals = write_segments(case.rows, sources, targets, **options)
    elif operation == "move":
        totals = move_segments(case.rows, sources, targets, **options)
    elif operation == "scan":
        totals = scan_segments(ranges(case.rows), sources, **options)
    else:
        totals = sum_segments(ranges(case.rows), sources, **options)
    if operation not in READS_FILES:
        for kept, part in zip(sources, case.src, strict=True):
            assert np.array_equal(engine.get(kept), part)
    made = None
    if operation in FILLS_MEMORY:
        made = [engine.get(target).tobytes() for target in targets]
    elif operation in WRITES_FILES:
        made = [target.read_bytes() for target in targets]
    engine.free()
    return made, totals


def ranges(rows: CopyTable) -> Ranges:
    return Ranges(rows.src, rows.src_offset, rows.nbytes)


def write_files(folder: Path, contents: tuple[np.ndarray | bytes, ...], name: str = "src") -> tuple[Path, ...]:
    paths = tuple(folder / f"{name}{i}.bin" for i in range(len(contents)))
    for path, data in zip(paths, contents, strict=True):
        path.write_bytes(bytes(data))
    return paths


def untouched_files(folder: Path, case: Case) -> tuple[Path, ...]:
    return write_files(folder, tuple(bytes([UNTOUCHED]) * size for size in case.dst_sizes), "dst")


def untouched(engine: Engine, case: Case) -> list[Buffer]:
    return [engine.put(np.full(size, UNTOUCHED, dtype=np.uint8), case.misaligned) for size in case.dst_sizes]


def segment(src_offset: int, dst_offset: int, nbytes: int) -> CopyTable:
    columns = (np.array([value], dtype=np.int64) for value in (0, src_offset, 0, dst_offset, nbytes))
    return CopyTable(*columns)


class OnFakeGpu(torch.Tensor):
    """A tensor in the fake's memory."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda:0")

    def as_on_host(self) -> torch.Tensor:
        """The same memory, as a tensor that torch works on."""
        return self.as_subclass(torch.Tensor)


@contextlib.contextmanager
def open_fake_gpu() -> Iterator[Engine]:
    """The CUDA engine on the fake runtime, which "auto" takes for tensors on the fake GPU meanwhile."""
    dispatch._fastest.cache_clear()
    with mock.patch.object(staged, "current_stream", lambda device: 0), open_engine("fake-cuda") as engine:
        yield engine
        engine.free()
    dispatch._fastest.cache_clear()


def to_fake_gpu(engine: Engine, values: torch.Tensor) -> OnFakeGpu:
    """A copy of a contiguous tensor, valid until ``engine.free``."""
    buffer = engine.put(values.contiguous().view(-1).view(torch.uint8).numpy() if values.numel() else values.numpy())
    assert isinstance(buffer, DeviceBuffer)
    memory = (ctypes.c_ubyte * max(buffer.nbytes, 1)).from_address(buffer.address)
    flat = torch.frombuffer(memory, dtype=torch.uint8)[: buffer.nbytes].view(values.dtype)
    return torch.Tensor._make_subclass(OnFakeGpu, flat.view(values.shape))
