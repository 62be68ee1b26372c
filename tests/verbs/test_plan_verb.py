"""``zeroelastic plan``: who reads how much from where, as a real load and a real reshard do it, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch
from places import GOLDEN
from programs import Done, run_command, run_python
from sample import write_sample
from synthetic import write_checkpoint
from training import initialize

import zeroelastic
from zeroelastic.checkpoint.open import open_checkpoint
from zeroelastic.checkpoint.saved_state import open_state
from zeroelastic.errors import UsageError
from zeroelastic.testing import RankPool
from zeroelastic.verbs.plan import _run_layout

MIB = 1 << 20
STAGES_1_AND_2 = ("stage1_rank2", "stage1_bf16_optimizer_rank2", "stage2_rank2", "stage2_round_robin_aligned_rank3")


def run(*arguments: object, code: str = "", **env: str) -> Done | CompletedProcess[str]:
    """``zeroelastic plan`` with these arguments; with ``code``, in a process that runs it before."""
    if not code:
        return run_command("plan", *arguments, env={"COLUMNS": "80", "TERM": "dumb", **env})
    return run_python("-c", f"{code}\nfrom zeroelastic.cli.app import main; main()", "plan", *arguments, COLUMNS="80")


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sample") / "ckpt"
    write_sample(root)
    return root


# --- what a load and a reshard do -------------------------------------------------------------------------------------


def build(elastic: bool, stage: int) -> Any:
    """About half a million parameters, of which one layer is frozen, and a buffer."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(256, 256) for _ in range(7)] + [torch.nn.Linear(256, 3)]
    model = torch.nn.Sequential(*layers)
    model.register_buffer("seen", torch.arange(250_000.0))
    for param in layers[2].parameters():
        param.requires_grad = False
    zero: dict[str, Any] = {"stage": stage, "elastic_checkpoint": elastic, "round_robin_gradients": True}
    if stage == 3:
        zero["sub_group_size"] = 60_000
    return initialize(model, zero, train_batch_size=12, bf16={"enabled": True})


