"""The CUDA engine beyond the suite of all executors: its build, streams, plans, large offsets, and loads onto a GPU.

What needs no GPU runs on the library itself or on the fake runtime (tests/engines.py). The rest is marked `gpu` and
needs neither DeepSpeed nor more than one device.
"""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from engines import Engine, open_engine, open_fake_gpu, segment, to_fake_gpu
from programs import copy_sources, run_program

from zeroelastic.checkpoint.extents import TensorExtents, TensorSlot, extent_windows
from zeroelastic.core.digest import DigestKey, digest_range, stream_seed
from zeroelastic.core.layout import Param, layout_from_sub_groups
from zeroelastic.core.plan import make_plan
from zeroelastic.deepspeed import fill as fill_module
from zeroelastic.deepspeed.fill import FillJob, Target, fill
from zeroelastic.deepspeed.live.digests import LivePiece, digest_pieces
from zeroelastic.deepspeed.node_local import peers
from zeroelastic.errors import CheckpointError, ConfigError, UnsupportedError
from zeroelastic.executors import cuda_executor, dispatch, staged
from zeroelastic.executors.build_info import describe_build
from zeroelastic.executors.cuda_executor import DevicePlan
from zeroelastic.executors.dispatch import (
    CopyTable,
    DeviceBuffer,
    DigestRows,
    Ranges,
    copy_segments,
    read_segments,
    sum_segments,
    write_segments,
)
from zeroelastic.torch_file import save
from zeroelastic.torch_file.save import DigestRange, write_torch_file

CUDA = describe_build("cuda")
built = pytest.mark.skipif(not CUDA.usable, reason=f"the CUDA engine is not built: {CUDA.reason}")


def memory_ranges(nbytes: list[int]) -> Ranges:
    """Each buffer whole."""
    number = np.arange(len(nbytes), dtype=np.int64)
    return Ranges(number, np.zeros_like(number), np.array(nbytes, dtype=np.int64))


def digests_of(itemsizes: list[int]) -> DigestRows:
    """A digest of its own for each row."""
    number = np.arange(len(itemsizes), dtype=np.int64)
    return DigestRows(number.astype(np.uint64) + 5, number, number * 77, np.array(itemsizes, dtype=np.int64))


def rows_of(engine: mock.Mock, operation: str) -> list[int]:
    """The rows of each table with which an engine was called for an operation."""
    return [len(call.args[0].nbytes) for call in engine.call_args_list if call.kwargs["sides"].operation == operation]


# --- the library ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.extended
def test_the_library_is_built_where_there_is_an_nvcc(tmp_path: Path) -> None:
    if shutil.which("nvcc") is None:
        pytest.skip("there is no nvcc on the PATH")
    source = copy_sources(tmp_path / "source")
    wanted = {"ZEROELASTIC_BUILD_CUDA": "1", "ZEROELASTIC_BUILD_NATIVE": "0"}
    done = run_program(sys.executable, "setup.py", "-q", "build_ext", "--inplace", cwd=source, timeout=900, **wanted)
    assert done.returncode == 0, done.stdout + done.stderr
    library = source / "zeroelastic" / "_cuda.so"
    assert library.is_file()
    assert b"fake_cuda" not in library.read_bytes()


@built
def test_the_library_loads_without_a_gpu_and_says_what_made_it(tmp_path: Path) -> None:
    assert CUDA.compiler.startswith("nvcc")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    empty = CopyTable(*[np.empty(0, dtype=np.int64)] * 5)
    with pytest.raises(UnsupportedError, match="the CUDA engine failed"):
        DevicePlan(empty, [], [], device=0)
    path = tmp_path / "x"
    path.write_bytes(bytes(8))
    with pytest.raises(UnsupportedError, match="the CUDA engine failed"):
        read_segments(segment(0, 0, 8), [path], [DeviceBuffer(4096, 8)], executor="cuda")
    with pytest.raises(UnsupportedError, match="the CUDA engine failed"):
        copy_segments(segment(0, 0, 8), [DeviceBuffer(4096, 8)], [DeviceBuffer(8192, 8)], executor="cuda")
    with pytest.raises(UnsupportedError, match="the CUDA engine failed"):
        write_segments(segment(0, 0, 8), [DeviceBuffer(4096, 8)], [path], executor="cuda")
    with pytest.raises(UnsupportedError, match="the CUDA engine failed"):
        sum_segments(memory_ranges([8]), [DeviceBuffer(4096, 8)], digest=digests_of([1]), executor="cuda")


