"""Lean tags: the verbs say what is where, and whatever is damaged in a shared file is found and named, by loads too."""

from __future__ import annotations

import html
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commands import run_command
from lean_tags import BUFFER, JOB, RANKS, build_lean_engine, copied, make_lean, save_lean, shared_file
from saved_files import flip, record_of
from synthetic import believe_sizes, edit
from training import Job

import zeroelastic
from zeroelastic.byte_sizes import format_size
from zeroelastic.checkpoint.checker import check_headers
from zeroelastic.checkpoint.commit_record import RECORD_NAME, record_text
from zeroelastic.checkpoint.shared_files import FROZEN_FOLDER, SharedFile, digest_of, metadata_of, shared_name
from zeroelastic.checkpoint.shared_weights import SHARED_KEY
from zeroelastic.errors import ZeroElasticError
from zeroelastic.report import ResumeReport
from zeroelastic.runs.candidates import list_run
from zeroelastic.testing import RankPool
from zeroelastic.torch_file.safetensors import lay_out, read_head
from zeroelastic.verbs.inspect.inspect import inspect
from zeroelastic.verbs.verify.findings import full_report
from zeroelastic.verbs.verify.payload_scan import combine, scan_ranks
from zeroelastic.verbs.verify.report import VerifyReport
from zeroelastic.verbs.verify.verify import verify

STAGES = (3, 2)
TAG = "global_step3"
FROZEN = {"adapter.weight", "adapter.bias", "frozen_table.weight"}


