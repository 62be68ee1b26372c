"""accelerate at other world sizes: what it keeps beside the engine goes on as in the uninterrupted run."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from documentation import blocks, zero_block
from documentation import run as run_command
from frameworks_job import (
    OFFLOADED,
    AccelerateJob,
    Seen,
    accelerate_metrics,
    accelerate_run,
    prepare,
    read_history,
    run_script,
)
from places import ROOT
from warm_python import executable

from zeroelastic.checkpoint.commit_record import read_record
from zeroelastic.checkpoint.open import open_checkpoint
from zeroelastic.deepspeed.patching import unwrap_all
from zeroelastic.testing import RankPool, compare_states

PRELOAD = ("accelerate", "transformers.models.llama.modeling_llama", "peft")

EXAMPLE = ROOT / "examples" / "accelerate" / "train.py"
DOCUMENT = "docs/guides/accelerate.md"
INSTALL_LINES = ("import zeroelastic", "zeroelastic.install()")
LOSS_RTOL = {"no": 5e-5, "bf16": 8e-3}


@pytest.fixture(scope="module")
def rank_pool() -> Iterator[RankPool]:
    """A pool of its own, which has imported what every rank of these tests needs."""
    with RankPool(4, preload=PRELOAD) as pool:
        yield pool


def check_history(found: list[dict[str, Any]], expected: list[dict[str, Any]], rtol: float) -> None:
    """The same steps with the same samples and learning rates, and losses within the tolerance."""
    assert [line["step"] for line in found] == [line["step"] for line in expected]
    for line, wanted in zip(found, expected, strict=True):
        assert line["samples"] == wanted["samples"], line["step"]
        assert line["lr"] == pytest.approx(wanted["lr"], rel=1e-9), line["step"]
        assert line["loss"] == pytest.approx(wanted["loss"], rel=rtol), line["step"]


@pytest.mark.extended
@pytest.mark.support("Frameworks", "accelerate `save_state`, `load_state`", "exact", "unmodified scripts")
@pytest.mark.parametrize(
    "flags",
    [["--mixed-precision", "no"], ["--lora"], ["--lora", "--stage", "2"]],
    ids=["fp32", "bf16-lora", "bf16-lora-zero2"],
)
def test_the_example_goes_on_at_other_world_sizes(rank_pool: RankPool, tmp_path: Path, flags: list[str]) -> None:
    """Saved by 4 ranks within an epoch, resumed by 3 and by 2 across its end; against a run of 4 throughout."""
    rtol = LOSS_RTOL["no" if "no" in flags else "bf16"]

    def run(world_size: int, out: Path, steps: int) -> None:
        arguments = ["--out", str(out), "--steps", str(steps), *flags]
        rank_pool.run(run_script, world_size, str(EXAMPLE), arguments, timeout=200)

    run(4, tmp_path / "whole", 9)
    whole = read_history(tmp_path / "whole")
    assert [line["step"] for line in whole] == list(range(1, 10)) and len({line["lr"] for line in whole}) > 5
    assert whole[-1]["loss"] < whole[0]["loss"]
    run(4, tmp_path / "first", 6)
    for world_size in (3, 2):
        shutil.copytree(tmp_path / "first", tmp_path / f"on{world_size}")
        run(world_size, tmp_path / f"on{world_size}", 9)
        found = read_history(tmp_path / f"on{world_size}")
        assert [line["processes"] for line in found] == [4] * 6 + [world_size] * 3
        check_history(found, whole, rtol)


@pytest.mark.support(
    "Using it", "`accelerate launch -m zeroelastic.run train.py`, `torchrun ... -m zeroelastic.run`", "exact"
)
@pytest.mark.extended
def test_the_commands_of_the_documentation_run_a_script_that_does_not_know_zeroelastic(tmp_path: Path) -> None:
    lines = EXAMPLE.read_text().splitlines()
    kept = [line for line in lines if not line.startswith(INSTALL_LINES)]
    assert len(kept) == len(lines) - 2
    (tmp_path / "train.py").write_text("\n".join(kept))
    (commands,) = [block.text.splitlines() for block in blocks(DOCUMENT) if block.language == "bash"]
    launchers = {
        "torchrun": ["torch.distributed.run", "--standalone"],
        "accelerate": ["accelerate.commands.launch", "--main_process_ip", "127.0.0.1", "--main_process_port", "0"],
    }
    for command in commands:
        program, *arguments = command.replace("accelerate launch", "accelerate").split()
        arguments = ["-m", *launchers[program], *arguments, "--mixed-precision", "no"]
        run_command(arguments, tmp_path, python=executable(*PRELOAD, "accelerate.commands.launch"))
    found = read_history(tmp_path / "out")
    assert [line["processes"] for line in found] == [4, 4, 3, 3, 3, 2]
    saved = open_checkpoint(tmp_path / "out/checkpoint/pytorch_model").shard(0).ds_config
    assert zero_block(DOCUMENT).items() <= saved["zero_optimization"].items()
    epoch = sorted(index for line in found[:4] for index in line["samples"])
    assert epoch == list(range(96)), "an epoch across the change is not every sample once"
    assert [line["lr"] for line in found] == pytest.approx([0, 5e-3 / 3, 1e-2 / 3, 5e-3, 5e-3 * 8 / 9, 5e-3 * 7 / 9])


@pytest.mark.parametrize("stages", [(3, 3), (2, 2), (2, 3)])
def test_the_script_of_the_documentation_goes_on(rank_pool: RankPool, tmp_path: Path, stages: tuple[int, int]) -> None:
    """It saves after 4 and 8 of its 9 steps; what is left is done again on more ranks."""
    (text,) = [block.text for block in blocks(DOCUMENT) if block.language == "python"]
    for world_size, stage in zip((2, 3), stages, strict=True):
        zero = '{"stage": 3, "elastic_checkpoint": True}'
        assert zero in text
        (tmp_path / "short.py").write_text(text if stage == 3 else text.replace(zero, str(zero_block(DOCUMENT))))
        rank_pool.run(run_script, world_size, str(tmp_path / "short.py"), [])
        assert (tmp_path / "state" / "pytorch_model" / "zeroelastic.json").exists()
    record = read_record(tmp_path / "state" / "pytorch_model")
    assert record is not None and (record.world_size, record.global_steps) == (2, 8), "the second run had 1 step left"


JOB = AccelerateJob()


@pytest.fixture(scope="module")
def saved(
    rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> tuple[str, list[Seen]]:
    """5 steps on 2 ranks, saved at step 3; what the ranks saw. The parameter is the ZeRO stage."""
    directory = str(tmp_path_factory.mktemp("saved") / "checkpoint")
    job = replace(JOB, stage=request.param, accumulation=4).at(2)
    return directory, rank_pool.run(accelerate_run, 2, job, 5, save=(3, directory))


at_stage_3 = pytest.mark.parametrize("saved", [3], indirect=True)
LOW_STAGES = pytest.mark.support("Frameworks", "accelerate at ZeRO stages 1 and 2", "exact", "also from and to stage 3")


@pytest.mark.support("Frameworks", "accelerate `save_state`, `load_state`", "exact", "unmodified scripts")
@pytest.mark.parametrize(
    ("saved", "stage", "world_size", "accumulation"),
    [
        (3, 3, 3, 4),
        (3, 3, 3, 2),
        (3, 3, 1, 4),
        pytest.param(2, 2, 3, 4, marks=LOW_STAGES),
        pytest.param(2, 3, 1, 2, marks=LOW_STAGES),
        pytest.param(2, 1, 3, 2, marks=LOW_STAGES),
        pytest.param(3, 2, 3, 2, marks=LOW_STAGES),
        pytest.param(1, 2, 3, 4, marks=LOW_STAGES),
        pytest.param(1, 1, 1, 2, marks=LOW_STAGES),
    ],
    indirect=["saved"],
)
def test_state_schedule_and_data_go_on(
    rank_pool: RankPool, saved: tuple[str, list[Seen]], stage: int, world_size: int, accumulation: int
) -> None:
    """2 -> 3 ranks with accumulation 4 used to hang: the new rank did not know accelerate's step."""
    directory, before = saved
    job = replace(JOB, stage=stage, accumulation=accumulation, seed=99).at(world_size)
    for seen in rank_pool.run(accelerate_run, world_size, job, 5, load=directory):
        assert compare_states(before[0].state, seen.state) == []
        assert seen.step == accumulation  # counted from the epoch on, which has 2 steps
        assert seen.rates == pytest.approx(before[0].rates[3:], rel=1e-12)
        assert seen.samples == before[0].samples[3:]
        assert seen.losses == pytest.approx(before[0].losses[3:], rel=2e-5)


