"""accelerate, Lightning and Fabric at other world sizes: what they keep beside the engine goes on as uninterrupted.

Lightning runs on CPUs with the accelerator of examples/lightning.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from frameworks_job import (
    OFFLOADED,
    PRELOAD,
    AccelerateJob,
    LightningJob,
    Seen,
    accelerate_beside_a_teacher,
    accelerate_numbered,
    accelerate_run,
    lightning_run,
    lightning_test,
    read_history,
    run_script,
)
from page_code import Reader, blocks
from places import ROOT
from warm_python import executable

import zeroelastic
from zeroelastic.checkpoint.commit_record import read_record
from zeroelastic.checkpoint.open import open_checkpoint
from zeroelastic.deepspeed.patching import unwrap_all
from zeroelastic.testing import RankPool, compare_states


def zero_block(document: str) -> dict[str, object]:
    """``zero_optimization`` in the only JSON block of a page."""
    (text,) = [block.text for block in blocks(document) if block.language == "json"]
    zero: dict[str, object] = json.loads(text)["zero_optimization"]
    return zero


EXAMPLES = ROOT / "examples"
INSTALL_LINES = ("import zeroelastic", "zeroelastic.install()")
STATE = ("Frameworks", "accelerate `save_state`, `load_state`", "exact", "unmodified scripts")
FIT = ("Frameworks", "Lightning `Trainer.fit(ckpt_path=...)`", "exact")
FABRIC = ("Frameworks", "Fabric `fabric.save`, `fabric.load`", "exact", "at stages 1, 2 and 3")
STATE_LOW = ("Frameworks", "accelerate at ZeRO stages 1 and 2", "exact", "also from and to stage 3")
FIT_LOW = ("Frameworks", "Lightning `Trainer.fit` at ZeRO stages 1 and 2", "exact", "also from and to stage 3")


def case(mark: tuple[str, ...], *values: Any, id: str | None = None) -> Any:
    """A case of a parametrised test, which shows a row of docs/support.md."""
    return pytest.param(*values, marks=pytest.mark.support(*mark), id=id)


@dataclass(frozen=True)
class Framework:
    """How a job of a framework is run, and saved after ``step`` of ``steps`` optimizer steps."""

    job: Any
    run: Callable[..., Seen]
    steps: int
    step: int
    batch_setting: str
    other_micro: int


ACCELERATE, LIGHTNING = "accelerate", "Lightning"
FRAMEWORKS = {
    ACCELERATE: Framework(AccelerateJob(), accelerate_run, 5, 3, "Accelerator(gradient_accumulation_steps=...)", 3),
    LIGHTNING: Framework(LightningJob(samples=96), lightning_run, 9, 6, "Trainer(accumulate_grad_batches=...)", 12),
}


@pytest.fixture(scope="module")
def rank_pool(frameworks_pool: RankPool) -> RankPool:
    return frameworks_pool


@pytest.mark.extended
@pytest.mark.parametrize(
    ("script", "flags", "sizes"),
    [
        case(STATE, "accelerate/train.py", ["--mixed-precision", "no"], (3, 2)),
        case(STATE, "accelerate/train.py", ["--lora", "--stage", "2"], (3, 2)),
        case(FIT, "lightning/train.py", ["--precision", "32-true"], (3, 2)),
        case(FIT, "lightning/train.py", ["--precision", "bf16-mixed", "--stage", "2"], (3,)),
        case(FABRIC, "lightning/train_fabric.py", [], (3, 2)),
        case(FABRIC, "lightning/train_fabric.py", ["--stage", "1"], (3,)),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_the_example_goes_on_at_other_world_sizes(
    rank_pool: RankPool, tmp_path: Path, script: str, flags: list[str], sizes: tuple[int, ...]
) -> None:
    """Saved by 4 ranks in the middle of an epoch, resumed by others across its end; against a run of 4 throughout."""
    rtol = 5e-5 if {"no", "32-true"}.intersection(flags) else 8e-3

    def run(world_size: int, out: Path, steps: int) -> list[dict[str, Any]]:
        arguments = ["--out", str(out), "--steps", str(steps), *flags]
        rank_pool.run(run_script, world_size, str(EXAMPLES / script), arguments, timeout=200)
        return read_history(out)

    whole = run(4, tmp_path / "whole", 9)
    assert [line["step"] for line in whole] == list(range(1, 10))
    assert len({line["lr"] for line in whole}) > 5 or "fabric" in script
    run(4, tmp_path / "first", 6)
    for world_size in sizes:
        shutil.copytree(tmp_path / "first", tmp_path / f"on{world_size}")
        found = run(world_size, tmp_path / f"on{world_size}", 9)
        assert [line["processes"] for line in found] == [4] * 6 + [world_size] * 3
        for line, wanted in zip(found, whole, strict=True):
            assert (line["step"], line["samples"]) == (wanted["step"], wanted["samples"])
            assert line["lr"] == pytest.approx(wanted["lr"], rel=1e-9), line["step"]
            assert line["loss"] == pytest.approx(wanted["loss"], rel=rtol), line["step"]


LAUNCHED = (
    "Using it", "`accelerate launch -m zeroelastic.run train.py`, `torchrun ... -m zeroelastic.run`", "exact"
)  # fmt: skip


@pytest.mark.extended
@pytest.mark.parametrize(
    ("document", "state", "processes", "rates"),
    [
        case(
            LAUNCHED,
            *("docs/guides/accelerate.md", "checkpoint/pytorch_model", [4, 4, 3, 3, 3, 2]),
            [0, 5e-3 / 3, 1e-2 / 3, 5e-3, 5e-3 * 8 / 9, 5e-3 * 7 / 9],
        ),
        (
            *("docs/guides/lightning.md", "last.ckpt/checkpoint", [2, 2, 3, 3, 3, 2]),
            [5e-3 * (1 - step / 12) for step in range(6)],
        ),
    ],
    ids=["accelerate", "lightning"],
)
def test_the_commands_of_the_documentation_run_a_script_that_does_not_know_zeroelastic(
    tmp_path: Path, document: str, state: str, processes: list[int], rates: list[float]
) -> None:
    """And print what the page shows."""
    framework = Path(document).stem
    scripts = tmp_path / "page" / "examples" / framework
    scripts.mkdir(parents=True)
    for path in (EXAMPLES / framework).glob("*.py"):
        lines = path.read_text().splitlines()
        (scripts / path.name).write_text("\n".join(line for line in lines if not line.startswith(INSTALL_LINES)))
    assert "\nimport zeroelastic" not in (scripts / "train.py").read_text()
    reader = Reader(tmp_path / "page", executable(*PRELOAD, "accelerate.commands.launch"))
    for block in blocks(document):
        reader.read(block)
    found = read_history(tmp_path / "page" / "out")
    assert [line["processes"] for line in found] == processes
    saved = open_checkpoint(tmp_path / "page" / "out" / state).shard(0).ds_config
    assert zero_block(document).items() <= saved["zero_optimization"].items()
    epoch = sorted(index for line in found[:4] for index in line["samples"])
    assert epoch == list(range(96)), "an epoch across the change is not every sample once"
    assert [line["lr"] for line in found] == pytest.approx(rates)


@pytest.mark.parametrize("stages", [(3, 3), (2, 3)])
def test_the_script_of_the_documentation_goes_on(rank_pool: RankPool, tmp_path: Path, stages: tuple[int, int]) -> None:
    """It saves after 4 and 8 of its 9 steps; what is left is done again on more ranks."""
    (text,) = [block.text for block in blocks("docs/guides/accelerate.md") if block.language == "python"]
    for world_size, stage in zip((2, 3), stages, strict=True):
        zero = '{"stage": 3}'
        assert zero in text
        (tmp_path / "short.py").write_text(
            text if stage == 3 else text.replace(zero, str(zero_block("docs/guides/accelerate.md")))
        )
        rank_pool.run(run_script, world_size, str(tmp_path / "short.py"), [])
        assert (tmp_path / "state" / "pytorch_model" / "zeroelastic.json").exists()
    record = read_record(tmp_path / "state" / "pytorch_model")
    assert record is not None and (record.world_size, record.global_steps) == (2, 8), "the second run had 1 step left"


@pytest.fixture(scope="module")
def saved(
    rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> tuple[str, list[Seen]]:
    """A run on 2 ranks that was saved in the middle, and what the ranks saw. The parameter: framework and stage."""
    name, stage = request.param
    framework = FRAMEWORKS[name]
    directory = str(tmp_path_factory.mktemp("saved") / "last.ckpt")
    job = replace(framework.job, stage=stage, accumulation=4).at(2)
    return directory, rank_pool.run(framework.run, 2, job, framework.steps, save=(framework.step, directory))


def saved_by(name: str) -> pytest.MarkDecorator:
    """At stage 3; test_state_schedule_and_data_go_on has the other stages."""
    return pytest.mark.parametrize("saved", [(name, 3)], indirect=True)


@pytest.mark.parametrize(
    ("saved", "stage", "world_size", "accumulation", "workers"),
    [
        case(STATE, (ACCELERATE, 3), 3, 3, 4, 0),
        case(STATE_LOW, (ACCELERATE, 2), 2, 3, 4, 0),
        case(STATE_LOW, (ACCELERATE, 3), 2, 3, 2, 0),
        case(STATE_LOW, (ACCELERATE, 1), 2, 1, 4, 0),
        case(FIT, (LIGHTNING, 3), 3, 3, 4, 1),
        case(FIT_LOW, (LIGHTNING, 2), 2, 2, 4, 1),
        case(FIT_LOW, (LIGHTNING, 3), 2, 1, 3, 0),
        case(FIT_LOW, (LIGHTNING, 1), 2, 3, 2, 0),
    ],
    indirect=["saved"],
)
def test_state_schedule_and_data_go_on(
    rank_pool: RankPool,
    saved: tuple[str, list[Seen]],
    stage: int,
    world_size: int,
    accumulation: int,
    workers: int,
    request: pytest.FixtureRequest,
) -> None:
    """In the second epoch, also at the same world size: Lightning alone would begin the epoch's data again.

    With accelerate 2 -> 3 ranks used to hang: the new rank did not know its step, which counts from the epoch on.
    """
    directory, before = saved
    name = request.node.callspec.params["saved"][0]
    framework = FRAMEWORKS[name]
    more = {"seed": 99} if name == ACCELERATE else {"workers": workers}
    job = replace(framework.job, stage=stage, accumulation=accumulation, **more).at(world_size)
    for seen in rank_pool.run(framework.run, world_size, job, framework.steps, load=directory):
        assert seen.error == ("", "")
        assert compare_states(before[0].state, seen.state) == []
        assert seen.step == (accumulation if name == ACCELERATE else framework.step)
        assert seen.samples == before[0].samples[framework.step :]
        assert seen.rates == pytest.approx(before[0].rates[framework.step :], rel=1e-12)
        assert seen.losses == pytest.approx(before[0].losses[framework.step :], rel=2e-5)


@pytest.mark.parametrize("name", [case(STATE_LOW, ACCELERATE), case(FIT_LOW, LIGHTNING)])
def test_an_optimizer_on_the_cpu_goes_on_at_stage_2(rank_pool: RankPool, tmp_path: Path, name: str) -> None:
    """With DeepSpeedCPUAdam: accelerate makes one of the script's AdamW, Lightning's is as its offload has it."""
    framework, path = FRAMEWORKS[name], str(tmp_path / "a")
    job = replace(framework.job, stage=2, zero=OFFLOADED)
    whole = rank_pool.run(framework.run, 2, job.at(2), 4, save=(2, path))[0]
    for seen in rank_pool.run(framework.run, 3, job.at(3), 4, load=path):
        assert compare_states(whole.state, seen.state) == []
        assert seen.samples == whole.samples[2:]
        assert seen.losses == pytest.approx(whole.losses[2:], rel=2e-5)


@pytest.mark.parametrize("scheduler_is", ["forgotten", "registered"])
def test_a_scheduler_that_accelerate_does_not_save_is_named_at_the_save_and_at_the_load(
    rank_pool: RankPool, tmp_path: Path, scheduler_is: str
) -> None:
    """accelerate keeps one that was prepared with the model, or registered; of any other it says nothing."""
    job, path = AccelerateJob(stage=2, schedule="fixed lambda", scheduler_is=scheduler_is), str(tmp_path / "a")
    whole = rank_pool.run(accelerate_run, 2, job.at(2), 4, save=(2, path))[0]
    seen = rank_pool.run(accelerate_run, 3, job.at(3), 4, load=path)[0]
    is_forgotten = scheduler_is == "forgotten"
    assert sum("WARNING accelerate: NO LEARNING RATE SCHEDULER is in" in text for text in whole.said) == is_forgotten
    assert any("NO LEARNING RATE SCHEDULER is in the checkpoint" in note for note in seen.notes) == is_forgotten
    assert (seen.rates == pytest.approx(whole.rates[2:], rel=1e-12)) is not is_forgotten


def test_the_newest_numbered_checkpoint_is_passed_over_where_it_lacks_what_a_load_reads(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    """A save that was cut short before or after the model, and a damaged one. The Trainer does the same."""
    job = AccelerateJob(stage=2)
    whole = rank_pool.run(accelerate_numbered, 2, job.at(2), str(tmp_path / "run"), 3)[0]
    for lacks in ("pytorch_model", "scheduler.bin", "optim_states.pt"):
        run = tmp_path / lacks
        newest = run / "checkpoints/checkpoint_2"
        shutil.copytree(tmp_path / "run", run)
        if lacks == "pytorch_model":
            (newest / lacks).rename(newest / ".pytorch_model.made.tmp")
        elif lacks == "scheduler.bin":
            (newest / lacks).unlink()
        else:
            os.truncate(next((newest / "pytorch_model").glob(f"*rank_1_*{lacks}")), 1000)
        for rank, seen in enumerate(rank_pool.run(accelerate_numbered, 3, job.at(3), str(run), 3)):
            assert seen.losses == pytest.approx(whole.losses[2:], rel=2e-5)
            warned = [text for text in seen.said if text.startswith("WARNING PASSED OVER: checkpoint_2, from which")]
            assert len(warned) == (rank == 0)
            assert all(f"goes on from {run}/checkpoints/checkpoint_1." in text and lacks in text for text in warned)
        assert zeroelastic.verify(newest).valid, "the save of the same step has taken its place"
    for number in (1, 2):
        shutil.rmtree(run / f"checkpoints/checkpoint_{number}/pytorch_model")
    with pytest.raises(Exception, match="checkpoint_2"):
        rank_pool.run(accelerate_numbered, 2, job.at(2), str(run), 4)


@pytest.mark.parametrize("teacher_first", [False, True])
def test_a_frozen_model_beside_the_trained_one_is_left_out_by_name(
    rank_pool: RankPool, tmp_path: Path, teacher_first: bool
) -> None:
    """One of ZeRO-3 without an optimizer, which DeepSpeed cannot save: rank 0 raised alone, and the others waited."""
    path, tag = str(tmp_path / "a"), "pytorch_model" if teacher_first else "pytorch_model_1"
    saved = rank_pool.run(accelerate_beside_a_teacher, 2, path, is_saving=True, teacher_first=teacher_first)
    assert not (tmp_path / "a" / tag).exists()
    assert all(error.startswith("UnsupportedError: ") and "GatheredParameters" in error for _, _, error in saved)
    loaded = rank_pool.run(accelerate_beside_a_teacher, 3, path, is_saving=False, teacher_first=teacher_first)
    for (state, rate), _, _ in loaded:
        assert compare_states(saved[0][0][0], state) == [] and rate == saved[0][0][1]
    for said in (saved[0][1], loaded[0][1]):
        assert any(f"{tag} IS NOT IN THE CHECKPOINT" in line for line in said)
    assert any("goes on being stepped 2 times per optimizer step" in line for line in loaded[0][1])


@pytest.mark.parametrize("rank", [0, 1])
def test_generators_without_a_file_are_not_said_to_be_restored(rank_pool: RankPool, tmp_path: Path, rank: int) -> None:
    """A save that was cut short after the model has files of some ranks, and half of one: accelerate says nothing."""
    job, path = AccelerateJob(stage=2), str(tmp_path / "a")
    rank_pool.run(accelerate_run, 2, job.at(2), 2, save=(2, path))
    file = tmp_path / f"a/random_states_{rank}.pkl"
    if rank:
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    notes = " ".join(rank_pool.run(accelerate_run, 3, job.at(3), 2, load=path)[0].notes)
    assert f"random number generators of rank {rank}: NOT RESTORED. random_states_*.pkl is missing" in notes
    assert "random number generators: the saved ones on 1 rank; 1 new, seeded" in notes


CHANGED = ("refused", 'with `"strict": true`; else a warning')


@pytest.mark.parametrize(
    "saved",
    [case(("Frameworks", f"{name}: a changed global batch", *CHANGED), (name, 3)) for name in FRAMEWORKS],
    indirect=True,
)
def test_a_changed_global_batch_is_loud_and_an_error_when_strict(
    rank_pool: RankPool, saved: tuple[str, list[Seen]], request: pytest.FixtureRequest
) -> None:
    directory, before = saved
    name = request.node.callspec.params["saved"][0]
    framework = FRAMEWORKS[name]
    job = replace(framework.job, micro=framework.other_micro)
    changed = f"GLOBAL BATCH CHANGED from 24 to {framework.other_micro}"
    for seen in rank_pool.run(framework.run, 1, job, framework.step, load=directory):
        kind, text = seen.error
        assert kind == "StrictError" and changed in text and framework.batch_setting in text
        assert "train_micro_batch_size_per_gpu 24 with gradient_accumulation_steps 1" in text
    steps = framework.step if name == ACCELERATE else framework.step + 2
    for seen in rank_pool.run(framework.run, 1, replace(job, options={}), steps, load=directory):
        loud = [line for line in seen.said if line.startswith("WARNING")]
        assert any(changed in line for line in loud) and any(framework.batch_setting in line for line in loud)
        if name == LIGHTNING:
            position = sorted(index for step in seen.samples for index in step)
            assert position == before[0].samples[6], "the position is in samples"


@pytest.mark.parametrize(
    ("name", "saving", "how", "lost"),
    [
        (ACCELERATE, {"accumulation": 4}, {"extra": 1}, "after 1 of 4 micro-steps"),
        (LIGHTNING, {"accumulation": 2, "save_in": "middle"}, {}, "1 of 2 micro-batches are lost"),
    ],
)
def test_a_save_between_optimizer_steps_is_loud_and_an_error_when_strict(
    rank_pool: RankPool, tmp_path: Path, name: str, saving: Any, how: Any, lost: str
) -> None:
    directory, framework = str(tmp_path / "middle"), FRAMEWORKS[name]
    job = replace(framework.job, **saving).at(2)
    steps = 1 if how else 3
    whole = rank_pool.run(framework.run, 2, job, steps, save=(1, directory), **how)[0]
    job = replace(framework.job, accumulation=4).at(3)
    for seen in rank_pool.run(framework.run, 3, job, steps, load=directory):
        assert seen.error[0] == "StrictError" and lost in seen.error[1]
    loose = rank_pool.run(framework.run, 3, replace(job, options={}), 3 - len(how), load=directory)
    assert any(line.startswith("WARNING") and "SAVED IN THE MIDDLE" in line for line in loose[0].said)
    if name == ACCELERATE:
        assert {seen.step for seen in loose} == {4}
    else:
        assert loose[0].samples == whole.samples[1:], "the step begins anew"


# accelerate


ACCELERATED = FRAMEWORKS[ACCELERATE].job


@pytest.mark.support("Frameworks", "accelerate: random number generators", "exact", "saved ranks; new ranks are seeded")
@saved_by(ACCELERATE)
def test_generators_are_the_saved_ones_or_derived_for_new_ranks(
    rank_pool: RankPool, saved: tuple[str, list[Seen]], tmp_path: Path
) -> None:
    directory, before = saved
    job = replace(ACCELERATED, accumulation=4, seed=98)
    same = rank_pool.run(accelerate_run, 2, replace(job, seed=99).at(2), 3, load=directory)
    assert [seen.draws for seen in same] == [seen.draws for seen in before]
    job = job.at(3)
    first = rank_pool.run(accelerate_run, 3, job, 3, load=directory)
    stale = tmp_path / "stale"
    shutil.copytree(directory, stale)
    shutil.copy(stale / "random_states_1.pkl", stale / "random_states_2.pkl")  # of an older save by more ranks
    again = rank_pool.run(accelerate_run, 3, replace(job, seed=97), 3, load=str(stale))
    assert [seen.draws for seen in first] == [seen.draws for seen in again]
    assert [seen.draws for seen in first[:2]] == [seen.draws for seen in before]
    assert len({seen.draws for seen in first}) == 3
    assert any("1 new, seeded from the checkpoint and the rank" in line for line in first[0].said)
    assert "1 new" in " ".join(first[1].notes)


def test_a_second_load_scales_the_counter_of_a_schedule_once(rank_pool: RankPool, tmp_path: Path) -> None:
    job, path = AccelerateJob(stage=2), str(tmp_path / "a")
    whole = rank_pool.run(accelerate_run, 2, job.at(2), 4, save=(2, path))[0]
    seen = rank_pool.run(accelerate_run, 3, job.at(3), 4, load=path, loads=2)[0]
    assert seen.rates == pytest.approx(whole.rates[2:], rel=1e-12)
    assert any("LambdaLR: its function counts 3 times per optimizer step" in line for line in seen.said)


@pytest.mark.parametrize("schedule", ["deepspeed", "deepspeed lambda"])
def test_a_scheduler_of_deepspeed_goes_on(rank_pool: RankPool, tmp_path: Path, schedule: str) -> None:
    """By accelerate's DummyScheduler: the engine steps, saves and restores it, and accelerate's counter has no part."""
    job, path = AccelerateJob(stage=2, schedule=schedule), str(tmp_path / "a")
    whole = rank_pool.run(accelerate_run, 2, job.at(2), 5, save=(2, path))[0]
    assert len(set(whole.rates)) > 3
    for seen in rank_pool.run(accelerate_run, 3, job.at(3), 5, load=path):
        assert seen.error == ("", "")
        assert seen.rates == pytest.approx(whole.rates[2:], rel=1e-12)
        assert seen.losses == pytest.approx(whole.losses[2:], rel=2e-5)
        assert not any("Lambda" in note for note in seen.notes)


class Recorder:
    """Stands for accelerate's own class: what is not ours must reach it as it was given."""

    def __init__(self, kind: str, stage: int, loader: object = None) -> None:
        self.distributed_type = f"DistributedType.{kind}"
        engine = SimpleNamespace(
            optimizer=object.__new__(DeepSpeedZeroOptimizer_Stage3) if stage else None,
            train_micro_batch_size_per_gpu=lambda: 2,
            _config=SimpleNamespace(_param_dict={}),
        )
        self._models, self._schedulers, self._dataloaders = [engine], [], [loader]
        self.num_processes, self.gradient_accumulation_steps = 1, 1
        self.calls: list[Any] = []

    def load_state(self, input_dir: Any = None, load_kwargs: Any = None, **kwargs: Any) -> str:
        self.calls.append((input_dir, load_kwargs, kwargs))
        return "done"

    def save_state(self, output_dir: Any = None) -> None: ...


