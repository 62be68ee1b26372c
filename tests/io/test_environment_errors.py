"""What goes wrong around a checkpoint - permissions, disks, servers, memory - is never a verdict on it."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from programs import no_result, run_command
from sample import write_sample

from zeroelastic import UnreadableError
from zeroelastic.checkpoint.commit_record import RECORD_NAME
from zeroelastic.io.paths import as_path
from zeroelastic.io.retries import Retries, retrying
from zeroelastic.io.storage import file_size
from zeroelastic.runs.run_store import RunStore
from zeroelastic.runs.verdicts import check_quickly, check_tag, plan_prune

TAG = "global_step4"
FILES = {
    "the record": RECORD_NAME,
    "model states": "zero_pp_rank_0_mp_rank_00_model_states.pt",
    "optimizer states": "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
}
VERBS: dict[str, tuple[list[str], list[str]]] = {
    "inspect": (["SRC"], [*FILES]),
    "inspect --all-ranks": (["SRC", "--all-ranks"], [*FILES]),
    "inspect --json": (["SRC", "--json"], [*FILES]),
    "verify": (["SRC"], [*FILES]),
    "verify --quick": (["SRC", "--quick"], ["the record"]),
    "plan": (["SRC", "--world-size", "2"], [*FILES]),
    "reshard": (["SRC", "OUT", "--world-size", "2"], [*FILES]),
    "diff": (["SRC", "SRC"], [*FILES]),
    "export": (["SRC", "OUT"], [*FILES]),
    "convert": (["SRC", "OUT", "--to", "fsdp2"], [*FILES]),
    "latest": (["SRC"], [*FILES]),
    "latest --quick": (["SRC", "--quick"], ["the record"]),
    "prune": (["SRC", "--keep", "1", "--yes"], ["the record"]),
}


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with one checkpoint."""
    root = tmp_path_factory.mktemp("sample") / "ckpt"
    write_sample(root)
    for name in os.listdir(root):
        if name not in (TAG, "latest"):
            shutil.rmtree(root / name)
    return root


@pytest.fixture
def unreadable(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path, int], None]:
    """Let every use of a path fail with an errno, as it does for who may not read it; root may read everything."""
    opened, listed = os.open, os.scandir

    def make(path: Path, number: int) -> None:
        def fail(name: object, folder: int | None = None) -> None:
            at = f"/proc/self/fd/{name}" if isinstance(name, int) else os.fspath(name)
            at = at if folder is None else f"/proc/self/fd/{folder}/{at}"
            if os.path.realpath(at) == str(path):
                raise OSError(number, os.strerror(number), str(path))

        def open_(name, flags, *arguments, dir_fd=None, **options):
            if not flags & os.O_PATH:  # which asks for no permission to read
                fail(name, dir_fd)
            return opened(name, flags, *arguments, dir_fd=dir_fd, **options)

        def scandir(name="."):
            fail(name)
            return listed(name)

        monkeypatch.setattr(os, "open", open_)
        monkeypatch.setattr(os, "scandir", scandir)

    return make


