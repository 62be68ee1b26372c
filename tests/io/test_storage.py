"""Directories and files, here and behind a URL: the same answers, and few requests for what is behind a URL."""

from __future__ import annotations

import os
import threading
import time
from itertools import pairwise

import fsspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stores import CountedFileSystem, counted, forget, put, upload
from synthetic import gather, write_checkpoint

from zeroelastic.checkpoint.open import open_checkpoint
from zeroelastic.core.layout import Param
from zeroelastic.errors import CheckpointError, MissingFileError, UnreadableError
from zeroelastic.io import retries, storage
from zeroelastic.io.paths import as_path
from zeroelastic.io.remote import read_ranges
from zeroelastic.io.storage import (
    BlockFile,
    file_size,
    file_sizes,
    folders,
    list_directory,
    read_range,
    read_whole,
)
from zeroelastic.torch_file.header import read_torch_file

pytestmark = pytest.mark.usefixtures("counted")
__all__ = ["counted"]


# --- directories and small files, here and there --------------------------------------------------------------------


@pytest.fixture(params=["local", "remote"])
def place(request, tmp_path):
    """A directory with the files ``a`` (5 bytes) and ``empty``, and the directory ``d``."""
    if request.param == "remote":
        put("counted://run/a", b"12345")
        put("counted://run/empty", b"")
        put("counted://run/d/x", b"1")
        return as_path("counted://run")
    (tmp_path / "a").write_bytes(b"12345")
    (tmp_path / "empty").touch()
    (tmp_path / "d").mkdir()
    return tmp_path


def test_a_directory_is_listed(place):
    assert file_sizes(place) == {"a": 5, "empty": 0} and folders(place) == ("d",)
    assert (file_size(place / "a"), file_size(place / "none"), file_size(place / "d")) == (5, None, None)
    for nowhere in (place / "nowhere", place / "a"):
        with pytest.raises(MissingFileError, match=f"{nowhere}: no such checkpoint directory"):
            file_sizes(nowhere)


def test_a_link_in_a_directory_does_not_hide_the_others(tmp_path):
    """One to itself leads nowhere, as one to a missing file; one that cannot be followed is named."""
    (tmp_path / "a").write_bytes(b"12345")
    (tmp_path / "d").mkdir()
    (tmp_path / "ring").symlink_to("ring")
    assert list_directory(tmp_path) == ({"a": 5}, ("d",)) and storage.place(tmp_path).file_names() == {"a"}
    (tmp_path / "long").symlink_to("x" * 300)
    for look in (list_directory, lambda path: storage.place(path).file_names()):
        with pytest.raises(UnreadableError, match=f"^{tmp_path / 'long'}: cannot be looked at: File name too long"):
            look(tmp_path)


def test_a_listing_without_sizes_asks_for_each(counted, monkeypatch):
    put("counted://run/a", b"12345")
    monkeypatch.setattr(counted, "ls", lambda self, path, detail: [{"name": "/run/a", "type": "file", "size": None}])
    assert file_sizes(as_path("counted://run")) == {"a": 5}


def test_a_server_that_hides_sizes_is_refused(counted, monkeypatch):
    monkeypatch.setattr(counted, "info", lambda self, path: {"name": path, "type": "file", "size": None})
    with pytest.raises(CheckpointError, match="does not say how large it is"):
        file_size(as_path("counted://run/a"))


def test_ranges_end_where_the_file_does(place):
    path = place / "a"
    assert [read_range(path, *r) for r in ((0, 5), (1, 2), (3, 9), (5, 1), (9, 1), (2, 0))] == [
        b"12345",
        b"23",
        b"45",
        b"",
        b"",
        b"",
    ]
    assert read_whole(path, limit=5) == b"12345" and read_whole(place / "empty", limit=5) == b""
    with pytest.raises(CheckpointError, match=f"{path}: has more than 4 bytes"):
        read_whole(path, limit=4)
    for read in (lambda: read_range(place / "b", 0, 1), lambda: read_whole(place / "b", limit=1)):
        with pytest.raises(MissingFileError, match=f"{place / 'b'}: no such file"):
            read()


def test_a_limit_takes_no_memory(tmp_path):
    (tmp_path / "a").write_bytes(b"12345")
    assert read_whole(tmp_path / "a", limit=1 << 50) == b"12345"


def test_what_goes_wrong_is_said_in_one_line(counted):
    path = put("counted://run/a", b"12345")

    def fail(path, start, data):
        raise PermissionError("Access\n Denied.")

    counted.answer = fail
    for read in (lambda: read_range(path, 3, 1), lambda: read_ranges([(path, 3, 1)])):
        with pytest.raises(UnreadableError, match=r"^counted://run/a: reading at byte 3 failed: Access Denied\.$"):
            read()
    with pytest.raises(UnreadableError, match=r"^counted://run/a: cannot be read: Access Denied\.$"):
        read_whole(path, limit=9)