class RecordedScheduler:
    """Stands for accelerate's wrapper of a scheduler."""

    def step(self) -> None: ...

    def state_dict(self) -> None: ...

    def load_state_dict(self, state: Any) -> None: ...


RECORDED = SimpleNamespace(Accelerator=Recorder, AcceleratedScheduler=RecordedScheduler)


@pytest.mark.parametrize(("kind", "stage"), [("FSDP", 3), ("MULTI_GPU", 3), ("DEEPSPEED", 0)])
def test_what_is_not_zero_is_left_alone(kind: str, stage: int) -> None:
    from zeroelastic.integrations import accelerate

    original = Recorder.load_state
    accelerate.wrap_module(RECORDED)  # type: ignore[arg-type]
    try:
        accelerate.wrap_module(RECORDED)  # type: ignore[arg-type]
        recorder = Recorder(kind, stage)
        assert recorder.load_state("there", {"a": 1}, strict=False) == "done"
        assert recorder.calls == [("there", {"a": 1}, {"strict": False})]
    finally:
        unwrap_all()
    assert Recorder.load_state is original


@pytest.mark.support("Frameworks", "accelerate: `use_stateful_dataloader`", "refused", "at another size or micro batch")
@saved_by(ACCELERATE)
def test_a_stateful_dataloader_of_another_size_is_refused(
    rank_pool: RankPool, saved: tuple[str, list[Seen]], tmp_path: Path
) -> None:
    directory = tmp_path / "checkpoint"
    shutil.copytree(saved[0], directory)
    torch.save({}, directory / "dl_state_dict.bin")
    for kind, text in rank_pool.run(load_with_stateful_loader, 1, str(directory)):
        assert kind == "UnsupportedError" and "counts the batches of 2 ranks" in text
        assert "data_position" in text


