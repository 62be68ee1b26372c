"""Node-local disks: each node sees its own shards, new nodes see none, and what is resumed is what was saved.

Ranks play nodes: in each the same path is another directory. Which disk a rank has is written as one number per rank,
0 and 1 being the nodes of the save.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from extended import with_swept
from saved_files import flip, process_status, reset_peak, state_bytes
from saves import NodeRun, Nodes, Saved, check_resumed, on_nodes
from sliced_model import use_sliced
from training import (
    WIDE,
    Job,
    attempt,
    build_engine,
    build_wide,
    look,
    of_all,
    raised,
    save_wide,
    train_and_save,
    train_step,
)

from zeroelastic.checkpoint.commit_record import RECORD_NAME
from zeroelastic.checkpoint.optimizer_reader import read_optimizer_file
from zeroelastic.testing import RankError, RankPool, compare_states

SECTION = "Checkpoint engines and storage"
NODE_LOCAL = {"checkpoint": {"use_node_local_storage": True}}
ELASTIC = Job(config=NODE_LOCAL)
RIGID = Job(config=NODE_LOCAL, elastic=False)
STOCK = Job(config=NODE_LOCAL, elastic=False, installed=False)

PLACED = ((1, 0, 0), (2, 0, 1), (2, 1, 3, 0, 0, 3))
"""Fewer ranks on the old nodes; a new node with rank 0; more ranks, most of them on new nodes."""

support = pytest.mark.support
pytestmark = pytest.mark.usefixtures("mounts")


@pytest.fixture(scope="module")
def run(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., NodeRun]:
    """A save of 4 ranks, on nodes 0 and 1 if nothing else is said; made once for each job and placement."""
    made: dict[str, NodeRun] = {}

    def get(job: Job, placed: tuple[int, ...] = (0, 0, 1, 1)) -> NodeRun:
        key = f"{job}{placed}"
        if key not in made:
            made[key] = NodeRun(tmp_path_factory.mktemp("nodes"), rank_pool, job, placed)
        return made[key]

    return get


@support(SECTION, "`use_node_local_storage`, saves on disks that differ", "exact", "with a commit record each")
def test_every_node_has_the_same_record_and_latest(run: Callable[..., NodeRun]) -> None:
    for job in (ELASTIC, RIGID):
        saved = run(job)
        records = [(saved.tag(node) / RECORD_NAME).read_bytes() for node in (0, 1)]
        assert records[0] == records[1] and len(json.loads(records[0])["files"]) == 8
        for node, ranks in ((0, (0, 1)), (1, (2, 3))):
            here = sorted(path.name for path in saved.tag(node).iterdir())
            assert here == sorted(
                [RECORD_NAME]
                + [f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in ranks]
                + [f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in ranks]
            )
            assert (saved.nodes.disk(node) / "latest").read_text() == "global_step3"
            assert not [path for path in saved.nodes.disk(node).iterdir() if path.name.startswith(".")]


@support(SECTION, "node-local disks, more and fewer ranks, on nodes old and new", "exact", "stock saves too")
@pytest.mark.parametrize("job", [ELASTIC, RIGID, STOCK], ids=["elastic", "rigid", "stock"])
def test_shards_of_other_nodes_are_resumed(run: Callable[..., NodeRun], job: Job) -> None:
    saved = run(job)
    for placed in PLACED[0 if job is ELASTIC else 1 if job is STOCK else 2 :]:
        outcomes = saved.resume(placed)
        check_resumed(Saved(str(saved.nodes.disk(0)), saved.outcome), outcomes, job)
        report = outcomes[0].report
        assert (report.format, report.saved_world_size) == ("elastic" if job.elastic else "rigid", 4)
        assert report.root_matches is (None if job is STOCK else True)
        assert report.bytes_sent > 0 and report.bytes_received > 0
        assert any("did not see all files" in note for note in report.notes)


@support(SECTION, "`use_node_local_storage`, every rank sees all files", "exact")
def test_a_node_that_has_all_files_is_found_without_the_flag_and_serves_a_new_one(run: Callable[..., NodeRun]) -> None:
    saved = run(ELASTIC, (0, 0, 0, 0))
    outcomes = saved.resume((1, 0), config={})
    check_resumed(Saved(str(saved.nodes.disk(0)), saved.outcome), outcomes, ELASTIC)
    assert outcomes[0].report.root_matches
    report = saved.resume((0, 0, 0))[0].report
    assert report.root_matches and report.bytes_sent == report.bytes_received == 0
    assert not any("node-local" in note for note in report.notes)


@pytest.mark.parametrize("elastic", [True, False], ids=["elastic", "rigid"])
def test_tensor_parallel_ranks_read_for_each_other(rank_pool: RankPool, tmp_path: Path, elastic: bool) -> None:
    """Of the two nodes each has one rank of the new run, and neither sees all files of its own tensor parallel rank."""
    nodes, job = Nodes(tmp_path), Job(batch=12, elastic=elastic, config=NODE_LOCAL)
    saved = rank_pool.run(on_nodes, 4, nodes, (0, 0, 1, 1), use_sliced, job, 2, nodes.path, save=True)
    loaded = rank_pool.run(on_nodes, 2, nodes, (0, 1), use_sliced, job.other(), 2, nodes.path)
    for tp_rank, outcome in loaded:
        same = [other for other_rank, other in saved if other_rank == tp_rank]
        assert compare_states(same[0].state, outcome.state) == []
        assert outcome.report.root_matches and outcome.report.bytes_sent > 0


def resume_in_fp32(job: Job, directory: str) -> tuple[Any, Any]:
    """Moments and master weights that are cast on the way, compared by the digests of what was read."""
    engine = build_engine(job)
    engine.load_checkpoint(directory)
    return engine.zeroelastic_report, look(engine)[0]


def test_what_is_cast_on_the_way_is_verified_as_read(run: Callable[..., NodeRun]) -> None:
    """Frozen parameters are bf16 in the save and fp32 in the run."""
    saved = run(ELASTIC)
    for report, _ in saved.call((2, 0, 1), resume_in_fp32, saved.job.other(precision="fp32"), saved.nodes.path):
        assert any("cast from bfloat16 to float32" in note for note in report.notes)
        assert any("digests of what was loaded match the record" in note for note in report.notes)


@support(SECTION, "node-local shards that no node has any more", "refused", "`elastic.resume` takes an older tag")
def test_shards_that_no_node_has_are_named(run: Callable[..., NodeRun]) -> None:
    for job, placed in ((ELASTIC, (0, 0, 2)), (STOCK, (2, 0))):
        saved = run(job)
        kind, said = of_all(saved.call(placed, attempt, job.other(installed=True), saved.nodes.path))
        assert kind == "MissingFileError"
        assert "zero_pp_rank_2_mp_rank_00_model_states.pt" in said and "rank_3" in said
        assert "no rank of this run sees the files of saved ranks 2, 3" in said


def resume_newest(job: Job, directory: str) -> tuple[Any, Any, int]:
    from zeroelastic.elastic import resume as elastic_resume

    engine = build_engine(job)
    start = elastic_resume(engine, directory)
    return start.tag, start.passed_over, look(engine)[0]


def go_on_and_save(job: Job, directory: str) -> Any:
    """Two more steps and another tag; returns the state."""
    engine = build_engine(job)
    engine.load_checkpoint(directory)
    for step in (3, 4):
        train_step(engine, step)
    engine.save_checkpoint(directory)
    return look(engine)[0]


@pytest.fixture(scope="module")
def two_tags(run: Callable[..., NodeRun], tmp_path_factory: pytest.TempPathFactory) -> tuple[NodeRun, Any]:
    """global_step3 by 4 ranks of node 0 alone, global_step5 by 4 ranks of nodes 0 and 1. Node 2 was away since."""
    saved = run(ELASTIC, (0, 0, 0, 0)).copy(tmp_path_factory.mktemp("two") / "run")
    shutil.copytree(saved.nodes.disk(0), saved.nodes.disk(2), dirs_exist_ok=True)
    newer = saved.call((0, 0, 1, 1), go_on_and_save, ELASTIC, saved.nodes.path)[0]
    return saved, newer


def test_resume_takes_the_newest_tag_that_the_nodes_have_together(two_tags: tuple[NodeRun, Any]) -> None:
    saved, newer = two_tags
    older = saved.outcome.state
    for placed, tag, state in (
        ((3, 1, 0), "global_step5", newer),  # rank 0 is on a new node
        ((2, 1, 0), "global_step5", newer),  # and on one that has only old tags
        ((0, 2, 3), "global_step3", older),  # node 1 is gone
        ((2, 3), "global_step3", older),
    ):
        for found, passed, live in saved.call(placed, resume_newest, ELASTIC.other(), saved.nodes.path):
            assert found == tag, placed
            assert compare_states(state, live) == []
            if tag == "global_step3" and 0 in placed:
                assert len(passed) == 1 and passed[0].startswith("global_step5") and "saved ranks 2, 3" in passed[0]
            else:
                assert passed == ()
    with pytest.raises(Exception, match="none of the checkpoints can be loaded"):
        saved.call((1, 3), resume_newest, ELASTIC.other(), saved.nodes.path)


def test_a_start_on_one_node_alone_changes_nothing_so_that_all_go_on_when_the_other_is_back(
    two_tags: tuple[NodeRun, Any], tmp_path: Path
) -> None:
    """All ranks see the same then, on node 1: half of a tag, whose commit record says that it was complete."""
    saved, newer = two_tags
    saved = saved.copy(tmp_path / "run")
    with pytest.raises(Exception, match="none of the checkpoints can be loaded"):
        saved.call((1, 1), resume_newest, ELASTIC.other(), saved.nodes.path)
    for found, passed, live in saved.call((0, 1), resume_newest, ELASTIC.other(), saved.nodes.path):
        assert (found, passed) == ("global_step5", ()) and compare_states(newer, live) == []


def test_an_old_latest_on_one_node_does_not_win(two_tags: tuple[NodeRun, Any]) -> None:
    saved, newer = two_tags
    assert (saved.nodes.disk(2) / "latest").read_text() == "global_step3"
    for outcome in saved.resume((2, 1, 0)):
        assert compare_states(newer, outcome.state) == []


@pytest.mark.quick
def test_files_beside_another_record_are_not_seen(two_tags: tuple[NodeRun, Any], tmp_path: Path) -> None:
    """Node 2 has a tag of the same name from before it was saved again: its files are of the same size."""
    saved, newer = two_tags
    saved = saved.copy(tmp_path / "run")
    stale = saved.nodes.disk(2) / "global_step5"
    os.rename(saved.nodes.disk(2) / "global_step3", stale)
    for outcome in saved.resume((2, 0, 1)):
        assert compare_states(newer, outcome.state) == []
        assert outcome.report.root_matches


def test_of_two_saves_of_one_tag_the_one_committed_last_is_taken(rank_pool: RankPool, tmp_path: Path) -> None:
    """Three nodes each have a whole tag of one name and step, as runs leave them that begin again elsewhere."""
    first = NodeRun(tmp_path, rank_pool, ELASTIC, (0,))
    saves = [
        first.outcome,
        *(first.call((n,), train_and_save, ELASTIC.other(lr=n), first.nodes.path)[0] for n in (1, 2)),
    ]
    for placed, newest in (((0, 1), 1), ((2, 1), 2), ((2, 0), 2)):
        for outcome in first.resume(placed):
            assert compare_states(saves[newest].state, outcome.state) == [], placed


def failed(job: Job, directory: str, names: tuple[str, ...]) -> list[tuple[str, str]]:
    engine = build_engine(job)
    return [raised(lambda name=name: engine.load_checkpoint(f"{directory}/{name}")) for name in names]


def test_damage_on_one_node_is_named_on_every_rank(run: Callable[..., NodeRun], tmp_path: Path) -> None:
    saved, nodes = run(ELASTIC), Nodes(tmp_path)
    kinds = {"payload": "DigestMismatchError", "header": "CheckpointError", "truncated": "CheckpointError"}
    for kind in kinds:
        for node in (0, 1):
            shutil.copytree(saved.nodes.disk(node), nodes.disk(node) / kind)
        path = next((nodes.disk(1) / kind).glob("global_step3/*zero_pp_rank_2_*optim_states.pt"))
        shard = read_optimizer_file(path, world_size=4).header(2, params=None)
        if kind == "truncated":
            os.truncate(path, path.stat().st_size - 100)
        else:
            header = path.read_bytes().index(b"base_optimizer_state")
            flip(path, header if kind == "header" else int(max(shard.extents["exp_avg"].offset)))
    by_rank = saved.pool.run(on_nodes, 3, nodes, (2, 0, 1), failed, ELASTIC.other(), nodes.path, (*kinds,), timeout=120)
    for wanted, errors in zip(kinds.values(), zip(*by_rank, strict=True), strict=True):
        ((name, text),) = set(errors)
        assert name == wanted and path.name in text, (name, text)


@pytest.mark.parametrize("stage", with_swept((3, 2), {2}))
def test_each_byte_is_read_once_and_memory_is_bounded(rank_pool: RankPool, tmp_path: Path, stage: int) -> None:
    """As the ranks report it; of Python's own reads as they are counted; and as the kernel counts memory."""
    nodes = Nodes(tmp_path)
    rank_pool.run(on_nodes, 4, nodes, (0, 0, 1, 1), save_wide, nodes.path, True, True, stage, WIDE, use_node_local)
    state = state_bytes(nodes.disk(0))
    # Which module states files go from node to node: DeepSpeed reads all of them but parameters.
    for placed, sent in (((2, 0, 1), (0,)), ((2, 1, 3, 0, 0, 3), (0, 1, 2, 3))):
        modules = sum(module_bytes(nodes, rank) for rank in sent) if stage == 3 else whole_module_bytes(nodes)
        found = rank_pool.run(on_nodes, len(placed), nodes, placed, load_large, nodes.path, stage)
        report = found[0][0]
        assert report.root_matches
        assert report.total_bytes_read == state, "all ranks together read the state once"
        assert report.bytes_received < 1.01 * report.bytes_owned + report.header_bytes
        here = sum(here for _, here, _ in found)
        assert state + modules <= here < 1.005 * (state + modules)  # what has no digest is read for its checksum, too
        for rank, (_, _, growth) in enumerate(found):
            assert growth < 64 << 20, (placed, rank, growth)