def save(directory: str, elastic: bool, stage: int) -> None:
    engine = build(elastic, stage)
    data = torch.ones(12 // torch.distributed.get_world_size(), 256, dtype=torch.bfloat16)
    engine.backward(engine(data).float().pow(2).mean())
    engine.step()
    engine.save_checkpoint(directory)


def load(directory: str, stage: int) -> Any:
    engine = build(True, stage)
    engine.load_checkpoint(directory)
    return engine.zeroelastic_report


@pytest.mark.parametrize(
    ("elastic", "saved", "world_size", "stages"),
    [(True, 4, 3, (3, 3)), (False, 3, 4, (2, 2)), (False, 4, 3, (1, 3))],
)
def test_a_real_load_reads_what_was_planned(
    rank_pool: RankPool, tmp_path: Path, elastic: bool, saved: int, world_size: int, stages: tuple[int, int]
) -> None:
    rank_pool.run(save, saved, str(tmp_path), elastic, stages[0])
    ranks = zeroelastic.plan(tmp_path, world_size=world_size, stage=stages[1]).ranks
    report = rank_pool.run(load, world_size, str(tmp_path), stages[1])[0]
    assert report.root_matches
    assert report.bytes_owned == max(rank.bytes_owned for rank in ranks)
    assert report.bytes_read == max(rank.bytes_read for rank in ranks)
    assert report.total_bytes_read == sum(rank.bytes_read for rank in ranks)
    assert report.files_opened == max(rank.files for rank in ranks)


@pytest.mark.support("Using it", "stage 1 and 2 checkpoints: plan", "exact", "the bytes that the load or reshard reads")
@pytest.mark.parametrize("name", ["rigid3", *STAGES_1_AND_2])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_a_reshard_moves_what_was_planned(tmp_path: Path, name: str, stage: int, world_size: int) -> None:
    """The headers of the result say which rank holds what."""
    plan = zeroelastic.plan(GOLDEN / name, world_size=world_size, stage=stage)
    read = [rank.bytes_read for rank in plan.ranks]
    assert read == [rank.bytes_owned for rank in plan.ranks] and sum(read) == plan.state.bytes
    assert read == [sum(source.bytes for source in rank.sources) for rank in plan.ranks]
    if (name, stage) == ("stage1_bf16_optimizer_rank2", 1):
        return  # no reshard writes one
    report = zeroelastic.reshard(GOLDEN / name, tmp_path / "b", world_size=world_size, stage=stage, format="rigid")
    assert report is not None and report.bytes_moved == sum(read)
    made = open_state(open_checkpoint(tmp_path / "b" / "global_step2"))
    target, real = _run_layout(_head(name), world_size, stage), made.parts[0].layout
    order = [target.index()[param.name] for param in real.params]
    for column in ("numel", "sub_group", "origin", "part", "offset"):
        assert getattr(target, column)[order].tolist() == getattr(real, column).tolist(), column


def _head(name: str) -> Any:
    return open_checkpoint(next((GOLDEN / name).glob("global_step*"))).shard(0)


def test_a_run_with_bf16_optimizer_has_the_order_of_its_groups() -> None:
    """Whatever round_robin_gradients says: the layout of what such a run saved."""
    head = _head("stage1_bf16_optimizer_rank2")
    config = {**head.ds_config, "zero_optimization": {"stage": 1, "round_robin_gradients": True}}
    head = dataclasses.replace(head, ds_config=config)
    real, made, dealt = head.layout, _run_layout(head, 2, 1), _run_layout(head, 2, 2)
    assert made.params == real.params != dealt.params and made.origin.tolist() == real.origin.tolist()


def test_frozen_parameters_are_read_from_where_they_are(sample: Path) -> None:
    """24 elements of two bytes, in parts of six on four ranks and of eight on three."""
    whole = zeroelastic.plan(sample, world_size=3)
    assert whole.state.frozen_params == 1
    trained = sum(param.bytes or 0 for param in zeroelastic.inspect(sample).params if param.kind == "trained")
    assert sum(rank.bytes_read for rank in whole.ranks) == trained + 48
    assert [[source.rank for source in rank.sources] for rank in whole.ranks] == [[0, 1], [1, 2], [2, 3]]


# --- the verb ---------------------------------------------------------------------------------------------------------


def test_the_document_and_the_table_say_the_same(sample: Path) -> None:
    done = run(sample, "-n", "3", "--tag", "global_step2", "--json")
    found = json.loads(done.stdout)
    assert (found["tag"], found["step"], found["world_size"], found["target_world_size"]) == ("global_step2", 2, 4, 3)
    shown = run(sample, "-n", "3", "--tag", "global_step2")
    assert shown.returncode == 0 and shown.stderr == ""
    assert "  ranks     4 to 3\n" in shown.stdout and "from saved ranks" in shown.stdout
    line = next(line for line in shown.stdout.splitlines() if line.split()[:1] == ["1"])
    assert line.split() == ["1", "77.9", "KiB", "77.9", "KiB", "4", "1:", "39.0", "KiB,", "2:", "39.0", "KiB"]
    assert "234 KiB read for 234 KiB of state; rank 0 reads most" in shown.stdout


def test_another_stage_is_planned_with_the_saved_options() -> None:
    report = zeroelastic.plan(GOLDEN / "stage2_rank2", world_size=3, stage=3)
    assert (report.stage, report.target_stage) == (2, 3)
    assert zeroelastic.plan(GOLDEN / "stage2_rank2", world_size=3).target_stage == 2
    done = run("--stage", 1, GOLDEN / "rigid2", "-n", 3, COLUMNS="200")
    assert done.returncode == 0 and "ZeRO stage 3 to 1" in done.stdout
    assert "for a run with round_robin_gradients false and parameter_alignment false" in done.stdout
    with pytest.raises(UsageError, match="no ZeRO stage 4"):
        zeroelastic.plan(GOLDEN / "rigid2", world_size=3, stage=4)


def test_many_ranks_are_cut_short_in_the_terminal_alone(tmp_path: Path) -> None:
    write_sample(tmp_path, world_size=40, steps=[1])
    done = run(tmp_path, "-n", "300")
    assert done.returncode == 0 and "and 284 more; --json lists them all" in done.stdout
    assert len(json.loads(run(tmp_path, "-n", "300", "--json").stdout)["ranks"]) == 300


def test_no_payload_is_read(tmp_path: Path) -> None:
    """Less than 512 KiB of a checkpoint of more than 16 MiB, modules imported meanwhile included."""
    write_sample(tmp_path, steps=[1], hidden=256, sub_group_size=10**9)
    assert sum(path.stat().st_size for path in tmp_path.glob("*/*")) > 16 * MIB
    code = (
        "import atexit, sys\n"
        "def count(): return int(open('/proc/self/io').readline().split()[1])\n"
        "import zeroelastic.cli.app, zeroelastic.cli.inspect, zeroelastic.verbs.plan, zeroelastic.runs.locate\n"
        "import zeroelastic.cli.view\n"
        "before = count(); atexit.register(lambda: print('read:', count() - before, file=sys.stderr))"
    )
    done = run(tmp_path, "-n", "3", code=code)
    assert done.returncode == 0
    assert int(done.stderr.split("read:")[1]) < 512 << 10


def test_a_damaged_checkpoint_is_invalid(tmp_path: Path) -> None:
    write_sample(tmp_path, steps=[1])
    path = tmp_path / "global_step1/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    done = run(tmp_path, "-n", "3")
    assert done.returncode == 3 and done.stdout == "" and "global_step1" in done.stderr


def test_another_optimizer_than_adam_is_planned(tmp_path: Path) -> None:
    tag_dir = tmp_path / "global_step3"
    write_checkpoint(tag_dir, world_size=2, states={"momentum_buffer": torch.float32}, record=True)
    found = zeroelastic.plan(tag_dir, world_size=3)
    assert found.state.state_keys == ("fp32", "momentum_buffer")
    assert sum(rank.bytes_read for rank in found.ranks) == found.state.bytes


@pytest.mark.parametrize("saved", [1, 3])
def test_a_rank_that_owns_nothing_opens_two_files(tmp_path: Path, saved: int) -> None:
    write_checkpoint(tmp_path / "a", world_size=saved, record=True)
    last = zeroelastic.plan(tmp_path / "a", world_size=64).ranks[-1]
    assert (last.bytes_owned, last.bytes_read, last.files, last.sources) == (0, 0, 2, ())
