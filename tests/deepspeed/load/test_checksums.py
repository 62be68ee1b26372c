"""Files without digests: what all ranks read of them together is compared with the CRC-32 that torch wrote."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from saved_files import flip
from saves import Saver, check_resumed, save_once
from training import Job, Outcome, build_engine, raised, resume, train_step

import zeroelastic
from zeroelastic.checkpoint import read_ranges
from zeroelastic.deepspeed.patching import patched
from zeroelastic.testing import RankPool
from zeroelastic.torch_file.zip_check import ZipRecord, read_zip_records

STOCK = {
    "stage 3": Job(elastic=False, installed=False),
    "stage 2": Job(stage=2, elastic=False, installed=False),
    "stage 1, fp32": Job(stage=1, precision="fp32", elastic=False, installed=False),
}


@pytest.fixture(scope="module")
def saved(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Saver:
    return save_once(rank_pool, tmp_path_factory)


def note_of(outcome: Outcome) -> str:
    (note,) = (note for note in outcome.report.notes if "commit record" in note)
    return note


def payload_records(tag_dir: Path, ending: str) -> Iterator[tuple[Path, ZipRecord]]:
    """The records of storages of at least 64 bytes in the files of this kind."""
    for path in sorted(tag_dir.glob(f"*{ending}")):
        for record in read_zip_records(path, path.stat().st_size):
            if "/data/" in record.name and record.nbytes >= 64:
                yield path, record


def attempt_damaged(job: Job, places: list[tuple[str, int]], directory: str) -> list[tuple[str, str]]:
    """The error of a load for each byte of a file that is flipped, one at a time."""
    engine = build_engine(job)
    found = []
    for path, offset in places:
        torch.distributed.barrier()
        if torch.distributed.get_rank() == 0:
            flip(Path(path), offset)
        torch.distributed.barrier()
        found.append(raised(lambda: engine.load_checkpoint(directory)))
        torch.distributed.barrier()
        if torch.distributed.get_rank() == 0:
            flip(Path(path), offset)
    torch.distributed.barrier()
    assert engine.load_checkpoint(directory)[0] is not None
    return found


@pytest.mark.parametrize("name", STOCK)
def test_every_record_of_a_stock_save_is_compared(rank_pool: RankPool, saved: Saver, tmp_path: Path, name: str) -> None:
    """At another size, where several ranks read parts of a record, and no rank loads its padding."""
    job = STOCK[name]
    checkpoint = saved(job, 4)
    mine = job.other(installed=True)
    outcomes = rank_pool.run(resume, 3, mine, checkpoint.directory)
    check_resumed(checkpoint, outcomes, job)
    assert {note_of(outcome) for outcome in outcomes} == {note_of(outcomes[0])}
    assert "what was read has the CRC-32 that its files state (" in note_of(outcomes[0])
    shutil.copytree(checkpoint.directory, tmp_path / "copy")
    tag_dir = tmp_path / "copy" / checkpoint.tag_dir.name
    records = [*payload_records(tag_dir, "optim_states.pt")]
    assert len(records) >= 20
    places = [(str(path), record.offset + record.nbytes // 2 + 1) for path, record in records]
    found = rank_pool.run(attempt_damaged, 3, mine, places, str(tmp_path / "copy"))
    for number, (path, record) in enumerate(records):
        (kind, text), *others = [each[number] for each in found]
        assert others == [(kind, text)] * 2 and kind == "DigestMismatchError"
        bounds = f"bytes {record.offset} to {record.offset + record.nbytes}"
        assert text.startswith(f"{path}: record {record.name.partition('/')[2]}, {bounds}, has CRC-32 ")
        assert text.count(" has CRC-32 ") == 1 and f"should have {record.crc32:08x}. The file is damaged." in text


def load_each(jobs: list[Job], directory: str, **load: Any) -> list[str]:
    """The note on checksums of the load of each job."""
    notes = []
    for job in jobs:
        engine = build_engine(job)
        engine.load_checkpoint(directory, **load)
        notes.append("; ".join(note for note in engine.zeroelastic_report.notes if "commit record" in note))
    return notes


def test_any_engine_and_level_that_reads_all_compares(rank_pool: RankPool, saved: Saver) -> None:
    job = STOCK["stage 3"]
    checkpoint = saved(job, 4)
    levels: list[dict[str, Any]] = [
        {"verify": verify, "io_engine": engine} for verify in ("read", "full") for engine in ("auto", "numpy", "torch")
    ]
    jobs = [job.other(installed=True, options=options) for options in (*levels, {"verify": "quick"})]
    *compared, quick = rank_pool.run(load_each, 3, jobs, checkpoint.directory)[0]
    assert len(set(compared)) == 1 and "has the CRC-32" in compared[0]
    assert "CRC-32" not in quick
    weights = rank_pool.run(load_each, 3, jobs[:1], checkpoint.directory, load_optimizer_states=False)[0][0]
    assert "has the CRC-32" in weights and weights != compared[0]


def test_a_flipped_bit_is_found_where_a_part_of_the_parameters_is_loaded(
    rank_pool: RankPool, saved: Saver, tmp_path: Path
) -> None:
    """What the run trains no more is read too, where it is little; else the report says that it was not compared."""
    job = replace(STOCK["stage 3"], frozen=False, sub_group_size=10**6)
    checkpoint = saved(job, 2)
    other = job.other(installed=True, frozen=True, options={"verify": True, "on_mismatch": "initialize"})
    (note,) = rank_pool.run(load_each, 3, [other], checkpoint.directory)[0]
    assert "has the CRC-32" in note and "in part" not in note
    shutil.copytree(checkpoint.directory, tmp_path / "copy")
    path, record = next(payload_records(tmp_path / "copy" / checkpoint.tag_dir.name, "optim_states.pt"))
    flip(path, record.offset + 4)
    for kind, text in rank_pool.run(attempt_load, 3, other, str(tmp_path / "copy")):
        assert kind == "DigestMismatchError" and text.startswith(f"{path}: record ")


def test_the_report_says_what_checks_a_record_that_was_read_in_part(rank_pool: RankPool, saved: Saver) -> None:
    job = replace(STOCK["stage 3"], frozen=False, sub_group_size=10**6)
    checkpoint = saved(job, 2)
    other = job.other(installed=True, frozen=True, options={"verify": True, "on_mismatch": "initialize"})
    (note,) = rank_pool.run(load_without_gaps, 3, other, checkpoint.directory)[0]
    assert f" records read in part; `zeroelastic verify {checkpoint.tag_dir}` checks all of them" in note
    assert "NOT CHECKED: " in note and zeroelastic.verify(checkpoint.tag_dir).valid


def load_without_gaps(job: Job, directory: str) -> list[str]:
    """The note of a load that reads nothing beside what it loads."""
    with patched(read_ranges, _FREE_GAPS=0, _GAPS_SHARE=1 << 62):
        return load_each([job], directory)


def attempt_load(job: Job, directory: str) -> tuple[str, str]:
    engine = build_engine(job)
    return raised(lambda: engine.load_checkpoint(directory))


def save_without_checksums(job: Job, directory: str) -> None:
    engine = build_engine(job)
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        engine.save_checkpoint(directory, tag="plain")
    finally:
        torch.serialization.set_crc32_options(before)


def test_files_that_state_no_checksums_are_loaded_and_the_report_says_so(rank_pool: RankPool, tmp_path: Path) -> None:
    """``torch.serialization.set_crc32_options(False)`` leaves 0 in place of every checksum."""
    job = STOCK["stage 3"]
    rank_pool.run(save_without_checksums, 2, job, str(tmp_path))
    (note,) = rank_pool.run(load_each, 3, [job.other(installed=True)], str(tmp_path))[0]
    assert "NOT CHECKED: " in note and "of files that state no CRC-32" in note
    report = zeroelastic.verify(tmp_path)
    assert report.valid and any("state no CRC-32" in text for text in report.unchecked)


def resume_or_go_back(job: Job, directory: str) -> tuple[str, tuple[str, ...]]:
    engine = build_engine(job)
    path, _ = engine.load_checkpoint(directory)
    return str(path), engine.zeroelastic_report.notes


def save_twice(job: Job, directory: str) -> None:
    engine = build_engine(job)
    for number in range(2):
        train_step(engine, number)
        engine.save_checkpoint(directory)


def test_a_fallback_goes_past_a_damaged_stock_save(rank_pool: RankPool, tmp_path: Path) -> None:
    job = STOCK["stage 2"]
    rank_pool.run(save_twice, 2, job, str(tmp_path))
    path, record = next(payload_records(tmp_path / "global_step2", "optim_states.pt"))
    flip(path, record.offset)
    mine = job.other(installed=True, options={"verify": True, "fallback": True})
    for loaded, notes in rank_pool.run(resume_or_go_back, 3, mine, str(tmp_path)):
        assert "global_step1" in loaded and any("FELL BACK" in note for note in notes)