@pytest.fixture(scope="module")
def runs(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """By stage, a run of two lean tags."""
    roots = {stage: tmp_path_factory.mktemp(f"stage{stage}") for stage in STAGES}
    return {stage: make_lean(rank_pool, root, stage) for stage, root in roots.items()}


@pytest.fixture
def run(runs: dict[int, Path], tmp_path: Path) -> Path:
    """A copy of the run of stage 3."""
    return copied(runs[3], tmp_path / "run")


def model_files(run: Path) -> list[Path]:
    return sorted((run / TAG).glob("*model_states.pt"))


def flip_tensor(name: str) -> Callable[[Path], None]:
    """Flip a bit in the last byte of a tensor of the shared file."""

    def damage(run: Path) -> None:
        place = read_head(shared_file(run)).tensors[name]
        flip(shared_file(run), place.offset + place.nbytes - 1)

    return damage


def truncate(run: Path) -> None:
    os.truncate(shared_file(run), shared_file(run).stat().st_size - 1)


def grow(run: Path) -> None:
    with open(shared_file(run), "ab") as file:
        file.write(b"\0")


def empty(run: Path) -> None:
    shared_file(run).write_bytes(b"")


def put(run: Path, make: Callable[[Path], object]) -> None:
    """Put something else in the place of the shared file."""
    path = shared_file(run)
    path.unlink()
    make(path)


def write_other(path: Path) -> None:
    """A shared file of the same size as any of this run, of a run whose frozen weights are other ones."""
    tensors = [(BUFFER, "float32", (1 << 15,)), *((name, "bfloat16", SHAPES[name]) for name in sorted(FROZEN))]
    digests = {name: 7 for name, *_ in tensors}
    digest = digest_of({name: (dtype, shape, digests[name]) for name, dtype, shape in tensors})
    header, head = lay_out(shared_name(digest), tensors, metadata_of(digests))
    path.write_bytes(header + bytes(head.nbytes - len(header)))


SHAPES = {"adapter.weight": (7, 16), "adapter.bias": (7,), "frozen_table.weight": (60, 16)}


def link_other(path: Path) -> None:
    other = path.parent.parent / "other"
    write_other(other)
    os.link(other, path)


def link_outside(path: Path) -> None:
    outside = path.parent.parent.parent / "outside.safetensors"
    write_other(outside)
    path.symlink_to(outside)


HEADER = {
    "length": lambda run: flip(shared_file(run), 1),
    "a brace": lambda run: flip(shared_file(run), 8),
    "a digest in the header": lambda run: flip(shared_file(run), shared_file(run).read_bytes().index(b"adapter") + 20),
    "a shape": lambda run: flip(shared_file(run), shared_file(run).read_bytes().index(b"[7,16]") + 1),
}
PAYLOAD = {name: flip_tensor(name) for name in (*sorted(FROZEN), BUFFER)}
PLACE: dict[str, Callable[[Path], None]] = {
    "truncated": truncate,
    "longer": grow,
    "empty": empty,
    "removed": lambda run: shared_file(run).unlink(),
    "its folder removed": lambda run: shutil.rmtree(run / FROZEN_FOLDER),
    "a fifo": lambda run: put(run, os.mkfifo),
    "a directory": lambda run: put(run, Path.mkdir),
}
OTHERS: dict[str, Callable[[Path], None]] = {
    "of another run": lambda run: put(run, write_other),
    "a hard link to another": lambda run: put(run, link_other),
    "a link out of the run": lambda run: put(run, link_outside),
}


def only_blames(report: VerifyReport, file: SharedFile) -> None:
    assert not report.valid
    assert {problem.file for problem in report.problems} == {file.path}
    assert all(file.name in problem.sentence for problem in report.problems)


def recorded_files(run: Path) -> tuple[SharedFile, ...]:
    return record_of(run / TAG).shared


def recorded_shared(run: Path) -> SharedFile:
    (file,) = recorded_files(run)
    return file


@pytest.mark.parametrize("with_record", [True, False], ids=["record", "no record"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_lean_tag_is_valid_and_its_shared_file_is_one_of_the_files(
    runs: dict[int, Path], tmp_path: Path, stage: int, with_record: bool
) -> None:
    run = copied(runs[stage], tmp_path / "run")
    name = recorded_shared(run).path
    if not with_record:
        (run / TAG / RECORD_NAME).unlink()
    report, full = verify(run), verify(runs[stage].parent / "full")
    assert report.valid, report.problems
    assert report.content_root == full.content_root
    (shared,) = (file for file in report.files if file.kind == "shared")
    assert (shared.name, shared.rank, shared.bytes) == (name, None, shared_file(run).stat().st_size)
    assert report.num_files == full.num_files + 1 and report.num_tensors == full.num_tensors + 1
    payload = sum(place.nbytes for place in read_head(shared_file(run)).tensors.values())
    assert report.bytes_read == payload + sum(file.stat().st_size for file in (run / TAG).glob("*.pt"))
    assert any("shared files: 1 of 1" in clause and "4 of 4 tensors" in clause for clause in report.checked)
    quick = verify(run, quick=True)
    assert quick.valid and any("shared files: 1 of 1" in clause for clause in quick.checked)
    assert inspect(run, all_ranks=True).problems == []


@pytest.mark.parametrize("stage", STAGES)
def test_inspect_says_what_is_where_and_what_it_saved(runs: dict[int, Path], tmp_path: Path, stage: int) -> None:
    page = tmp_path / "page.html"
    done = run_command("inspect", runs[stage], "--html", page)
    assert done.returncode == 0
    found, full = inspect(runs[stage]), inspect(runs[stage].parent / "full")
    assert full.lean is None and found.lean is not None
    assert (found.buffers, found.totals.state_bytes) == (full.buffers, full.totals.state_bytes)
    (file,) = found.lean.files
    assert (file.state, file.num_tensors, file.bytes) == ("whole", 4, shared_file(runs[stage]).stat().st_size)
    assert found.lean.tag_bytes == found.totals.disk_bytes
    assert found.lean.weight_bytes == (0 if stage == 3 else 2 * found.totals.trained_numel)
    # Beside the tensors, both tags have tables, which the lean one has more of.
    assert abs(full.totals.disk_bytes - found.totals.disk_bytes - found.lean.saved_bytes) < 6000
    for text in (done.stdout, html.unescape(page.read_text())):
        assert file.path in text.replace("<wbr>", "") and format_size(found.lean.saved_bytes) in text
    assert f"in shared files: {format_size(file.tensor_bytes)}" in page.read_text()


@pytest.mark.parametrize(("what", "state"), [("removed", "missing"), ("truncated", "damaged"), ("a shape", "damaged")])
def test_inspect_says_that_a_shared_file_is_not_there_or_not_whole(run: Path, what: str, state: str) -> None:
    {**HEADER, **PLACE}[what](run)
    lean = inspect(run).lean
    assert lean is not None and [file.state for file in lean.files] == [state]


@pytest.mark.parametrize("what", [*HEADER, *PLACE, *OTHERS])
def test_damage_outside_of_the_payload_is_found_by_inspect_and_verify(run: Path, what: str) -> None:
    file = recorded_shared(run)
    {**HEADER, **PLACE, **OTHERS}[what](run)
    only_blames(verify(run), file)
    (problem,) = inspect(run).problems
    assert file.name in problem
    if what in PLACE:
        only_blames(verify(run, quick=True), file)


@pytest.mark.parametrize("with_record", [True, False], ids=["record", "no record"])
@pytest.mark.parametrize("name", PAYLOAD)
def test_a_flipped_bit_of_a_shared_tensor_is_found_where_it_is(run: Path, name: str, with_record: bool) -> None:
    file, place = recorded_shared(run), read_head(shared_file(run)).tensors[name]
    if not with_record:
        (run / TAG / RECORD_NAME).unlink()
    PAYLOAD[name](run)
    report = verify(run)
    only_blames(report, file)
    (problem,) = report.problems
    key = "buffer" if name == BUFFER else "frozen"
    assert (problem.param, problem.key, problem.offset, problem.bytes) == (name, key, place.offset, place.nbytes)
    assert inspect(run).problems == []  # no payload is read


def forget_buffer(run: Path) -> None:
    """Let the tag take the buffer no more."""

    def forget(data: dict[str, Any]) -> None:
        del data[SHARED_KEY]["buffers"][BUFFER]

    (run / TAG / RECORD_NAME).unlink()
    for path in model_files(run):
        edit(path, forget)


def test_tensors_that_the_tag_does_not_take_are_not_read(run: Path) -> None:
    forget_buffer(run)
    PAYLOAD[BUFFER](run)
    report = verify(run)
    assert report.valid and report.bytes_read < (1 << 17)


def retell(**changes: Any) -> Callable[[dict[str, Any]], object]:
    """Let the row of a parameter in a model states file say something else."""

    def change(data: dict[str, Any]) -> None:
        file, offset, dtype, shape, digest = data[SHARED_KEY]["params"]["adapter.weight"]
        row = {"file": file, "offset": offset, "dtype": dtype, "shape": shape, "digest": digest, **changes}
        data[SHARED_KEY]["params"]["adapter.weight"] = tuple(row.values())

    return change


@pytest.mark.parametrize(
    "change", [{"offset": 131100}, {"dtype": "float16"}, {"shape": (14, 8)}, {"digest": "0123456789abcdef"}], ids=str
)
def test_a_table_that_contradicts_the_header_is_noticed(run: Path, change: dict[str, Any]) -> None:
    (run / TAG / RECORD_NAME).unlink()
    for path in model_files(run):
        edit(path, retell(**change))
    for problems in (inspect(run).problems, [problem.sentence for problem in verify(run).problems]):
        assert any("its header contradicts the tag" in text and "adapter.weight" in text for text in problems), problems


def test_ranks_that_say_different_tables_are_named(run: Path) -> None:
    (run / TAG / RECORD_NAME).unlink()
    edit(model_files(run)[1], retell(digest="0123456789abcdef"))
    for problems in (inspect(run, all_ranks=True).problems, [one.sentence for one in verify(run).problems]):
        assert any("differ in where shared weights are" in text for text in problems), problems


def test_a_record_that_lists_other_shared_files_or_digests_is_noticed(run: Path) -> None:
    for path in model_files(run):
        edit(path, retell(digest="0123456789abcdef"))
        edit(path, lambda data: data[SHARED_KEY].update(files=[*data[SHARED_KEY]["files"], OTHER]))
    believe_sizes(run / TAG)
    for problems in (inspect(run).problems, [one.sentence for one in verify(run).problems]):
        assert any("refers to other shared files than" in text for text in problems), problems
        assert any("says that the digest of adapter.weight is 0123456789abcdef" in text for text in problems), problems


OTHER = (f"../{FROZEN_FOLDER}/frozen-{'0' * 32}.safetensors", 8, "0" * 64)


def test_a_table_without_a_parameter_of_the_record_is_noticed(run: Path) -> None:
    for path in model_files(run):
        edit(path, lambda data: data[SHARED_KEY]["params"].pop("adapter.weight"))
    believe_sizes(run / TAG)
    for problems in (inspect(run).problems, [one.sentence for one in verify(run).problems]):
        assert any("they do not hold adapter.weight" in text for text in problems), problems


def test_weights_of_a_base_model_are_checked_where_they_are(
    rank_pool: RankPool, runs: dict[int, Path], tmp_path: Path
) -> None:
    """The base model calls its tensors otherwise, and its file states no digests."""
    base = tmp_path / "base" / "model.safetensors"
    base.parent.mkdir()
    head = read_head(shared_file(runs[3]))
    data = shared_file(runs[3]).read_bytes()
    begin = min(place.offset for place in head.tensors.values())
    tensors = [(f"model.{name}", place.dtype, place.shape) for name, place in head.tensors.items()]
    base.write_bytes(lay_out(base.name, tensors, {})[0] + data[begin:])
    job = replace(JOB, options={**JOB.options, "frozen": str(base.parent)})
    rank_pool.run(save_lean, RANKS, job, str(tmp_path / "run"), str(tmp_path / "full"))
    (file,) = recorded_files(tmp_path / "run")
    assert file.path == str(base)
    report, lean = verify(tmp_path / "run"), inspect(tmp_path / "run").lean
    assert report.valid, report.problems
    assert report.content_root == verify(runs[3]).content_root
    assert lean is not None and [(one.path, one.state, one.num_tensors) for one in lean.files] == [
        (str(base), "whole", 4)
    ]
    place = read_head(base).tensors["model.adapter.weight"]
    flip(base, place.offset)
    (problem,) = verify(tmp_path / "run").problems
    assert (problem.file, problem.param, problem.offset) == (str(base), "adapter.weight", place.offset)
    base.write_bytes(lay_out(base.name, tensors[1:], {})[0] + bytes(head.nbytes))
    assert not inspect(tmp_path / "run").ok


# --- all tags of a run ------------------------------------------------------------------------------------------------


def test_all_tags_are_verified_and_what_they_share_is_read_once(runs: dict[int, Path]) -> None:
    report = zeroelastic.verify_all(runs[3])
    assert report.ok and [Path(tag.path).name for tag in report.tags] == ["global_step3", "global_step2"]
    newer, older = report.tags
    for tag in report.tags:
        alone = verify(tag.path)
        assert (alone.checked, alone.content_root, alone.files) == (tag.checked, tag.content_root, tag.files)
    assert newer.bytes_read == verify(newer.path).bytes_read
    assert older.bytes_read == sum(file.stat().st_size for file in Path(older.path).glob("*.pt"))
    assert report.bytes_read == newer.bytes_read + older.bytes_read
    assert report.path == str(runs[3]) and report.mode == "full"


def test_damage_of_what_tags_share_is_a_problem_of_each(run: Path) -> None:
    PAYLOAD["adapter.weight"](run)
    report = zeroelastic.verify_all(run)
    assert not report.ok and len(report.tags) == 2
    for tag in report.tags:
        only_blames(tag, recorded_shared(run))


def test_a_shared_file_that_one_tag_takes_another_tensor_from_is_read_for_that_alone(run: Path) -> None:
    forget_buffer(run)
    place = read_head(shared_file(run)).tensors[BUFFER]
    found = {Path(tag.path).name: tag for tag in zeroelastic.verify_all(run).tags}
    own = {name: sum(file.stat().st_size for file in (run / name).glob("*.pt")) for name in found}
    read = sum(tag.bytes_read - own[name] for name, tag in found.items())
    assert read == sum(one.nbytes for one in read_head(shared_file(run)).tensors.values()) > place.nbytes


def test_a_tag_that_is_removed_meanwhile_is_no_damage(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def list_and_remove(root: Path) -> Any:
        found = list_run(root)
        shutil.rmtree(run / "global_step2")
        return found

    monkeypatch.setattr("zeroelastic.verbs.verify.verify.list_run", list_and_remove)
    report = zeroelastic.verify_all(run)
    assert report.ok and [Path(tag.path).name for tag in report.tags] == [TAG]


def test_a_tag_that_cannot_be_checked_hides_no_other(run: Path) -> None:
    """A Universal checkpoint beside the tags."""
    universal = run / "global_step3_universal"
    (universal / "zero/w").mkdir(parents=True)
    (universal / "zero/w/fp32.pt").write_bytes(b"")
    shutil.copy(model_files(run)[0], universal)
    done = run_command("verify", run, "--all", "--json")
    document = json.loads(done.stdout)
    kinds = {Path(tag["path"]).name: (tag["ok"], bool(tag["problems"])) for tag in document["tags"]}
    assert done.returncode == 1
    assert kinds == {name: (name != universal.name, False) for name in ("global_step3", "global_step2", universal.name)}
    assert f"{universal}: is a Universal checkpoint" in run_command("verify", run, "--all").stdout


def test_the_verb_shows_each_tag_and_the_damage(run: Path) -> None:
    done = run_command("verify", run, "--all")
    assert done.returncode == 0 and done.stdout.endswith("2 of 2 checkpoints valid.\n")
    assert done.stdout.index("global_step3: 5 files") < done.stdout.index("global_step2: 5 files")
    (run / "global_step2" / model_files(run)[0].name).unlink()
    done = run_command("verify", run, "--all")
    assert done.returncode == 3 and done.stdout.endswith("1 of 2 checkpoints valid.\n")
    assert "Invalid: 1 problem in zero_pp_rank_0_mp_rank_00_model_states.pt." in done.stdout
    assert run_command("verify", run, "--all", "--quick").returncode == 3


@pytest.mark.parametrize("option", [("--html", "x.html"), ("--tag", TAG), ("--lift-quarantine",)], ids=lambda o: o[0])
def test_options_of_one_tag_are_refused_for_all(run: Path, option: tuple[str, ...]) -> None:
    done = run_command("verify", run, "--all", *option)
    assert done.returncode == 2 and f"{option[0]}: cannot be given with --all" in done.stderr


def test_shared_files_are_dealt_to_the_ranks_that_are_scanned(runs: dict[int, Path]) -> None:
    headers = check_headers(runs[3] / TAG)
    scans = [scan_ranks(headers, [rank]) for rank in (1, 0)]
    assert [len(scan.shared) for scan in scans] == [0, 4]
    assert full_report(headers, combine(scans, headers)).valid


# --- plan -------------------------------------------------------------------------------------------------------------


def load_report(job: Job, directory: str) -> ResumeReport | None:
    """Load a run, on ranks: what it read."""
    engine = build_lean_engine(job)
    engine.load_checkpoint(directory)
    return zeroelastic.last_report(engine)


@pytest.mark.parametrize("stage", STAGES)
def test_a_plan_of_a_lean_tag_is_what_its_load_reads(
    rank_pool: RankPool, runs: dict[int, Path], tmp_path: Path, stage: int
) -> None:
    ranks = 3
    report = rank_pool.run(load_report, ranks, replace(JOB, stage=stage), str(runs[stage]))[0]
    assert report is not None
    planned = zeroelastic.plan(runs[stage], world_size=ranks)
    assert planned.worst.bytes_owned.value == report.bytes_owned
    assert planned.worst.bytes_read.value == report.bytes_read
    assert planned.total.bytes_read == report.total_bytes_read
    assert planned.load.files_worst_rank == report.files_opened
    buffer = read_head(shared_file(runs[stage])).tensors[BUFFER].nbytes
    own = model_files(runs[stage])[0].stat().st_size
    assert all(rank.header_bytes > 2 * own + buffer for rank in planned.ranks), "the frozen weights are not in the tag"
    assert any("130 KiB of frozen weights are in 1 shared file" in note for note in planned.notes)


@pytest.mark.parametrize("stage", STAGES)
def test_a_plan_of_a_full_reshard_counts_what_shared_files_have(
    runs: dict[int, Path], tmp_path: Path, stage: int
) -> None:
    planned = zeroelastic.plan(runs[stage], world_size=3, verb="reshard").reshard
    zeroelastic.reshard(runs[stage], tmp_path / "new", world_size=3, full=True)
    written = sum(file.stat().st_size for file in (tmp_path / "new" / TAG).iterdir())
    assert planned.bytes_written == pytest.approx(written, rel=0.05)
    assert planned.files_read == len(list((runs[stage] / TAG).glob("*.pt"))) + 1


# --- loads ------------------------------------------------------------------------------------------------------------


def load_each(job: Job, directories: list[str]) -> list[tuple[bool, str]]:
    """Load each run, on ranks: whether the error is one of ours, and its text; empty where it loads."""
    engine = build_lean_engine(job)
    found: list[tuple[bool, str]] = []
    for directory in directories:
        try:
            engine.load_checkpoint(directory, tag=TAG)
            found.append((True, ""))
        except Exception as error:
            found.append((isinstance(error, ZeroElasticError), str(error)))
    return found


def say_other_files(run: Path) -> None:
    """Let the commit record list another shared file, which is there."""
    record = record_of(run / TAG)
    other = run / FROZEN_FOLDER / f"frozen-{'0' * 32}.safetensors"
    shutil.copyfile(shared_file(run), other)
    file = record.shared[0].model_copy(update={"path": f"../{FROZEN_FOLDER}/{other.name}"})
    (run / TAG / RECORD_NAME).write_bytes(record_text(record.model_copy(update={"shared": (file,)})))


@pytest.mark.parametrize("stage", STAGES)
def test_a_load_names_the_damaged_shared_file(
    rank_pool: RankPool, runs: dict[int, Path], tmp_path: Path, stage: int
) -> None:
    damages = {**PAYLOAD, **PLACE, **OTHERS}
    name = recorded_shared(runs[stage]).name
    copies = [copied(runs[stage], tmp_path / str(i) / "run") for i in range(len(damages) + 2)]
    for damage, copy in zip(damages.values(), copies, strict=False):
        damage(copy)
    say_other_files(copies[-1])
    answers = rank_pool.run(load_each, RANKS, replace(JOB, stage=stage), [str(copy) for copy in copies])
    *others, of_record = zip(*answers, strict=True)
    for what, outcomes in zip([*damages, "nothing"], others, strict=True):
        for is_ours, text in outcomes:
            assert is_ours and (name in text if what != "nothing" else text == ""), (what, text)
    assert all(is_ours and "refers to other shared files than" in text for is_ours, text in of_record), of_record
