"""Verification: sound checkpoints raise no alarm; whatever is damaged is found, and named where it is."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import places
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from programs import Done, run_command
from sample import write_sample
from saved_files import flip
from synthetic import believe_sizes, edit, edit_optim, model_name, optim_name, sealed, write_checkpoint

import zeroelastic
from zeroelastic.checkpoint.checker import check_headers
from zeroelastic.checkpoint.commit_record import RECORD_NAME, RECORD_VERSION
from zeroelastic.checkpoint.open import open_checkpoint
from zeroelastic.checkpoint.tag_headers import Problem
from zeroelastic.errors import CheckpointError
from zeroelastic.io.storage import Blocks
from zeroelastic.runs.verdicts import check_quickly
from zeroelastic.torch_file import zip_check
from zeroelastic.torch_file.zip_check import ZipRecord, read_zip_records
from zeroelastic.verbs.verify.findings import VerifyReport, full_report
from zeroelastic.verbs.verify.payload_scan import file_rows, scan_ranks
from zeroelastic.verbs.verify.verify import verify_checkpoint

GOLDEN = sorted(places.GOLDEN.glob("*/global_step*"))
KINDS = ("elastic", "rigid", "rigid without record")
RANKS = 3
SEEDS = range(4)
MANY = [0, *(pytest.param(seed, marks=pytest.mark.extended) for seed in SEEDS[1:])]
"""Seeds of tests that damage files twenty times."""


@pytest.fixture(scope="session")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("samples")
    for kind in KINDS:
        format, _, rest = kind.partition(" ")
        for step in (2, 4):
            write_sample(
                root / kind, world_size=RANKS, steps=[step], hidden=26, layers=1, format=format, record=not rest
            )
    return root


@pytest.fixture
def kind() -> str:
    """Which sample a test works on, where it is not given several."""
    return "elastic"


@pytest.fixture
def tag_dir(samples: Path, tmp_path: Path, kind: str) -> Path:
    """A copy of the sample of the kind that the test is given."""
    return copy(samples, tmp_path, kind)


def copy(samples: Path, tmp_path: Path, kind: str, step: int = 4) -> Path:
    target = tmp_path / kind / f"global_step{step}"
    shutil.copytree(samples / kind / f"global_step{step}", target)
    return target


def optim(tag_dir: Path, rank: int) -> Path:
    return tag_dir / optim_name(rank)


def model(tag_dir: Path, rank: int) -> Path:
    return tag_dir / model_name(rank)


def records(path: Path) -> dict[str, ZipRecord]:
    """The records of a file by name without the archive's folder."""
    return {record.name.partition("/")[2]: record for record in read_zip_records(path, path.stat().st_size)}


def files_of(report: VerifyReport) -> set[str]:
    return {problem.file for problem in report.problems}


def only(report: VerifyReport) -> Problem:
    assert len(report.problems) == 1, report.problems
    return report.problems[0]


# --- no false alarm ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.parent.name)
def test_what_deepspeed_saved_is_valid(path: Path) -> None:
    report = verify_checkpoint(path)
    assert report.valid and verify_checkpoint(path, quick=True).valid
    assert report.bytes_read == sum(file.stat().st_size for file in path.glob("*.pt"))
    num_models = len(list(path.glob("*model_states.pt")))
    assert report.num_files == report.world_size + num_models
    expected = json.loads((path.parent / "expected.json").read_text())
    root = report.content_root
    assert root is not None and root == expected.get("content_root", root)
    if report.recorded_root is None:
        assert "no commit record" in report.unchecked[0]
    else:
        assert report.recorded_root == root and report.unchecked == ()


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    world_size=st.integers(1, 7),
    format=st.sampled_from(["elastic", "rigid"]),
    record=st.booleans(),
    sub_group_size=st.sampled_from([1, 7, 10, None]),
    alias=st.booleans(),
    frozen=st.booleans(),
    states=st.sampled_from([{}, {"m": torch.float32}, {"a": torch.bfloat16, "b": torch.uint8, "c": torch.float64}]),
)
def test_no_sound_checkpoint_raises_an_alarm(
    tmp_path_factory, world_size, format, record, sub_group_size, alias, frozen, states
):
    tag_dir = tmp_path_factory.mktemp("tag")
    options = {} if frozen else {"frozen": None}
    record = record or format == "elastic"
    truth = write_checkpoint(
        tag_dir, world_size=world_size, format=format, record=record, sub_group_size=sub_group_size, alias=alias,
        states=states, **options,
    )  # fmt: skip
    report = verify_checkpoint(tag_dir)
    assert report.valid, report.problems
    assert report.num_tensors == sum(len(tensors) for tensors in truth.values())
    assert report.content_root is not None and report.recorded_root in (None, report.content_root)