def run(verb: str, root: Path, out: Path) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a verb, run in this process."""
    words = [{"SRC": str(root), "OUT": str(out)}.get(word, word) for word in VERBS[verb][0]]
    done = run_command(verb.partition(" ")[0], *words, env={"COLUMNS": "300", "TERM": "dumb"})
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("verb", "what"), [(verb, what) for verb, (_, files) in VERBS.items() for what in [*files, "the directory"]]
)
def test_what_cannot_be_read_now_is_one_error_line_and_no_verdict(sample, unreadable, tmp_path, verb, what):
    number = errno.EIO if what == "optimizer states" else errno.EACCES
    path = sample / TAG / FILES[what] if what in FILES else sample / TAG
    unreadable(path, number)
    code, stdout, stderr = run(verb, sample, tmp_path / "out")
    assert code == 1, (stdout, stderr)
    assert os.strerror(number) in stdout + stderr and "damaged" not in stdout + stderr
    if not verb.startswith(("latest", "prune")):  # which say of each tag what it is
        assert no_result(stdout) and stderr.count("\n") == 1 and stderr.startswith("error: ")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("verb", ["verify", "reshard"])
def test_a_payload_that_cannot_be_read_is_no_damage(sample, monkeypatch, tmp_path, verb):
    def fail(*arguments, **options):
        raise UnreadableError(
            f"{sample / TAG / FILES['optimizer states']}: reading at byte 64 failed: Stale file handle."
        )

    monkeypatch.setattr("zeroelastic.verbs.verify.payload_scan.scan_segments", fail)
    monkeypatch.setattr("zeroelastic.verbs.new_files.move_segments", fail)
    code, stdout, stderr = run(verb, sample, tmp_path / "out")
    assert code == 1 and no_result(stdout) and stderr.startswith("error: ") and "Stale file handle" in stderr


def test_memory_that_runs_out_is_one_error_line(sample, monkeypatch, tmp_path):
    def fail(*arguments, **options):
        raise MemoryError

    monkeypatch.setattr("zeroelastic.torch_file.header.HeaderUnpickler.load", fail)
    for verb in ("inspect", "verify", "plan"):
        assert run(verb, sample, tmp_path) == (1, "", "error: out of memory\n")


def test_threads_that_the_system_does_not_start_are_one_error_line(sample, monkeypatch, tmp_path):
    def fail(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("threading.Thread.start", fail)
    for verb in ("verify", "reshard"):
        code, stdout, stderr = run(verb, sample, tmp_path / "out")
        assert code == 1 and no_result(stdout) and "starts no more threads. Raise the limit" in stderr
        assert stderr.count("\n") == 1 and "Traceback" not in stderr and not (tmp_path / "out").exists()


def test_a_bucket_without_credentials_is_one_error_line(monkeypatch, tmp_path):
    pytest.importorskip("s3fs")
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    for verb in VERBS:
        if verb not in ("ls", "prune", "latest"):
            words = [
                {"SRC": "s3://bucket/run", "OUT": str(tmp_path / "out")}.get(word, word) for word in VERBS[verb][0]
            ]
            done = run_command(verb.partition(" ")[0], *words)
            assert done.returncode == 1 and no_result(done.stdout), (verb, done.output)
            found = "error: s3://bucket/run: cannot be listed: Unable to locate credentials."
            assert done.stderr == f"{found} {UnreadableError.remedy}\n"


def test_a_web_server_that_is_away_is_no_missing_file():
    pytest.importorskip("aiohttp")
    once_more = retrying(Retries(1, first_pause_s=0.0))
    with once_more, pytest.raises(UnreadableError, match=r"http://127\.0\.0\.1:9/a: cannot be looked at: "):
        file_size(as_path("http://127.0.0.1:9/a"))


def test_a_tag_that_cannot_be_read_is_neither_removed_nor_called_damaged(sample, unreadable):
    unreadable(sample / TAG / RECORD_NAME, errno.EACCES)
    plan = plan_prune(sample, keep=1, invalid=True, min_age_s=0)
    assert [(one.remove, one.valid, one.undecided) for one in plan.decisions] == [(False, False, True)]


def test_a_folder_that_cannot_be_listed_is_not_passed_over_in_silence(sample, unreadable, tmp_path):
    for step in (2, 4):
        (tmp_path / f"checkpoint-{step}").mkdir()
        shutil.copytree(sample / TAG, tmp_path / f"checkpoint-{step}" / TAG)
        (tmp_path / f"checkpoint-{step}/latest").write_text(TAG)
    unreadable(tmp_path / "checkpoint-4", errno.EACCES)
    newest, older = RunStore(tmp_path).tags()
    verdict = check_tag(newest, check_quickly)
    assert newest.name == "checkpoint-4" and verdict is not None and verdict.undecided
    assert check_tag(older, check_quickly) is None
