"""The writer writes what torch.save writes, byte for byte, and digests it on the way; so does an image of the file."""

from __future__ import annotations

import ctypes
import errno
import os
import weakref
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroelastic.core.digest import digest_range
from zeroelastic.errors import UnsupportedError
from zeroelastic.executors import dispatch, staged
from zeroelastic.executors.batches import join_crc32_reference
from zeroelastic.executors.dispatch import Executor, describe_build, join_crc32
from zeroelastic.io import atomic
from zeroelastic.torch_file import image as file_image
from zeroelastic.torch_file import save
from zeroelastic.torch_file.header import read_torch_file
from zeroelastic.torch_file.image import FileImage, host_memory, write_past_cache
from zeroelastic.torch_file.save import DigestRange, TorchSaveSkeleton, write_skeleton, write_torch_file

EXECUTORS = ["numpy", "native"]


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool, torch.float64]


@pytest.fixture(params=EXECUTORS)
def executor(request: pytest.FixtureRequest) -> Executor:
    if request.param == "native" and not describe_build("native").usable:
        pytest.skip(f"the native engine is not built: {describe_build('native').reason}")
    return request.param


class Scaler:
    """A class of the user's, with a tensor inside."""

    def __init__(self) -> None:
        self.scale = 65536.0
        self.history = torch.arange(5)


def sample() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(7)
    flat = torch.randn(100_003, generator=generator)
    return {
        "flat": flat,
        "views of one storage": [flat[:1], flat[5:77], flat[77:]],
        "empty": torch.empty(0),
        "scalar": torch.tensor(3.0),
        "transposed": torch.randn(7, 11, generator=generator).t(),
        "parameter": torch.nn.Parameter(torch.randn(3, 4, generator=generator)),
        "storage": torch.arange(9, dtype=torch.int16).untyped_storage(),
        "nested": OrderedDict(x=(torch.ones(3, dtype=torch.bool), None, "text", 1 << 70)),
        "object": Scaler(),
        **{str(dtype): torch.arange(1000).to(dtype) for dtype in DTYPES},
    }


def saved_by_torch(obj: object, folder: Path, name: str = "x.pt") -> bytes:
    """What torch.save writes under the same name, which is part of a file's content."""
    (folder / "torch").mkdir(exist_ok=True)
    torch.save(obj, folder / "torch" / name)
    return (folder / "torch" / name).read_bytes()


__all__ = ["executor"]

BLOCK = 4096
Write = Callable[..., "list[int | None]"]


def image_of(obj: object, path: Path, *, room: int = 0, **kwargs: Any) -> FileImage:
    laid = write_skeleton(obj, path)
    return FileImage(laid, host_memory(laid.nbytes + room), **kwargs)


def write_by_image(
    obj: object,
    path: Path,
    *,
    before_last: Any = None,
    sync: bool = False,
    executor: Executor = "auto",
    **kwargs: Any,
) -> list[int | None]:
    """As ``write_torch_file``."""
    image = image_of(obj, path, **kwargs)
    digests = image.complete(before_last=before_last, executor=executor)
    image.write(sync=sync)
    return digests


WAYS = pytest.mark.parametrize("write", [write_torch_file, write_by_image])