def test_progress_adds_up_to_every_byte_of_every_file(samples: Path) -> None:
    path = samples / "elastic" / "global_step4"
    done: list[int] = []
    report = verify_checkpoint(path, progress=done.append)
    assert sum(done) == report.bytes_read == check_headers(path).nbytes and min(done) >= 0


def test_a_missing_file_does_not_read_as_damage_of_the_others(tag_dir: Path) -> None:
    """Every tensor that is there in full equals the recorded one; the others are named as not checked."""
    total = verify_checkpoint(tag_dir).num_tensors
    optim(tag_dir, 1).unlink()
    done = run_command("verify", tag_dir)
    found = re.search(r"digests of (\d+) of (\d+) tensors? that could be read in full equal", done.stdout)
    left = re.search(r"not checked, because parts are missing or unreadable: the digests of (\d+) tensors", done.stdout)
    assert done.returncode == 3 and found is not None and left is not None
    assert found[1] == found[2] and int(found[2]) + int(left[1]) == total


def test_what_was_not_checked_is_said_in_the_same_words(tag_dir: Path) -> None:
    quick = run_command("verify", tag_dir, "--quick").stdout
    assert "note  not checked, because of --quick: headers and payload\n" in quick
    (tag_dir.parent / "latest").write_text("nowhere")
    assert "note  not checked: anything else\n" in run_command("verify", tag_dir.parent).stdout


@pytest.mark.parametrize("kind", ["elastic", "rigid without record"])
def test_files_left_by_more_ranks_are_no_fault_and_are_named(tag_dir: Path, kind: str) -> None:
    shutil.copy(optim(tag_dir, 0), optim(tag_dir, RANKS))
    report = verify_checkpoint(tag_dir)
    assert report.valid and any(optim_name(RANKS) in clause for clause in report.unchecked)


def test_tensors_that_share_their_bytes_are_digested_all_the_same(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, world_size=1, frozen=None, sub_group_size=None, alias=False)

    def share(state: dict) -> None:
        state["base_optimizer_state"][0]["exp_avg_sq"][0] = state["base_optimizer_state"][0]["exp_avg"][0]

    before = verify_checkpoint(tmp_path)
    edit_optim(tmp_path / optim_name(0), share)
    report = verify_checkpoint(tmp_path)
    assert files_of(report) == {RECORD_NAME} and report.content_root not in (None, before.content_root)


