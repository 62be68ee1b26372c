"""Lightning and Fabric at other world sizes, on CPUs with the accelerator of examples/lightning."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from documentation import blocks, zero_block
from documentation import run as run_command
from frameworks_job import OFFLOADED, LightningJob, Seen, lightning_run, lightning_test, read_history, run_script
from places import ROOT
from warm_python import executable

import zeroelastic
from zeroelastic.checkpoint.open import open_checkpoint
from zeroelastic.deepspeed.patching import unwrap_all
from zeroelastic.testing import RankPool, compare_states

EXAMPLES = ROOT / "examples" / "lightning"
DOCUMENT = "docs/guides/lightning.md"
INSTALL_LINES = ("import zeroelastic", "zeroelastic.install()")
LOSS_RTOL = {"32-true": 5e-5, "bf16-mixed": 8e-3}
FIT = ("Frameworks", "Lightning `Trainer.fit(ckpt_path=...)`", "exact")
FABRIC = ("Frameworks", "Fabric `fabric.save`, `fabric.load`", "exact", "at stages 1, 2 and 3")


@pytest.fixture(scope="module")
def rank_pool() -> Iterator[RankPool]:
    """A pool of its own, which has imported Lightning, with the examples' modules on the path."""
    sys.path.insert(0, str(EXAMPLES))
    with RankPool(4, preload=("lightning.pytorch", "lightning.fabric")) as pool:
        yield pool
    sys.path.remove(str(EXAMPLES))


def run(rank_pool: RankPool, script: str, world_size: int, out: Path, steps: int, flags: list[str]) -> None:
    arguments = ["--out", str(out), "--steps", str(steps), *flags]
    rank_pool.run(run_script, world_size, str(EXAMPLES / script), arguments, timeout=200)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("script", "flags", "sizes"),
    [
        pytest.param("train.py", ["--precision", "32-true"], (3, 2), marks=pytest.mark.support(*FIT)),
        pytest.param("train.py", ["--precision", "bf16-mixed"], (3,), marks=pytest.mark.support(*FIT)),
        pytest.param("train.py", ["--precision", "bf16-mixed", "--stage", "2"], (3,), marks=pytest.mark.support(*FIT)),
        pytest.param("train_fabric.py", [], (3, 2), marks=pytest.mark.support(*FABRIC)),
        pytest.param("train_fabric.py", ["--stage", "2"], (3, 2), marks=pytest.mark.support(*FABRIC)),
        pytest.param("train_fabric.py", ["--stage", "1"], (3,), marks=pytest.mark.support(*FABRIC)),
    ],
    ids=["trainer-fp32", "trainer-bf16", "trainer-bf16-zero2", "fabric-bf16", "fabric-bf16-zero2", "fabric-bf16-zero1"],
)
def test_the_example_goes_on_at_other_world_sizes(
    rank_pool: RankPool, tmp_path: Path, script: str, flags: list[str], sizes: tuple[int, ...]
) -> None:
    """Saved by 4 ranks in the middle of an epoch, resumed by others across its end; against a run of 4 throughout."""
    rtol = LOSS_RTOL["32-true" if "32-true" in flags else "bf16-mixed"]
    run(rank_pool, script, 4, tmp_path / "whole", 9, flags)
    whole = read_history(tmp_path / "whole")
    assert [line["step"] for line in whole] == list(range(1, 10))
    run(rank_pool, script, 4, tmp_path / "first", 6, flags)
    for world_size in sizes:
        shutil.copytree(tmp_path / "first", tmp_path / f"on{world_size}")
        run(rank_pool, script, world_size, tmp_path / f"on{world_size}", 9, flags)
        found = read_history(tmp_path / f"on{world_size}")
        assert [line["processes"] for line in found] == [4] * 6 + [world_size] * 3
        for line, wanted in zip(found, whole, strict=True):
            assert (line["step"], line["samples"]) == (wanted["step"], wanted["samples"])
            assert line["lr"] == pytest.approx(wanted["lr"], rel=1e-9)
            assert line["loss"] == pytest.approx(wanted["loss"], rel=rtol)