class Concurrency:
    """How many requests a file system had under way at a time, at most.

    Each request waits a little for others, so that it does not depend on the load of the machine: until ``wanted`` were
    under way at a time once, for at most 0.3 s.
    """

    def __init__(self, system, *, wanted):
        self.most, self._now, self._wanted = 0, 0, wanted
        self._changed = threading.Condition()
        system.answer = self.answer

    def answer(self, path, start, data):
        with self._changed:
            self._now += 1
            self.most = max(self.most, self._now)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self.most >= self._wanted, timeout=0.3)
        time.sleep(0.001 * (1 + start % 3))
        with self._changed:
            self._now -= 1
        return data


# --- many ranges at once --------------------------------------------------------------------------------------------


def test_ranges_come_in_their_order_several_at_a_time(counted):
    path = put("counted://run/a", bytes(range(200)))
    under_way = Concurrency(counted, wanted=2)
    assert read_ranges([(path, i, 2) for i in range(100)]) == [bytes([i, i + 1]) for i in range(100)]
    assert 2 <= under_way.most <= 8
    assert read_ranges([]) == []


def test_several_file_systems_in_one_call():
    fsspec.filesystem("memory").pipe_file("/run/b", b"abc")
    a, b = put("counted://run/a", b"123"), as_path("memory://run/b")
    assert read_ranges([(a, 0, 1), (b, 0, 2), (a, 1, 2)]) == [b"1", b"ab", b"23"]
    fsspec.filesystem("memory").rm("/run/b")


def test_of_several_failures_the_first_is_named(counted):
    a = put("counted://run/a", b"12345")
    missing = as_path("counted://run/b")
    with pytest.raises(CheckpointError, match=r"run/a: ends at byte 5\. The file is truncated\."):
        read_ranges([(a, 0, 5), (a, 2, 4), (missing, 0, 1)])
    with pytest.raises(MissingFileError, match=r"run/b: no such file\. The checkpoint is incomplete\."):
        read_ranges([(missing, 0, 1), (a, 2, 4)])


def test_a_server_that_ignores_ranges_is_refused(counted):
    path = put("counted://run/a", b"12345")
    counted.answer = lambda path, start, data: b"12345"
    with pytest.raises(CheckpointError, match=r"5 bytes came for 2\. Its server does not serve ranges"):
        read_ranges([(path, 1, 2)])


# --- headers --------------------------------------------------------------------------------------------------------


LARGE = (Param("w", (700, 1000)), Param("v", (300, 1000)), Param("b", (1000,)))


@pytest.mark.parametrize("format", ["elastic", "rigid"])
def test_opening_a_checkpoint_takes_few_requests_and_no_payload(counted, tmp_path, format):
    """Files of several MB: a listing, the record, and per file its ends and the places where storages begin."""
    truth = write_checkpoint(
        tmp_path / "t", world_size=2, groups=[LARGE], format=format, sub_group_size=200_000, record=True
    )
    upload(tmp_path / "t", "counted://run/t")
    under_way = Concurrency(counted, wanted=3)
    checkpoint = open_checkpoint("counted://run/t")
    assert [call for call in counted.calls if call[0] == "ls"] == [("ls", "/run/t")]
    for rank in range(2):
        before = len(counted.ranges)
        shard = checkpoint.shard(rank)
        file = read_torch_file(tmp_path / "t" / shard.path.name)
        num_storages = len([*file._records.storages()])
        assert shard.size > 4 << 20
        shard_ranges = [r for r in counted.ranges[before:] if r[0].endswith(shard.path.name)]
        assert len(shard_ranges) <= 4 + num_storages
        assert shard.header_bytes == sum(end - start for _, start, end in shard_ranges)
        assert shard.header_bytes <= (128 << 10) + (16 << 10) * (num_storages + 4) < shard.size // 4
        checkpoint.model_states(rank)
    counted.answer = None
    assert num_storages >= 6 and under_way.most >= 3, "where storages begin is asked one by one"
    assert checkpoint.header_bytes == sum(
        min(end, len(counted.store[path].getbuffer())) - start for path, start, end in counted.ranges
    )
    assert gather(checkpoint) == truth


