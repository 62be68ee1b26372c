"""A checkpoint that is saved again while a verb reads it: the verb finishes with one save, or says so; no verdict."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from programs import no_result, run_command
from saved_files import Opens
from stores import CountedFileSystem, counted, upload
from synthetic import write_checkpoint
from torch.distributed.checkpoint import FileSystemReader

from zeroelastic.errors import SavedAgainError
from zeroelastic.runs import tag_directory
from zeroelastic.runs.run_store import RunStore
from zeroelastic.runs.verdicts import check_quickly, check_tag

__all__ = ["counted"]

TAG, SAVE_ID = "last", "1" * 32

VERBS: dict[str, tuple[str, ...]] = {
    "verify": ("--json",),
    "inspect": ("--json", "--all-ranks"),
    "reshard": ("{out}", "-n", "3", "--sub-group-size", "10", "--json"),
    "export": ("{out}",),
    "convert": ("{out}", "--to", "fsdp2"),
    "diff": ("{first}", "--json"),
    "plan": ("-n", "3", "--json"),
    "latest": ("--json",),
}

PLACES = 8
"""About as many times in a verb are tried."""

AGAIN = "was saved again, or removed, while it was read"


@pytest.fixture(scope="module")
def changing() -> Iterator[Opens]:
    found = Opens()
    yield found
    found.stop()


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Directories of two saves of one tag."""
    folder = tmp_path_factory.mktemp("two")
    for seed, name in enumerate(("a", "b")):
        write_checkpoint(
            folder / name / TAG, world_size=2, record=True, seed=seed, save_id=str(seed) * 32, global_steps=seed + 3
        )
        (folder / name / "latest").write_text(TAG)
    return folder / "a", folder / "b"


def outcome(verb: str, root: Path | str, out: Path, first: Path) -> tuple[int, object, str]:
    """The exit code of a verb, what it found of the checkpoint, and all that it said."""
    given = [text.format(out=out, first=first) for text in VERBS[verb]]
    done = run_command(verb, root, *given)
    found: object = None
    if "--json" in given and done.stdout.startswith("{") and not no_result(done.stdout):
        document = json.loads(done.stdout)
        keys = ("content_root", "ok", "problems", "tensors", "ranks", "step", "passed_over")
        found = {key: document[key] for key in keys if key in document}
    elif out.is_dir():
        files = {path.name: path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()}
        if files.pop(".metadata", None) is not None:  # torch writes the directory and a random id into it
            metadata = FileSystemReader(out).read_metadata()
            found = files, metadata.state_dict_metadata, metadata.storage_data, metadata.planner_data
        else:
            found = files
    return done.returncode, found, done.output


@pytest.mark.starts_processes
@pytest.mark.parametrize(
    ("verb", "kind"), [*((verb, "replaced") for verb in VERBS), ("verify", "in place"), ("export", "in place")]
)
def test_a_verb_reads_one_save_or_says_that_it_was_saved_again(
    verb: str,
    kind: str,
    two: tuple[Path, Path],
    changing: Opens,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("zeroelastic.executors.dispatch._fastest", lambda: "numpy")  # whose opens are seen
    expected = [outcome(verb, root, tmp_path / f"expected-{root.name}", two[0]) for root in two]
    assert [code for code, _, _ in expected] in ([0, 0], [0, 1]), expected
    root, out = tmp_path / "c", tmp_path / "out"

    def change() -> None:
        if kind == "replaced":
            tag_directory.publish_tag(tag_directory.staging_dir_of(root / TAG, SAVE_ID), root / TAG).finish()
        else:
            for path in sorted((two[1] / TAG).iterdir()):
                (root / TAG / path.name).write_bytes(path.read_bytes())

    total, said_again = 1, 0
    at = -1
    while at < total:
        for left in (root, out):
            shutil.rmtree(left, ignore_errors=True)
        shutil.copytree(two[0], root)
        shutil.copytree(two[1] / TAG, tag_directory.staging_dir_of(root / TAG, SAVE_ID))
        changing.arm(root, at, change)
        code, found, text = outcome(verb, root, out, two[0])
        if at == -1:
            total = changing.count
            assert (code, found) == expected[0][:2]
        changing.stop()
        again = code == 1 and AGAIN in text
        said_again += again
        assert again or (code, found) in [one[:2] for one in expected], f"open {at} of {total}: {code}, {text[:1000]}"
        assert not again or not out.exists(), "what is not of one save was written"
        at += 1 if at < 0 else max(1, total // PLACES)
    assert said_again or verb in ("latest", "plan"), "the checkpoint was never replaced while it was read"


def test_a_tag_that_was_replaced_meanwhile_has_no_verdict_of_the_save_before(
    two: tuple[Path, Path], changing: Opens, tmp_path: Path
) -> None:
    root, total, at, said_again = tmp_path / "c", 1, -1, 0
    while at < total:
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(two[0], root)
        (root / TAG / "zero_pp_rank_1_mp_rank_00_model_states.pt").unlink()
        shutil.copytree(two[1] / TAG, tag_directory.staging_dir_of(root / TAG, SAVE_ID))
        changing.arm(
            root,
            at,
            lambda: tag_directory.publish_tag(tag_directory.staging_dir_of(root / TAG, SAVE_ID), root / TAG).finish(),
        )
        tags = RunStore(root).tags()
        try:
            verdict = check_tag(tags[0], check_quickly)
        except SavedAgainError:
            assert at >= 0
            said_again += 1
        else:
            if at == -1:
                total = changing.count
                assert verdict is not None and "missing" in verdict.problems[0]
            else:
                assert verdict is None
        changing.stop()
        at += 1 if at < 0 else max(1, total // PLACES)
    assert said_again, "the checkpoint was never replaced while it was judged"


@pytest.mark.parametrize(("verb", "names"), [("verify", None), ("plan", ["zeroelastic.json"])])
def test_a_remote_checkpoint_that_is_saved_again_is_not_called_damaged(
    two: tuple[Path, Path], counted: type[CountedFileSystem], verb: str, names: list[str] | None
) -> None:
    """All files are written again; or a save, or a removal, has begun, of which the commit record goes first."""
    url = "counted://bucket/last"
    total, at, again = 1, -1, 0
    while at < total:
        counted.store.clear()
        upload(two[0] / TAG, url)
        requests: list[str] = []

        def answer(path: str, start: int, data: bytes, requests: list[str] = requests, at: int = at) -> bytes:
            requests.append(path)
            if len(requests) - 1 == at:
                for name in names or ():
                    CountedFileSystem().rm_file(f"/bucket/last/{name}")
                for file in sorted((two[1] / TAG).iterdir()) if names is None else ():
                    CountedFileSystem().pipe_file(f"/bucket/last/{file.name}", file.read_bytes())
            return data

        counted.answer = staticmethod(answer)
        code, _, text = outcome(verb, url, Path("unused"), two[0])
        if at == -1:
            total = len(requests)
            assert code == 0, text
        assert code == 0 or (code == 1 and AGAIN in text), f"request {at} of {total}: {code}, {text[:1000]}"
        again += code
        at += 1 if at < 0 else max(1, total // PLACES)
    assert again