@pytest.mark.extended
def test_the_documentation_holds(tmp_path: Path) -> None:
    """Its commands, with a script that does not know zeroelastic, and its code."""
    for path in EXAMPLES.glob("*.py"):
        lines = [line for line in path.read_text().splitlines() if not line.startswith(INSTALL_LINES)]
        (tmp_path / path.name).write_text("\n".join(lines))
    assert "\nimport zeroelastic" not in (tmp_path / "train.py").read_text()
    for block in blocks(DOCUMENT):
        if block.language == "python":
            exec(block.text, {})
        for line in block.text.splitlines() if block.language == "bash" else ():
            program, *arguments = line.split()
            assert program == "torchrun"
            launch = ["-m", "torch.distributed.run", "--standalone"]
            run_command([*launch, *arguments], tmp_path, python=executable("lightning"))
    found = read_history(tmp_path / "out")
    assert [line["processes"] for line in found] == [2, 2, 3, 3, 3, 2]
    saved = open_checkpoint(tmp_path / "out/last.ckpt/checkpoint").shard(0).ds_config
    assert zero_block(DOCUMENT).items() <= saved["zero_optimization"].items()
    epoch = sorted(index for line in found[:4] for index in line["samples"])
    assert epoch == list(range(96)), "an epoch across the change is not every sample once"
    assert [line["lr"] for line in found] == pytest.approx([5e-3 * (1 - step / 12) for step in range(6)])


JOB = LightningJob(samples=96)