def test_a_plan_runs_any_number_of_times_and_adds_to_its_digests() -> None:
    with open_engine("fake-cuda") as engine:
        data = np.arange(1000, dtype=np.uint8)
        src, dst = engine.put(data), engine.put(np.zeros(1000, dtype=np.uint8))
        totals = engine.put(np.zeros(8, dtype=np.uint8))
        assert isinstance(src, DeviceBuffer) and isinstance(dst, DeviceBuffer) and isinstance(totals, DeviceBuffer)
        digest = DigestRows(np.array([9], dtype=np.uint64), *(np.array([value]) for value in (0, 77, 4)))
        table = segment(0, 0, 1000)
        with DevicePlan(table, [src], [dst], device=0, digest=digest, totals=totals) as plan:
            for _ in range(3):
                plan.run()
        part = digest_range(data, 4, seed=9, start=77)
        assert engine.get(totals).view(np.uint64)[0] == 3 * part % 2**64
        assert np.array_equal(engine.get(dst), data)
        engine.free()


# --- loads ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def fake_gpu() -> Iterator[Engine]:
    with open_fake_gpu() as engine:
        yield engine


def on_fake_gpu(engine: Engine, numel: int, dtype: torch.dtype) -> torch.Tensor:
    return to_fake_gpu(engine, torch.full((numel,), -1, dtype=dtype))


NUMELS = (1000, 3, 50_001)


class Checkpoint:
    """Two ranks of fp32 weights in files, and what one rank of one fills: plan, extents, and the whole parameters."""

    def __init__(self, folder: Path) -> None:
        params = [Param(f"p{i}", (numel,)) for i, numel in enumerate(NUMELS)]
        saved, live = (layout_from_sub_groups([params], world_size) for world_size in (2, 1))
        self.plan = make_plan(saved, live, rank=0)
        self.values = [torch.randn(numel) for numel in NUMELS]
        self.extents = {}
        for rank in range(2):
            flat = torch.zeros(int(saved.sub_group_numel[0]))
            for i, (start, length) in enumerate(zip(*saved.owned(rank), strict=True)):
                flat[saved.offset[i] : saved.offset[i] + length] = self.values[i][start : start + length]
            path = folder / f"{rank}.bin"
            path.write_bytes(b"header" + flat.numpy().tobytes())
            self.extents[rank] = {"fp32": TensorExtents(path, {0: "float32"}, 6 + saved.offset * 4)}
        self.want = torch.cat(self.values)


