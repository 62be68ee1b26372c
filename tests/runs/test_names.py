"""One rule for tags: what a save accepts, every reader finds; what would not be found again is refused by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from programs import run_command
from synthetic import model_name, write_checkpoint
from training import Job, build_engine, look, train_step

from zeroelastic.elastic import resume
from zeroelastic.errors import CheckpointError, UsageError
from zeroelastic.runs.locate import find_source
from zeroelastic.runs.names import list_tags, normal, read_latest, run_of, why_not_saved
from zeroelastic.runs.run_store import RunStore
from zeroelastic.runs.verdicts import check_quickly, refuse_fresh_start
from zeroelastic.testing import RankPool, compare_states

JOB = Job(groups=1, frozen=False)
FOUND = (
    "epoch1/step5", ".hidden", "a\u00a0b", "👩\u200d🚀",
    "tab\there", "a\u3000b", "epoch1/step6", "a/b/c/d", "two words", "checkpoint-5/step5", "line\nbreak",
)  # fmt: skip
REFUSED = (
    "", "../x", "x\u00a0", f".x.{'0' * 32}.tmp",
    ".", "/abs", " x", "latest", "n" * 256, "a/b/c/d/e", "\udcff", "a\0b",
)  # fmt: skip
NUM_SAVED, NUM_REFUSED = 4, 4

PART = st.text(st.sampled_from("ab. \u00a0\u3000\t\n\x00\udcff~é👩") | st.characters(), max_size=6) | st.sampled_from(
    ["latest", "..", ".", "", f".x.{'0' * 32}.old", "a" * 255, "a" * 256, "checkpoint-5", "zero"]
)
NAME = st.lists(PART, min_size=1, max_size=5).map("/".join)


def is_found(root: Path, tag: str) -> bool:
    """Whether a tag that ``latest`` names is found by every reader."""
    listed = [(found.name, found.tag_dir) for found in RunStore(root).tags()]
    source = find_source(root)
    return (
        read_latest(root) == tag == source.tag
        and (tag, root / tag) in listed
        and tag in list_tags(root)
        and source.tag_dir == find_source(root, tag=tag).tag_dir == find_source(root / tag).tag_dir == root / tag
    )


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(names=st.lists(NAME, min_size=1, max_size=4))
@example(names=list(FOUND))
@example(names=["a/b", "a", "a/b/c"])
@example(names=["./\r0", "a /."])
def test_a_name_is_refused_by_a_save_or_found_by_every_reader(
    tmp_path_factory: pytest.TempPathFactory, names: list[str]
) -> None:
    root = tmp_path_factory.mktemp("run")
    saved: list[str] = []
    for name in names:
        if why_not_saved(root, name) is not None:
            continue
        tag = normal(name)
        (root / name).mkdir(parents=True, exist_ok=True)
        (root / name / model_name(0)).write_bytes(b"")
        (root / "latest").write_bytes(tag.encode())
        saved.append(tag)
        assert is_found(root, tag)
    if saved:
        assert {found.name for found in RunStore(root).tags()} == set(saved) == set(list_tags(root))
        with pytest.raises(CheckpointError, match="trains the parameters of this engine"):
            refuse_fresh_start(root)
    shutil.rmtree(root)


def save_under_many_names(job: Job, directory: str, found: tuple[str, ...], refused: tuple[str, ...]) -> Any:
    """Each of ``found`` in a directory of its own; the errors of ``refused``, all in one directory."""
    engine = build_engine(job)
    train_step(engine, 0)
    for i, tag in enumerate(found):
        engine.save_checkpoint(f"{directory}/{i}", tag=tag)
    errors = []
    for tag in refused:
        with pytest.raises(Exception) as raised:
            engine.save_checkpoint(f"{directory}/refused", tag=tag)
        errors.append((raised.type.__name__, str(raised.value)))
    return look(engine)[0], errors


def resume_each(directory: str, count: int) -> list[tuple[str | None, dict[str, Any]]]:
    engine = build_engine(JOB.other())
    outcomes = []
    for i in range(count):
        start = resume(engine, f"{directory}/{i}")
        outcomes.append((start.tag, look(engine)[0]))
    return outcomes


def test_what_is_saved_is_resumed_at_another_size_whatever_its_name(rank_pool: RankPool, tmp_path: Path) -> None:
    found, refused = FOUND[:NUM_SAVED], REFUSED[:NUM_REFUSED]
    (state, errors), (_, others) = rank_pool.run(save_under_many_names, 2, JOB, str(tmp_path), found, refused)
    assert errors == others and {kind for kind, _ in errors} == {"UsageError"}
    for tag, (_, text) in zip(refused, errors, strict=True):
        assert "nothing can be saved under the tag" in text and text.isprintable(), tag
    assert not (tmp_path / "refused").exists()
    (outcomes,) = rank_pool.run(resume_each, 1, str(tmp_path), len(found))
    for tag, (resumed, loaded) in zip(found, outcomes, strict=True):
        assert resumed == tag
        assert compare_states(loaded, state) == [], tag


@pytest.mark.parametrize("tag", REFUSED)
def test_what_would_not_be_found_again_is_refused(tmp_path: Path, tag: str) -> None:
    assert why_not_saved(tmp_path, tag) is not None


def save_as_stock_does(directory: str) -> None:
    engine = build_engine(Job(groups=1, frozen=False, elastic=False))
    for tag in ("latest", "a\0b", f".x.{'0' * 32}.tmp"):  # where DeepSpeed would leave ranks in a barrier, or lose it
        with pytest.raises(UsageError, match="nothing can be saved under the tag"):
            engine.save_checkpoint(directory, tag=tag)
    engine.save_checkpoint(directory, tag="")


def begin(directory: str, fresh: bool = False) -> tuple[str | None, str]:
    """The tag that ``resume`` goes on from, and its error."""
    engine = build_engine(JOB)
    try:
        return resume(engine, directory, **({"fresh": True} if fresh else {})).tag, ""
    except CheckpointError as error:
        return None, str(error)


def test_a_checkpoint_in_the_directory_itself_is_resumed(rank_pool: RankPool, tmp_path: Path) -> None:
    """DeepSpeed saves and loads the tag "": rigid saves of that name are left to it, and found."""
    rank_pool.run(save_as_stock_does, 2, str(tmp_path))
    assert (tmp_path / model_name(1)).exists()
    assert rank_pool.run(begin, 1, str(tmp_path)) == [(".", "")]


def save_and_cut_a_replacement_short(directory: str, tag: str) -> tuple[str | None, str]:
    engine = build_engine(JOB)
    engine.save_checkpoint(directory, tag=tag)
    place = Path(directory) / tag
    place.rename(place.parent / f".{place.name}.{'0' * 32}.old")
    return begin(directory)


@pytest.mark.parametrize("tag", ["best", "epoch1/best"])
def test_a_replacement_that_was_cut_short_is_resumed(rank_pool: RankPool, tmp_path: Path, tag: str) -> None:
    """Where a file system cannot swap two directories, there is a moment in which a tag is hidden only."""
    assert rank_pool.run(save_and_cut_a_replacement_short, 1, str(tmp_path), tag) == [(tag, "")]


@pytest.mark.parametrize(
    "files",
    [
        ("global_step5/mp_rank_00_model_states.pt",), ("latest",), ("epoch1/step5/zeroelastic.json",), (model_name(0),),
        ("step_5_universal/zero/optimizer_state.pt",), ("run/latest", f"run/step5/{model_name(0)}"),
    ],
    ids=["another stage", "latest", "a torn tag", "a tag itself", "universal", "another run"],
)  # fmt: skip
def test_nothing_begins_anew_beside_a_checkpoint(tmp_path: Path, files: tuple[str, ...]) -> None:
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    with pytest.raises(CheckpointError, match=r"latest names no checkpoint, and none .* of this engine, but there is"):
        refuse_fresh_start(tmp_path)


def test_a_run_begins_in_a_directory_that_has_other_things(tmp_path: Path) -> None:
    (tmp_path / f".global_step1.{'0' * 32}.tmp").mkdir()
    (tmp_path / f".global_step1.{'0' * 32}.tmp" / model_name(0)).touch()
    (tmp_path / "logs" / "tensorboard").mkdir(parents=True)
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "self").symlink_to(".")
    refuse_fresh_start(tmp_path)
    refuse_fresh_start(tmp_path / "not there")


def begin_twice(directory: str) -> list[tuple[str | None, str]]:
    return [begin(directory), begin(directory, fresh=True)]


def test_resume_asks_before_it_begins_anew(rank_pool: RankPool, tmp_path: Path) -> None:
    (tmp_path / "earlier").mkdir()
    (tmp_path / "earlier" / "latest").write_text("global_step5")
    (refused, begun), other = rank_pool.run(begin_twice, 2, str(tmp_path))
    assert other == [refused, begun] and refused[0] is None and begun == (None, "")
    assert f"there is {tmp_path}/earlier/latest" in refused[1] and "fresh=True" in refused[1]


def verb(*arguments: object) -> tuple[int, str, str]:
    done = run_command(*arguments, env={"COLUMNS": "200", "TERM": "dumb"})
    return done.returncode, done.stdout, done.stderr


def test_every_verb_finds_tags_of_any_name(tmp_path: Path) -> None:
    for step, tag in enumerate(FOUND, 1):
        (tmp_path / tag).parent.mkdir(parents=True, exist_ok=True)
        write_checkpoint(tmp_path / tag, world_size=2, global_steps=step, record=True)
    newest = FOUND[-1]
    (tmp_path / "latest").write_text(newest)
    code, out, _ = verb("latest", tmp_path, "--quick", "--json")
    assert code == 0 and json.loads(out)["tag"] == newest and json.loads(out)["num_tags"] == len(FOUND)
    for tag in FOUND:
        for name in ("verify", "inspect"):
            code, out, _ = verb(name, tmp_path, "--tag", tag, "--json")
            assert code == 0 and json.loads(out).get("ok", True), (name, tag)
    (tmp_path / "epoch1" / "best").symlink_to("step5")
    code, out, _ = verb("prune", tmp_path, "--keep", 2, "--yes", "--json")
    document = json.loads(out)
    stay = {newest, FOUND[-2], "epoch1/step5", "epoch1/best"}
    assert code == 0 and set(document["removed"]) == {*FOUND} - stay, document
    assert {tag.name for tag in RunStore(tmp_path).tags()} == stay - {"epoch1/best"}
    assert all(check_quickly(tmp_path / tag) == () for tag in stay)


def test_reshard_takes_a_nested_tag_along(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "ck" / "epoch1" / "step5", world_size=2, global_steps=5, record=True)
    (tmp_path / "ck" / "latest").write_text("epoch1/step5")
    code, _, err = verb("reshard", tmp_path / "ck", tmp_path / "new", "-n", 3, "--sub-group-size", 40)
    assert code == 0, err
    assert find_source(tmp_path / "new").tag == "epoch1/step5"
    assert check_quickly(tmp_path / "new" / "epoch1" / "step5") == ()


@pytest.mark.parametrize("name", ["checkpoint-500", "checkpoint_3", "epoch=1.ckpt", "run"])
def test_a_folder_of_a_framework_around_one_tag_is_in_the_directory_of_the_run(name: str) -> None:
    directory = Path("out") / name
    assert run_of(directory) == (directory if name == "run" else Path("out"))
