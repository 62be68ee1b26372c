"""`zeroelastic prove`: a good resume is proved, and one that is not says what is wrong; the checkpoint stays as it is.

tests/project/test_docs.py runs the command itself, under torchrun; here the ranks come from a pool.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from documentation import documented_keys
from places import ROOT
from saved_files import flip
from training import LOSS_RTOL, Job, build_engine, flat_buffers, train_and_save, train_step
from typer.testing import CliRunner

from zeroelastic.cli.app import app
from zeroelastic.cli.documents import check
from zeroelastic.errors import RemoteRankError, UsageError
from zeroelastic.proving import driver
from zeroelastic.proving.checks import (
    BACK,
    CONTROL,
    OTHER,
    REPEAT,
    TOLERANCES,
    Check,
    check_records,
    loss_difference,
    tolerance_of,
)
from zeroelastic.proving.driver import (
    ProofRequest,
    check_sizes,
    environment,
    failure_of,
    launch,
    prepare,
    prove,
    verify_source,
)
from zeroelastic.proving.rank import recorded
from zeroelastic.proving.records import RunRecord, RunSpec, read_record, read_run, write_record, write_run
from zeroelastic.proving.report import Prove, markdown, report_digest
from zeroelastic.runs.locate import find_source
from zeroelastic.testing import Fingerprint, RankError, RankPool
from zeroelastic.verbs.verify.report import VerifyReport

support = pytest.mark.support
SAVED_ON, OTHER_SIZE, STEPS = 2, 3, 2


def script(directory: str, mischief: str, stage: int = 3) -> None:
    """A training script that resumes; what it does wrong, it does where there are OTHER_SIZE ranks."""
    import torch
    import torch.distributed as dist

    wrong = mischief if dist.get_world_size() == OTHER_SIZE else ""
    engine = build_engine(Job(micro=20, stage=stage).other())
    if mischief == "never loads":
        return
    if mischief == "loads another":
        engine.load_checkpoint(str(Path(directory).parent / "other"), load_module_only=True)
        return
    if wrong == "cannot load":
        raise ValueError("this model cannot be loaded")
    engine.load_checkpoint(directory, load_optimizer_states=wrong != "no moments")
    optimizer = engine.optimizer
    if wrong == "another lr":
        optimizer.param_groups[0]["lr"] *= OTHER_SIZE / SAVED_ON
    elif wrong == "one bit" and dist.get_rank() == 1:
        flat_buffers(optimizer)[0].view(torch.int32)[0] ^= 1
    elif wrong == "moments gone":
        for state in optimizer.optimizer.state.values():
            state["exp_avg"].zero_()
    elif wrong == "one stale copy" and dist.get_rank() == 2:
        engine.module.batches_seen.add_(1)
    elif wrong == "scheduler":
        engine.lr_scheduler.last_epoch += 1
    if mischief == "another style":
        engine.backward = lambda loss: loss.backward()
    for step in range(3, 4 if mischief == "ends early" else 9):
        if wrong == "other data":
            step += 100
        try:
            train_step(engine, step)
        except SystemExit:
            if mischief != "another style":
                raise
        engine.save_checkpoint(directory)
    if mischief == "another style":
        raise AssertionError("the recorder did not stop the script")


def one_rank(run: RunSpec, directory: str, mischief: str, stage: int = 3) -> bool:
    return recorded(run, lambda: script(directory, mischief, stage))


@pytest.fixture(scope="module")
def checkpoint(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = str(tmp_path_factory.mktemp("prove") / "ckpt")
    rank_pool.run(train_and_save, SAVED_ON, Job(micro=20), directory, after=0)
    return directory


@pytest.fixture(scope="module")
def source(checkpoint: str) -> VerifyReport:
    return verify_source(find_source(checkpoint))


def is_proved(checks: list[Check]) -> bool:
    return all(check.ok is not False for check in checks)


@pytest.fixture(scope="module")
def by_pool(rank_pool: RankPool, checkpoint: str) -> Callable[[str], Callable[..., int | None]]:
    """A stand-in for torchrun: the same ranks, from the pool."""

    def of(mischief: str) -> Callable[..., int | None]:
        def launched(run: RunSpec, *_: Any, **__: Any) -> int:
            try:
                rank_pool.run(one_rank, run.world_size, run, checkpoint, mischief)
            except RankError:
                return 1
            return 0

        return launched

    return of


@pytest.fixture(scope="module")
def proof(checkpoint: str, by_pool: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A good one, by the command: its directory, and what --json prints."""
    out = tmp_path_factory.mktemp("out") / "proof"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "launch", by_pool(""))
        arguments = ["prove", checkpoint, "-n", str(OTHER_SIZE), "--steps", str(STEPS), "--out", str(out), "--json"]
        arguments += ["--html", str(out.parent / "proof.html")]
        done = CliRunner().invoke(app, [*arguments, "--signed-off-by", "A. Sceptic", "--", __file__, "--its", "own"])
    assert done.exit_code == 0, done.output
    check("prove", done.stdout)
    (out.parent / "stderr.txt").write_text(done.stderr)
    return out, json.loads(done.stdout)