def module_bytes(nodes: Nodes, rank: int) -> int:
    """Bytes of a rank's module states file that are no frozen parameter, from the file itself."""
    path = next(nodes.root.glob(f"node*/global_step*/zero_pp_rank_{rank}_mp_rank_00_model_states.pt"))
    fragments = torch.load(path, weights_only=False)["frozen_param_fragments"]
    return path.stat().st_size - sum(fragment.numel() * fragment.element_size() for fragment in fragments.values())


def whole_module_bytes(nodes: Nodes) -> int:
    """Bytes of a node's file of the whole module that are no parameter, from the file itself."""
    path = next(nodes.disk(0).glob("global_step*/mp_rank_00_model_states.pt"))
    params = torch.load(path, weights_only=False)["module"]
    return path.stat().st_size - sum(param.numel() * param.element_size() for param in params.values())


def use_node_local(engine: Any) -> None:
    engine._config.use_node_local_storage = True


def load_large(directory: str, stage: int) -> tuple[Any, int, int]:
    """The report, bytes of payload that the numpy engine read, and growth of memory."""
    from zeroelastic.distributed import exchange
    from zeroelastic.executors import numpy_executor

    engine = build_wide(True, True, "numpy", stage)
    exchange.ROUND_BYTES, exchange._LEAST_BYTES = 1 << 18, 1 << 17  # many rounds, two peers in each
    engine.load_checkpoint(directory)
    read = 0
    original = os.preadv

    def preadv(*args: Any) -> int:
        nonlocal read
        got = original(*args)
        read += got
        return got

    numpy_executor.os = SimpleNamespace(**{**vars(os), "preadv": preadv})  # type: ignore[attr-defined]
    reset_peak()
    resident = process_status("VmRSS")
    engine.load_checkpoint(directory)
    return engine.zeroelastic_report, read, process_status("VmHWM") - resident