# --- one flipped bit --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_bit_of_a_tensor_is_found_where_it_is(tag_dir: Path, kind: str, seed: int) -> None:
    rng = random.Random(seed)
    rank = rng.randrange(RANKS)
    headers = check_headers(tag_dir)
    path = rng.choice(headers.files(rank))
    rows = file_rows(headers, rank, path)
    row = rng.randrange(len(rows.offset))
    tensor = headers.tensors[int(rows.tensor[row])]
    offset = int(rows.offset[row]) + rng.randrange(int(rows.nbytes[row]))
    flip(path, offset, 1 << rng.randrange(8))
    problem = only(verify_checkpoint(tag_dir))
    assert problem.file == path.name and problem.key == tensor.key
    assert problem.offset is not None and problem.bytes is not None
    assert problem.offset <= offset < problem.offset + problem.bytes
    assert path.name in problem.sentence
    if kind != "rigid without record":  # where nothing but the checksum of a whole flat buffer tells
        assert (problem.param, problem.offset, problem.bytes) == (
            tensor.param.name, int(rows.offset[row]), int(rows.nbytes[row]),
        )  # fmt: skip
    else:
        assert problem.param in (None, tensor.param.name) and f"{tensor.key} of " in problem.sentence


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", ["elastic", "rigid"])
def test_a_flipped_bit_of_padding_is_found(tag_dir: Path, kind: str, seed: int) -> None:
    rng = random.Random(seed)
    rank = RANKS - 1
    path = optim(tag_dir, rank)
    headers = check_headers(tag_dir)
    rows = file_rows(headers, rank, path)
    inside = [r for name, r in records(path).items() if name.startswith("data/") and r.nbytes > 64]
    covered = np.zeros(path.stat().st_size, dtype=bool)
    for offset, nbytes in zip(rows.offset.tolist(), rows.nbytes.tolist(), strict=True):
        covered[offset : offset + nbytes] = True
    gaps = [
        offset
        for record in inside
        if covered[record.offset : record.offset + record.nbytes].any()
        for offset in range(record.offset, record.offset + record.nbytes)
        if not covered[offset]
    ]
    assert gaps
    flip(path, rng.choice(gaps), 1 << rng.randrange(8))
    problem = only(verify_checkpoint(tag_dir))
    assert problem.file == path.name and problem.param is None and "padding is damaged" in problem.sentence


@pytest.mark.parametrize("kind", ["elastic", "rigid without record"])
@pytest.mark.parametrize("which", [optim, model])
@pytest.mark.parametrize("name", ["data.pkl", "version", "byteorder", ".data/serialization_id", ".format_version"])
def test_a_flipped_bit_of_what_is_no_tensor_is_found(
    tag_dir: Path, name: str, which: Callable[[Path, int], Path]
) -> None:
    path = which(tag_dir, 1)
    if name == ".format_version" and name not in records(path):
        pytest.skip("this torch does not write it")
    record = records(path)[name]
    flip(path, record.offset + record.nbytes // 2, 2)
    report = verify_checkpoint(tag_dir)
    assert files_of(report) == {path.name}
    assert any((p.offset, p.bytes) == (record.offset, record.nbytes) for p in report.problems)
    assert [p.sentence for p in report.problems if "CRC-32" in p.sentence and name in p.sentence]


@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_bit_of_a_modules_buffer_is_found(tag_dir: Path) -> None:
    path = model(tag_dir, 2)
    record = next(r for name, r in records(path).items() if name.startswith("data/") and r.nbytes == 52)
    flip(path, record.offset + 40)
    problem = only(verify_checkpoint(tag_dir))
    assert problem.file == path.name and "no parameter or optimizer state" in problem.sentence


class Content(Blocks):
    """A file of this content, which may change."""

    has_cache = False

    def __init__(self, data: bytearray) -> None:
        self.data, self.size, self.bytes_read = data, len(data), 0

    def read(self, offset: int, nbytes: int) -> bytes:
        return bytes(self.data[offset : offset + max(0, nbytes)])


@pytest.mark.extended
def test_any_bit_of_an_archive_that_is_not_payload_matters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "small.pt"
    torch.save({"a": torch.arange(5), "b": torch.empty(0), "c": torch.ones(3, dtype=torch.bfloat16)}, path)
    data = path.read_bytes()
    found = read_zip_records(path, len(data))
    assert not found.faults and found.directory.folder == "small"
    payload = {at for record in found for at in range(record.offset, record.offset + record.nbytes)}
    damaged = bytearray(data)
    monkeypatch.setattr(zip_check, "open_blocks", lambda *_, **__: Content(damaged))
    unseen = []
    for at in range(len(data)):
        for bit in range(8) if at not in payload else ():
            damaged[at] ^= 1 << bit
            try:
                if not read_zip_records(path, len(data)).faults:
                    unseen.append((at, bit))
            except CheckpointError:
                pass
            damaged[at] ^= 1 << bit
    assert not unseen


@pytest.mark.parametrize("nbytes", [3 << 20, (4 << 30) - 1, 4 << 30])
def test_archives_with_64_bit_places_are_understood(tmp_path: Path, nbytes: int) -> None:
    path = tmp_path / "large.pt"  # a hole: it takes no space
    with torch.serialization.skip_data():
        torch.save([torch.empty(n, dtype=torch.uint8) for n in (20, nbytes, 12, 0)], path)
    found = read_zip_records(path, path.stat().st_size)
    assert not found.faults
    assert [r.nbytes for r in found if "/data/" in r.name and ".data" not in r.name] == [20, nbytes, 12, 0]


def test_a_damaged_record_does_not_hide_a_damaged_file(tag_dir: Path) -> None:
    text = (tag_dir / RECORD_NAME).read_text()
    (tag_dir / RECORD_NAME).write_text(text.replace(f'"format_version": {RECORD_VERSION}', '"format_version": 0'))
    flip(optim(tag_dir, 1), records(optim(tag_dir, 1))["data/0"].offset)
    report = verify_checkpoint(tag_dir)
    assert files_of(report) == {RECORD_NAME, optim_name(1)}


# --- larger damage ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("which", [optim, model])
@pytest.mark.parametrize("left", [0, 3, 1000, -1])
def test_a_truncated_file_is_named(tag_dir: Path, which: Callable[[Path, int], Path], left: int) -> None:
    path = which(tag_dir, 2)
    data = path.read_bytes()
    path.write_bytes(data[:left])
    assert files_of(verify_checkpoint(tag_dir)) == {path.name}
    if (tag_dir / RECORD_NAME).exists():
        assert f"{len(data)}" in only(verify_checkpoint(tag_dir, quick=True)).sentence


def spoilt(data: bytes, rng: random.Random) -> bytes:
    """Some bytes of a file wrong, gone, or too many."""
    at, length = rng.randrange(len(data)), rng.randrange(1, 300)
    end = min(at + length, len(data))
    return rng.choice(
        [
            lambda: data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :],
            lambda: data[:at] + rng.randbytes(end - at) + data[end:],
            lambda: data[:at] + bytes(end - at) + data[end:],
            lambda: data[:at] + data[end:],
            lambda: data[:at] + rng.randbytes(length) + data[at:],
            lambda: data[:at] + data[end:] + data[at:end],
        ]
    )()