@pytest.fixture(scope="module")
def records(proof: tuple[Path, dict[str, Any]]) -> dict[Any, RunRecord]:
    out, report = proof
    return {run["role"]: read_record(out / run["record"]) for run in report["runs"]}


@support("Using it", "`zeroelastic prove`: a script of one's own at two sizes", "exact", "losses within a tolerance")
def test_a_good_resume_is_proved(proof: tuple[Path, dict[str, Any]], source: VerifyReport, checkpoint: str) -> None:
    out, report = proof
    assert report["verdict"] == "PROVED" and report["reasons"] == []
    assert [run["world_size"] for run in report["runs"]] == [SAVED_ON, SAVED_ON, OTHER_SIZE, SAVED_ON]
    roots = report["content_roots"]
    before = {roots[key] for key in ("recorded", "files", "loaded_at_reference_size", "loaded_at_other_size")}
    after = {roots[key] for key in ("saved_at_other_size", "loaded_back")}
    assert before == {source.content_root} and len(after) == 1 and after != before
    names = {check["name"] for check in report["checks"] if check["ok"]}
    assert names >= {"state after the load", "state at the first step", "losses", "round trip, state"}
    assert all(len(report["losses"][role]) == STEPS for role in (CONTROL, REPEAT, OTHER))
    assert report["losses"][CONTROL] == report["losses"][REPEAT], "on a CPU the same size repeats itself"
    assert report["source"]["step"] == 3 and report["signed_off_by"] == "A. Sceptic"
    assert report["script"] == [__file__, "--its", "own"]
    assert json.loads((out / "report.json").read_text()) == report
    assert not (out / "checkpoint").exists(), "the save at the other size is kept only when asked for"
    assert os.listdir(checkpoint) and sorted(os.listdir(checkpoint))[0] == "global_step3", "a save was not skipped"
    assert report["runs"][0]["saves_skipped"] == STEPS - 1  # the script is stopped inside the last step


def test_every_step_is_said_as_it_begins(proof: tuple[Path, dict[str, Any]], checkpoint: str) -> None:
    lines = (proof[0].parent / "stderr.txt").read_text().splitlines()
    steps = [line.split(": ")[:2] for line in lines if line.startswith("step ")]
    assert [number for number, _ in steps] == [f"step {i} of 6" for i in range(1, 7)]
    assert checkpoint in steps[0][1] and [role for _, role in steps[1:5]] == [CONTROL, REPEAT, OTHER, BACK]


def test_the_states_compared_hold_everything(records: dict[Any, RunRecord]) -> None:
    state = records[OTHER].loaded
    assert state is not None
    kinds = {key.split("/")[0] for key in state}
    assert kinds >= {"weight", "master", "state", "scalar", "buffer", "group", "scheduler", "loss_scaler", "engine"}
    assert isinstance(state["master/up.weight"], Fingerprint)
    assert records[OTHER].samples == records[CONTROL].samples and None not in records[OTHER].samples
    assert records[OTHER].accumulation != records[CONTROL].accumulation
    assert max(map(abs, records[OTHER].losses)) > 0


def test_losses_are_those_of_the_global_batch(
    rank_pool: RankPool, checkpoint: str, records: dict[Any, RunRecord]
) -> None:
    """As the script itself would add them up, over ranks and micro steps."""
    losses = rank_pool.run(plain_resume, SAVED_ON, checkpoint)[0]
    assert records[CONTROL].losses == pytest.approx(losses, rel=1e-6)


def plain_resume(directory: str) -> list[float]:
    engine = build_engine(Job(micro=20).other())
    engine.load_checkpoint(directory)
    return [train_step(engine, step) for step in range(3, 3 + STEPS)]


