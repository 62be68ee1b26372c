"""Sources behind object stores: the same bytes and digests as from a disk, for no more requests than it takes."""

from __future__ import annotations

import errno
import os
import subprocess
import threading
import time
import tracemalloc
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from engines import Case, cases, checksums, expected, ranges, segment, shuffled, untouched_files, write_files
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from places import GOLDEN
from programs import run_python
from stores import BUCKET, CountedFileSystem, S3Server, counted, forget, forget_clients, put, serve_s3
from synthetic import gather, write_checkpoint

from zeroelastic.checkpoint.open import open_checkpoint
from zeroelastic.core.layout import Param
from zeroelastic.errors import CheckpointError, ConfigError, MissingFileError, UnreadableError
from zeroelastic.executors import native_executor, numpy_executor
from zeroelastic.executors.build_info import describe_build
from zeroelastic.executors.dispatch import (
    CopyTable,
    DeviceBuffer,
    DigestRows,
    Ranges,
    move_segments,
    read_segments,
    scan_segments,
)
from zeroelastic.executors.remote_executor import MAX_GAP, RemoteEngine, affordable_gap, plan_requests
from zeroelastic.executors.tables import CASTS, Endpoints, MoveOptions
from zeroelastic.io import retries
from zeroelastic.io.paths import FilePath, as_path
from zeroelastic.io.remote import RemotePath, read_ranges
from zeroelastic.io.storage import read_range, read_whole
from zeroelastic.torch_file.header import DTYPE_BYTES

UNTOUCHED = 0xA5
STAGING = 3 * 2048
"""Small enough that the tables of these tests take several batches."""

pytestmark = pytest.mark.usefixtures("counted")
__all__ = ["counted"]

many = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(params=["numpy", "native"])
def host(request: pytest.FixtureRequest) -> object:
    if request.param == "native" and not describe_build("native").usable:
        pytest.skip("the native engine is not built")
    return numpy_executor.run if request.param == "numpy" else native_executor.run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files")