def check_that_damage_is_found(tag_dir: Path, seed: int) -> None:
    """Damage files, one after the other: each is found, and no other is blamed."""
    rng = random.Random(seed)
    for number in range(20):
        path = rng.choice(sorted(tag_dir.glob("*.pt")))
        before = path.read_bytes()
        after = spoilt(before, rng)
        path.write_bytes(after)
        report = verify_checkpoint(tag_dir)
        assert files_of(report) == ({path.name} if after != before else set()), (seed, number, report.problems)
        path.write_bytes(before)


@pytest.mark.parametrize("seed", MANY)
@pytest.mark.parametrize("kind", KINDS)
def test_whatever_happens_to_a_file_is_found_and_no_other_is_blamed(tag_dir: Path, seed: int) -> None:
    check_that_damage_is_found(tag_dir, seed)


@pytest.mark.parametrize("seed", MANY)
@pytest.mark.parametrize("stage", [1, 2])
def test_whatever_happens_to_a_file_of_stages_1_and_2_is_found(tmp_path: Path, stage: int, seed: int) -> None:
    zeroelastic.reshard(
        places.GOLDEN / "stage2_round_robin_aligned_rank3", tmp_path / "made", world_size=3, stage=stage
    )
    (tag_dir,) = (path for path in (tmp_path / "made").iterdir() if path.is_dir())
    assert verify_checkpoint(tag_dir).valid
    check_that_damage_is_found(tag_dir, seed)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("which", [optim, model])
def test_swapped_files_of_two_ranks_are_named(tag_dir: Path, which: Callable[[Path, int], Path]) -> None:
    a, b = which(tag_dir, 0), which(tag_dir, 2)
    a.rename(tag_dir / "x")
    b.rename(a)
    (tag_dir / "x").rename(b)
    assert files_of(verify_checkpoint(tag_dir)) - {""} == {a.name, b.name}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rank", [0, RANKS - 1])
