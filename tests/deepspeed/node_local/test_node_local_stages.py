"""Node-local disks at ZeRO stages 1 and 2, where every node writes a file of the whole module under the same name.

Ranks play nodes as in test_node_local.py. Buffers and client state of a save differ between its nodes, so that it shows
whose file a rank has taken.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from saved_files import flip, record_of, state_bytes
from saves import NodeRun, Nodes, on_nodes
from training import LOSS_RTOL, Job, Outcome, build_engine, look, train_step

import zeroelastic
from zeroelastic.checkpoint.commit_record import RECORD_NAME, read_record
from zeroelastic.deepspeed.save.shard_writer import ShardWriter
from zeroelastic.testing import RankPool, compare_states

SECTION = "Checkpoint engines and storage"
NODE_LOCAL = {"checkpoint": {"use_node_local_storage": True}}
MODULE = "mp_rank_00_model_states.pt"
PLACED = (0, 0, 1, 1)
"""Of the saves: which node each rank is on."""

STAGE_2 = Job(stage=2, config=NODE_LOCAL, zero={"round_robin_gradients": True})
STAGE_3 = Job(config=NODE_LOCAL)
STOCK = Job(stage=2, config=NODE_LOCAL, elastic=False, installed=False)
BACKGROUND_BF16 = Job(
    stage=1, config={**NODE_LOCAL, "data_types": {"grad_accum_dtype": "fp32"}}, options={"async_save": True}
)
"""A run with a ``BF16_Optimizer``, saved in the background."""

support = pytest.mark.support
pytestmark = pytest.mark.usefixtures("mounts")


@pytest.fixture(scope="module")
def run(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> NodeRun:
    """A save at stage 2 by 4 ranks on nodes 0 and 1."""
    return NodeRun(tmp_path_factory.mktemp("nodes"), rank_pool, STAGE_2, PLACED, save_differing)


def save_differing(job: Job, directory: str) -> Outcome:
    """Three steps and a save; the ranks differ in a buffer and in client state, of which one tensor is a weight."""
    engine = build_engine(job)
    for step in range(3):
        train_step(engine, step)
    engine.module.batches_seen.fill_(10.0 + dist.get_rank())
    state, gathered = look(engine)
    weight = engine.module.up.weight.detach()
    engine.save_checkpoint(directory, client_state={"note": "hello", "rank": dist.get_rank(), "weight": weight})
    copy = weight.clone()
    losses = [train_step(engine, step) for step in (3, 4)]
    if job.installed:
        zeroelastic.wait_for_save(engine)
    dist.barrier()
    return Outcome(state, gathered, losses, client_state=copy)


@dataclass(frozen=True)
class Resumed:
    """What one rank has after a load, and whose buffer and client state these are."""

    state: Mapping[str, Any]
    gathered: Mapping[str, str]
    losses: Sequence[float]
    buffer_of: int
    client_of: int
    weight: torch.Tensor
    report: Any
    error: str = ""


def resume(job: Job, directory: str, **load: Any) -> Resumed:
    return load_here(build_engine(job), directory, **load)


def load_here(engine: Any, directory: str, **load: Any) -> Resumed:
    path, client_state = engine.load_checkpoint(directory, **load)
    assert path is not None
    state, gathered = look(engine)
    buffer_of = int(engine.module.batches_seen[0].item()) - 10
    losses = [train_step(engine, step) for step in (3, 4)]
    rank, weight = client_state["rank"], client_state["weight"]
    return Resumed(state, gathered, losses, buffer_of, rank, weight, engine.zeroelastic_report)


def check(saved: Outcome, resumed: Sequence[Resumed], taken: Sequence[int]) -> None:
    """The saved state is live on every rank; ``taken`` are the ranks whose buffers and client state each rank has."""
    assert [(one.buffer_of, one.client_of) for one in resumed] == [(rank, rank) for rank in taken]
    for rank, one in enumerate(resumed):
        lines = compare_states(saved.state, one.state)
        assert [line for line in lines if not line.startswith(("buffer/", "loss_scaler/"))] == [], f"rank {rank}"
        assert one.gathered == saved.gathered
        assert one.losses == pytest.approx(saved.losses, rel=LOSS_RTOL["bf16"])
        assert torch.equal(one.weight, saved.client_state), "client state in the memory of a weight"
        assert one.report == resumed[0].report


@support(SECTION, "`use_node_local_storage` at stages 1 and 2, more and fewer ranks", "exact", "on nodes old and new")
@pytest.mark.parametrize("placed", [PLACED, (2, 0, 1), (1, 2, 0, 0, 2)], ids=str)
def test_every_rank_takes_the_files_that_its_node_has(run: NodeRun, placed: tuple[int, ...]) -> None:
    resumed = run.call(placed, resume, STAGE_2.other(), run.nodes.path)
    check(run.outcome, resumed, [{0: 0, 1: 2, 2: 0}[node] for node in placed])
    report = resumed[0].report
    assert report.root_matches and report.total_bytes_read == state_bytes(run.nodes.disk(0))
    assert (report.bytes_sent > 0) == (placed != PLACED), "the same ranks on the same nodes read their own files"
    notes = [note for note in report.notes if MODULE in note]
    assert "differs between the nodes" in notes[0]
    without = ", ".join(str(rank) for rank, node in enumerate(placed) if node == 2)
    assert len(notes) == 1 + bool(without) and f"({without})" in notes[-1] + "()"


@support(SECTION, "node-local disks from ZeRO stage 2 to 3 and back", "exact")
def test_stage_3_goes_on_from_stage_2_and_back(run: NodeRun, rank_pool: RankPool, tmp_path: Path) -> None:
    resumed = run.call((2, 1, 0), resume, STAGE_3.other(), run.nodes.path)
    check(run.outcome, resumed, [0, 2, 0])
    assert resumed[0].report.root_matches
    back = NodeRun(tmp_path, rank_pool, STAGE_3, (0, 0, 1), save_differing)
    resumed = back.call((1, 2, 0, 0), resume, STAGE_2.other(), back.nodes.path)
    check(back.outcome, resumed, [0, 1, 2, 0])
    assert resumed[0].report.root_matches


@support(SECTION, '`use_node_local_storage` with `"async_save"`', "exact")
@support(SECTION, '`use_node_local_storage` at stages 1 and 2 with `"async_save"`, `BF16_Optimizer`', "exact")
def test_a_bf16_optimizer_is_saved_in_the_background(rank_pool: RankPool, tmp_path: Path) -> None:
    saved = NodeRun(tmp_path, rank_pool, BACKGROUND_BF16, (0, 1, 0), save_differing)
    resumed = saved.call((1, 0, 2, 0), resume, STAGE_2.other(), saved.nodes.path)
    check(saved.outcome, resumed, [1, 0, 0, 0])
    assert resumed[0].report.root_matches and resumed[0].report.saved_world_size == 3


@support(SECTION, "what DeepSpeed alone saved with `use_node_local_storage` at stages 1 and 2", "exact", "at any size")
def test_what_deepspeed_alone_saved_is_resumed(rank_pool: RankPool, tmp_path: Path) -> None:
    """Its files of all nodes but the first do not list tied parameters, and the others have no ``latest``."""
    saved = NodeRun(tmp_path, rank_pool, STOCK, (0, 0, 1), save_differing)
    assert torch.load(saved.tag(1) / MODULE, weights_only=False)["shared_params"] == {}
    assert not (saved.nodes.disk(1) / "latest").exists()
    for placed, taken in (((0, 0, 1), [0, 0, 2]), ((1, 0), [2, 0])):
        job = STOCK.other(installed=True)
        resumed = saved.call(placed, resume, job, saved.nodes.path)
        check(saved.outcome, resumed, taken)
        assert resumed[0].report.root_matches is None


def stock_resume(job: Job, directory: str) -> tuple[Mapping[str, Any], int]:
    engine = build_engine(job)
    path, client_state = engine.load_checkpoint(directory)
    assert path is not None
    return look(engine)[0], client_state["rank"]


def test_deepspeed_alone_loads_what_was_saved_at_the_same_size(run: NodeRun) -> None:
    job = replace(STAGE_2, elastic=False, installed=False).other()
    for node, (state, client_of) in zip(PLACED, run.call(PLACED, stock_resume, job, run.nodes.path), strict=True):
        lines = compare_states(run.outcome.state, state)
        assert [line for line in lines if not line.startswith("buffer/")] == []
        assert client_of == PLACED.index(node)


def test_the_record_of_each_node_states_its_own_file(run: NodeRun, tmp_path: Path) -> None:
    """They differ in nothing else, and the files of all nodes in one directory are a checkpoint, in any order."""
    records = []
    for node in (0, 1):
        record = record_of(run.tag(node))
        files, directories = dict(record.files), dict(record.directories)
        assert files.pop(MODULE) == (run.tag(node) / MODULE).stat().st_size
        assert len(directories.pop(MODULE)) == 64
        records.append(record.model_copy(update={"files": files, "directories": directories}))
        assert torch.load(run.tag(node) / MODULE, weights_only=False)["shared_params"] != {}
        assert (run.nodes.disk(node) / "latest").read_text() == "global_step3"
        assert not [path for path in run.nodes.disk(node).iterdir() if path.name.startswith(".")]
    assert records[0] == records[1] and len(records[0].files) == 4
    for nodes in ((0, 1), (1, 0)):
        whole = tmp_path / f"{nodes[1]} last" / "global_step3"
        for node in nodes:
            shutil.copytree(run.tag(node), whole, dirs_exist_ok=True)
        assert zeroelastic.verify(whole).valid


def lost_module(disks: list[Path]) -> None:
    (disks[1] / MODULE).unlink()


def lost_record(disks: list[Path]) -> None:
    (disks[1] / RECORD_NAME).unlink()


def lost_everything_but_shards(disks: list[Path]) -> None:
    """The module is on node 0 alone, where saved rank 0's optimizer file is not."""
    lost_module(disks)
    lost_record(disks)
    name = "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    (disks[0] / name).rename(disks[1] / name)