@pytest.fixture(params=["host", "device"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Tensors in host memory are written as they are, others through a staging buffer, here a small one."""
    if request.param == "device":
        monkeypatch.setattr(dispatch, "_kind", lambda buffer: "host" if isinstance(buffer, np.ndarray) else "other")
        monkeypatch.setattr(staged, "STAGING_BYTES", 1 << 12)
    return request.param


def expected(run: DigestRange) -> int:
    data = run.tensor.contiguous().view(torch.uint8).numpy()
    return digest_range(data, run.tensor.element_size(), seed=run.seed, start=run.start)


def test_the_file_is_the_one_that_torch_saves(tmp_path: Path, executor: Executor, place: str) -> None:
    obj = sample()
    write_torch_file(obj, tmp_path / "x.pt", executor=executor)
    assert (tmp_path / "x.pt").read_bytes() == saved_by_torch(obj, tmp_path)
    assert zipfile.ZipFile(tmp_path / "x.pt").testzip() is None  # every checksum
    loaded = torch.load(tmp_path / "x.pt", weights_only=False)
    assert torch.equal(loaded["flat"], obj["flat"]) and loaded["object"].scale == 65536.0
    assert loaded["views of one storage"][0].data_ptr() == loaded["flat"].data_ptr()


@WAYS
@pytest.mark.parametrize("obj", [{}, 3, torch.empty(0), torch.zeros(()), {"a": torch.ones(3), "b": torch.empty(0)}])
def test_small_things_too(tmp_path: Path, executor: Executor, write: Write, obj: object) -> None:
    assert write(obj, tmp_path / "x.pt", executor=executor) == []
    assert (tmp_path / "x.pt").read_bytes() == saved_by_torch(obj, tmp_path)


def test_checksums_are_written_also_where_the_job_has_turned_them_off(tmp_path: Path) -> None:
    torch.save(obj := [torch.arange(999)], tmp_path / "a.pt")
    want = (tmp_path / "a.pt").read_bytes()
    torch.serialization.set_crc32_options(False)
    try:
        write_torch_file(obj, tmp_path / "a.pt")
        assert not torch.serialization.get_crc32_options()
    finally:
        torch.serialization.set_crc32_options(True)
    assert (tmp_path / "a.pt").read_bytes() == want


def test_a_file_that_was_there_is_replaced_not_patched(tmp_path: Path) -> None:
    write_torch_file({"large": torch.ones(10_000)}, tmp_path / "x.pt")
    write_torch_file({"small": torch.ones(10)}, tmp_path / "x.pt")
    assert (tmp_path / "x.pt").read_bytes() == saved_by_torch({"small": torch.ones(10)}, tmp_path)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_digests_of_runs_are_those_of_the_elements_written(tmp_path_factory: Any, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("runs")
    dtypes = data.draw(st.lists(st.sampled_from(DTYPES), min_size=1, max_size=3))
    sizes = [data.draw(st.integers(0, 5000)) for _ in dtypes]
    tensors = [torch.arange(n).remainder(251).to(dtype) for n, dtype in zip(sizes, dtypes, strict=True)]
    runs = []
    for tensor in tensors:
        cuts = sorted(data.draw(st.lists(st.integers(0, tensor.numel()), max_size=6)))
        for begin, end in zip(cuts[::2], cuts[1::2], strict=False):
            runs.append(
                DigestRange(tensor[begin:end], data.draw(st.integers(0, 2**64 - 1)), data.draw(st.integers(0, 2**40)))
            )
    runs = data.draw(st.permutations(runs))
    executor = data.draw(st.sampled_from([e for e in EXECUTORS if e == "numpy" or describe_build("native").usable]))
    for write in (write_torch_file, write_by_image):
        made = write(tensors, folder / "x.pt", digest_ranges=runs, executor=executor)
        assert (folder / "x.pt").read_bytes() == saved_by_torch(tensors, folder)
        assert made == [expected(run) if run.tensor.numel() else None for run in runs]


def test_digests_of_staged_runs_add_up_over_the_pieces(tmp_path: Path, executor: Executor, place: str) -> None:
    flat = torch.randn(20_000)
    half = torch.randn(3001).bfloat16()
    runs = [
        DigestRange(flat[7:12_345], 3, 1000),
        DigestRange(half[1:3000], 5, 77),
        DigestRange(flat[12_345:], 4, 1 << 35),
    ]
    made = write_torch_file({"flat": flat, "half": half}, tmp_path / "x.pt", digest_ranges=runs, executor=executor)
    assert made == [expected(run) for run in runs]


@WAYS
def test_runs_that_overlap_or_are_not_in_the_file_have_no_digest(tmp_path: Path, write: Write) -> None:
    flat = torch.randn(100)
    runs = [
        DigestRange(flat[:50], 1, 0),
        DigestRange(flat[40:60], 2, 0),
        DigestRange(torch.randn(4), 3, 0),
        DigestRange(flat[60:], 4, 0),
    ]
    made = write(flat, tmp_path / "x.pt", digest_ranges=runs)
    assert [digest is None for digest in made] == [False, True, True, False]


@WAYS
def test_the_last_tensor_is_written_after_the_digests_are_known(
    tmp_path: Path, executor: Executor, place: str, write: Write
) -> None:
    flat, table = torch.randn(5000), torch.zeros(2, dtype=torch.int64)
    runs = [DigestRange(flat[:100], 1, 0), DigestRange(flat[100:], 2, 100), DigestRange(table, 3, 0)]

    def fill(digests: Any) -> None:
        assert digests == [*(expected(run) for run in runs[:2]), None]
        table.copy_(torch.tensor([digest >> 1 for digest in digests[:2]]))

    obj = {"table": table, "flat": flat}
    made = write(obj, tmp_path / "x.pt", digest_ranges=runs, last=[table], before_last=fill, executor=executor)
    assert made[0] is not None and made[1] is not None and made[2] == expected(runs[2])
    assert torch.load(tmp_path / "x.pt")["table"].tolist() == [made[0] >> 1, made[1] >> 1]
    assert (tmp_path / "x.pt").read_bytes() == saved_by_torch(obj, tmp_path)

    def never(digests: Any) -> None:
        raise AssertionError("the table is in another file")

    write(flat, tmp_path / "y.pt", digest_ranges=runs, last=[table], before_last=never)


def test_more_than_4_gib_are_laid_out_with_64_bit_sizes(tmp_path: Path) -> None:
    """The layout of a large file, which has no payload yet: offsets of its records and where their checksums go."""
    obj = {"a": torch.empty(5 << 30, dtype=torch.uint8), "b": torch.arange(7.0)}
    laid = save.write_skeleton(obj, tmp_path / "x.pt")
    assert laid.sizes.tolist() == [5 << 30, 28] and laid.offsets[1] > 5 << 30 and laid.directory.offset > 5 << 30
    file = read_torch_file(tmp_path / "x.pt")
    assert [file.extent(file.root[key]).offset for key in "ab"] == laid.offsets.tolist()


def fails_with(error: int) -> Any:
    def fallocate(*_: object) -> int:
        ctypes.set_errno(error)
        return -1

    return fallocate


@WAYS
def test_a_full_disk_is_an_error_before_the_payload_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Write
) -> None:
    monkeypatch.setattr(atomic, "_fallocate", fails_with(errno.ENOSPC))
    with pytest.raises(OSError, match=r"No space left on device.*x\.pt") as caught:
        write(torch.ones(1 << 20), tmp_path / "x.pt")
    assert caught.value.errno == errno.ENOSPC
    assert os.stat(tmp_path / "x.pt").st_blocks * 512 < 1 << 20


def test_what_cannot_fit_is_refused_before_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system gives a request that is too large all that it has before it refuses: nobody could write then."""
    asked: list[int] = []
    fallocate = atomic._fallocate

    def told(fd: int, mode: int, offset: Any, nbytes: Any) -> int:
        asked.append(nbytes.value)
        return fallocate(fd, mode, offset, nbytes)

    monkeypatch.setattr(atomic, "_fallocate", told)
    free = os.statvfs(tmp_path)
    with open(tmp_path / "x", "wb") as file:
        with pytest.raises(OSError, match="No space left on device") as caught:
            atomic.reserve_space(file.fileno(), free.f_blocks * free.f_frsize + (1 << 40))
        assert caught.value.errno == errno.ENOSPC
        assert asked == [1] and os.fstat(file.fileno()).st_blocks * 512 <= 1 << 20
        atomic.reserve_space(file.fileno(), 3 << 20)
        assert asked == [1, 1, 3 << 20]
        held = os.fstat(file.fileno())
        assert held.st_size == 3 << 20 and held.st_blocks * 512 >= 3 << 20


def test_a_file_system_that_cannot_reserve_is_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(atomic, "_fallocate", fails_with(errno.EOPNOTSUPP))
    write_torch_file(torch.ones(1000), tmp_path / "x.pt")
    assert (tmp_path / "x.pt").read_bytes() == saved_by_torch(torch.ones(1000), tmp_path)


def test_a_layout_that_is_not_known_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lay_out = save._lay_out

    def compressed(obj: object, path: Path) -> dict[str, torch.UntypedStorage]:
        storages = lay_out(obj, path)
        with zipfile.ZipFile(path) as before:
            contents = {info.filename: before.read(info) for info in before.infolist() if info.file_size < 1000}
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as after:
            for name, text in contents.items():
                after.writestr(name, text)
        return storages

    monkeypatch.setattr(save, "_lay_out", compressed)
    with pytest.raises(UnsupportedError, match=r"x\.pt: torch .* lays files out in a way that is not known here"):
        write_torch_file(torch.ones(1000), tmp_path / "x.pt")


def test_a_torch_that_cannot_leave_payload_out_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(torch.serialization, "skip_data")
    with pytest.raises(UnsupportedError, match="it cannot leave payload out"):
        write_torch_file(torch.ones(3), tmp_path / "x.pt")


@pytest.mark.parametrize("damage", ["short", "text", "directory"])
def test_anything_else_than_the_expected_archive_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    lay_out = save._lay_out

    def damaged(obj: object, path: Path) -> dict[str, torch.UntypedStorage]:
        storages = lay_out(obj, path)
        data = bytearray(path.read_bytes())
        if damage == "directory":
            at = data.rindex(b"PK\x06\x06") + 48
            data[at : at + 8] = (len(data) - 30).to_bytes(8, "little")
        path.write_bytes({"short": b"PK", "text": b"x" * 500}.get(damage, bytes(data)))
        return storages

    monkeypatch.setattr(save, "_lay_out", damaged)
    with pytest.raises(UnsupportedError, match="in a way that is not known here"):
        write_torch_file(torch.ones(1000), tmp_path / "x.pt")


def test_a_directory_that_does_not_exist_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises((OSError, RuntimeError), match="nowhere"):
        write_torch_file(torch.ones(3), tmp_path / "nowhere" / "x.pt")


@given(st.lists(st.binary(max_size=300), max_size=12))
def test_checksums_of_runs_join_to_that_of_the_whole(parts: list[bytes]) -> None:
    sums = np.array([zlib.crc32(part) for part in parts], dtype=np.uint32)
    nbytes = np.array([len(part) for part in parts], dtype=np.int64)
    assert join_crc32(sums, nbytes) == join_crc32_reference(sums, nbytes) == zlib.crc32(b"".join(parts))


@WAYS
def test_a_file_is_flushed_when_it_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Write) -> None:
    """Not before its checksums are in place; and not at all unless asked for."""
    contents: list[bytes] = []
    monkeypatch.setattr(save.os, "fsync", lambda fd: contents.append((tmp_path / "x.pt").read_bytes()))
    write(torch.ones(1000), tmp_path / "x.pt", executor="numpy")
    assert contents == []
    write(torch.ones(1000), tmp_path / "x.pt", executor="numpy", sync=True)
    assert contents[-1] == saved_by_torch(torch.ones(1000), tmp_path)


# ---- images ----


@pytest.mark.parametrize("room", [0, 1, 100_000])
def test_an_image_is_written_as_the_file_that_torch_saves(tmp_path: Path, executor: Executor, room: int) -> None:
    """The moment is the one when it was made: what the tensors hold later is not written."""
    obj = sample()
    want = saved_by_torch(obj, tmp_path)
    image = image_of(obj, tmp_path / "x.pt", room=room)
    for value in obj.values():
        if isinstance(value, torch.Tensor):
            value.detach().zero_()
    image.complete(executor=executor)
    image.write()
    assert (tmp_path / "x.pt").read_bytes() == want


def test_a_view_is_of_the_copy(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    image = image_of({"base": base, "other": torch.ones(5)}, tmp_path / "x.pt")
    view = image.view(base[1:, ::2])
    assert view is not None and torch.equal(view, base[1:, ::2]) and view.stride() == base[1:, ::2].stride()
    base.zero_()
    assert view[0, 1] == 8
    assert image.view(torch.ones(3)) is None


def test_nothing_of_what_was_saved_is_kept_alive(tmp_path: Path) -> None:
    flat = torch.ones(1000)
    alive = weakref.ref(flat)
    image = image_of([flat], tmp_path / "x.pt", digest_ranges=[DigestRange(flat, 1, 0)])
    del flat
    assert alive() is None
    (digest,) = image.complete()
    assert digest is not None


class Device:
    """Stands in for ``os``: what is written past the page cache, and what that comes to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, opens: int = 0, writes: Sequence[int] = ()) -> None:
        self.opens, self.writes, self.direct = opens, list(writes), list[tuple[int, int]]()
        self._fds: set[int] = set()
        self._open, self._pwrite = os.open, os.pwrite
        monkeypatch.setattr(file_image.os, "open", self.open)
        monkeypatch.setattr(file_image.os, "pwrite", self.pwrite)
        self._close = os.close
        monkeypatch.setattr(file_image.os, "close", self.close)

    def open(self, path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if not flags & os.O_DIRECT:
            return self._open(path, flags, *args, **kwargs)
        if self.opens:
            raise OSError(self.opens, os.strerror(self.opens), path)
        fd = self._open(path, flags & ~os.O_DIRECT)
        self._fds.add(fd)
        return fd

    def close(self, fd: int) -> None:
        self._fds.discard(fd)  # its number may come again
        self._close(fd)

    def pwrite(self, fd: int, data: Any, offset: int) -> int:
        if fd not in self._fds:
            return self._pwrite(fd, data, offset)
        address = np.frombuffer(data, dtype=np.uint8).ctypes.data
        assert address % BLOCK == offset % BLOCK == len(data) % BLOCK == 0, "the kernel would refuse this"
        self.direct.append((offset, len(data)))
        most = self.writes.pop(0) if self.writes else len(data)
        if most < 0:
            raise OSError(-most, os.strerror(-most))
        return self._pwrite(fd, data[:most], offset)


def filled(size: int) -> np.ndarray:
    memory = host_memory(size).numpy()
    memory[:] = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    return memory


@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, 5 * BLOCK + 17, 3 * (1 << 20) + 5])
def test_all_but_the_last_bytes_go_past_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    device = Device(monkeypatch)
    monkeypatch.setattr(file_image, "_CALL_BYTES", 1 << 20)
    data = filled(size)
    (tmp_path / "x").write_bytes(b"older" * 10)
    write_past_cache(str(tmp_path / "x"), data, sync=True)
    assert (tmp_path / "x").read_bytes()[:size] == data.tobytes()
    assert sum(nbytes for _, nbytes in device.direct) == size // BLOCK * BLOCK


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP])
@pytest.mark.parametrize("writes", [None, [], [BLOCK], [BLOCK * 256, 3 * BLOCK]])
def test_a_file_system_that_knows_no_direct_writes_gets_ordinary_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: list[int] | None, code: int
) -> None:
    """When it says so: as the file is opened, at the first write or at a later one."""
    Device(monkeypatch, opens=code) if writes is None else Device(monkeypatch, writes=[*writes, -code])
    monkeypatch.setattr(file_image, "_CALL_BYTES", 1 << 20)
    data = filled((5 << 20) + 100)
    (tmp_path / "x").touch()
    write_past_cache(str(tmp_path / "x"), data, sync=False)
    assert (tmp_path / "x").read_bytes() == data.tobytes()


@pytest.mark.parametrize("short", [0, 100, BLOCK + 1])
def test_a_write_that_stops_inside_a_block_is_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, short: int
) -> None:
    device = Device(monkeypatch, writes=[2 * BLOCK, short])
    data = filled(20 * BLOCK)
    (tmp_path / "x").touch()
    write_past_cache(str(tmp_path / "x"), data, sync=False)
    assert (tmp_path / "x").read_bytes() == data.tobytes()
    assert len(device.direct) == 2


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_what_the_device_says_is_raised_with_the_name_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    image = image_of(torch.ones(100_000), tmp_path / "x.pt")
    image.complete()
    before = len(os.listdir("/proc/self/fd"))
    Device(monkeypatch, writes=[BLOCK, -code])
    with pytest.raises(OSError, match=r"x\.pt") as caught:
        image.write()
    assert caught.value.errno == code
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_that_is_no_longer_as_it_was_laid_out_is_named(tmp_path: Path) -> None:
    image = image_of(torch.ones(1000), tmp_path / "short.pt")
    os.truncate(tmp_path / "short.pt", 10)
    with pytest.raises(OSError, match=r"short\.pt"):
        image.complete()
    image = image_of(torch.ones(1000), tmp_path / "other.pt")
    (tmp_path / "other.pt").write_bytes(bytes(os.stat(tmp_path / "other.pt").st_size))
    with pytest.raises(UnsupportedError, match=r"other\.pt.*no descriptor follows"):
        image.complete()


def test_memory_begins_at_a_page_and_has_room(tmp_path: Path) -> None:
    for nbytes in (0, 1, BLOCK, 10_000_001):
        memory = host_memory(nbytes)
        assert memory.numel() == nbytes and memory.dtype == torch.uint8 and memory.data_ptr() % BLOCK == 0
    laid = write_skeleton(torch.ones(1000), tmp_path / "x.pt")
    assert isinstance(laid, TorchSaveSkeleton)
    with pytest.raises(AssertionError):
        FileImage(laid, host_memory(laid.nbytes - 1))
    with pytest.raises(AssertionError):
        FileImage(laid, host_memory(laid.nbytes + 8)[8:])


def test_the_real_device_takes_it(tmp_path: Path) -> None:
    """Without anything in between; where the file system knows no direct writes, the ordinary ones."""
    weights = torch.randn(5_000_003)
    image = image_of(weights, tmp_path / "archive")
    image.complete()
    image.write(sync=True)
    assert torch.equal(torch.load(tmp_path / "archive"), weights)