def load_with_stateful_loader(directory: str) -> tuple[str, str]:
    from zeroelastic.integrations import accelerate

    accelerate.wrap_module(RECORDED)  # type: ignore[arg-type]
    recorder = Recorder("DEEPSPEED", 3, SimpleNamespace(use_stateful_dataloader=True))
    try:
        recorder.load_state(directory)
    except Exception as error:
        assert recorder.calls == []
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize(
    ("done", "drop_last", "expected"),
    [(0, False, (0, 0, 0)), (9, False, (1, 4, 8)), (9, True, (2, 1, 2)), (4, True, (1, 0, 0))],
)
def test_the_position_in_the_data_follows_from_the_steps(
    done: int, drop_last: bool, expected: tuple[int, int, int]
) -> None:
    """100 samples in batches of 24: 5 steps an epoch, 4 whole ones."""
    from zeroelastic.integrations.accelerate import data_position

    accelerator = Recorder("DEEPSPEED", 3)
    accelerator.gradient_accumulation_steps = 2
    accelerator._models[0].global_steps = done
    accelerator._models[0].train_batch_size = lambda: 24
    position = data_position(accelerator, SimpleNamespace(total_dataset_length=100, _drop_last=drop_last))
    assert (position.epoch, position.steps, position.batches) == expected
    assert position.samples == position.steps * 24


