"""What is made of a lean tag is what is made of the full tag of the same state, byte for byte."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import run_command
from exports import plain
from lean_saves import JOB, load_and_look, save_lean_and_full
from made_once import made_once
from saved_files import record_of
from training import Job, raised

import zeroelastic
from zeroelastic.checkpoint.shared_files import FROZEN_FOLDER, read_shared_head
from zeroelastic.errors import DigestMismatchError, MissingFileError
from zeroelastic.testing import RankPool
from zeroelastic.verbs.reshard import reshard as reshard_module

SAVES = {
    "3": (3, JOB),
    "3-rigid-fp16": (2, replace(JOB, elastic=False, precision="fp16")),
    "2": (3, replace(JOB, stage=2, zero={"round_robin_gradients": True})),
    "2-fp16": (2, replace(JOB, stage=2, precision="fp16")),
    "1": (3, replace(JOB, stage=1, zero={"parameter_alignment": True})),
    "1-fp32": (2, replace(JOB, stage=1, precision="fp32")),
}


@pytest.fixture(scope="module", params=[*SAVES])
def saved(request: pytest.FixtureRequest, rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders ``lean`` and ``full``."""
    ranks, job = SAVES[request.param]
    return made_once(
        tmp_path_factory,
        f"lean-{request.param}",
        lambda directory: rank_pool.run(save_lean_and_full, ranks, job, str(directory)) and None,
    )