def save_fails(job: Job, directory: str) -> tuple[str, str]:
    """The disk of node 1 cannot take the tag: a file has its name."""
    engine = build_engine(job)
    train_step(engine, 0)
    return raised(lambda: engine.save_checkpoint(directory, tag="blocked"))


def test_a_node_that_cannot_write_fails_the_save_on_all(rank_pool: RankPool, tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)
    (nodes.disk(1) / "blocked").write_text("a file")
    kind, text = of_all(rank_pool.run(on_nodes, 2, nodes, (0, 1), save_fails, ELASTIC, nodes.path))
    assert kind == "SaveError" and "blocked" in text
    left = {path.name for path in nodes.disk(0).iterdir()}
    assert left <= {"zero_to_fp32.py", "zero_to_torch.py"}, "nothing is left of the other node's part"
    assert [path.name for path in nodes.disk(1).iterdir()] == ["blocked"]


def place_on_one_node_only(directory: str, tag: str, fault: str) -> None:
    """Save a tag that there may be already; node 1 does not put it in place."""
    from zeroelastic.deepspeed.save import directory as on_disk

    def fail(staging_dir: Path, place: Path, **options: bool) -> None:
        if fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError(5, "Input/output error", str(place))

    engine = build_engine(ELASTIC)
    for step in range(2):
        train_step(engine, step)
        if dist.get_rank() == 2 and step == 1:
            on_disk.publish_tag = fail  # type: ignore[assignment]
        if step == 1 or tag == "old":
            engine.save_checkpoint(directory, tag=tag)