@LOW_STAGES
def test_an_optimizer_on_the_cpu_goes_on_at_stage_2(rank_pool: RankPool, tmp_path: Path) -> None:
    """accelerate makes a DeepSpeedCPUAdam of the script's AdamW."""
    job = replace(JOB, stage=2, zero=OFFLOADED)
    whole = rank_pool.run(accelerate_run, 2, job.at(2), 4, save=(2, str(tmp_path / "a")))[0]
    for seen in rank_pool.run(accelerate_run, 3, job.at(3), 4, load=str(tmp_path / "a")):
        assert compare_states(whole.state, seen.state) == []
        assert seen.samples == whole.samples[2:]
        assert seen.losses == pytest.approx(whole.losses[2:], rel=2e-5)


@pytest.mark.support("Frameworks", "accelerate: random number generators", "exact", "saved ranks; new ranks are seeded")
@pytest.mark.parametrize(("saved", "stage"), [(3, 3), (2, 2)], indirect=["saved"])
def test_generators_are_the_saved_ones_or_derived_for_new_ranks(
    rank_pool: RankPool, stage: int, saved: tuple[str, list[Seen]], tmp_path: Path
) -> None:
    directory, before = saved
    job = replace(JOB, stage=stage, accumulation=4, seed=98)
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


@pytest.mark.support("Frameworks", "accelerate: learning rate schedulers", "exact", "LambdaLR and those of torch")
@pytest.mark.parametrize(("schedule", "stage"), [("fixed lambda", 3), ("cosine", 3), ("one cycle", 3), ("cosine", 2)])
def test_any_schedule_goes_on(rank_pool: RankPool, tmp_path: Path, schedule: str, stage: int) -> None:
    """Down, and back up from what the smaller run saved."""
    job = replace(JOB, schedule=schedule, stage=stage)
    whole = rank_pool.run(accelerate_run, 3, job.at(3), 6, save=(2, str(tmp_path / "a")))[0]
    assert len(set(whole.rates)) == 6
    down = rank_pool.run(accelerate_run, 2, job.at(2), 4, load=str(tmp_path / "a"), save=(4, str(tmp_path / "b")))[0]
    up = rank_pool.run(accelerate_run, 3, job.at(3), 6, load=str(tmp_path / "b"))[0]
    assert [*down.rates, *up.rates] == pytest.approx(whole.rates[2:], rel=1e-9)
    assert any("3 times per optimizer step" in line for line in down.said)