def lost_shard(disks: list[Path]) -> None:
    (disks[1] / "bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt").unlink()


def lost_modules(disks: list[Path]) -> None:
    for disk in disks[:2]:
        (disk / MODULE).unlink()


def stale_module(disks: list[Path]) -> None:
    """Of another save: here another node's, which has the same size."""
    shutil.copy(disks[0] / MODULE, disks[1] / MODULE)


def truncated_module(disks: list[Path]) -> None:
    """Not of the size that the node's record states, so not of this save: the file of another node is taken."""
    path = disks[1] / MODULE
    path.write_bytes(path.read_bytes()[:-100])


def altered_buffer(disks: list[Path]) -> None:
    """In a file that one node alone reads."""
    path = disks[1] / MODULE
    buffer = torch.load(path, weights_only=False)["module"]["batches_seen"]
    assert buffer.tolist() == [12.0, 12.0], "saved rank 2 was the first on the node"
    flip(path, path.read_bytes().index(buffer.view(torch.uint8).numpy().tobytes()))


def altered_frozen_parameter(disks: list[Path]) -> None:
    """In both files, of which each rank reads a part."""
    for disk in disks:
        path = disk / MODULE
        weight = torch.load(path, weights_only=False)["module"]["adapter.weight"]
        flip(path, path.read_bytes().index(weight.view(torch.uint8).numpy().tobytes()) + weight.numel())