@pytest.fixture(scope="module")
def saved(
    rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> tuple[str, list[Seen]]:
    """7 steps of 24 samples on 2 ranks, 4 an epoch, saved at step 6; what the ranks saw. The parameter is the stage."""
    directory = str(tmp_path_factory.mktemp("saved") / "last.ckpt")
    job = replace(JOB, stage=request.param, accumulation=4).at(2)
    return directory, rank_pool.run(lightning_run, 2, job, 9, save=(6, directory))


at_one_stage = pytest.mark.parametrize(("saved", "stage"), [(3, 3), (2, 2)], indirect=["saved"])
LOW_STAGES = pytest.mark.support(
    "Frameworks", "Lightning `Trainer.fit` at ZeRO stages 1 and 2", "exact", "also from and to stage 3"
)


@pytest.mark.support(*FIT)
@pytest.mark.parametrize(
    ("saved", "stage", "world_size", "accumulation", "workers"),
    [
        (3, 3, 3, 2, 0),
        (3, 3, 3, 4, 1),
        (3, 3, 1, 3, 0),
        (3, 3, 2, 4, 0),
        pytest.param(2, 2, 3, 2, 0, marks=LOW_STAGES),
        pytest.param(2, 2, 2, 4, 1, marks=LOW_STAGES),
        pytest.param(2, 3, 3, 4, 0, marks=LOW_STAGES),
        pytest.param(3, 2, 1, 3, 0, marks=LOW_STAGES),
        pytest.param(1, 2, 3, 2, 0, marks=LOW_STAGES),
        pytest.param(2, 1, 1, 3, 0, marks=LOW_STAGES),
    ],
    indirect=["saved"],
)
def test_state_schedule_and_data_go_on(
    rank_pool: RankPool, saved: tuple[str, list[Seen]], stage: int, world_size: int, accumulation: int, workers: int
) -> None:
    """In the second epoch, also at the same world size: Lightning alone would begin the epoch's data again."""
    directory, before = saved
    job = replace(JOB, stage=stage, accumulation=accumulation, workers=workers).at(world_size)
    for seen in rank_pool.run(lightning_run, world_size, job, 9, load=directory):
        assert seen.error == ("", "")
        assert compare_states(before[0].state, seen.state) == []
        assert seen.step == 6
        assert seen.samples == before[0].samples[6:]
        assert seen.rates == pytest.approx(before[0].rates[6:], rel=1e-12)
        assert seen.losses == pytest.approx(before[0].losses[6:], rel=2e-5)


@pytest.mark.support(
    "Frameworks",
    "Lightning `Trainer.test(ckpt_path=...)`",
    "exact",
    "weights and buffers; engines without an optimizer",
)
@at_one_stage
def test_a_model_is_tested_at_any_size(rank_pool: RankPool, saved: tuple[str, list[Seen]], stage: int) -> None:
    """Lightning builds an engine without an optimizer for that, which DeepSpeed alone does not load at stage 3."""
    directory, _ = saved
    with zeroelastic.open(directory) as checkpoint:
        weights = {name: checkpoint[name].torch().flatten().tolist() for name in checkpoint}
    losses = {}
    for world_size in (2, 3):
        ranks = rank_pool.run(lightning_test, world_size, replace(JOB, stage=stage), directory)
        assert all(found == weights for found, _, _ in ranks) and "net.batches_seen" in weights
        assert sum(number for _, _, number in ranks) == JOB.samples
        losses[world_size] = sum(loss for _, loss, _ in ranks)
    assert losses[2] == pytest.approx(losses[3], rel=1e-5)


@LOW_STAGES
def test_an_optimizer_on_the_cpu_goes_on_at_stage_2(rank_pool: RankPool, tmp_path: Path) -> None:
    """With DeepSpeedCPUAdam, as Lightning's ``deepspeed_stage_2_offload`` is used."""
    job = replace(JOB, stage=2, zero=OFFLOADED)
    whole = rank_pool.run(lightning_run, 2, job.at(2), 4, save=(2, str(tmp_path / "a")))[0]
    for seen in rank_pool.run(lightning_run, 3, job.at(3), 4, load=str(tmp_path / "a")):
        assert compare_states(whole.state, seen.state) == []
        assert seen.samples == whole.samples[2:]
        assert seen.losses == pytest.approx(whole.losses[2:], rel=2e-5)


@pytest.mark.support(*FIT)
@pytest.mark.parametrize("stage", [3, 2])
def test_saves_of_other_moments_go_on(rank_pool: RankPool, tmp_path: Path, stage: int) -> None:
    """At an epoch's end, and before a batch that then comes again."""
    job = replace(JOB, stage=stage, accumulation=2).at(2)
    whole = rank_pool.run(lightning_run, 2, job, 8, save=(4, str(tmp_path / "end")))[0]
    rank_pool.run(lightning_run, 2, replace(job, save_in="batch start"), 6, save=(5, str(tmp_path / "start")))
    for moment, first in (("end", 4), ("start", 5)):
        seen = rank_pool.run(lightning_run, 3, replace(job, accumulation=4).at(3), 8, load=str(tmp_path / moment))[0]
        assert seen.samples == whole.samples[first:], moment
        assert seen.rates == pytest.approx(whole.rates[first:], rel=1e-12)


@pytest.mark.support(*FIT)
@at_one_stage
def test_a_run_goes_on_twice(rank_pool: RankPool, saved: tuple[str, list[Seen]], stage: int, tmp_path: Path) -> None:
    """Each time with another accumulation: gradients keep the scale of the first run."""
    directory, before = saved
    again = str(tmp_path / "again")
    job = replace(JOB, stage=stage, accumulation=2).at(3)
    first = rank_pool.run(lightning_run, 3, job, 8, load=directory, save=(7, again))[0]
    kept = "GRADIENTS are divided by 4 besides the mean, not by 2"
    assert any(line.startswith("WARNING") and kept in line for line in first.said)
    second = rank_pool.run(lightning_run, 1, replace(job, accumulation=1).at(1), 9, load=again)[0]
    assert second.samples == before[0].samples[7:]
    assert second.losses == pytest.approx(before[0].losses[7:], rel=2e-5)


@at_one_stage
def test_a_second_load_into_the_same_engine_keeps_the_scale_of_gradients(
    rank_pool: RankPool, saved: tuple[str, list[Seen]], stage: int
) -> None:
    """And an option leaves it to Lightning, which is said: the same once more is another run then."""
    directory, before = saved
    job = replace(JOB, stage=stage, accumulation=2).at(3)
    seen = rank_pool.run(lightning_run, 3, job, 9, load=directory, loads=2)[0]
    assert seen.losses == pytest.approx(before[0].losses[6:], rel=2e-5)
    left = replace(job, options={**job.options, "keep_gradient_scale": False})
    alone = rank_pool.run(lightning_run, 3, left, 9, load=directory)[0]
    assert any("GRADIENTS are divided by 2 besides the mean, not by 4" in line for line in alone.said)
    assert alone.losses != pytest.approx(before[0].losses[6:], rel=2e-5)


@pytest.mark.parametrize("stage", [3, 2])
def test_a_save_between_optimizer_steps_is_loud_and_an_error_when_strict(
    rank_pool: RankPool, tmp_path: Path, stage: int
) -> None:
    directory = str(tmp_path / "middle")
    job = replace(JOB, stage=stage, accumulation=2, save_in="middle").at(2)
    whole = rank_pool.run(lightning_run, 2, job, 3, save=(1, directory))[0]
    job = replace(JOB, stage=stage, accumulation=4).at(3)
    for seen in rank_pool.run(lightning_run, 3, job, 3, load=directory):
        assert seen.error[0] == "StrictError" and "1 of 2 micro-batches are lost" in seen.error[1]
    loose = rank_pool.run(lightning_run, 3, replace(job, options={}), 3, load=directory)[0]
    assert loose.samples == whole.samples[1:], "the step begins anew"
    assert any(line.startswith("WARNING") and "SAVED IN THE MIDDLE" in line for line in loose.said)


@pytest.mark.support("Frameworks", "Lightning: a stream (`IterableDataset`)", "exact", "strided over the ranks")
@pytest.mark.parametrize("stage", [3, 2])
def test_a_stream_goes_on(rank_pool: RankPool, tmp_path: Path, stage: int) -> None:
    job = replace(JOB, stage=stage, loader="stream", accumulation=2)
    whole = rank_pool.run(lightning_run, 2, job.at(2), 4, save=(2, str(tmp_path / "a")))[0]
    seen = rank_pool.run(lightning_run, 3, replace(job, accumulation=4).at(3), 4, load=str(tmp_path / "a"))[0]
    assert seen.samples == whole.samples[2:] and sorted(index for step in whole.samples for index in step) == list(
        range(96)
    )


@pytest.mark.support("Frameworks", "Lightning: stateful DataLoaders", "refused", "at another size; exact at the same")
def test_a_stateful_loader_is_refused_at_another_size(rank_pool: RankPool, tmp_path: Path) -> None:
    job = replace(JOB, loader="stateful")
    whole = rank_pool.run(lightning_run, 2, job.at(2), 4, save=(2, str(tmp_path / "a")))[0]
    for seen in rank_pool.run(lightning_run, 3, job.at(3), 4, load=str(tmp_path / "a")):
        assert seen.error[0] == "UnsupportedError" and "counts the batches of 2 ranks" in seen.error[1]
    same = rank_pool.run(lightning_run, 2, job.at(2), 4, load=str(tmp_path / "a"))[0]
    assert same.samples == whole.samples[2:]


@pytest.mark.support(
    "Frameworks", "Lightning: a changed global batch", "refused", 'with `"strict_batch": true`; else a warning'
)
@at_one_stage
def test_a_changed_global_batch_is_loud_and_an_error_when_strict(
    rank_pool: RankPool, saved: tuple[str, list[Seen]], stage: int
) -> None:
    directory, before = saved
    job = LightningJob(micro=12, samples=96, stage=stage)
    for seen in rank_pool.run(lightning_run, 1, job, 7, load=directory):
        kind, text = seen.error
        assert kind == "StrictError" and "GLOBAL BATCH CHANGED from 24 to 12" in text
        assert "train_micro_batch_size_per_gpu 24 with gradient_accumulation_steps 1" in text
        assert "Trainer(accumulate_grad_batches=...)" in text
    for seen in rank_pool.run(lightning_run, 1, replace(job, options={}), 8, load=directory):
        loud = [line for line in seen.said if line.startswith("WARNING")]
        assert any("GLOBAL BATCH CHANGED from 24 to 12" in line for line in loud)
        assert any("Trainer(accumulate_grad_batches=...)" in line for line in loud)
        assert sorted(index for step in seen.samples for index in step) == before[0].samples[6], (
            "the position is in samples"
        )


@pytest.mark.support(
    "Frameworks", "Lightning: epochs that end within a global batch", "refused", 'with `"strict_batch": true`'
)
def test_uneven_epochs_are_loud_and_an_error_when_strict(rank_pool: RankPool, tmp_path: Path) -> None:
    """60 samples are 2 and a half global batches."""
    job = LightningJob(samples=60, accumulation=2).at(2)
    rank_pool.run(lightning_run, 2, replace(job, save_in="epoch end"), 4, save=(0, str(tmp_path / "a")))
    for seen in rank_pool.run(lightning_run, 3, replace(job, accumulation=4).at(3), 5, load=str(tmp_path / "a")):
        assert seen.error[0] == "StrictError" and "EPOCHS ARE UNEVEN" in seen.error[1]


class Strategy:
    """Stands for Lightning's own class: what is not ours must reach it as it was given."""

    zero_stage_3, load_full_weights, lightning_module = True, True, None

    def load_checkpoint(self, checkpoint_path: str, weights_only: bool | None = None) -> tuple[str, bool | None]:
        return checkpoint_path, weights_only

    def save_checkpoint(self, checkpoint: dict[str, int], filepath: str) -> tuple[dict[str, int], str]:
        return checkpoint, filepath


def test_what_is_not_a_sharded_load_is_left_alone() -> None:
    from zeroelastic.integrations import lightning

    before = dict(vars(Strategy))
    for _ in range(2):
        lightning.wrap_module(SimpleNamespace(DeepSpeedStrategy=Strategy))  # type: ignore[arg-type]
    try:
        assert vars(Strategy)["load_checkpoint"] is not before["load_checkpoint"]
        assert Strategy().load_checkpoint("there", weights_only=True) == ("there", True)
        assert Strategy().save_checkpoint({"epoch": 1}, "there") == ({"epoch": 1}, "there")
    finally:
        unwrap_all()
    assert dict(vars(Strategy)) == before


def test_loggers_get_saves_loads_and_lost_steps(rank_pool: RankPool, tmp_path: Path) -> None:
    """2 ranks to step 3, saving at step 2; then 3 ranks from there to step 3."""
    job, events = LightningJob(), str(tmp_path / "events.jsonl")
    save = (2, str(tmp_path / "a.ckpt"))
    first, second = rank_pool.run(lightning_run, 2, job.at(2), 3, save=save, events=events)
    (saved,) = [each for each in first.tracked if "zeroelastic/save/bytes" in each]
    assert saved["step"] in (2, 3) and saved["zeroelastic/save/stall_s"] > 0
    assert not [key for each in second.tracked for key in each if key.startswith("zeroelastic/")]
    resumed, *_ = rank_pool.run(lightning_run, 3, job.at(3), 3, load=save[1], events=events)
    values = {key: value for each in resumed.tracked for key, value in each.items()}
    assert (values["zeroelastic/load/from_ranks"], values["zeroelastic/load/to_ranks"]) == (2, 3)
    assert values["zeroelastic/job/lost_steps"] == 1