@pytest.fixture
def same_save_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every reshard has the same id, which its files have in them."""
    original = reshard_module.new_directory

    @contextmanager
    def new_directory(*arguments: Any, **options: Any) -> Iterator[tuple[Path, str]]:
        with original(*arguments, **options) as (directory, save_id):
            yield directory, "0" * len(save_id)

    monkeypatch.setattr(reshard_module, "new_directory", new_directory)


def contents(directory: Path) -> dict[str, object]:
    """Every file, but what names the source: its id and time, and scripts of DeepSpeed that a save copies."""
    found: dict[str, object] = {}
    for path in sorted(path for path in directory.rglob("*") if path.is_file()):
        if path.name == "zeroelastic.json":
            record = json.loads(path.read_text())
            found[path.name] = {key: record[key] for key in record.keys() - {"parent", "committed_at", "checksum"}}
        elif path.suffix != ".py":
            found[str(path.relative_to(directory))] = path.read_bytes()
    return found


@pytest.mark.usefixtures("same_save_id")
@pytest.mark.parametrize(("stage", "world_size"), [(3, 2), (3, 5), (2, 2), (2, 1), (1, 3), (0, 2)])
def test_a_full_reshard_is_that_of_the_full_tag(saved: Path, tmp_path: Path, stage: int, world_size: int) -> None:
    for name in ("lean", "full"):
        options: dict[str, Any] = {"world_size": world_size, "stage": stage, "full": True}
        zeroelastic.reshard(saved / name, tmp_path / name, **options)
    assert contents(tmp_path / "lean") == contents(tmp_path / "full")
    assert not (tmp_path / "lean" / FROZEN_FOLDER).exists()


@pytest.mark.parametrize(("stage", "world_size"), [(3, 2), (2, 4), (1, 1)])
def test_without_full_the_result_is_lean(saved: Path, tmp_path: Path, stage: int, world_size: int) -> None:
    """With the same state; nothing is written that the source has in shared files. It can be made full from there."""
    (shared,) = (saved / "lean" / FROZEN_FOLDER).iterdir()
    report = zeroelastic.reshard(saved / "lean", tmp_path / "lean", world_size=world_size, stage=stage, verify=True)
    assert report.content_root == report.recorded_root
    assert (tmp_path / "lean" / FROZEN_FOLDER / shared.name).samefile(shared)
    assert zeroelastic.diff(saved / "full", tmp_path / "lean").equal
    assert [file.name for file in record_of(tmp_path / "lean" / report.tag).shared] == [shared.name]
    for path in (tmp_path / "lean" / report.tag).glob("*model_states.pt"):
        module = torch.load(path, weights_only=False)["module"]
        filled = {name for name, value in module.items() if value is not None and value.numel()}
        assert filled == {"batches_seen", "part"}
    zeroelastic.reshard(tmp_path / "lean", tmp_path / "full", world_size=3, full=True)
    assert zeroelastic.diff(saved / "full", tmp_path / "full").equal
    assert not (tmp_path / "full" / FROZEN_FOLDER).exists()


def test_a_lean_result_resumes(saved: Path, rank_pool: RankPool, tmp_path: Path) -> None:
    """As what is made of the full tag does."""
    job = replace(SAVES[saved.name.removeprefix("once-lean-")][1], perturb=0.5)
    found = []
    for name in ("lean", "full"):
        zeroelastic.reshard(saved / name, tmp_path / name, world_size=1)
        found.append(rank_pool.run(load_and_look, 1, job, str(tmp_path / name)))
    assert found[0] == found[1]


def test_stage_0_needs_full(saved: Path, tmp_path: Path) -> None:
    done = run_command("reshard", saved / "lean", tmp_path / "out", "-n", 2, "--stage", 0)
    assert done.returncode == 2 and "Add --full" in done.stderr.replace("\n", " ")
    assert not list(tmp_path.iterdir())
    done = run_command("reshard", saved / "lean", tmp_path / "out", "-n", 2, "--full", "--dry-run", "--json")
    assert done.returncode == 0
    assert not any(FROZEN_FOLDER in note for note in json.loads(done.stdout)["notes"])


def loaded(path: Path) -> object:
    state = torch.load(path, weights_only=False)
    return plain(state.get("module", state))


def test_an_export_is_that_of_the_full_tag(saved: Path, tmp_path: Path) -> None:
    for name in ("lean", "full"):
        report = zeroelastic.export(saved / name, tmp_path / name, optimizer=True)
        assert report.digests_compared
    assert contents(tmp_path / "lean") == contents(tmp_path / "full")


def test_a_distributed_checkpoint_is_that_of_the_full_tag(saved: Path, tmp_path: Path) -> None:
    """All but the metadata, which name the checkpoint."""
    for name in ("lean", "full"):
        zeroelastic.convert(saved / name, tmp_path / name, to="dcp")
    lean, full = contents(tmp_path / "lean"), contents(tmp_path / "full")
    assert lean.pop(".metadata") and full.pop(".metadata")
    assert lean == full


def test_lean_and_full_do_not_differ(saved: Path) -> None:
    report = zeroelastic.diff(saved / "full", saved / "lean")
    assert report.equal and not report.state
    assert "mask" in {tensor.param for tensor in report.equal_tensors}


def test_every_tensor_is_read_and_shown_from_where_it_is(saved: Path) -> None:
    (shared,) = (saved / "lean" / FROZEN_FOLDER).iterdir()
    with zeroelastic.open(saved / "lean") as lean, zeroelastic.open(saved / "full") as full:
        assert [*lean] == [*full]
        assert all(lean[name].numpy().tobytes() == full[name].numpy().tobytes() for name in full)
        assert all(lean[name].kind == full[name].kind for name in full)
        assert [place.path for place in lean.places("mask")] == [shared]
    shown, other = (zeroelastic.show(saved / name, "*frozen_table*").tensors[0] for name in ("lean", "full"))
    assert [place.file for place in shown.places] == [shared.name]
    assert (shown.digest, shown.statistics) == (shown.recorded_digest, other.statistics)


@pytest.fixture
def without_file(saved: Path, tmp_path: Path) -> tuple[Path, str]:
    """A lean run whose shared file is gone, and the name of the file."""
    shutil.copytree(saved / "lean", tmp_path / "lean")
    (shared,) = (tmp_path / "lean" / FROZEN_FOLDER).iterdir()
    shared.rename(tmp_path / "away")
    return tmp_path / "lean", shared.name


@pytest.mark.parametrize(
    "read",
    [
        lambda run: zeroelastic.reshard(run, run.parent / "out", world_size=2, full=True),
        lambda run: zeroelastic.export(run, run.parent / "out"),
        lambda run: zeroelastic.convert(run, run.parent / "out", to="dcp"),
        lambda run: zeroelastic.diff(run, run),
        lambda run: zeroelastic.show(run, "frozen_table.weight"),
    ],
    ids=["reshard", "export", "convert", "diff", "show"],
)
def test_a_shared_file_that_is_gone_is_named(without_file: tuple[Path, str], read: Callable[[Path], object]) -> None:
    run, name = without_file
    with pytest.raises(MissingFileError, match=name):
        read(run)


def without_record(saved: Path, to: Path) -> Path:
    """A copy of the lean run whose commit record is lost."""
    shutil.copytree(saved / "lean", to)
    next(to.glob("global_step*/zeroelastic.json")).unlink()
    return to


def test_a_tag_whose_record_is_lost_is_read_as_before(saved: Path, rank_pool: RankPool, tmp_path: Path) -> None:
    """By verbs, by ``open`` and by a load, which notices damage too."""
    lean = without_record(saved, tmp_path / "lean")
    zeroelastic.export(lean, tmp_path / "weights")
    zeroelastic.export(saved / "full", tmp_path / "full-weights")
    assert contents(tmp_path / "weights") == contents(tmp_path / "full-weights")
    zeroelastic.reshard(lean, tmp_path / "full", world_size=2, full=True)
    assert zeroelastic.diff(saved / "full", tmp_path / "full").equal and zeroelastic.diff(saved / "full", lean).equal
    with zeroelastic.open(lean) as opened, zeroelastic.open(saved / "full") as full:
        assert all(opened[name].numpy().tobytes() == full[name].numpy().tobytes() for name in full)
    job = replace(SAVES[saved.name.removeprefix("once-lean-")][1], perturb=0.5)
    found = [rank_pool.run(load_and_look, 2, job, str(run)) for run in (lean, saved / "full")]
    assert found[0] == found[1]
    damage(next((lean / FROZEN_FOLDER).iterdir()), "frozen_table.weight")
    for kind, text in rank_pool.run(try_to_load, 2, job, str(lean)):
        assert kind == "DigestMismatchError" and "frozen_table.weight is not what was saved" in text


def try_to_load(job: Job, directory: str) -> tuple[str, str]:
    return raised(lambda: load_and_look(job, directory))


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("name", ["frozen_table.weight", "mask"])
def test_damage_in_a_shared_file_is_found(saved: Path, tmp_path: Path, name: str, recorded: bool) -> None:
    """In a frozen parameter, by the commit record, and in a buffer, by the digest that the tag states."""
    shutil.copytree(saved / "lean", tmp_path / "lean") if recorded else without_record(saved, tmp_path / "lean")
    (shared,) = (tmp_path / "lean" / FROZEN_FOLDER).iterdir()
    damage(shared, name)
    with pytest.raises(DigestMismatchError, match=name):
        zeroelastic.reshard(tmp_path / "lean", tmp_path / "out", world_size=2, full=True)
    assert not (tmp_path / "out").exists()


def damage(shared: Path, name: str) -> None:
    """Flip a bit of a tensor in a shared file."""
    place = read_shared_head(shared)[0].tensors[name]
    with open(shared, "r+b") as file:
        file.seek(place.offset + 8)
        byte = file.read(1)
        file.seek(place.offset + 8)
        file.write(bytes([byte[0] ^ 1]))