HARMLESS = (lost_module, lost_record, lost_everything_but_shards, truncated_module)
REFUSED = {
    lost_shard: ("MissingFileError", "no rank of this run sees the files of saved rank 2"),
    lost_modules: ("MissingFileError", MODULE),
    stale_module: ("CheckpointError", f"It is the {MODULE} (of rank 2)."),
    altered_buffer: ("CheckpointError", f"It is the {MODULE} (of rank 2)."),
    altered_frozen_parameter: ("DigestMismatchError", f"Damaged: {MODULE} (of rank 1). Damaged: {MODULE} (of rank 2)."),
}


def load_each(job: Job, directory: str, names: Sequence[str]) -> list[Resumed | tuple[str, str]]:
    """What one engine has after each of several loads, or the type and the text of the error."""
    engine = build_engine(job)
    found: list[Resumed | tuple[str, str]] = []
    for name in names:
        try:
            found.append(load_here(engine, f"{directory}/{name}"))
        except Exception as error:
            found.append((type(error).__name__, str(error)))
        with torch.no_grad():
            engine.module.batches_seen.zero_()
    return found


@support(SECTION, "a node that lost its module states file or its commit record", "exact", "another node's is taken")
@support(SECTION, "node-local shards of stages 1 and 2 that no node has any more", "refused", "on every rank")
def test_files_that_a_node_has_lost_or_that_are_stale(run: NodeRun, tmp_path: Path) -> None:
    """Rank 0 is on a new node, where the directory is empty."""
    cases: tuple[Callable[[list[Path]], None], ...] = (*HARMLESS, *REFUSED)
    nodes = Nodes(tmp_path)
    for case in cases:
        folders = [nodes.disk(node) / case.__name__ for node in (0, 1)]
        for node, folder in enumerate(folders):
            shutil.copytree(run.nodes.disk(node), folder)
        case([folder / "global_step3" for folder in folders])
    names = [case.__name__ for case in cases]
    by_rank = run.pool.run(on_nodes, 3, nodes, (2, 0, 1), load_each, STAGE_2.other(), nodes.path, names, timeout=240)
    for case, results in zip(cases, zip(*by_rank, strict=True), strict=True):
        if case in HARMLESS:
            assert all(isinstance(one, Resumed) for one in results), (case.__name__, results)
            check(run.outcome, results, [0, 0, 0])
            assert results[0].report.root_matches
            assert any(f"have no {MODULE} of this save: these ranks took" in note for note in results[0].report.notes)
        else:
            ((name, text),) = set(results)
            assert name == REFUSED[case][0] and REFUSED[case][1] in text, (case.__name__, text)