def test_the_markdown_says_what_the_document_says(proof: tuple[Path, dict[str, Any]]) -> None:
    out, report = proof
    text = (out / "report.md").read_text()
    assert text == markdown(Prove.model_validate(report)) and text.startswith(
        f"# PROVED: {report['source']['path']}, 2 -> 3 ranks\n"
    )
    for fact in (*filter(None, report["content_roots"].values()), report["digest"], "A. Sceptic"):
        assert fact in text
    for loss in report["losses"][OTHER]:
        assert repr(loss) in text
    bad = Prove.model_validate({**report, "verdict": "NOT PROVED", "reasons": ["the losses differ"]})
    assert markdown(bad).startswith("# NOT PROVED") and "* the losses differ" in markdown(bad)


def test_the_report_for_a_browser_shows_the_losses(proof: tuple[Path, dict[str, Any]]) -> None:
    """What else is in it is shown by tests/cli/test_html_reports.py."""
    out, report = proof
    page = (out.parent / "proof.html").read_text()
    assert "Proved: a checkpoint of 2 ranks resumes on 3 ranks" in page
    for role in (CONTROL, REPEAT, OTHER):
        for step, loss in enumerate(report["losses"][role], start=1):
            assert re.search(f'data-tip="{role}, . ranks, step after the load {step}: loss {loss:.8g}"', page)
    assert "Difference to the reference size" in page