@pytest.mark.support(
    "Frameworks", "accelerate: a changed global batch", "refused", 'with `"strict_batch": true`; else a warning'
)
@pytest.mark.parametrize(("saved", "stage"), [(3, 3), (2, 2)], indirect=["saved"])
def test_a_changed_global_batch_is_loud_and_an_error_when_strict(
    rank_pool: RankPool, stage: int, saved: tuple[str, list[Seen]]
) -> None:
    directory, _ = saved
    job = AccelerateJob(micro=3, stage=stage)
    for seen in rank_pool.run(accelerate_run, 1, job, 3, load=directory):
        kind, text = seen.error
        assert kind == "StrictError" and "GLOBAL BATCH CHANGED from 24 to 3" in text
        assert "train_micro_batch_size_per_gpu 24 with gradient_accumulation_steps 1" in text
        assert "Accelerator(gradient_accumulation_steps=...)" in text
    for seen in rank_pool.run(accelerate_run, 1, replace(job, options={}), 3, load=directory):
        loud = [line for line in seen.said if line.startswith("WARNING")]
        assert any("GLOBAL BATCH CHANGED from 24 to 3" in line for line in loud)
        assert any("Accelerator(gradient_accumulation_steps=...)" in line for line in loud)


@pytest.mark.parametrize("stage", [3, 2])
def test_a_save_between_optimizer_steps_is_loud_and_an_error_when_strict(
    rank_pool: RankPool, tmp_path: Path, stage: int
) -> None:
    directory = str(tmp_path / "checkpoint")
    job = replace(JOB, accumulation=4, stage=stage)
    rank_pool.run(accelerate_run, 2, job.at(2), 1, save=(1, directory), extra=1)
    for seen in rank_pool.run(accelerate_run, 3, job.at(3), 1, load=directory):
        assert seen.error[0] == "StrictError" and "after 1 of 4 micro-steps" in seen.error[1]
    loose = rank_pool.run(accelerate_run, 3, replace(job, options={}).at(3), 2, load=directory)
    assert {seen.step for seen in loose} == {4}
    assert any(line.startswith("WARNING") and "SAVED IN THE MIDDLE" in line for line in loose[0].said)


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