# Lightning


FITTED = FRAMEWORKS[LIGHTNING].job


@pytest.mark.support(
    "Frameworks",
    "Lightning `Trainer.test(ckpt_path=...)`",
    "exact",
    "weights and buffers; engines without an optimizer",
)
@saved_by(LIGHTNING)
def test_a_model_is_tested_at_any_size(rank_pool: RankPool, saved: tuple[str, list[Seen]]) -> None:
    """Lightning builds an engine without an optimizer for that, which DeepSpeed alone does not load at stage 3."""
    directory, _ = saved
    with zeroelastic.open(directory) as checkpoint:
        weights = {name: checkpoint[name].torch().flatten().tolist() for name in checkpoint}
    losses = {}
    for world_size in (2, 3):
        ranks = rank_pool.run(lightning_test, world_size, FITTED, directory)
        assert all(found == weights for found, _, _ in ranks) and "net.batches_seen" in weights
        assert sum(number for _, _, number in ranks) == FITTED.samples
        losses[world_size] = sum(loss for _, loss, _ in ranks)
    assert losses[2] == pytest.approx(losses[3], rel=1e-5)


@pytest.mark.support(*FIT)
def test_saves_of_other_moments_go_on(rank_pool: RankPool, tmp_path: Path) -> None:
    """At an epoch's end, and before a batch that then comes again."""
    job = replace(FITTED, accumulation=2).at(2)
    whole = rank_pool.run(lightning_run, 2, job, 8, save=(4, str(tmp_path / "end")))[0]
    rank_pool.run(lightning_run, 2, replace(job, save_in="batch start"), 6, save=(5, str(tmp_path / "start")))
    for moment, first in (("end", 4), ("start", 5)):
        seen = rank_pool.run(lightning_run, 3, replace(job, accumulation=4).at(3), 8, load=str(tmp_path / moment))[0]
        assert seen.samples == whole.samples[first:], moment
        assert seen.rates == pytest.approx(whole.rates[first:], rel=1e-12)