def test_a_large_header_is_few_requests(counted, tmp_path):
    """A pickle of several MB comes in one piece."""
    import torch

    torch.save({"names": [f"parameter number {i}" for i in range(200_000)], "t": torch.arange(3)}, tmp_path / "f.pt")
    path = put("counted://run/f.pt", (tmp_path / "f.pt").read_bytes())
    file = read_torch_file(path)
    assert file.size > 3 << 20 and len(counted.ranges) <= 5
    assert file.read(file.root["t"]).view("<i8").tolist() == [0, 1, 2] and len(counted.ranges) <= 5
    assert file.header_bytes <= file.size


def test_errors_of_remote_files_are_those_of_local_ones(tmp_path):
    write_checkpoint(tmp_path / "t", world_size=1)
    whole = next((tmp_path / "t").glob("*optim*")).read_bytes()
    (tmp_path / "d").mkdir()
    for data in (
        b"",
        b"PK",
        b"\x80\x02xx",
        b"junk" * 100,
        whole[:-30],
        whole[:2000],
        whole.replace(b"PK\3\4", b"PK\3\5"),
    ):
        (tmp_path / "f").write_bytes(data)
        said = []
        for path in (tmp_path / "f", put("counted://run/f", data)):
            with pytest.raises(CheckpointError) as caught:
                read_torch_file(path)
            said.append(str(caught.value).replace(str(path), "F"))
        assert said[0] == said[1]
    with pytest.raises(MissingFileError, match=r"^counted://run/g: no such file\. The checkpoint is incomplete\.$"):
        read_torch_file("counted://run/g")


def test_a_file_that_shrinks_while_it_is_read_is_truncated(counted, tmp_path):
    write_checkpoint(tmp_path / "t", world_size=1)
    whole = next((tmp_path / "t").glob("*optim*")).read_bytes()
    path = put("counted://run/f", whole)

    def shrink(name, start, data):
        put("counted://run/f", whole[: start + len(data) - 1])
        return data[:-1]

    counted.answer = shrink
    with pytest.raises(CheckpointError, match=r"counted://run/f: ends at byte \d+\. The file is truncated\."):
        read_torch_file(path)


def test_what_does_not_answer_fails_after_a_while(monkeypatch):
    import asyncio

    from fsspec.asyn import AsyncFileSystem

    class Silent(AsyncFileSystem):
        protocol = "silent"

        async def _cat_file(self, path, start=None, end=None, **kwargs):
            await asyncio.sleep(60)

        async def _ls(self, path, detail=True, **kwargs):
            await asyncio.sleep(60)

    fsspec.register_implementation("silent", Silent, clobber=True)
    monkeypatch.setattr(retries, "TIME_LIMIT_S", 1.0)
    path, begin = as_path("silent://run/a"), time.monotonic()
    with pytest.raises(UnreadableError, match="silent://run/a: reading at byte 7 failed: no answer in 1 s"):
        read_ranges([(path, 7, 1), (path, 8, 1)])
    with pytest.raises(UnreadableError, match="cannot be listed: no answer in 1 s"):
        file_sizes(path)
    assert time.monotonic() - begin < 20


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    size=st.integers(0, 300_000),
    asked=st.lists(st.tuples(st.integers(0, 320_000), st.integers(0, 100_000), st.booleans()), max_size=12),
)
def test_blocks_are_the_bytes_of_the_file_and_come_once(size, asked):
    forget()
    data = os.urandom(size)
    path = put("counted://run/f", data)
    file = BlockFile(path)
    for offset, nbytes, ahead in asked:
        if ahead:
            file.prefetch([(offset, nbytes), (offset // 2, 10)])
        assert file.read(offset, nbytes) == data[offset : offset + nbytes]
    covered = sorted((start, end) for _, start, end in CountedFileSystem.ranges)
    assert all(first[1] <= second[0] for first, second in pairwise(covered)), "read twice"
    assert file.bytes_read == sum(end - start for start, end in covered) <= size
    assert file.size == size


def test_blocks_that_are_kept_are_bounded_and_neighbours_are_one_request(counted):
    path = put("counted://run/f", bytes(64 << 20))
    file = BlockFile(path)
    assert len(counted.ranges) == 2 and file.bytes_read == 128 << 10
    assert len(file.read(0, 40 << 20)) == 40 << 20
    assert len(counted.ranges) == 2 + 5 and file.bytes_read == (40 << 20) + (64 << 10)
    assert sum(map(len, file._blocks.values())) <= 4 << 20
    forget()
    scattered = [(i * 100_000, 30) for i in range(file.capacity)]
    file.prefetch(scattered)
    prefetched = len(counted.ranges)
    for offset, nbytes in scattered:
        file.read(offset, nbytes)
    assert len(counted.ranges) == prefetched <= 2 * file.capacity