@pytest.mark.parametrize("which", [optim, model])
def test_a_file_of_an_older_save_is_named(
    samples: Path, tag_dir: Path, kind: str, rank: int, which: Callable[[Path, int], Path]
) -> None:
    older = which(samples / kind / "global_step2", rank)
    shutil.copy(older, which(tag_dir, rank))
    report = verify_checkpoint(tag_dir)
    assert files_of(report) == {older.name}, report.problems
    assert not report.valid and report.content_root is None


@pytest.mark.parametrize("kind", ["elastic", "rigid"])
def test_all_files_of_another_save_contradict_the_record(samples: Path, tag_dir: Path, kind: str) -> None:
    for path in (samples / kind / "global_step2").glob("*.pt"):
        shutil.copy(path, tag_dir / path.name)
    report = verify_checkpoint(tag_dir)
    assert not report.valid and files_of(report) >= {model_name(0)}


@pytest.mark.parametrize("quick", [False, True])
def test_an_elastic_save_without_its_record_is_not_committed(tag_dir: Path, quick: bool) -> None:
    (tag_dir / RECORD_NAME).unlink()
    report = verify_checkpoint(tag_dir, quick=quick)
    assert not report.valid and only(report).file == RECORD_NAME
    assert "does not count as complete" in only(report).sentence


def test_an_altered_file_is_named_by_its_own_digests(samples: Path, tmp_path: Path) -> None:
    tag_dir = copy(samples, tmp_path, "elastic")
    (tag_dir / RECORD_NAME).unlink()

    def alter(state: dict) -> None:
        state["fp32_flat_groups"][0].data[5] += 1

    edit_optim(optim(tag_dir, 1), alter)  # written anew: all checksums are right
    report = verify_checkpoint(tag_dir)
    assert files_of(report) == {optim_name(1), RECORD_NAME} and len(report.problems) == 2
    problem = next(problem for problem in report.problems if problem.file == optim_name(1))
    assert "altered" in problem.sentence
    assert problem.param == "model.embed_tokens.weight" and problem.key is None
    assert "exp_avg or exp_avg_sq or fp32 of" in problem.sentence


def test_an_altered_rigid_file_is_found_by_the_record(samples: Path, tmp_path: Path) -> None:
    tag_dir = copy(samples, tmp_path, "rigid")

    def alter(state: dict) -> None:
        state["optimizer_state_dict"]["state"][0]["exp_avg"][5] += 1

    path = optim(tag_dir, 1)
    edit_optim(path, alter)
    believe_sizes(tag_dir)
    problem, other = verify_checkpoint(tag_dir).problems
    assert other.file == path.name and f"is not the one in {RECORD_NAME}" in other.sentence
    assert (problem.param, problem.key) == ("model.embed_tokens.weight", "exp_avg")
    assert path.name in problem.sentence and problem.file == ""


@pytest.mark.parametrize("stage", [1, 2])
def test_an_altered_file_of_stages_1_and_2_is_found_by_the_record(tmp_path: Path, stage: int) -> None:
    """The tensor is one that a later rank has whole, so that no other rank's file can be meant."""
    zeroelastic.reshard(
        places.GOLDEN / "stage2_round_robin_aligned_rank3", tmp_path / "made", world_size=2, stage=stage
    )
    (tag_dir,) = (path for path in (tmp_path / "made").iterdir() if path.is_dir())
    checkpoint = open_checkpoint(tag_dir)
    path, layout = checkpoint.optim_files[1], checkpoint.shard(1).layout
    whole = int(np.flatnonzero(layout.owned(1)[1] == layout.numel)[0])
    group, offset = int(layout.sub_group[whole]), int(layout.buffer_offset(1)[whole])

    def alter(state: dict) -> None:
        state["base_optimizer_state"]["state"][group]["exp_avg"][offset] += 1

    edit_optim(path, alter)
    believe_sizes(tag_dir)
    report = verify_checkpoint(tag_dir)
    assert files_of(report) == {path.name}
    of_tensor = next(problem for problem in report.problems if problem.param)
    assert (of_tensor.param, of_tensor.key) == (layout.params[whole].name, "exp_avg")
    assert path.name in of_tensor.sentence
    assert any(clause.startswith("3 of 3 files of 2 ranks") for clause in report.checked)