@pytest.mark.parametrize(("kind", "stage"), [("FSDP", 3), ("MULTI_GPU", 3), ("DEEPSPEED", 0)])
def test_what_is_not_zero_is_left_alone(kind: str, stage: int) -> None:
    from zeroelastic.integrations import accelerate

    original = Recorder.load_state
    accelerate.wrap_module(SimpleNamespace(Accelerator=Recorder))  # type: ignore[arg-type]
    try:
        accelerate.wrap_module(SimpleNamespace(Accelerator=Recorder))  # type: ignore[arg-type]
        recorder = Recorder(kind, stage)
        assert recorder.load_state("there", {"a": 1}, strict=False) == "done"
        assert recorder.calls == [("there", {"a": 1}, {"strict": False})]
    finally:
        unwrap_all()
    assert Recorder.load_state is original


def test_uninstall_puts_accelerate_back(rank_pool: RankPool) -> None:
    assert rank_pool.run(install_and_uninstall, 1) == [(True, False)]


def install_and_uninstall() -> tuple[bool, bool]:
    """Whether load_state is wrapped once an engine is built, and after uninstall()."""
    import zeroelastic

    accelerator, *_ = prepare(JOB)
    wrapped = hasattr(type(accelerator).load_state, "__wrapped__")
    zeroelastic.uninstall()
    return wrapped, hasattr(type(accelerator).load_state, "__wrapped__")


@pytest.mark.support("Frameworks", "accelerate: `use_stateful_dataloader`", "refused", "at another size or micro batch")
@at_stage_3
def test_a_stateful_dataloader_of_another_size_is_refused(
    rank_pool: RankPool, saved: tuple[str, list[Seen]], tmp_path: Path
) -> None:
    directory = tmp_path / "checkpoint"
    shutil.copytree(saved[0], directory)
    torch.save({}, directory / "dl_state_dict.bin")
    for kind, text in rank_pool.run(load_with_stateful_loader, 1, str(directory)):
        assert kind == "UnsupportedError" and "counts the batches of 2 processes" in text
        assert "data_position" in text


def load_with_stateful_loader(directory: str) -> tuple[str, str]:
    from zeroelastic.integrations import accelerate

    accelerate.wrap_module(SimpleNamespace(Accelerator=Recorder))  # type: ignore[arg-type]
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


def test_trackers_get_saves_loads_and_lost_steps(rank_pool: RankPool, tmp_path: Path) -> None:
    """2 ranks to step 3, saving at 3 only; then 3 ranks from step 3 to 4, and the same again."""
    job, events = AccelerateJob(), str(tmp_path / "events.jsonl")
    first, second = rank_pool.run(accelerate_metrics, 2, job.at(2), str(tmp_path / "a"), events, 3)
    assert second == []
    (step, saved), *_ = [(step, values) for step, values in first if "zeroelastic/save/bytes" in values]
    assert step == 3 and saved["zeroelastic/save/stall_s"] > 0
    for lost in (0.0, 1.0):
        found, *_ = rank_pool.run(
            accelerate_metrics, 3, job.at(3), str(tmp_path / "b"), events, 4, load=str(tmp_path / "a")
        )
        values = {key: value for _, each in found for key, value in each.items()}
        assert (values["zeroelastic/load/from_ranks"], values["zeroelastic/load/to_ranks"]) == (2, 3)
        assert values["zeroelastic/job/lost_steps"] == lost