def load_old(directory: str) -> tuple[bool, list[str]]:
    """Whether the tag has the state of the first step, and what there is beside it on this rank's node."""
    engine, other = build_engine(ELASTIC), build_engine(ELASTIC.other())
    train_step(engine, 0)
    other.load_checkpoint(directory, tag="old")
    return look(other)[0] == look(engine)[0], sorted(os.listdir(directory))


@pytest.mark.parametrize("fault", ["fails", "killed"])
def test_a_tag_that_one_node_does_not_put_in_place_is_what_it_was_on_all(
    rank_pool: RankPool, tmp_path: Path, fault: str
) -> None:
    """A tag that is saved again, and a new one. The error of the save says so."""
    nodes = Nodes(tmp_path)
    for tag in ("old", "new"):
        with pytest.raises(RankError) as caught:
            called = (place_on_one_node_only, nodes.path, tag, fault)
            rank_pool.run(on_nodes, 4, nodes, (0, 0, 1, 1), *called, grace=60)
        said = {failure.headline for failure in caught.value.failures if fault == "fails" or failure.rank != 2}
        (text,) = said
        assert "not committed" in text and "`latest` is unchanged" in text
    for whole, listed in rank_pool.run(on_nodes, 4, nodes, (0, 0, 1, 1), load_old, nodes.path):
        assert whole and "new" not in listed and "old" in listed