def test_frozen_parameters_are_checked_too(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, world_size=2, record=True)
    path = tmp_path / model_name(1)
    edit(path, lambda data: data["frozen_param_fragments"]["embedding"].neg_())
    report = verify_checkpoint(tmp_path)
    assert ("embedding", "frozen") in {(problem.param, problem.key) for problem in report.problems}


def test_all_damage_is_found_not_only_the_first(tag_dir: Path) -> None:
    flip(optim(tag_dir, 0), records(optim(tag_dir, 0))["data.pkl"].offset + 9)
    headers = check_headers(tag_dir)
    rows = file_rows(headers, 1, optim(tag_dir, 1))
    for row in (2, len(rows.offset) - 1):
        flip(optim(tag_dir, 1), int(rows.offset[row]) + 1)
    model(tag_dir, 2).write_bytes(b"")
    model(tag_dir, 0).unlink()
    report = verify_checkpoint(tag_dir)
    assert files_of(report) == {optim_name(0), optim_name(1), model_name(2), model_name(0)}
    named = {(p.param, p.key) for p in report.problems if p.file == optim_name(1)}
    assert named == {(headers.tensors[int(rows.tensor[r])].param.name, headers.tensors[int(rows.tensor[r])].key)
                     for r in (2, len(rows.offset) - 1)}  # fmt: skip


def test_a_file_that_vanishes_in_between_is_a_finding(tag_dir: Path) -> None:
    headers = check_headers(tag_dir)
    optim(tag_dir, 1).unlink()
    report = full_report(headers, scan_ranks(headers))
    assert files_of(report) == {optim_name(1)} and "no such file" in only(report).sentence
    assert report.num_files == 2 * RANKS - 1 and report.content_root is None


@pytest.mark.parametrize("kind", KINDS)
def test_missing_files_are_named(tag_dir: Path) -> None:
    optim(tag_dir, 1).unlink()
    model(tag_dir, 2).unlink()
    for quick in (False, True):
        assert files_of(verify_checkpoint(tag_dir, quick=quick)) == {optim_name(1), model_name(2)}


def test_a_record_of_many_ranks_does_not_fill_the_report(tag_dir: Path) -> None:
    path = tag_dir / RECORD_NAME
    path.write_text(sealed(path.read_text().replace(f'"world_size": {RANKS}', '"world_size": 16000000')))
    report = verify_checkpoint(tag_dir, quick=True)
    assert 0 < len(report.problems) < 300 and "16000000 ranks are missing" in report.problems[-1].sentence


def test_the_record_is_compared_with_what_the_headers_say(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, world_size=2, record=True)
    path = tmp_path / RECORD_NAME
    before = path.read_text()
    for old, new, said in (
        ('"trainable": true', '"trainable": false', "is frozen by the commit record"),
        ('"train_batch_size": 4', '"train_batch_size": 8', "the global batch is 4"),
        ('"global_steps": 3', '"global_steps": 5', "the commit record at step 5"),
        ('"checkpoint_format": "elastic"', '"checkpoint_format": "rigid"', "the format is elastic"),
        ('"save_id": "0', '"save_id": "1', "belongs to save 01234567"),
    ):
        assert old in before
        path.write_text(sealed(before.replace(old, new, 1)))
        assert any(said in problem.sentence for problem in verify_checkpoint(tmp_path).problems), said


# --- the verb ---------------------------------------------------------------------------------------------------------


def cli(*arguments: object, **env: str) -> Done:
    return run_command("verify", *arguments, env=env)


def test_the_verb_shows_a_valid_checkpoint(samples: Path) -> None:
    done = cli(samples / "elastic")
    assert done.returncode == 0 and done.stderr == "" and done.stdout.endswith("Valid.\n")
    assert "digests of" in done.stdout and "the saved one" in done.stdout
    done = cli(samples / "elastic", "--json", "--tag", "global_step2")
    document = json.loads(done.stdout)
    assert done.returncode == 0 and document["ok"] and document["path"].endswith("global_step2")
    sizes = {path.name: path.stat().st_size for path in (samples / "elastic/global_step2").glob("*_states.pt")}
    assert {file["name"]: file["bytes"] for file in document["files"]} == sizes
    assert [file["rank"] for file in document["files"]] == sorted(file["rank"] for file in document["files"])
    assert document["content_root"] == document["recorded_root"]