def save_another(job: Job, directory: str) -> None:
    """Go on from a checkpoint, and save the newer global_step5."""
    engine = build_engine(job)
    load_here(engine, directory)
    engine.save_checkpoint(directory, client_state={"rank": dist.get_rank(), "weight": torch.zeros(1)})


def test_a_tag_that_one_node_alone_has_committed_is_passed_over(run: NodeRun, tmp_path: Path) -> None:
    """As when a job is killed while its nodes put a save in place; and a tag of the same name from another save."""
    saved = run.copy(tmp_path / "run")
    saved.call(PLACED, save_another, STAGE_2.other(), saved.nodes.path)
    old, new = (saved.nodes.disk(1) / f"global_step{step}" for step in (3, 5))
    shutil.rmtree(new)
    shutil.copytree(old, new)  # the old save under the new name, of the same sizes
    fallback = replace(STAGE_2, options={"fallback": True})
    for job, expected in ((STAGE_2, None), (fallback, [0, 2, 0])):
        results = saved.call((0, 1, 2), load_each, job.other(), saved.nodes.path, ["."])
        outcomes = [one for (one,) in results]
        if expected is None:
            ((name, text),) = set(outcomes)
            assert name == "MissingFileError" and "sees the files of saved ranks 2, 3" in text, text
        else:
            check(run.outcome, outcomes, expected)
            assert any("FELL BACK to global_step3" in note for note in outcomes[0].report.notes)


def save_with_writers(job: Job, directory: str, writes: bool) -> list[str]:
    """The files that this rank writes, where DeepSpeed has all ranks or none write the module."""
    engine = build_engine(job)
    engine.save_non_zero_checkpoint = writes
    written: list[str] = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        save = ShardWriter.save
        monkeypatch.setattr(
            ShardWriter, "save", lambda self, state, path: (written.append(Path(path).name), save(self, state, path))
        )
        engine.save_checkpoint(directory)
    assert engine.save_non_zero_checkpoint is writes
    return written


@pytest.mark.parametrize("placed", [(0, 0), (0, 1)], ids=str)
def test_one_rank_of_each_disk_writes_the_module(rank_pool: RankPool, tmp_path: Path, placed: tuple[int, ...]) -> None:
    """Whatever the launcher says of local ranks, by which DeepSpeed goes."""
    nodes = Nodes(tmp_path)
    written = rank_pool.run(on_nodes, 2, nodes, placed, save_with_writers, STAGE_2, nodes.path, placed == (0, 0))
    assert [names.count(MODULE) for names in written] == ([1, 0] if placed == (0, 0) else [1, 1])
    for node in set(placed):
        record = read_record(nodes.disk(node) / "global_step0")
        assert (
            record is not None and record.files[MODULE] == (nodes.disk(node) / "global_step0" / MODULE).stat().st_size
        )
