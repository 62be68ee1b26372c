"""Verification on load and fall back on real DeepSpeed ranks: what is damaged is never trained on."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from saved_files import flip, record_of, watch_opens
from training import Job, build_engine, look, train_step

import zeroelastic
from zeroelastic.checkpoint.commit_record import RECORD_NAME
from zeroelastic.checkpoint.open import open_checkpoint
from zeroelastic.deepspeed.options import parse_options
from zeroelastic.errors import ZeroElasticError
from zeroelastic.testing import RankPool, compare_states

NEWEST, MIDDLE, OLDEST = "global_step3", "global_step2", "global_step1"
FALLBACK: dict[str, Any] = {"fallback": True}


@dataclass(frozen=True)
class Run:
    """A directory with three tags, and the state at each."""

    directory: Path
    states: dict[str, Any]


@dataclass(frozen=True)
class Loaded:
    """What one rank saw of a load: the tag, or the error; the state; what was opened; warnings of rank 0."""

    tag: str = ""
    error: str = ""
    text: str = ""
    state: Any = None
    notes: tuple[str, ...] = ()
    opened: list[str] = field(default_factory=list)
    matches: bool | None = None


def save_three(directory: str) -> dict[str, Any]:
    engine = build_engine(Job())
    states = {}
    for step in range(3):
        train_step(engine, step)
        states[f"global_step{step + 1}"], _ = look(engine)
        engine.save_checkpoint(directory)
    return states


@pytest.fixture(scope="module")
def saved(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Run:
    directory = tmp_path_factory.mktemp("three")
    return Run(directory, rank_pool.run(save_three, 3, str(directory))[0])


@pytest.fixture
def run(saved: Run, tmp_path: Path) -> Run:
    shutil.copytree(saved.directory, tmp_path / "c")
    return Run(tmp_path / "c", saved.states)


def load(
    directory: str,
    job: Job,
    *,
    latest: Sequence[bytes | None] = (None,),
    resume: bool = False,
    **how: Any,
) -> list[Loaded]:
    """Load with one engine, once for each content of ``latest``, None for what is there; on ranks."""
    engine = build_engine(job)
    opened = watch_opens()
    results: list[Loaded] = []
    for content in latest:
        if content is not None and dist.get_rank() == 0:
            (Path(directory) / "latest").write_bytes(content)
        dist.barrier()
        opened.clear()
        try:
            if resume:
                tag: str | None = zeroelastic.resume(engine, directory).tag
            else:
                path, _ = engine.load_checkpoint(directory, **how)
                tag = None if path is None else Path(path).parent.name
        except ZeroElasticError as error:
            results.append(Loaded(error=type(error).__name__, text=str(error)))
            continue
        report = engine.zeroelastic_report
        mine = [name for name in opened if name.startswith(directory)]
        results.append(Loaded(str(tag), "", "", look(engine)[0], report.notes, mine, report.root_matches))
    return results


def alike(ranks: list[list[Loaded]]) -> list[Loaded]:
    """The results, of which every rank has the same."""
    for results in ranks:
        for mine, first in zip(results, ranks[0], strict=True):
            assert (mine.tag, mine.error, mine.text, mine.notes) == (first.tag, first.error, first.text, first.notes)
    return ranks[0]


def damage_state(tag: Path, *, key: str = "exp_avg") -> str:
    """Flip a bit of a tensor; the name of the file."""
    shard = open_checkpoint(tag).shard(1)
    flip(shard.path, int(shard.extents[key].offset[shard.layout.index()["up.weight"]]) + 6, 8)
    return shard.path.name


@pytest.mark.support(
    "Using it", '`"fallback": true`', "exact", "to the newest tag that loads; nothing is written or deleted"
)
def test_a_load_falls_back_loudly_and_leaves_the_bad_tag_as_it_is(run: Run, rank_pool: RankPool) -> None:
    name = damage_state(run.directory / NEWEST)
    before = {path: path.read_bytes() for path in run.directory.rglob("*") if path.is_file()}
    ranks = rank_pool.run(load, 2, str(run.directory), Job(options=FALLBACK).other())
    for (loaded,) in ranks:
        assert loaded.tag == MIDDLE and loaded.matches and compare_states(run.states[MIDDLE], loaded.state) == []
        assert "FELL BACK to global_step2" in loaded.notes[0] and name in loaded.notes[0]
        assert "up.weight: exp_avg" in loaded.notes[0]
    alike(ranks)
    after = {path: path.read_bytes() for path in run.directory.rglob("*") if path.is_file()}
    assert after == before, "something was changed, written or deleted"


def test_what_is_found_without_reading_payload_falls_back_too_until_none_is_left(run: Run, rank_pool: RankPool) -> None:
    path = next((run.directory / NEWEST).glob("*rank_0_*model_states.pt"))
    path.write_bytes(path.read_bytes()[:-1])
    next((run.directory / MIDDLE).glob("*rank_1_*optim_states.pt")).unlink()
    job = Job(options=FALLBACK).other()
    (loaded,) = alike(rank_pool.run(load, 2, str(run.directory), job))
    assert loaded.tag == OLDEST and compare_states(run.states[OLDEST], loaded.state) == []
    assert path.name in loaded.notes[0] and "rank_1_mp_rank_00_optim_states.pt" in loaded.notes[0]
    damage_state(run.directory / OLDEST, key="fp32")
    (failed,) = alike(rank_pool.run(load, 2, str(run.directory), job))
    assert failed.error == "CheckpointError" and "none of the checkpoints can be loaded" in failed.text
    assert all(tag in failed.text for tag in (NEWEST, MIDDLE, OLDEST))


def test_a_torn_commit_record_is_no_commit(run: Run, rank_pool: RankPool) -> None:
    """Such a tag is tried only where ``latest`` names it, and is never in the way of an older one."""
    flip(run.directory / NEWEST / RECORD_NAME, 40, 8)
    (run.directory / MIDDLE / RECORD_NAME).write_text("{")
    (loaded,) = alike(rank_pool.run(load, 2, str(run.directory), Job(options=FALLBACK).other()))
    assert loaded.tag == OLDEST and RECORD_NAME in loaded.notes[0] and MIDDLE not in loaded.notes[0]


def test_what_is_wrong_with_the_run_is_raised(run: Run, rank_pool: RankPool) -> None:
    (other,) = alike(rank_pool.run(load, 2, str(run.directory), Job(options=FALLBACK).other(extra="more")))
    assert other.error == "LayoutMismatchError"
    strict = Job(options={**FALLBACK, "strict": True}).other(batch=60)
    assert alike(rank_pool.run(load, 2, str(run.directory), strict))[0].error == "StrictError"


def test_a_tag_that_is_named_is_loaded_or_an_error(run: Run, rank_pool: RankPool) -> None:
    name = damage_state(run.directory / NEWEST)
    job = Job(options=FALLBACK).other()
    (failed,) = alike(rank_pool.run(load, 2, str(run.directory), job, tag=NEWEST))
    assert failed.error == "DigestMismatchError" and name in failed.text
    (loaded,) = alike(rank_pool.run(load, 2, str(run.directory), job, tag=MIDDLE))
    assert loaded.tag == MIDDLE and loaded.matches


def load_without_latest(directory: str, jobs: Sequence[Job]) -> list[list[Loaded]]:
    return [load(directory, job, resume=resume) for resume in (False, True) for job in jobs]


def test_without_latest_the_newest_commit_of_the_same_parameters_is_taken(run: Run, rank_pool: RankPool) -> None:
    """And an engine whose parameters no commit has is refused: it never begins from scratch without a word."""
    (run.directory / "latest").unlink()
    job = Job(options=FALLBACK).other()
    own, other, resumed, refused = (
        results[0]
        for results in rank_pool.run(load_without_latest, 2, str(run.directory), [job, job.other(extra="more")])[0]
    )
    for loaded in (own, resumed):
        assert loaded.tag == NEWEST and loaded.notes[0].startswith("NOT WHAT LATEST NAMES: ")
    for failed in (other, refused):
        assert failed.error == "CheckpointError" and "trains the parameters of this engine" in failed.text


def test_what_latest_names_is_where_a_walk_begins(run: Run, rank_pool: RankPool) -> None:
    job = Job(options=FALLBACK).other()
    (run.directory / "latest").write_text(MIDDLE)
    damage_state(run.directory / MIDDLE)
    (loaded,) = alike(rank_pool.run(load, 2, str(run.directory), job))
    assert loaded.tag == OLDEST, "somebody pointed latest at an older tag"
    contents = (b"global_stepr", b"", b"\x07lobal_step3")
    for loaded in alike(rank_pool.run(load, 2, str(run.directory), job, latest=contents)):
        assert loaded.tag == NEWEST


def test_latest_that_is_damaged_or_not_the_newest_is_said(run: Run, rank_pool: RankPool) -> None:
    damaged = {
        b"global_stepr": "names 'global_stepr'",
        b"gl\xefbal": "does not hold the name",
        b"": "does not hold the name",
    }
    contents = (*damaged, MIDDLE.encode())
    *failed, loaded = alike(rank_pool.run(load, 2, str(run.directory), Job().other(), latest=contents))
    for result, told in zip(failed, damaged.values(), strict=True):
        assert result.error in ("CheckpointError", "MissingFileError")
        assert str(run.directory / "latest") in result.text and told in result.text
    assert loaded.tag == MIDDLE and loaded.notes[0].startswith("NOT THE NEWEST: ") and NEWEST in loaded.notes[0]


def test_a_resume_says_that_latest_holds_a_path(run: Run, rank_pool: RankPool) -> None:
    """Which leads nowhere, for a load as for the verbs."""
    contents = [str(run.directory / MIDDLE).encode(), f"../{run.directory.name}/{MIDDLE}".encode()]
    results = alike(rank_pool.run(load, 2, str(run.directory), Job().other(), latest=contents, resume=True))
    for result in results:
        assert result.tag == NEWEST and result.notes[0].startswith("NOT WHAT LATEST NAMES: ")


def _buffer(tag: Path) -> tuple[Path, int]:
    """The module states of rank 0, and where the bytes of the buffer are."""
    from zeroelastic.torch_file.header import TensorRef, read_torch_file

    path = tag / "zero_pp_rank_0_mp_rank_00_model_states.pt"
    file = read_torch_file(path, foreign="inert")
    assert isinstance(file.root, dict)
    ref = file.root["module"]["batches_seen"]
    assert isinstance(ref, TensorRef)
    return path, file.extent(ref).offset


DAMAGE: dict[str, Callable[[Path], tuple[Path, int]]] = {
    "state": lambda tag: (
        (shard := open_checkpoint(tag).shard(0)).path,
        int(shard.extents["fp32"].offset[shard.layout.index()["up.weight"]]),
    ),
    "buffer": _buffer,
    "directory": lambda tag: (path := next(tag.glob("*rank_0_*optim_states.pt")), path.stat().st_size - 60),
}


LEVELS = ("full", "read", "quick", "off")


def load_damaged(directory: str) -> list[Loaded]:
    """Load under each level of verification with each of DAMAGE; on ranks."""
    engines = [build_engine(Job(options={"verify": level}).other()) for level in LEVELS]
    results: list[Loaded] = []
    for engine, find in itertools.product(engines, DAMAGE.values()):
        path, offset = find(Path(directory) / NEWEST)
        for after in (False, True):
            dist.barrier()
            if dist.get_rank() == 0:
                flip(path, offset)
            dist.barrier()
            if after:
                continue
            try:
                engine.load_checkpoint(directory)
                results.append(Loaded(NEWEST, notes=engine.zeroelastic_report.notes))
            except ZeroElasticError as error:
                results.append(Loaded(error=type(error).__name__, text=str(error)))
                assert path.name in str(error)
    return results


@pytest.mark.support("Using it", '`"verify"`: full, read, quick, off', "exact", "what was not verified is said")
def test_the_levels_of_verification(run: Run, rank_pool: RankPool) -> None:
    """Payload is for "full" and "read"; "quick" sees what a directory says; "off" only what it cannot do without."""
    seen: dict[str, list[str]] = {what: [] for what in DAMAGE}
    results = alike(rank_pool.run(load_damaged, 2, str(run.directory)))
    for (level, what), result in zip(itertools.product(LEVELS, DAMAGE), results, strict=True):
        if result.error:
            seen[what].append(level)
        else:
            assert f'content not verified ("verify": "{level}")' in result.notes
    content = ["full", "read"]
    assert seen == {"state": content, "buffer": content, "directory": [*content, "quick"]}


def load_shifted(directory: str, level: str) -> str:
    """Load by a plan that mistakes two parameters of one size for each other; on ranks."""
    from zeroelastic.deepspeed.load import restore

    fill = restore.fill

    def shifted(plan: Any, *arguments: Any, **options: Any) -> Any:
        names = [param.name for param in plan.dst.params]
        if "norm.weight" in names:
            first, second = (plan.param == names.index(name) for name in ("norm.weight", "norm.bias"))
            moved = plan.dst_offset.copy()
            moved[first], moved[second] = plan.dst_offset[second], plan.dst_offset[first]
            plan = replace(plan, dst_offset=moved)
        return fill(plan, *arguments, **options)

    restore.fill = shifted
    try:
        engine = build_engine(Job(options={"verify": level}).other(sub_group_size=10**6))
        engine.load_checkpoint(directory)
        return "loaded"
    except ZeroElasticError as error:
        return type(error).__name__
    finally:
        restore.fill = fill


@pytest.mark.parametrize("level", ["full", "read"])
def test_the_plan_is_not_trusted(saved: Run, rank_pool: RankPool, level: str) -> None:
    """What was read is right, and lies where the run has something else."""
    assert set(rank_pool.run(load_shifted, 2, str(saved.directory), level)) == {"DigestMismatchError"}


def load_changed_later(directory: str, level: str) -> tuple[str, int]:
    """Load while something changes one element after everything is in its place; on ranks.

    Also returns of how many tensors, with elements on this rank, the digest was computed from the live state.
    """
    from zeroelastic.deepspeed.live import digests
    from zeroelastic.deepspeed.load import restore

    restore_values, digest_pieces = restore._restore_values, digests.digest_pieces
    live_digests: list[int] = []

    def changing(engine: Any, live: Any, *arguments: Any) -> Any:
        live.fp32(0)[0] += 1
        return restore_values(engine, live, *arguments)

    def counting(pieces: Any) -> list[int]:
        live_digests.append(sum(piece.tensor.numel() > 0 for piece in pieces))
        return digest_pieces(pieces)

    restore._restore_values, digests.digest_pieces = changing, counting
    try:
        engine = build_engine(Job(options={"verify": level}))
        engine.load_checkpoint(directory)
        return "loaded", sum(live_digests)
    except ZeroElasticError as error:
        return type(error).__name__, sum(live_digests)
    finally:
        restore._restore_values, digests.digest_pieces = restore_values, digest_pieces


def test_only_full_sees_what_changes_after_it_was_read(saved: Run, rank_pool: RankPool) -> None:
    """As docs/reference/loading.md says; "read" passes over no live tensor for what it does show."""
    assert set(rank_pool.run(load_changed_later, 2, str(saved.directory), "read")) == {("loaded", 0)}
    results = rank_pool.run(load_changed_later, 2, str(saved.directory), "full")
    assert all(error == "DigestMismatchError" and count > 0 for error, count in results)


@pytest.mark.parametrize("level", ["full", "read"])
def test_weights_that_are_rounded_are_verified_as_they_were_read(run: Run, rank_pool: RankPool, level: str) -> None:
    job = Job(options={"verify": level}).other(zero={"load_from_fp32_weights": False})
    (loaded,) = alike(rank_pool.run(load, 2, str(run.directory), job))
    assert any("digests of what was loaded match the record" in note for note in loaded.notes)
    name = damage_state(run.directory / NEWEST, key="fp32")
    (failed,) = alike(rank_pool.run(load, 2, str(run.directory), job))
    assert failed.error == "DigestMismatchError" and "up.weight: fp32" in failed.text and name in failed.text


def test_the_default_is_read_with_a_warning_where_digests_are_not_native(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import zeroelastic.deepspeed.options as options

    monkeypatch.setattr(options, "is_usable", lambda name: False)
    assert parse_options({}).verify == "read"
    options.warn_of_slow_verification(parse_options({"zeroelastic": {"verify": True}}))
    assert not caplog.records
    options.warn_of_slow_verification(parse_options({}))
    assert "the native engine is not built" in caplog.text


def test_module_states_that_have_changed_places_are_noticed_at_any_level(run: Run, rank_pool: RankPool) -> None:
    """Their content is the ranks' own, and nothing in them but torch's name of the archive says whose."""
    first, second = (run.directory / NEWEST / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in (0, 1))
    mine, theirs = first.read_bytes(), second.read_bytes()
    first.write_bytes(theirs)
    second.write_bytes(mine)
    (failed,) = alike(rank_pool.run(load, 2, str(run.directory), Job(options={"verify": "off"}).other()))
    assert failed.error == "CheckpointError" and first.name in failed.text
    assert record_of(run.directory / NEWEST).files[first.name] == len(mine)