def test_the_verb_names_the_damage_and_exits_with_3(tag_dir: Path) -> None:
    headers = check_headers(tag_dir)
    rows = file_rows(headers, 1, optim(tag_dir, 1))
    tensor = headers.tensors[int(rows.tensor[3])]
    flip(optim(tag_dir, 1), int(rows.offset[3]))
    done = cli(tag_dir)
    assert done.returncode == 3 and done.stderr == ""
    for said in (optim_name(1), tensor.param.name, tensor.key, str(int(rows.offset[3])), "Invalid: 1 problem in"):
        assert said in done.stdout
    done = cli(tag_dir, "--json")
    document = json.loads(done.stdout)
    assert done.returncode == 3 and not document["ok"]
    assert [document["problems"][0][k] for k in ("file", "param", "key", "offset", "bytes")] == [
        optim_name(1), tensor.param.name, tensor.key, int(rows.offset[3]), int(rows.nbytes[3]),
    ]  # fmt: skip
    assert cli(tag_dir, "--quick").returncode == 0
    with open(optim(tag_dir, 1), "ab") as file:
        file.write(b"x")
    assert cli(tag_dir, "--quick").returncode == 3


@pytest.mark.parametrize("content", [b"global_step5", b"\xff", b""])
def test_a_damaged_latest_is_a_finding(tag_dir: Path, content: bytes) -> None:
    (tag_dir.parent / "latest").write_bytes(content)
    done = cli(tag_dir.parent, "--json")
    assert done.returncode == 3 and done.stderr == ""
    assert "latest" in only_problem(done)["sentence"]
    assert cli(tag_dir.parent, "--tag", "global_step4").returncode == 0


def only_problem(done: subprocess.CompletedProcess[str]) -> dict[str, object]:
    problems = json.loads(done.stdout)["problems"]
    assert len(problems) == 1
    found: dict[str, object] = problems[0]
    return found


def factored(data: dict[str, Any]) -> None:
    """State of an optimizer that factors it: neither of the shape of the weights nor a number."""
    for state in data["optimizer_state_dict"]["state"].values():
        state["exp_avg_sq"] = torch.ones(3, 2)


def test_what_only_deepspeed_reads_is_sound_or_damaged_all_the_same(tmp_path: Path) -> None:
    """Three answers: a checkpoint that is not read here is not an invalid one, and may be damaged."""
    write_checkpoint(tmp_path, world_size=2, format="rigid")
    for rank in range(2):
        edit_optim(tmp_path / optim_name(rank), factored)
    report = verify_checkpoint(tmp_path)
    assert report.valid and report.remedy is None and report.num_files == 4
    assert len(report.unsupported) == 1 and "Block-quantised and factored states" in report.unsupported[0]
    assert check_quickly(tmp_path) == ()
    done = cli(tmp_path)
    assert done.returncode == 0 and " not supported  " in done.stdout
    assert done.stdout.endswith("not supported: only a training job resumes it, as said above.\n")
    flip_a_weight(tmp_path / optim_name(1))
    report = verify_checkpoint(tmp_path)
    assert report.unsupported and {problem.file for problem in report.problems} == {optim_name(1)}


def save_tensor_parallel(tag_dir: Path) -> None:
    """Two tensor parallel ranks of two ranks each."""
    write_checkpoint(tag_dir, world_size=2, format="rigid")
    for rank in range(2):
        edit(tag_dir / model_name(rank), lambda data: data.update(mp_world_size=2))
    for path in list(tag_dir.glob("*_states.pt")):
        torch.save(torch.load(path, weights_only=False), tag_dir / path.name.replace("mp_rank_00", "mp_rank_01"))