def test_a_report_that_was_changed_shows(proof: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    _, report = proof
    assert report["digest"] == report_digest(report)
    command = [sys.executable, "-m", "zeroelastic.proving.report"]
    for name, text, status in (
        ("as-written.json", json.dumps(report), 0),
        ("changed.json", json.dumps({**report, "verdict": "NOT PROVED"}), 1),
    ):
        (tmp_path / name).write_text(text)
        done = subprocess.run([*command, tmp_path / name], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == status, done.stderr
    assert "has been changed" in done.stderr


def test_the_document_has_the_documented_keys(proof: tuple[Path, dict[str, Any]]) -> None:
    table = documented_keys("prove")
    found: set[str] = set()
    for key, value in proof[1].items():
        if key in ("losses", "versions"):
            found.add(f"{key}.{'ROLE' if key == 'losses' else 'NAME'}")
        elif isinstance(value, dict):
            found |= {f"{key}.{inner}" for inner in value}
        elif key in ("checks", "runs"):
            found |= {f"{key}[].{inner}" for row in value for inner in row}
        else:
            found.add(key)
    assert found == table


def judged(
    by_pool: Any, records: dict[Any, RunRecord], source: VerifyReport, checkpoint: str, folder: Path, mischief: str
) -> list[Check]:
    """The checks where the run at the other size is replaced by one that does mischief."""
    run = RunSpec(OTHER, OTHER_SIZE, STEPS, str(find_source(checkpoint).tag_dir), str(folder))
    assert by_pool(mischief)(run) == 0, failure_of(run)
    others = {**records, OTHER: read_record(run.record_path)}
    del others[BACK]
    return check_records(source, 3, others, saved_root=None, tolerance=None, changed_files=(), failures={})


@pytest.mark.parametrize(
    ("mischief", "said", "failed"),
    [
        (
            "another lr",
            "group/0/lr: is 0.0075, expected 0.005",
            {"unchanged by the script, other size", "state at the first step"},
        ),
        ("one bit", "has other elements", {"unchanged by the script, other size", "state at the first step"}),
        ("moments gone", "/exp_avg: has other elements", {"unchanged by the script, other size"}),
        ("scheduler", "scheduler/last_epoch: is 4, expected 3", {"state at the first step"}),
        ("no moments", "no content root was computed", {"content root, other size", "state after the load"}),
        ("one stale copy", "ranks differ in replicated state", {"copies, other size"}),
        ("other data", "The sizes saw different samples", {"losses"}),
    ],
)
def test_a_resume_that_is_not_one_is_not_proved(
    by_pool: Any,
    records: dict[Any, RunRecord],
    source: VerifyReport,
    checkpoint: str,
    tmp_path: Path,
    mischief: str,
    said: str,
    failed: set[str],
) -> None:
    wrong = [check for check in judged(by_pool, records, source, checkpoint, tmp_path, mischief) if check.ok is False]
    names = {check.name for check in wrong}
    assert failed <= names
    everything = [line for check in wrong for line in (check.sentence, *check.details)]
    assert any(said in line for line in everything), everything
    if mischief == "other data":
        assert failed == names, "the state is not to blame"


def test_a_script_that_catches_everything_and_calls_backward_itself_is_recorded_and_stopped_all_the_same(
    by_pool: Any, records: dict[Any, RunRecord], source: VerifyReport, checkpoint: str, tmp_path: Path
) -> None:
    assert is_proved(judged(by_pool, records, source, checkpoint, tmp_path, "another style"))
    losses = read_record(tmp_path / "record.json").losses
    assert losses == pytest.approx(records[OTHER].losses, rel=1e-6)


def test_a_run_that_fails_is_a_verdict_and_one_that_cannot_be_compared_an_error(
    by_pool: Any, checkpoint: str, records: dict[Any, RunRecord], tmp_path: Path
) -> None:
    found = find_source(checkpoint)
    verified = verify_source(found)

    def carry_out(mischief: str, steps: int = STEPS) -> Prove:
        request = ProofRequest(found, OTHER_SIZE, SAVED_ON, steps, prepare(tmp_path / mischief), repeat=False)
        launched = by_pool(mischief)

        def run(spec: RunSpec) -> str | None:
            if spec.role == CONTROL and mischief == "cannot load":  # the same as that of the good proof
                write_record(spec.record_path, records[CONTROL])
                return None
            return failure_of(spec) if launched(spec) else None

        return prove(request, verified, run)

    report = carry_out("cannot load")
    assert report.verdict == "NOT PROVED" and check("prove", json.dumps(report.to_json())) == report
    assert "the run at the other size failed: rank 0: ValueError: this model cannot be loaded" in report.reasons[0]
    assert report.content_roots.loaded_back is None and "NOT PROVED" in markdown(report)
    with pytest.raises(UsageError, match=r"never called engine\.load_checkpoint"):
        carry_out("never loads")
    with pytest.raises(UsageError, match="1 optimizer steps after the load; 2 are to be compared"):
        carry_out("ends early")
    with pytest.raises(UsageError, match=r"the script loaded \S*/other\S*, not \S*/global_step3"):
        shutil.copytree(checkpoint, Path(checkpoint).parent / "other")
        carry_out("loads another")


@support("Using it", "`zeroelastic prove` of ZeRO stage 2", "exact", "resumed at stage 2 or 3")
@pytest.mark.parametrize(
    ("stage", "mischief", "said"),
    [
        (2, "", ""),
        pytest.param(3, "", "", marks=pytest.mark.extended),
        pytest.param(2, "one bit", "has other elements", marks=pytest.mark.extended),
    ],
)
def test_what_stage_2_saved_is_proved(
    rank_pool: RankPool, tmp_path: Path, stage: int, mischief: str, said: str
) -> None:
    directory = str(tmp_path / "ckpt")
    rank_pool.run(train_and_save, SAVED_ON, Job(micro=20, stage=2), directory, after=0)
    found = find_source(directory)

    def run(spec: RunSpec) -> str | None:
        try:
            rank_pool.run(one_rank, spec.world_size, spec, directory, mischief, stage)
        except RankError:
            return failure_of(spec)
        return None

    request = ProofRequest(found, OTHER_SIZE, SAVED_ON, STEPS, prepare(tmp_path / "proof"), repeat=False)
    report = prove(request, verify_source(found), run)
    assert report.verdict == ("NOT PROVED" if mischief else "PROVED"), report.reasons
    failed = [line for check in report.checks if check.ok is False for line in check.details]
    assert any(said in line for line in failed) if mischief else not failed
    roots = report.content_roots
    loaded = [roots.recorded, roots.loaded_at_reference_size, roots.loaded_at_other_size]
    assert len(set(loaded)) == 1 and None not in loaded


def test_a_script_that_fails_at_the_reference_size_is_an_error(checkpoint: str, tmp_path: Path) -> None:
    found = find_source(checkpoint)
    request = ProofRequest(found, OTHER_SIZE, SAVED_ON, 1, prepare(tmp_path / "proof"))
    with pytest.raises(RemoteRankError, match="fails at the size to compare with, 2 ranks"):
        prove(request, verify_source(found), lambda run: "rank 0: ImportError: no module")
    assert prepare(tmp_path / "proof"), "what came to no report may be done again"
    (tmp_path / "proof/report.json").write_text("{}")
    with pytest.raises(UsageError, match="exists"):
        prepare(tmp_path / "proof")


def test_a_checkpoint_that_changed_meanwhile_is_not_proved(
    checkpoint: str, records: dict[Any, RunRecord], tmp_path: Path
) -> None:
    mine = tmp_path / "ckpt"
    shutil.copytree(checkpoint, mine)
    found = find_source(mine)

    def run(spec: RunSpec) -> str | None:
        write_record(spec.record_path, dataclasses.replace(records[spec.role], role=spec.role))
        if spec.role == OTHER:
            shutil.copytree(found.tag_dir, spec.save_to[0] + "/" + spec.save_to[1])
            (mine / "global_step3" / "new").write_text("")
        return None

    request = ProofRequest(found, OTHER_SIZE, SAVED_ON, STEPS, prepare(tmp_path / "proof"))
    checks = {check.name: check for check in prove(request, verify_source(found), run).checks}
    assert checks["source untouched"].ok is False and checks["source untouched"].details == ["new: is new"]
    assert not checks["round trip, content root"].ok


def test_judgements_without_ranks(records: dict[Any, RunRecord], source: VerifyReport) -> None:
    def reasons(saved_root: str | None = None, tolerance: float | None = None, **other: Any) -> str:
        changed = {**records, OTHER: dataclasses.replace(records[OTHER], **other)}
        root = records[BACK].report["loaded_root"] if saved_root is None else saved_root  # type: ignore[index]
        found = check_records(source, 3, changed, saved_root=root, tolerance=tolerance, changed_files=(), failures={})
        return "\n".join(check.sentence for check in found if check.ok is False)

    assert not reasons()
    assert "losses cannot be compared" in reasons(global_batch=119)
    assert reasons(losses=[math.nan, 1.0])
    assert reasons(tolerance=0.0), "another size rounds otherwise"
    assert reasons(saved_root="0" * 64)
    assert reasons(report=None)
    wrong_root = {**records[OTHER].report, "loaded_root": "1" * 64}  # type: ignore[dict-item]
    assert "111111111111" in reasons(report=wrong_root)
    later = {**records[OTHER].loaded, "engine/global_steps": 4}  # type: ignore[dict-item]
    assert "at step 4, the checkpoint at 3" in reasons(loaded=later)
    near = [loss * (1 + 0.9 * TOLERANCES["bf16"]) for loss in records[CONTROL].losses]
    far = [loss * (1 + 1.1 * TOLERANCES["bf16"]) for loss in records[CONTROL].losses]
    assert not reasons(losses=near, samples=[None] * STEPS) and reasons(losses=far)


def test_tolerances_are_no_tighter_than_the_suites_own() -> None:
    assert all(TOLERANCES[name] >= rtol for name, rtol in LOSS_RTOL.items())
    assert tolerance_of("fp32 with bf16 autocast") == TOLERANCES["bf16"] and tolerance_of(None) == TOLERANCES["fp32"]
    assert loss_difference([2.0, 4.0], [2.0, 5.0]) == 0.25 and loss_difference([1.0], [math.inf]) == math.inf


def vandal(directory: str, protected: list[str]) -> list[str]:
    """What of many ways to change a checkpoint got through."""
    from zeroelastic.proving.rank import forbid_writes

    forbid_writes(protected)
    tag = Path(directory) / "global_step3"
    first = next(tag.glob("*optim_states.pt"))
    ways: dict[str, Callable[[], object]] = {
        "write": lambda: first.write_bytes(b""),
        "append": lambda: first.open("ab"),
        "update": lambda: os.open(first, os.O_RDWR),
        "add": lambda: (tag / "new").write_text("x"),
        "folder": lambda: (tag / "inner").mkdir(),
        "remove": first.unlink,
        "rename": lambda: first.rename(tag / "other"),
        "move away": lambda: tag.rename(tag.parent / "moved"),
        "move the parent": lambda: os.rename(directory, directory + "-moved"),
        "rmdir": lambda: os.rmdir(tag),
        "rmtree": lambda: shutil.rmtree(tag),
        "rmtree of the parent": lambda: shutil.rmtree(directory),
        "truncate": lambda: os.truncate(first, 0),
        "latest": lambda: (Path(directory) / "latest").write_text("other"),
        "replace latest": lambda: os.replace(__file__, Path(directory) / "latest"),
        "through a link": lambda: (Path(directory + "-link") / "global_step3" / "new").write_text("x"),
    }
    done = []
    for name, way in ways.items():
        try:
            way()
        except PermissionError as error:
            assert "is being proved" in str(error)
        else:
            done.append(name)
    (Path(directory) / "log.txt").write_text("beside it anything may be written")
    Path(directory).mkdir(exist_ok=True)
    with tempfile.TemporaryFile(dir=directory):
        pass
    first.read_bytes()
    return done


def test_the_checkpoint_is_guarded_while_the_script_runs(rank_pool: RankPool, checkpoint: str, tmp_path: Path) -> None:
    mine = tmp_path / "ckpt"
    shutil.copytree(checkpoint, mine)
    os.symlink(mine, f"{mine}-link")
    before = {path: path.read_bytes() for path in mine.rglob("*") if path.is_file()}
    protected = [str(mine / "global_step3"), str(mine / "latest")]
    assert rank_pool.run(vandal, 1, str(mine), protected)[0] == []
    (mine / "log.txt").unlink()
    assert {path: path.read_bytes() for path in mine.rglob("*") if path.is_file()} == before


def test_runs_and_records_travel_as_they_are(tmp_path: Path) -> None:
    run = RunSpec(OTHER, 3, 5, "/ckpt/tag", str(tmp_path), ("/ckpt",), None, ("/scratch", "proof"))
    write_run(tmp_path / "run.json", run)
    assert read_run(tmp_path / "run.json") == run
    state: Any = {"a": Fingerprint("torch.float32", (2, 3), "00"), "b": None, "c": 1e-17, "d": True, "e": math.inf}
    record = RunRecord(OTHER, 3, True, loaded=state, losses=[0.1, math.inf], samples=["x", None])
    write_record(tmp_path / "record.json", record)
    assert read_record(tmp_path / "record.json") == record


def test_misuse_is_refused_before_anything_runs(
    checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*_: Any, **__: Any) -> int:
        raise AssertionError("a run was started")

    monkeypatch.setattr(driver, "launch", forbidden)
    monkeypatch.chdir(tmp_path)
    damaged = tmp_path / "damaged"
    shutil.copytree(checkpoint, damaged)
    file = next(damaged.glob("*/*optim_states.pt"))
    flip(file)
    cases = [
        (2, "no such script", [checkpoint, "-n", "3", "--", "missing.py"]),
        (2, "both runs would have 2 ranks", [checkpoint, "-n", "2", "--", __file__]),
        (2, "at least one rank", [checkpoint, "-n", "0", "--", __file__]),
        (2, "holds no ZeRO checkpoint", [str(ROOT / "docs"), "-n", "3", "--", __file__]),
        (2, "is not a time such as", [checkpoint, "-n", "3", "--time-limit", "soon", "--", __file__]),
        (2, "too many for the", [checkpoint, "-n", "9999", "--", __file__]),
        (2, "-m needs the name of a module", [checkpoint, "-n", "3", "--", "-m"]),
        (3, "is damaged", [str(damaged), "-n", "3", "--", __file__]),
    ]
    for code, said, arguments in cases:
        done = CliRunner().invoke(app, ["prove", *arguments], env={"COLUMNS": "300", "TERM": "dumb"})
        assert (done.exit_code, said in done.stderr) == (code, True), (arguments, done.output)
    assert not (tmp_path / "proof").exists()


def test_processes_go_where_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setattr(driver, "_num_gpus", lambda: 4)
    assert environment(8, 1)[1] == "cpu"
    monkeypatch.delenv("DS_ACCELERATOR")
    assert environment(4, 1 << 60)[1] == "cuda" and "DS_ACCELERATOR" not in environment(4, 1)[0]
    with pytest.raises(UsageError, match="8 processes need 8 GPUs; this machine has 4"):
        environment(8, 1)
    monkeypatch.setattr(driver, "_num_gpus", lambda: 0)
    with pytest.raises(UsageError, match="do not fit into"):
        environment(2, 1 << 60)
    env, device = environment(2, 1)
    assert device == "cpu" and env["DS_ACCELERATOR"] == "cpu"
    check_sizes(3, 4)


def test_a_run_that_takes_too_long_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun and its ranks, here a process that would sleep for minutes."""
    monkeypatch.setattr(driver, "command", lambda run, script: ["sleep", "300"])
    run = RunSpec(CONTROL, 1, 1, "/ckpt", str(tmp_path))
    monkeypatch.setattr(driver, "_BEAT_SECONDS", 0.05)
    waited: list[float] = []
    assert launch(run, ["train.py"], time_limit_s=0.2, env=dict(os.environ), waiting=waited.append) is None
    assert len(waited) >= 2 and waited == sorted(waited)  # a line for each is a sign of life
    assert failure_of(run) == "" and read_run(tmp_path / "run.json") == run