@pytest.mark.support(*FIT)
@saved_by(LIGHTNING)
def test_a_run_goes_on_twice(rank_pool: RankPool, saved: tuple[str, list[Seen]], tmp_path: Path) -> None:
    """Each time with another accumulation: gradients keep the scale of the first run."""
    directory, before = saved
    again = str(tmp_path / "again")
    job = replace(FITTED, accumulation=2).at(3)
    first = rank_pool.run(lightning_run, 3, job, 8, load=directory, save=(7, again))[0]
    kept = "GRADIENTS are divided by 4 besides the mean, not by 2"
    assert any(line.startswith("WARNING") and kept in line for line in first.said)
    second = rank_pool.run(lightning_run, 1, replace(job, accumulation=1).at(1), 9, load=again)[0]
    assert second.samples == before[0].samples[7:]
    assert second.losses == pytest.approx(before[0].losses[7:], rel=2e-5)


@saved_by(LIGHTNING)
def test_a_second_load_into_the_same_engine_keeps_the_scale_of_gradients(
    rank_pool: RankPool, saved: tuple[str, list[Seen]]
) -> None:
    """And an option leaves it to Lightning, which is said: the same once more is another run then."""
    directory, before = saved
    job = replace(FITTED, accumulation=2).at(3)
    seen = rank_pool.run(lightning_run, 3, job, 9, load=directory, loads=2)[0]
    assert seen.losses == pytest.approx(before[0].losses[6:], rel=2e-5)
    left = replace(job, options={**job.options, "keep_gradient_scale": False})
    alone = rank_pool.run(lightning_run, 3, left, 9, load=directory)[0]
    assert any("GRADIENTS are divided by 2 besides the mean, not by 4" in line for line in alone.said)
    assert alone.losses != pytest.approx(before[0].losses[6:], rel=2e-5)


