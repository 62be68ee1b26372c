"""The files of a commit record: their names by pattern, and their rows read by range."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroelastic.checkpoint.commit_record import (
    RECORD_NAME,
    RECORD_VERSION,
    CommitRecord,
    Versions,
    read_record,
    read_record_by_range,
    record_text,
    with_rows_at,
)
from zeroelastic.checkpoint.file_table import ROW_BYTES, FileNames, FileSizes, names_json, names_of_json
from zeroelastic.checkpoint.param_table import param_records
from zeroelastic.core.digest import content_root
from zeroelastic.errors import CheckpointError

RANK_NAMES = st.builds(
    "{}zero_pp_rank_{}_mp_rank_0{}_{}_states.pt".format,
    st.sampled_from(["", "bf16_"]),
    st.one_of(st.integers(0, 6), st.sampled_from(["00", "7x", 10**9])),
    st.integers(0, 1),
    st.sampled_from(["optim", "model"]),
)
NAMES = st.lists(st.one_of(RANK_NAMES, st.sampled_from(["mp_rank_00_model_states.pt", "a*.pt", "*", "latest"])))


def make(num_ranks: int, others: tuple[str, ...] = ()) -> CommitRecord:
    names = [f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(num_ranks)]
    names += [f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in range(num_ranks)]
    names += others
    return CommitRecord(
        format_version=RECORD_VERSION,
        checkpoint_format="elastic",
        save_id="5" * 32,
        tag="global_step3",
        world_size=num_ranks,
        global_steps=3,
        train_batch_size=8,
        versions=Versions(zeroelastic="1", deepspeed="2", torch="3"),
        files={name: 1000 + i for i, name in enumerate(names)},
        directories={name: f"{i:064x}" for i, name in enumerate(names) if name not in others},
        params=param_records((), frozenset()),
        content_root=content_root(()),
    )


def by_range(tag_dir: Path) -> CommitRecord:
    record, _ = read_record_by_range(tag_dir)
    assert record is not None and isinstance(record.files, FileSizes)
    return record


@given(names=NAMES)
def test_names_by_pattern_are_the_names(names: list[str]) -> None:
    found = FileNames.of(names)
    assert sorted(found) == sorted(set(names)) and len(found) == len(set(names))
    assert [found.place(name) for name in found] == list(range(len(found)))
    assert [found.at(place) for place in range(len(found))] == list(found)
    assert all(name in found for name in names) and "more" not in found and found.place("zero_pp_rank_99") is None
    entries = [(entry["name"], entry.get("ranks")) for entry in names_json(found)]
    assert names_of_json(entries) == found == pickle.loads(pickle.dumps(found))  # type: ignore[arg-type]
    assert FileNames.of(names[:-1]) <= found and (found <= FileNames.of(names[:-1])) == (set(names) == set(names[:-1]))


def test_names_of_many_ranks_are_small() -> None:
    record = make(16_384)
    assert len(pickle.dumps(FileNames.of(record.files))) < 400


@pytest.mark.parametrize("num_parts", [1, 2, 3, 9, 40])
def test_every_part_reads_its_rows_and_no_others(tmp_path: Path, num_parts: int) -> None:
    written = make(9, ("other.pt",))
    (tmp_path / RECORD_NAME).write_bytes(record_text(written))
    found: dict[str, tuple[int, str | None]] = {}
    for part in range(num_parts):
        record = by_range(tmp_path)
        assert isinstance(record.files, FileSizes)
        share = record.files.rows.share(part, num_parts)
        assert found.keys().isdisjoint(share)
        found |= share
        assert record.files.rows.bytes_read <= (19 // num_parts + 1) * ROW_BYTES + 6
    assert found == {name: (size, written.directories.get(name)) for name, size in written.files.items()}


def test_a_record_read_by_range_says_the_same(tmp_path: Path) -> None:
    written = make(50, ("other.pt",))
    (tmp_path / RECORD_NAME).write_bytes(record_text(written))
    record, nbytes = read_record_by_range(tmp_path)
    assert record is not None and nbytes < 1500
    sent = pickle.loads(pickle.dumps(with_rows_at(record, None)))
    received = with_rows_at(sent, tmp_path)
    for found in (record, received):
        assert dict(found.files) == written.files and dict(found.directories) == written.directories
        assert found.params == written.params and found.save_id == written.save_id
        assert "more" not in found.files and found.directories.get("other.pt") is None
    one = by_range(tmp_path)
    name = "zero_pp_rank_7_mp_rank_00_model_states.pt"
    assert (one.files[name], one.directories[name]) == (written.files[name], written.directories[name])
    assert isinstance(one.files, FileSizes) and one.files.rows.bytes_read <= 32 * ROW_BYTES
    assert read_record(tmp_path) == written


def test_a_record_of_another_form_is_read_whole(tmp_path: Path) -> None:
    """With spaces that zeroelastic does not write."""
    written = make(3)
    text = record_text(written).decode()
    for other in (text.replace("\n", "\n "), text.replace(' "file_rows"', '  "file_rows"'), f"{text}\n"):
        (tmp_path / RECORD_NAME).write_text(other)
        record, nbytes = read_record_by_range(tmp_path)
        assert record == written and nbytes == len(other)
    (tmp_path / RECORD_NAME).unlink()
    assert read_record_by_range(tmp_path) == (None, 0)


def test_any_changed_byte_of_the_rows_is_noticed_by_one_of_the_readers(tmp_path: Path) -> None:
    """White space around a row counts, too: what JSON forgives is not what was written."""
    text = record_text(make(2))
    begin = text.index(b'"file_rows": [')
    for at in range(begin, len(text)):
        (tmp_path / RECORD_NAME).write_bytes(text[:at] + bytes([text[at] ^ 1]) + text[at + 1 :])
        with pytest.raises(CheckpointError, match="damaged"):
            record, _ = read_record_by_range(tmp_path)
            assert record is not None
            if not isinstance(record.files, FileSizes):
                pytest.fail(f"byte {at} changes nothing")
            for part in range(3):
                record.files.rows.share(part, 3)


@pytest.mark.parametrize("num_bytes", [2, 6, 100, 300])
def test_a_record_that_ends_early_or_goes_on_is_damaged(tmp_path: Path, num_bytes: int) -> None:
    text = record_text(make(2))
    for other in (text[:-num_bytes], text + b"x" * num_bytes):
        (tmp_path / RECORD_NAME).write_bytes(other)
        with pytest.raises(CheckpointError, match="damaged"):
            read_record_by_range(tmp_path)


def test_rows_of_another_record_are_refused(tmp_path: Path) -> None:
    """As where a record is replaced between the reads of two ranks."""
    (tmp_path / RECORD_NAME).write_bytes(record_text(make(2)))
    record = by_range(tmp_path)
    (tmp_path / RECORD_NAME).write_bytes(record_text(make(2).model_copy(update={"save_id": "6" * 32})))
    with pytest.raises(CheckpointError, match=r"file_rows\.0: .* is not the size.* of bf16_zero"):
        _ = record.files["zero_pp_rank_0_mp_rank_00_model_states.pt"]
    (tmp_path / RECORD_NAME).unlink()
    with pytest.raises(CheckpointError, match="was there and is gone"):
        _ = record.files["zero_pp_rank_0_mp_rank_00_model_states.pt"]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([("a", None), ("a", None)], "files.1: 'a' is there twice"),
        ([("zero_pp_rank_*_mp_rank_00_model_states.pt", 2)] * 2, "files.1: .* is there twice"),
        ([("zero_pp_rank_1_mp_rank_00_model_states.pt", 2)], "files.0.ranks: .* is not the pattern"),
        ([("*", 2)], "files.0.ranks: .* is not the pattern"),
        (
            [("zero_pp_rank_*_mp_rank_00_model_states.pt", 2), ("zero_pp_rank_1_mp_rank_00_model_states.pt", None)],
            "files: .* is there twice",
        ),
    ],
)
def test_names_that_overlap_are_refused(entries: list[tuple[str, int | None]], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        names_of_json(entries)