def save_stage_0(tag_dir: Path) -> None:
    tag_dir.mkdir(parents=True)
    optimizer = {"state": {0: {"exp_avg": torch.ones(50)}}, "param_groups": [{"params": [0]}]}
    states = {"module": {"w": torch.ones(50)}, "optimizer": optimizer, "global_steps": 3}
    torch.save({**states, "dp_world_size": 2, "mp_world_size": 1}, tag_dir / "mp_rank_00_model_states.pt")


@pytest.mark.parametrize("save", [save_tensor_parallel, save_stage_0])
@pytest.mark.parametrize("quick", [False, True])
def test_tensor_parallelism_and_stage_0_are_sound_or_damaged_all_the_same(
    tmp_path: Path, save: Callable[[Path], None], quick: bool
) -> None:
    tag_dir = tmp_path / "global_step3"
    save(tag_dir)
    report = verify_checkpoint(tag_dir, quick=quick)
    assert report.valid and len(report.unsupported) == 1 and report.world_size == 2
    assert "tensor parallel" in report.unsupported[0] or "stage 0" in report.unsupported[0]
    assert report.num_files == len(report.files) == len(list(tag_dir.iterdir()))
    assert zeroelastic.latest(tmp_path, quick=quick).tag is None, "no commit, and latest does not name it"
    assert zeroelastic.latest(tmp_path, set_to="global_step3").tag.name == "global_step3"
    assert zeroelastic.latest(tmp_path, quick=quick).tag.name == "global_step3"
    assert zeroelastic.ls(tmp_path).tags[0].status == "no record"
    done = cli(tag_dir)
    assert done.returncode == 0 and done.stdout.endswith("only a training job resumes it, as said above.\n")
    path = max(tag_dir.iterdir())
    if not quick:
        flip(path, path.read_bytes().index(torch.ones(3).numpy().tobytes()) if save is save_stage_0 else 2000)
        report = verify_checkpoint(tag_dir)
        assert {problem.file for problem in report.problems} == {path.name} and report.unsupported
        assert cli(tag_dir).returncode == 3


@pytest.mark.parametrize("quick", [False, True])
def test_missing_files_of_tensor_parallel_ranks_and_of_optimizers_are_damage(tmp_path: Path, quick: bool) -> None:
    save_tensor_parallel(tmp_path / "tp")
    gone = "bf16_zero_pp_rank_1_mp_rank_01_optim_states.pt"
    (tmp_path / "tp" / gone).unlink()
    assert files_of(verify_checkpoint(tmp_path / "tp", quick=quick)) == {gone}
    for path in (tmp_path / "tp").glob("*mp_rank_01*"):
        path.unlink()
    report = verify_checkpoint(tmp_path / "tp", quick=quick)
    assert len(report.problems) == 4 and all("mp_rank_01" in problem.file for problem in report.problems)
    save_stage_0(tmp_path / "stage_2")  # as a checkpoint of stage 2 without its optimizer files
    edit(tmp_path / "stage_2" / "mp_rank_00_model_states.pt", lambda data: data.update(optimizer=None))
    report = verify_checkpoint(tmp_path / "stage_2", quick=quick)
    assert report.unsupported == () and len(report.problems) == 2


def test_files_that_no_rank_of_a_zero_run_writes_are_read_or_named(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, world_size=2, format="rigid")
    torch.save({"w": torch.ones(9)}, tmp_path / "layer_00-model_states.pt")  # of a pipeline
    torch.save({"w": torch.ones(9)}, tmp_path / "mine.pt")
    report = verify_checkpoint(tmp_path)
    assert report.valid and report.num_files == 5
    assert any("mine.pt" in note and "layer_00" not in note for note in report.unchecked)
    flip_a_weight(tmp_path / "layer_00-model_states.pt")
    assert {problem.file for problem in verify_checkpoint(tmp_path).problems} == {"layer_00-model_states.pt"}


def flip_a_weight(path: Path) -> None:
    """Flip a bit in the largest record of a file."""
    largest = max(read_zip_records(path, path.stat().st_size), key=lambda record: record.nbytes)
    flip(path, largest.offset + largest.nbytes // 2)