@pytest.mark.support("Frameworks", "Lightning: a stream (`IterableDataset`)", "exact", "strided over the ranks")
def test_a_stream_goes_on(rank_pool: RankPool, tmp_path: Path) -> None:
    job = replace(FITTED, loader="stream", accumulation=2)
    whole = rank_pool.run(lightning_run, 2, job.at(2), 4, save=(2, str(tmp_path / "a")))[0]
    seen = rank_pool.run(lightning_run, 3, replace(job, accumulation=4).at(3), 4, load=str(tmp_path / "a"))[0]
    assert seen.samples == whole.samples[2:] and sorted(index for step in whole.samples for index in step) == list(
        range(96)
    )


@pytest.mark.support("Frameworks", "Lightning: stateful DataLoaders", "refused", "at another size; exact at the same")
def test_a_stateful_loader_is_refused_at_another_size(rank_pool: RankPool, tmp_path: Path) -> None:
    job = replace(FITTED, loader="stateful")
    whole = rank_pool.run(lightning_run, 2, job.at(2), 4, save=(2, str(tmp_path / "a")))[0]
    for seen in rank_pool.run(lightning_run, 3, job.at(3), 4, load=str(tmp_path / "a")):
        assert seen.error[0] == "UnsupportedError" and "counts the batches of 2 ranks" in seen.error[1]
    same = rank_pool.run(lightning_run, 2, job.at(2), 4, load=str(tmp_path / "a"))[0]
    assert same.samples == whole.samples[2:]


@pytest.mark.support("Frameworks", "Lightning: `ElasticStatefulDataLoader`", "exact")
@pytest.mark.parametrize(("step", "accumulation"), [(3, 1), (5, 2)])
def test_an_elastic_loader_goes_on_at_another_size(
    rank_pool: RankPool, tmp_path: Path, step: int, accumulation: int
) -> None:
    """Also in the epochs after the one of the resume, which had as many batches as that one had left."""
    job, path = LightningJob(loader="elastic", accumulation=accumulation), str(tmp_path / "a")
    whole = rank_pool.run(lightning_run, 2, job.at(2), 9, save=(step, path))[0]
    for world_size, now in ((3, 2), (2, accumulation)):
        seen = rank_pool.run(lightning_run, world_size, replace(job, accumulation=now).at(world_size), 9, load=path)[0]
        assert seen.samples == whole.samples[step:]


@pytest.mark.support(
    "Frameworks", "Lightning: epochs that end within a global batch", "refused", 'with `"strict": true`'
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

    def remove_checkpoint(self, filepath: str) -> None: ...

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