def test_tensors_on_a_gpu_are_filled_by_the_cuda_engine(
    fake_gpu: Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved = Checkpoint(tmp_path)
    numel = len(saved.want)
    for executor in ("auto", "cuda"):
        # One on the "GPU", one that is cast there, one in host memory; each with padding that nobody touches.
        same = on_fake_gpu(fake_gpu, numel + 2, torch.float32)
        other = on_fake_gpu(fake_gpu, numel + 2, torch.bfloat16)
        host = torch.full((numel + 2,), -1.0)
        targets = [Target("fp32", 0, tensor, "float32") for tensor in (same, other, host)]
        with caplog.at_level(logging.DEBUG, logger="zeroelastic.executors"):
            filled = fill(saved.plan, saved.extents, targets, executor=executor)  # type: ignore[arg-type]
        for tensor in (same, host):
            assert torch.equal(tensor.as_subclass(torch.Tensor)[:numel], saved.want)
        assert torch.equal(other.as_subclass(torch.Tensor)[:numel], saved.want.bfloat16())
        assert all((t.as_subclass(torch.Tensor)[numel:] == -1).all() for t in (same, other, host))
        assert filled.bytes_read == filled.bytes_owned == 3 * 4 * numel
        assert set(filled.cast_digests) == {DigestKey(f"p{i}", "fp32") for i in range(len(NUMELS))}
    assert caplog.text.count("moved by the cuda engine") == 1


def test_other_executors_fill_a_gpu_by_way_of_host_memory(
    fake_gpu: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = Checkpoint(tmp_path)
    monkeypatch.setattr(cuda_executor, "run", lambda *_, **__: pytest.fail("the cuda engine was used"))
    for executor in ("numpy", "native"):
        if executor == "native" and not describe_build("native").usable:
            continue
        tensor = on_fake_gpu(fake_gpu, len(saved.want), torch.float32)
        fill(saved.plan, saved.extents, [Target("fp32", 0, tensor, "float32")], executor=executor)  # type: ignore[arg-type]
        assert torch.equal(tensor.as_subclass(torch.Tensor), saved.want)


def test_where_cuda_refuses_auto_goes_by_way_of_host_memory_and_cuda_fails(
    fake_gpu: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise UnsupportedError("the CUDA engine failed: no pinned memory.")

    saved = Checkpoint(tmp_path)
    monkeypatch.setattr(cuda_executor, "run", refuse)
    tensor = on_fake_gpu(fake_gpu, len(saved.want), torch.float32)
    targets = [Target("fp32", 0, tensor, "float32")]
    with pytest.raises(UnsupportedError, match="no pinned memory"):
        fill(saved.plan, saved.extents, targets, executor="cuda")
    assert (tensor.as_subclass(torch.Tensor) == -1).all()
    fill(saved.plan, saved.extents, targets)
    assert torch.equal(tensor.as_subclass(torch.Tensor), saved.want)
    assert "cuda:0 is filled through host memory instead, which is slower: the CUDA engine failed" in caplog.text


def test_a_damaged_file_is_not_read_by_another_way(fake_gpu: Engine, tmp_path: Path) -> None:
    saved = Checkpoint(tmp_path)
    os.truncate(tmp_path / "1.bin", 100)
    tensor = on_fake_gpu(fake_gpu, len(saved.want), torch.float32)
    with pytest.raises(CheckpointError, match=r"1.bin: ends at byte 100\. The file is truncated"):
        fill(saved.plan, saved.extents, [Target("fp32", 0, tensor, "float32")])


def test_without_the_cuda_engine_naming_it_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ConfigError(f"the {name} engine cannot be used")

    saved = Checkpoint(tmp_path)
    monkeypatch.setattr(dispatch, "load_library", missing)
    with pytest.raises(ConfigError, match="the cuda engine cannot be used"):
        fill(saved.plan, saved.extents, [Target("fp32", 0, torch.zeros(len(saved.want)), "float32")], executor="cuda")


def test_what_other_ranks_send_goes_to_its_place_on_the_gpu(
    fake_gpu: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round that has arrived on the GPU, or in host memory, for tensors there, and for one that is cast."""
    saved = Checkpoint(tmp_path)
    numel = len(saved.want)
    (rows,) = extent_windows(saved.plan, saved.extents, [TensorSlot("fp32", 0, "float32")] * 2)
    at = np.cumsum(rows.nbytes) - rows.nbytes + 8 * np.arange(rows.num_rows)
    arrived = np.zeros(int(at[-1] + rows.nbytes[-1]), dtype=np.uint8)
    for path, offset, nbytes, begin in zip(
        (rows.paths[file] for file in rows.file), rows.file_offset, rows.nbytes, at, strict=True
    ):
        arrived[begin : begin + nbytes] = np.frombuffer(Path(path).read_bytes(), np.uint8)[offset : offset + nbytes]
    by_cuda = mock.Mock(wraps=cuda_executor.run)
    monkeypatch.setattr(cuda_executor, "run", by_cuda)
    for there in (to_fake_gpu(fake_gpu, torch.from_numpy(arrived)), arrived):
        same = on_fake_gpu(fake_gpu, numel + 2, torch.float32)
        other = on_fake_gpu(fake_gpu, numel + 2, torch.bfloat16)
        targets = [Target("fp32", 0, tensor, "float32") for tensor in (same, other)]
        part = FillJob(saved.plan, targets, "auto", digest=True)
        peers._put(part, rows, at, there)
        assert torch.equal(same.as_subclass(torch.Tensor)[:numel], saved.want)
        assert torch.equal(other.as_subclass(torch.Tensor)[:numel], saved.want.bfloat16())
        assert all((tensor.as_subclass(torch.Tensor)[numel:] == -1).all() for tensor in (same, other))
        streams, totals = peers._digest(part, rows, at, there)
        read = fill(saved.plan, saved.extents, part.targets, digest=True).read_digests
        assert len(totals) == 2 * len(read) == 2 * len(NUMELS)  # one for each target
        assert all(total == read[name].digest for name, total in zip(streams.names, totals.tolist(), strict=True))
    assert rows_of(by_cuda, "copy") == [rows.num_rows // 2], (
        "on the GPU all that is not cast, in one call; from host memory none"
    )


# --- saves and digests ----------------------------------------------------------------------------------------------


def refuse(*_: object, **__: object) -> None:
    raise UnsupportedError("the CUDA engine failed: out of memory.")


def test_digests_of_a_gpu_are_made_there_in_one_call(
    fake_gpu: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Pieces of several tensors, dtypes and devices, one of them empty and one no range of memory."""
    values = [torch.randn(numel) for numel in NUMELS] + [torch.randn(999).bfloat16(), torch.empty(0), torch.randn(7, 3)]
    pieces, want = [], []
    for i, value in enumerate(values):
        tensor = to_fake_gpu(fake_gpu, value)
        tensor, value = (tensor.t(), value.t().contiguous()) if value.dim() == 2 else (tensor, value)
        pieces.append(LivePiece(f"p{i}", "fp32", tensor, 11 * i))
        data = value.reshape(-1).view(torch.uint8).numpy()
        want.append(digest_range(data, value.element_size(), seed=stream_seed(f"p{i}", "fp32"), start=11 * i))
    pieces.insert(2, LivePiece("host", "exp_avg", torch.arange(10.0), 3))
    data = torch.arange(10.0).view(torch.uint8).numpy()
    want.insert(2, digest_range(data, 4, seed=stream_seed("host", "exp_avg"), start=3))
    by_cuda = mock.Mock(wraps=cuda_executor.run)
    monkeypatch.setattr(cuda_executor, "run", by_cuda)
    assert digest_pieces(pieces) == want
    assert rows_of(by_cuda, "sum") == [len(values)]
    monkeypatch.setattr(cuda_executor, "run", refuse)
    by_host = mock.Mock(return_value=(np.arange(len(values), dtype=np.uint64), 0))
    monkeypatch.setattr(staged, "run", by_host)
    assert digest_pieces(pieces) == [0, 1, want[2], *range(2, len(values))]
    assert (
        "memory of the GPU goes through host memory instead, which is slower: the CUDA engine failed: out"
        in caplog.text
    )


def test_more_than_one_launch_sums_is_added_up(fake_gpu: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_executor, "_MAX_SUMMED_ROWS", 2)
    values = [np.random.default_rng(i).integers(0, 256, size, dtype=np.uint8) for i, size in enumerate((9000, 8, 5000))]
    digest = digests_of([4, 8, 2])
    found = sum_segments(memory_ranges([9000, 8, 5000]), [fake_gpu.put(v) for v in values], digest=digest)
    assert found is not None and found.tolist() == [
        digest_range(v, size, seed=i + 5, start=i * 77)
        for i, (v, size) in enumerate(zip(values, (4, 8, 2), strict=True))
    ]


def test_the_plan_of_a_sum_is_kept_for_the_same_rows_and_made_anew_for_others(
    fake_gpu: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = mock.Mock(wraps=DevicePlan)
    monkeypatch.setattr(cuda_executor, "DevicePlan", made)
    data = np.random.default_rng(0).integers(0, 256, 9000, dtype=np.uint8)
    first, second = fake_gpu.put(data), fake_gpu.put(data[::-1].copy())
    assert isinstance(first, DeviceBuffer) and isinstance(second, DeviceBuffer)
    digest = digests_of([4])

    def summed(buffer: DeviceBuffer, nbytes: int = 9000) -> list[int]:
        found = sum_segments(memory_ranges([nbytes]), [buffer], digest=digest)
        assert found is not None
        return found.tolist()

    def expected(content: np.ndarray) -> list[int]:
        return [digest_range(content, 4, seed=5, start=0)]

    assert [summed(first), summed(first)] == [expected(data)] * 2 and made.call_count == 1
    ctypes.memset(first.address, 7, 9000)  # other content at the same address: the plan is of addresses alone
    assert summed(first) == expected(np.full(9000, 7, dtype=np.uint8)) and made.call_count == 1
    assert summed(second) == expected(data[::-1].copy()) and made.call_count == 2
    assert summed(second, 8000) == expected(data[::-1][:8000].copy()) and made.call_count == 3
    digest = replace(digest, start=digest.start + 3)
    assert summed(second, 8000) == [digest_range(data[::-1][:8000].copy(), 4, seed=5, start=3)]
    assert made.call_count == 4


def test_a_gpu_makes_no_checksums(fake_gpu: Engine) -> None:
    sums = np.zeros(1, dtype=np.uint32)
    tensor = to_fake_gpu(fake_gpu, torch.zeros(2))
    with pytest.raises(AssertionError, match="digests, not checksums"):
        sum_segments(memory_ranges([8]), [tensor], digest=digests_of([4]), crc32=sums, executor="cuda")


def test_a_save_writes_a_gpu_by_the_cuda_engine(
    fake_gpu: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Every executor writes the file of torch.save; if CUDA fails, they go through host memory."""
    gpu = {f"p{numel}": torch.randn(numel) for numel in NUMELS}
    on_host = {"host": torch.randn(999)}
    values = {**gpu, **on_host}
    torch.save(values, tmp_path / "torch.pt")
    copies = {value.untyped_storage()._cdata: to_fake_gpu(fake_gpu, value).view(torch.uint8) for value in gpu.values()}
    as_bytes = save.as_bytes
    monkeypatch.setattr(
        save, "as_bytes", lambda storage: copies[storage._cdata] if storage._cdata in copies else as_bytes(storage)
    )
    by_cuda = mock.Mock(wraps=cuda_executor.run)
    monkeypatch.setattr(cuda_executor, "run", by_cuda)
    path = tmp_path / "ours" / "torch.pt"
    path.parent.mkdir()
    executors: tuple[dispatch.Executor, ...] = ("auto", "cuda", "numpy")
    for executor in executors:
        runs = [DigestRange(value[1:-1], 5, 10) for value in values.values()]
        made = write_torch_file(values, path, digest_ranges=runs, executor=executor)
        assert path.read_bytes() == (tmp_path / "torch.pt").read_bytes(), executor
        for run, digest in zip(runs, made, strict=True):
            assert digest == digest_range(run.tensor.view(torch.uint8).numpy(), 4, seed=5, start=10)
    with_digest, without = len(gpu), 2 * len(gpu)
    assert rows_of(by_cuda, "write") == [with_digest, without] * 2, "by auto and cuda, what is on the GPU alone"
    monkeypatch.setattr(cuda_executor, "run", refuse)
    write_torch_file(values, path)
    assert path.read_bytes() == (tmp_path / "torch.pt").read_bytes()
    assert "memory of the GPU goes through host memory instead" in caplog.text
    with pytest.raises(UnsupportedError, match="out of memory"):
        write_torch_file(values, path, executor="cuda")


# --- on a GPU -------------------------------------------------------------------------------------------------------


@built
@pytest.mark.gpu
def test_a_read_comes_after_what_its_stream_was_asked_for(tmp_path: Path) -> None:
    data = np.random.default_rng(0).integers(0, 256, 40_000_000, dtype=np.uint8)
    path = tmp_path / "x"
    path.write_bytes(data.tobytes())
    target = torch.zeros(len(data), dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        target.fill_(7)
        read_segments(segment(0, 0, len(data)), [path], [target], executor="cuda")
    assert np.array_equal(target.cpu().numpy(), data)


@built
@pytest.mark.gpu
def test_a_plan_runs_on_streams_that_do_not_wait_for_the_default_one() -> None:
    data = np.random.default_rng(1).integers(0, 256, 3_000_001, dtype=np.uint8)
    src = torch.from_numpy(data).cuda()
    digest = DigestRows(np.array([9], dtype=np.uint64), *(np.array([value]) for value in (0, 77, 1)))
    for _ in range(20):
        dst = torch.zeros(len(data) + 1, dtype=torch.uint8, device="cuda")
        totals = torch.zeros(1, dtype=torch.int64, device="cuda")
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        ranges = [DeviceBuffer(t.data_ptr(), t.nbytes, t.device.index) for t in (src, dst, totals)]
        table = segment(0, 1, len(data))
        with DevicePlan(table, ranges[:1], ranges[1:2], device=0, digest=digest, totals=ranges[2]) as plan:
            plan.run(stream.cuda_stream)
            stream.synchronize()
        assert np.array_equal(dst[1:].cpu().numpy(), data)
        assert int(totals) % 2**64 == digest_range(data, 1, seed=9, start=77)


@built
@pytest.mark.gpu
def test_offsets_beyond_4_gib_of_device_memory(tmp_path: Path) -> None:
    size = 5 * 2**30
    if torch.cuda.mem_get_info()[0] < 2 * size:
        pytest.skip("the GPU has less than 10 GiB of memory to spare")
    memory = torch.zeros(size, dtype=torch.uint8, device="cuda")
    data = np.arange(1, 100, dtype=np.uint8)
    path = tmp_path / "x"
    path.write_bytes(data.tobytes())
    read_segments(segment(0, 2**32 + 5, 99), [path], [memory], executor="cuda")
    other = torch.zeros(200, dtype=torch.uint8, device="cuda")
    copy_segments(segment(2**32 + 5, 3, 99), [memory], [other], executor="cuda")
    assert np.array_equal(other[3:102].cpu().numpy(), data) and int(other.sum()) == int(data.sum())
    assert int(memory[: 2**32].max()) == 0


@built
@pytest.mark.gpu
@pytest.mark.parametrize("executor", ["auto", "cuda", "numpy"])
def test_a_gpu_is_filled_alike_by_every_way(tmp_path: Path, executor: dispatch.Executor) -> None:
    saved = Checkpoint(tmp_path)
    numel = len(saved.want)
    tensors = [torch.full((numel + 2,), -1, dtype=dtype, device="cuda") for dtype in (torch.float32, torch.bfloat16)]
    filled = fill(saved.plan, saved.extents, [Target("fp32", 0, t, "float32") for t in tensors], executor=executor)
    for tensor in tensors:
        assert torch.equal(tensor[:numel].cpu(), saved.want.to(tensor.dtype)) and (tensor[numel:] == -1).all()
    assert filled.bytes_read == filled.bytes_owned == 2 * 4 * numel
    assert fill_module.STAGING_BYTES + (48 << 20) <= 64 << 20


@built
@pytest.mark.gpu
def test_more_than_the_pinned_memory_holds_arrives_whole(tmp_path: Path) -> None:
    """More than the ring holds, again and again: a slot that is used too early shows."""
    data = np.random.default_rng(2).integers(0, 256, 100_000_003, dtype=np.uint8)
    path = tmp_path / "x"
    path.write_bytes(data.tobytes())
    digest = DigestRows(np.array([5], dtype=np.uint64), *(np.array([value]) for value in (0, 12, 1)))
    want = digest_range(data, 1, seed=5, start=12)
    for shift in range(4):
        target = torch.zeros(len(data) + 4, dtype=torch.uint8, device="cuda")
        result = read_segments(segment(0, shift, len(data)), [path], [target], digest=digest, executor="cuda")
        assert result.digests is not None and result.digests.tolist() == [want]
        assert np.array_equal(target[shift : shift + len(data)].cpu().numpy(), data)