def int64(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


# --- what is asked for ----------------------------------------------------------------------------------------------


@settings(max_examples=150)
@given(
    steps=st.lists(st.tuples(st.integers(0, 1), st.integers(-60, 90), st.integers(0, 90)), max_size=30),
    request_bytes=st.sampled_from([17, 40, 64, 1000]),
    max_gap=st.sampled_from([0, 5, 40]),
)
def test_requests_cover_every_row_once_and_little_else(steps, request_bytes, max_gap):
    """A step is a file, and the bytes between the row and the one before in that file: less than 0, they overlap."""
    rows, ends = [], [0, 0]
    for number, gap, length in steps:
        begin = max(0, ends[number] + gap)
        rows.append((number, begin, length))
        ends[number] = begin + length
    file, offset, nbytes = (int64(*(row[i] for row in rows)) for i in range(3))
    plan = plan_requests(file, offset, nbytes, request_bytes=request_bytes, max_gap=max_gap)
    reached: dict[int, int] = dict.fromkeys(range(len(rows)), 0)
    for row, request, at, start, length in zip(
        *(c.tolist() for c in (plan.row, plan.request, plan.piece_offset, plan.piece_start, plan.piece_nbytes)),
        strict=True,
    ):
        assert start == reached[row] and start % 8 == 0 and length > 0
        reached[row] += length
        assert plan.file[request] == file[row] and plan.offset[request] + at == offset[row] + start
        assert at >= 0 and at + length <= plan.nbytes[request]
    assert reached == dict(enumerate(nbytes.tolist()))
    assert np.array_equal(plan.request, np.sort(plan.request))
    assert (plan.nbytes <= request_bytes).all()
    allowed = {(f, byte) for f, o, n in rows for byte in range(o, o + n)}
    for f in range(2):
        spans = sorted((o, o + n) for g, o, n in rows if g == f and n)
        end = spans[0][1] if spans else 0
        for begin, stop in spans:
            if begin - end <= max_gap:
                allowed |= {(f, byte) for byte in range(end, begin)}
            end = max(end, stop)
    asked = [
        (f, byte)
        for f, o, n in zip(plan.file.tolist(), plan.offset.tolist(), plan.nbytes.tolist(), strict=True)
        for byte in range(o, o + n)
    ]
    assert set(asked) <= allowed
    assert len(asked) - len(set(asked)) <= 7 * max(0, len(plan.nbytes) - 1), "more than cut elements come twice"


def test_neighbours_share_a_request_and_distant_rows_do_not():
    offsets = int64(0, 100, 100 + MAX_GAP + 50, 100 + 2 * MAX_GAP + 51 + 50)
    plan = plan_requests(int64(0, 0, 0, 0), offsets, int64(100, 50, 50, 1), request_bytes=1 << 20)
    assert plan.offset.tolist() == [0, int(offsets[3])] and plan.request.tolist() == [0, 0, 0, 1]


def test_small_gaps_are_read_over_only_while_they_are_little_beside_the_rows():
    """Rows of 3000 bytes with the bytes of two other ranks between them, as after a resume at another size."""
    nbytes = np.full(100, 3000, dtype=np.int64)
    file = np.zeros(100, dtype=np.int64)
    gap = affordable_gap(file, np.arange(100, dtype=np.int64) * 9000, nbytes)
    assert gap < 6000, "each byte would be read by three ranks"
    padded = np.arange(100, dtype=np.int64) * 3004
    assert affordable_gap(file, padded, nbytes) == MAX_GAP, "padding costs less than a request each"
    assert affordable_gap(file[:1], padded[:1], nbytes[:1]) == MAX_GAP
    assert affordable_gap(np.arange(100, dtype=np.int64), padded, nbytes) == MAX_GAP, "rows of other files are no gap"


# --- the same as the host engine's ----------------------------------------------------------------------------------


def placed(case: Case, folder: Path, remote: list[bool]) -> tuple[FilePath, ...]:
    """The sources, some on the disk and some not."""
    here = write_files(folder, case.src)
    there = [put(f"counted://b/src{i}", bytes(data)) for i, data in enumerate(case.src)]
    forget()
    return tuple(t if is_remote else h for h, t, is_remote in zip(here, there, remote, strict=False))


def bytes_asked() -> int:
    sizes = {path: len(file.getbuffer()) for path, file in CountedFileSystem.store.items()}
    return sum(min(end, sizes[path]) - start for path, start, end in CountedFileSystem.ranges)


def most_bytes(case: Case, remote: list[bool]) -> int:
    """Bytes of the remote rows, and of the gaps between them."""
    total = 0
    for number in range(len(case.src)):
        rows = np.flatnonzero((case.rows.src == number) & (case.rows.nbytes > 0))
        if remote[number] and len(rows):
            end = int((case.rows.src_offset + case.rows.nbytes)[rows].max())
            total += end - int(case.rows.src_offset[rows].min())
    return total


remote_or_not = st.lists(st.booleans(), min_size=4, max_size=4)


@many
@given(data=st.data(), remote=remote_or_not, digested=st.booleans(), summed=st.booleans())
@pytest.mark.parametrize("operation", ["read", "move", "scan"])
def test_every_row_comes_and_nothing_else(data, remote, digested, summed, operation, host, folder):
    case = data.draw(cases(casts=("none",) if operation == "scan" else CASTS))
    if operation != "read":
        case = shuffled(case, np.array(data.draw(st.permutations(range(len(case.rows.nbytes)))), dtype=np.int64))
    paths, targets = placed(case, folder, remote), untouched_files(folder, case)
    buffers = [np.full(size, UNTOUCHED, dtype=np.uint8) for size in case.dst_sizes]
    sums = np.full(len(case.rows.nbytes), 1, dtype=np.uint32) if summed and operation != "read" else None
    reported: list[int] = []
    digest = case.digest if digested else None
    options = MoveOptions(digest, sums, case.cast, threads=2, progress=reported.append)
    sides = {
        "read": Endpoints(paths, dst=buffers),
        "move": Endpoints(paths, dst_paths=targets),
        "scan": Endpoints(paths),
    }[operation]
    table = ranges(case.rows) if operation == "scan" else case.rows
    totals, bytes_read = RemoteEngine(host, staging_bytes=STAGING)(table, options, sides=sides)
    want, digests = expected(case)
    if operation != "scan":
        got = [b.tobytes() for b in buffers] if operation == "read" else [path.read_bytes() for path in targets]
        assert got == [part.tobytes() for part in want]
    assert totals is None if digest is None else totals is not None and totals.tolist() == digests
    assert sums is None or sums.tolist() == checksums(case)
    assert sum(reported) == int(case.rows.nbytes.sum())
    local = [n for i, n in zip(case.rows.src.tolist(), case.rows.nbytes.tolist(), strict=True) if not remote[i]]
    assert operation != "read" or bytes_read == sum(local) + bytes_asked()
    assert bytes_asked() <= most_bytes(case, remote) + 7 * len(CountedFileSystem.ranges)
    assert all(end - start <= STAGING // 3 for _, start, end in CountedFileSystem.ranges)


@pytest.mark.parametrize("executor", ["auto", "numpy", "native"])
def test_the_public_functions_take_remote_sources(tmp_path, executor):
    content = os.urandom(5000)
    path = put("counted://b/f", content)
    buffer = np.zeros(3000, dtype=np.uint8)
    result = read_segments(segment(1000, 0, 3000), [path], [buffer], executor=executor)
    assert bytes(buffer) == content[1000:4000] and result.bytes_read == 3000 and result.files == (path,)
    sums = np.zeros(1, dtype=np.uint32)
    scan_segments(Ranges(int64(0), int64(10), int64(4000)), (path,), crc32=sums, executor=executor)
    assert sums.tolist() == [zlib.crc32(content[10:4010])]
    (tmp_path / "d").write_bytes(bytes(3000))
    move_segments(segment(1000, 0, 3000), [path], [tmp_path / "d"], executor=executor)
    assert (tmp_path / "d").read_bytes() == content[1000:4000]


def test_tensors_are_filled_and_device_addresses_are_refused():
    path = put("counted://b/f", np.arange(100, dtype="<f4").tobytes())
    tensor = torch.zeros(50)
    read_segments(segment(200, 0, 200), [path], [tensor])
    assert tensor.tolist() == list(range(50, 100))
    with pytest.raises(ConfigError):
        read_segments(segment(0, 0, 8), [path], [DeviceBuffer(1 << 20, 8)])


# --- bounds and failures --------------------------------------------------------------------------------------------


def test_staging_is_bounded_and_the_next_batch_is_under_way(counted, tmp_path):
    """10 MiB through 1.5 MiB: the answers that are held at a time never exceed it."""
    size, staging = 10 << 20, 3 << 19
    path = put("counted://b/f", bytes(size))
    (tmp_path / "d").touch()
    os.truncate(tmp_path / "d", size)
    engine = RemoteEngine(numpy_executor.run, staging_bytes=staging)
    asked_while_moving: list[int] = []

    def slow(*arguments, sides):
        time.sleep(0.02)
        asked_while_moving.append(bytes_asked())
        return numpy_executor.run(*arguments, sides=sides)

    sides = Endpoints([path], dst_paths=[tmp_path / "d"])
    tracemalloc.start()
    try:
        engine(segment(0, 0, size), MoveOptions(crc32=np.zeros(1, dtype=np.uint32)), sides=sides)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < staging
    forget()
    RemoteEngine(slow, staging_bytes=staging)(segment(0, 0, size), MoveOptions(), sides=sides)
    moved = np.arange(len(asked_while_moving)) * (staging // 3)
    ahead = np.array(asked_while_moving) - moved
    assert (ahead <= 2 * (staging // 3) + 4096).all() and (ahead[:-2] > staging // 3).all()


@pytest.mark.parametrize("operation", ["read", "move", "scan"])
@pytest.mark.parametrize("size", [0, 5, 4096, 9999])
def test_a_short_file_is_named_with_the_byte_where_it_ends(tmp_path, operation, size):
    path = put("counted://b/f", bytes(size))
    engine = RemoteEngine(numpy_executor.run, staging_bytes=STAGING)
    (tmp_path / "d").write_bytes(bytes(10_000))
    with pytest.raises(CheckpointError, match=rf"^counted://b/f: ends at byte {size}\. The file is truncated\.$"):
        run(engine, operation, path, tmp_path / "d")


def run(engine: RemoteEngine, operation: str, path: RemotePath, target: Path, progress=None) -> object:
    options = MoveOptions(progress=progress)
    rows = segment(0, 0, 10_000)
    if operation == "read":
        return engine(rows, options, sides=Endpoints([path], dst=[np.zeros(10_000, np.uint8)]))
    if operation == "move":
        return engine(rows, options, sides=Endpoints([path], dst_paths=[target]))
    return engine(ranges(rows), options, sides=Endpoints([path]))


@pytest.mark.parametrize("operation", ["read", "move", "scan"])
def test_a_missing_file_and_one_that_fails_are_named(counted, tmp_path, operation):
    engine = RemoteEngine(numpy_executor.run, staging_bytes=STAGING)
    (tmp_path / "d").write_bytes(bytes(10_000))
    with pytest.raises(MissingFileError, match=r"^counted://b/f: no such file\. The checkpoint is incomplete\.$"):
        run(engine, operation, as_path("counted://b/f"), tmp_path / "d")
    path = put("counted://b/f", bytes(10_000))

    def fail(path, start, data):
        if start > 6000:
            raise OSError("connection reset")
        return data

    counted.answer = fail
    with pytest.raises(UnreadableError, match=r"^counted://b/f: reading at byte \d+ failed: connection reset\.$"):
        run(engine, operation, path, tmp_path / "d")


@pytest.mark.parametrize("operation", ["read", "move", "scan"])
def test_progress_ends_a_call_that_waits_for_an_answer(counted, tmp_path, operation):
    path, hold = put("counted://b/f", bytes(10_000)), threading.Event()
    (tmp_path / "d").write_bytes(bytes(10_000))

    def wait(path, start, data):
        hold.wait(30)
        return data

    def interrupt(nbytes):
        raise KeyboardInterrupt

    counted.answer = wait
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run(RemoteEngine(numpy_executor.run), operation, path, tmp_path / "d", interrupt)
    assert time.monotonic() - begin < 10
    hold.set()


# --- a real S3 server -----------------------------------------------------------------------------------------------


LARGE = (Param("w", (300, 1000)), Param("v", (100, 1000)), Param("b", (1000,)))


@pytest.fixture(scope="module")
def checkpoints(s3: S3Server, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, str]]:
    """Local tag directories and the URLs of their copies."""
    root = tmp_path_factory.mktemp("s3")
    found = {path.name: next(path.glob("global_step*")) for path in GOLDEN.iterdir() if (path / "latest").exists()}
    for format in ("elastic", "rigid"):
        found[format] = root / format / "global_step3"
        write_checkpoint(found[format], world_size=3, groups=[LARGE], sub_group_size=None, format=format, record=True)
    for name, path in found.items():
        s3.client().put_object(Bucket=BUCKET, Key=f"{name}/latest", Body=path.name.encode())
    return {name: (path, s3.upload(path, f"{name}/{path.name}")) for name, path in found.items()}


NAMES = ("elastic", "rigid", "elastic3", "rigid2")


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_on_s3_is_the_local_one(calm, checkpoints, name):
    local, url = checkpoints[name]
    here, there = open_checkpoint(local), open_checkpoint(url)
    assert here.record == there.record
    for rank in range(here.world_size):
        a, b = here.shard(rank), there.shard(rank)
        for field in ("size", "format", "save_id", "groups", "tensor_keys", "scalars", "scaler", "ds_config"):
            assert getattr(a, field) == getattr(b, field), field
        assert str(b.path) == f"{url}/{a.path.name}" and b.path.name == a.path.name
        assert a.layout.params == b.layout.params
        assert here.model_states(rank).sub_groups == there.model_states(rank).sub_groups
    assert len(calm.requests) <= 2 + 8 * len(there.opened)
    assert gather(there) == gather(here)
    assert all(request.range for request in calm.payload_requests())
    assert {request.method for request in calm.requests} <= {"GET", "HEAD"}


def payload_rows(url: str | Path) -> tuple[tuple[FilePath, ...], CopyTable, DigestRows]:
    """Every tensor of every rank's optimizer file, one row each, one behind the other in destination 0."""
    checkpoint = open_checkpoint(url)
    rows, itemsizes, at = [], [], 0
    for rank in range(checkpoint.world_size):
        shard = checkpoint.shard(rank)
        length = shard.layout.owned(rank)[1]
        for extents in shard.extents.values():
            for p in np.flatnonzero(length > 0).tolist():
                itemsize = DTYPE_BYTES[extents.dtype[int(shard.layout.sub_group[p])]]
                nbytes = int(length[p]) * itemsize
                rows.append((rank, int(extents.offset[p]), 0, at, nbytes))
                itemsizes.append(itemsize)
                at += nbytes
    order = sorted(range(len(rows)), key=rows.__getitem__)
    table = np.array([rows[i] for i in order], dtype=np.int64)
    rng = np.random.default_rng(0)
    digest = DigestRows(
        rng.integers(0, 2**64, 5, dtype=np.uint64),
        rng.integers(0, 5, len(rows)),
        rng.integers(0, 2**30, len(rows)),
        np.array([itemsizes[i] for i in order], dtype=np.int64),
    )
    return checkpoint.optim_files, CopyTable(*(np.ascontiguousarray(c) for c in table.T)), digest


@pytest.mark.parametrize("name", NAMES)
def test_reads_moves_and_scans_of_s3_are_those_of_a_disk(calm, checkpoints, tmp_path, name):
    results = []
    for where in checkpoints[name]:
        paths, rows, digest = payload_rows(where)
        calm.requests.clear()
        size = int(rows.nbytes.sum())
        buffer = np.zeros(size, dtype=np.uint8)
        read = read_segments(rows, paths, [buffer], digest=digest)
        asked = sum(request.nbytes for request in calm.payload_requests())
        (tmp_path / "d").write_bytes(bytes(size))
        sums = np.zeros((2, len(rows.nbytes)), dtype=np.uint32)
        moved = move_segments(rows, paths, [tmp_path / "d"], digest=digest, crc32=sums[0])
        scanned = scan_segments(Ranges(rows.src, rows.src_offset, rows.nbytes), paths, digest=digest, crc32=sums[1])
        assert (tmp_path / "d").read_bytes() == bytes(buffer) and np.array_equal(sums[0], sums[1])
        assert read.digests.tolist() == moved.tolist() == scanned.tolist()
        results.append((bytes(buffer), moved.tolist(), sums[0].tolist(), [path.name for path in read.files]))
    assert results[0] == results[1]
    gaps = len(rows.nbytes) * MAX_GAP
    assert asked == read.bytes_read and size <= asked <= size + gaps
    if name in ("elastic", "rigid"):
        assert asked <= 1.01 * size
    assert all(request.range for request in calm.payload_requests())


def test_what_is_not_there_is_named(calm, checkpoints):
    _, url = checkpoints["elastic"]
    for missing in (calm.url("nowhere"), "s3://no-such-bucket/run", f"{url}/zeroelastic.json"):
        with pytest.raises(MissingFileError, match=f"^{missing}: no such checkpoint directory"):
            open_checkpoint(missing)
    path = as_path(url) / "gone.pt"
    with pytest.raises(MissingFileError, match=rf"^{url}/gone\.pt: no such file"):
        read_segments(segment(0, 0, 10), [path], [np.zeros(10, np.uint8)])


def test_an_object_deleted_after_the_listing_is_missed(calm, checkpoints):
    local, _ = checkpoints["elastic2"]
    url = calm.upload(local, "shrinking/global_step2")
    checkpoint = open_checkpoint(url)
    calm.client().delete_object(Bucket=BUCKET, Key=f"shrinking/global_step2/{checkpoint.optim_files[1].name}")
    with pytest.raises(MissingFileError, match=checkpoint.optim_files[1].name):
        checkpoint.shard(1)
    with pytest.raises(MissingFileError, match="1 of the files of 2 ranks is missing"):
        open_checkpoint(url)


class Translated(OSError):
    """An error as file systems make it of an answer: with the status, or with the cause that has it."""

    def __init__(self, number: int, cause: BaseException | None = None, **attributes: object) -> None:
        super().__init__(number, "failed")
        self.__cause__ = cause
        self.__dict__.update(attributes)


def answered(status: int) -> Translated:
    """botocore's ClientError, as far as it is looked at."""
    return Translated(errno.EIO, response={"ResponseMetadata": {"HTTPStatusCode": status}})


@pytest.mark.parametrize(
    ("error", "refused"),
    [
        (Translated(errno.EIO, status=416), True),
        (Translated(errno.EIO, code=416), True),
        pytest.param(Translated(errno.EINVAL, status=500), False, marks=pytest.mark.extended),
        (Translated(errno.EINVAL, answered(416)), True),
        pytest.param(Translated(errno.EINVAL, answered(400)), False, marks=pytest.mark.extended),
        (Translated(errno.EINVAL), True),
        (ValueError("Bad Request"), True),
        pytest.param(PermissionError("range 416"), False, marks=pytest.mark.extended),
        pytest.param(TimeoutError("range 416"), False, marks=pytest.mark.extended),
    ],
    ids=repr,
)
def test_a_refused_range_is_known_by_its_status_and_not_by_its_words(counted, error, refused):
    path = put("counted://b/f", b"12345")

    def refuse(path, start, data):
        raise error

    counted.answer = refuse
    if refused:
        assert read_range(path, 5, 1) == b""
    else:
        with pytest.raises(UnreadableError, match="reading at byte 5 failed"):
            read_range(path, 5, 1)
    with pytest.raises(UnreadableError, match="reading at byte 4 failed"):
        read_range(path, 4, 1)


def test_ranges_end_where_an_object_does(calm, checkpoints):
    path = as_path(checkpoints["elastic2"][1]) / "zeroelastic.json"
    size = (checkpoints["elastic2"][0] / "zeroelastic.json").stat().st_size
    assert read_range(path, size, 5) == b"" and len(read_range(path, size - 2, 5)) == 2
    for offset in (size - 2, size, size + 1000):
        with pytest.raises(CheckpointError, match=rf"zeroelastic\.json: ends at byte {size}\. The file is truncated\."):
            read_ranges([(path, offset, 5)])
    calm.client().put_object(Bucket=BUCKET, Key="empty", Body=b"")
    assert read_whole(as_path(calm.url("empty")), limit=5) == b""


def test_denied_access_is_said(calm, checkpoints, monkeypatch):
    _, url = checkpoints["elastic2"]
    paths = open_checkpoint(url).optim_files
    calm.reset_access(allow=False)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    forget_clients()
    with pytest.raises(UnreadableError, match=f"^{url}: cannot be listed: The AWS Access Key Id .* does not exist"):
        open_checkpoint(url)
    with pytest.raises(UnreadableError, match=rf"^{paths[0]}: reading at byte 3 failed: The AWS Access Key Id"):
        read_segments(segment(3, 0, 10), [paths[0]], [np.zeros(10, np.uint8)])


def test_a_transient_fault_is_retried(calm, checkpoints):
    paths, rows, _ = payload_rows(checkpoints["elastic"][1])
    wanted, got = (np.zeros(int(rows.nbytes.sum()), dtype=np.uint8) for _ in range(2))
    read_segments(rows, paths, [wanted])
    left, lock = ["cut", "503", "cut"], threading.Lock()

    def fault(request):
        with lock:
            return left.pop() if left and request.range else None

    calm.fault = fault
    read_segments(rows, paths, [got])
    assert not left and np.array_equal(wanted, got)


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As many attempts as ever, with less time between them; s3fs makes two of each."""
    monkeypatch.setattr("s3fs.S3FileSystem.retries", 2)
    with retries.retrying(retries.Retries(first_pause_s=0.05)):
        yield


@pytest.mark.extended
@pytest.mark.usefixtures("short_pauses")
@pytest.mark.parametrize(
    ("fault", "message", "most_s"),
    [("cut", r".*not completed", 60), ("stall", r"no answer in 2 s\.$", 20)],
    ids=["broken", "stalled"],
)
def test_a_connection_that_always_breaks_is_an_error_with_the_place(
    calm, checkpoints, monkeypatch, fault, message, most_s
):
    path = open_checkpoint(checkpoints["elastic2"][1]).optim_files[0]
    if fault == "stall":
        monkeypatch.setattr(retries, "TIME_LIMIT_S", 2.0)
    calm.fault = lambda request: fault if request.range else None
    begin = time.monotonic()
    with pytest.raises(UnreadableError, match=rf"^{path}: reading at byte 100 failed: {message}"):
        read_segments(segment(100, 0, 1000), [path], [np.zeros(1000, np.uint8)])
    assert time.monotonic() - begin < most_s


@pytest.mark.extended
@pytest.mark.usefixtures("short_pauses")
def test_a_server_that_dies_in_the_middle_is_an_error(checkpoints, tmp_path):
    """A server of its own, which is gone after the first batch; the next one may have been read by then."""
    size = 24 << 20
    (tmp_path / "f").write_bytes(os.urandom(size))
    (tmp_path / "d").write_bytes(bytes(size))
    with serve_s3() as server:
        path = as_path(server.upload(tmp_path, "x")) / "f"
        assert isinstance(path, RemotePath)
        engine = RemoteEngine(numpy_executor.run, staging_bytes=3 << 20)

        def die(nbytes):
            if nbytes and server.alive:
                server.stop()

        begin = time.monotonic()
        with pytest.raises(UnreadableError, match=rf"^{path}: reading at byte \d+ failed: .*"):
            engine(segment(0, 0, size), MoveOptions(progress=die), sides=Endpoints([path], dst_paths=[tmp_path / "d"]))
        assert time.monotonic() - begin < 90


# --- what is built on it --------------------------------------------------------------------------------------------


def zeroelastic(*arguments: object, directory: Path) -> subprocess.CompletedProcess[str]:
    return run_python("-m", "zeroelastic", *arguments, cwd=directory)


@pytest.mark.support(
    "Checkpoint engines and storage",
    "`s3://` sources on the command line",
    "exact",
    "read by range, written to this machine",
)
def test_the_command_line_reshards_from_s3(calm, checkpoints, tmp_path):
    local, url = checkpoints["elastic3"]
    for source, target in ((url, "from-s3"), (local, "from-disk")):
        done = zeroelastic("reshard", source, target, "--world-size", 2, directory=tmp_path)
        assert done.returncode == 0, done.stderr
    here, there = (open_checkpoint(next((tmp_path / name).glob("global_step*"))) for name in ("from-disk", "from-s3"))
    assert gather(here) == gather(there) and here.record.content_root == there.record.content_root
    assert all(request.range for request in calm.payload_requests())
    assert {request.method for request in calm.requests} <= {"GET", "HEAD"}


@pytest.mark.extended
@pytest.mark.parametrize(
    "options",
    [("export",), ("export", "--optimizer", "--dtype", "bf16"), ("convert", "--to", "fsdp2")],
    ids=" ".join,
)
def test_the_command_line_writes_the_same_from_s3_as_from_a_disk(calm, checkpoints, tmp_path, options):
    written = []
    for where, target in zip(checkpoints["elastic3"], ("out-here", "out-away"), strict=True):
        done = zeroelastic(options[0], where, target, *options[1:], directory=tmp_path)
        assert done.returncode == 0, done.stderr
        files = [path for path in sorted((tmp_path / target).rglob("*")) if path.is_file()]
        written.append({str(path.relative_to(tmp_path / target)): path.read_bytes() for path in files})
    here, there = written
    assert here.keys() == there.keys() and here
    same = [name for name in here if name != ".metadata"]  # of which any two conversions of one source differ
    assert [
        name for name in same if here[name].replace(b"out-here", b"") != there[name].replace(b"out-away", b"")
    ] == []
    assert calm.requests and all(request.range for request in calm.payload_requests())


@pytest.mark.starts_processes
@pytest.mark.parametrize(
    "verb",
    [("inspect", "--json"), ("verify",), ("verify", "--quick"), ("plan", "--world-size", "2"), ("diff",)],
    ids=" ".join,
)
def test_the_command_line_says_the_same_of_s3_as_of_a_disk(calm, checkpoints, tmp_path, verb):
    said = []
    local, url = (str(where) for where in checkpoints["elastic3"])
    for source in (local, url):
        name, *options = verb
        extra = [local] if name == "diff" else []
        done = zeroelastic(name, source, *extra, *options, directory=tmp_path)
        assert done.returncode == 0, done.stderr
        said.append(done.stdout.replace(source, "SOURCE").replace(local, "SOURCE"))
    if verb[0] in ("inspect", "diff") or "--quick" in verb:
        assert said[0] == said[1]
    assert all("SOURCE" in text for text in said)
    assert calm.requests and all(request.range for request in calm.payload_requests())
    assert {request.method for request in calm.requests} <= {"GET", "HEAD"}
