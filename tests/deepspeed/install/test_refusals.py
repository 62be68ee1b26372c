"""What cannot be saved or resumed right is refused by name, before anything is written or touched, on every rank.

With elastic_checkpoint on that happens while the engine is built. With it off DeepSpeed saves and loads at the same
size as it does without us, with one line in the log, and another world size is refused with the reason. Configurations
that DeepSpeed builds on a CPU are built; of the others an engine is given the attributes that DeepSpeed gives it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import training
from programs import run_command
from saved_files import logged
from sliced_model import ByHand, HostQuantizer, SlicedModel, build_sliced, use_sliced
from training import Job, attempt, look, of_all, raised, train_step

from zeroelastic.testing import RankPool, compare_states

SECTION = "Parallelism and communication"
ADVICE = 'Save with "format": "rigid", and resume at the saved world size.'

Change = Callable[[], None]


def zenflow() -> None:
    """Built by DeepSpeed on a CPU; its steps need a GPU."""


def quantised_frozen_weights() -> None:
    """DeepSpeed's own partitioning, with its CUDA op replaced."""
    from deepspeed.runtime.zero import partition_parameters

    partition_parameters.CUDAQuantizer = HostQuantizer


def a_sequence_mesh() -> None:
    """The mesh that data_parallel_size and sequence_parallel_size make: partitions are not shared along a sequence."""


def _after_building(mark: Callable[[Any, Any], None]) -> None:
    """Mark an engine and its optimizer as soon as DeepSpeed has built it: before zeroelastic, which wraps this."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    build = DeepSpeedEngine._configure_zero_optimizer

    def _configure_zero_optimizer(self: Any, optimizer: Any) -> Any:
        made = build(self, optimizer)
        mark(self, made)
        return made

    DeepSpeedEngine._configure_zero_optimizer = _configure_zero_optimizer


def _another_class(name: str) -> None:
    def mark(engine: Any, made: Any) -> None:
        made.__class__ = type(name, (type(made),), {})

    _after_building(mark)


def superoffload() -> None:
    """It needs a CUDA GPU: an optimizer of that class."""
    _another_class("SuperOffloadOptimizer_Stage3")


def mics() -> None:
    """It needs DeepSpeed < 0.19.7: an optimizer of that class."""
    _another_class("MiCS_Optimizer")


def experts() -> None:
    """What DeepSpeed sets for mixture-of-experts layers, AutoEP's among them."""

    def mark(engine: Any, made: Any) -> None:
        engine.has_moe_layers = True

    _after_building(mark)


ZENFLOW = {
    "overlap_comm": True,
    "offload_optimizer": {"device": "cpu"},
    "zenflow": {
        "topk_ratio": 0.1,
        "select_strategy": "step",
        "select_interval": 2,
        "update_interval": 2,
        "full_warm_up_rounds": 0,
        "overlap_step": False,
    },
}
CASES: dict[str, tuple[Change, Job, str]] = {
    "ZenFlow": (zenflow, Job(zero=ZENFLOW), "ZenFlow (parameters are transposed"),
    "SuperOffload": (superoffload, Job(), "SuperOffload (its moments are in another process"),
    "MiCS": (mics, Job(), "MiCS (parameters are partitioned within shard groups"),
    "experts that DeepSpeed does not describe": (experts, Job(), "mixture-of-experts layers"),
    "`zero_quantized_nontrainable_weights`": (
        quantised_frozen_weights,
        Job(zero={"zero_quantized_nontrainable_weights": True}),
        "zero_quantized_nontrainable_weights",
    ),
    "sequence parallelism by `data_parallel_size`": (
        a_sequence_mesh,
        Job(config={"data_parallel_size": 1, "sequence_parallel_size": 2}),
        "a data parallel group of 1 of 2 ranks (for sequence parallelism, give deepspeed.initialize an mpu",
    ),
}
NOTES = {"experts that DeepSpeed does not describe": "recognised by `engine.has_moe_layers`"}


def build_error(change: Change, job: Job) -> tuple[str, str]:
    """The error of deepspeed.initialize on this rank."""
    change()
    return raised(lambda: training.build_engine(job))


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.support(SECTION, n, "refused", NOTES.get(n, "")), id=n) for n in CASES]
)
def test_elastic_saving_is_refused_while_the_engine_is_built(rank_pool: RankPool, name: str) -> None:
    change, job, said = CASES[name]
    kind, text = of_all(rank_pool.run(build_error, 2, change, job, timeout=90))
    assert kind == "UnsupportedError" and said in text and ADVICE in text, text


def save_and_load_alone(change: Change, job: Job, directory: str) -> tuple[list[str], list[str]]:
    """With the flag off: save and load at one size, unchanged; what the log says of each."""
    change()
    engine = training.build_engine(job)
    train_step(engine, 0)
    records = logged("")
    saved, _ = look(engine)
    engine.save_checkpoint(directory)
    said = list(records)
    train_step(engine, 1)
    assert engine.load_checkpoint(directory)[0] is not None
    assert compare_states(saved, look(engine)[0]) == []
    assert not hasattr(engine, "zeroelastic_report")
    return said, records[len(said) :]


def attempt_changed(change: Change, job: Job, directory: str) -> tuple[str, str]:
    change()
    return attempt(job, directory)


def test_rigid_runs_are_left_to_deepspeed_at_the_same_size(rank_pool: RankPool, tmp_path: Path) -> None:
    change, job, said = CASES["SuperOffload"]
    job = replace(job, elastic=False)
    results = rank_pool.run(save_and_load_alone, 2, change, job, str(tmp_path), timeout=90)
    assert [(len(at_save), len(at_load)) for at_save, at_load in results] == [(1, 1), (0, 0)], "rank 0 speaks, once"
    assert "no commit record is written" in results[0][0][0] and said in results[0][0][0]
    assert "loading through DeepSpeed alone" in results[0][1][0] and said in results[0][1][0]
    assert not list(tmp_path.rglob("zeroelastic.json"))
    kind, text = of_all(rank_pool.run(attempt_changed, 3, change, job, str(tmp_path), timeout=90))
    assert kind == "UnsupportedError" and said in text and ADVICE in text


def sliced_under_zero_init(job: Job, directory: str, *, save: bool, init: bool = True) -> tuple[str, str]:
    """AutoTP on a model that zero.Init has partitioned over all ranks: saved and loaded, or the error of loading."""
    import deepspeed

    if init:
        with deepspeed.zero.Init(config_dict_or_path=training.ds_config(job)):
            model = SlicedModel()
    else:
        model = SlicedModel()
    engine = build_sliced(job, 2, model)
    if save:
        state, _ = look(engine)
        engine.save_checkpoint(directory)
        assert engine.load_checkpoint(directory)[0] is not None
        assert compare_states(state, look(engine)[0]) == []
        return "", ""
    training.build_engine = lambda job: engine  # type: ignore[assignment]
    return attempt(job, directory)


def test_zero_init_before_tensor_parallelism_without_the_flag(rank_pool: RankPool, tmp_path: Path) -> None:
    """DeepSpeed saves and loads it at the same size; another size is refused, with zero.Init and without."""
    job = Job(batch=12, elastic=False, groups=1)
    assert rank_pool.run(sliced_under_zero_init, 4, job, str(tmp_path), save=True, timeout=90) == [("", "")] * 4
    kind, text = of_all(rank_pool.run(sliced_under_zero_init, 2, job, str(tmp_path), save=False, timeout=90))
    assert kind == "UnsupportedError" and "deepspeed.zero.Init" in text
    kind, text = of_all(
        rank_pool.run(sliced_under_zero_init, 2, job, str(tmp_path), save=False, init=False, timeout=90)
    )
    assert kind == "CheckpointError" and "2 ranks imply" in text


def save_after(job: Job, directory: str) -> tuple[str, str]:
    """The engine is built as usual, and becomes what cannot be saved; only rank 1 notices."""
    engine = training.build_engine(job)
    if torch.distributed.get_rank() == 1:
        engine.has_moe_layers = True
    return raised(lambda: engine.save_checkpoint(directory))


def test_a_save_that_one_rank_refuses_writes_nothing(rank_pool: RankPool, tmp_path: Path) -> None:
    kind, text = of_all(rank_pool.run(save_after, 2, Job(), str(tmp_path), timeout=60))
    assert kind == "UnsupportedError" and "mixture-of-experts" in text
    assert not list(tmp_path.iterdir())


class HalfAnMpu(ByHand):
    """Groups that leave ranks out: pipeline stages that the data and model parallel groups do not tell of."""

    def __init__(self) -> None:
        super().__init__(2)
        self.data_parallel = self._mine([[rank] for rank in range(torch.distributed.get_world_size())])


def build_with_half_an_mpu() -> tuple[str, str]:
    import deepspeed

    deepspeed.init_distributed()
    mpu = HalfAnMpu()
    initialize = deepspeed.initialize
    deepspeed.initialize = lambda **kwargs: initialize(mpu=mpu, **kwargs)
    return build_error(zenflow, Job())


@pytest.mark.support(SECTION, "an `mpu` whose groups do not make up the world", "refused")
def test_mpu_whose_groups_are_not_the_world(rank_pool: RankPool) -> None:
    kind, text = of_all(rank_pool.run(build_with_half_an_mpu, 4, timeout=90))
    assert kind == "UnsupportedError" and ADVICE in text
    assert "groups do not make up the world (data parallel 1 x model parallel 2 of 4 ranks)" in text


def build_a_pipeline(stage: int) -> str:
    import deepspeed
    from deepspeed.pipe import PipelineModule

    import zeroelastic

    zeroelastic.install()
    deepspeed.init_distributed()
    model = PipelineModule([torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)], num_stages=2)
    config = training.ds_config(Job(precision="fp32"))
    config["zero_optimization"]["stage"] = stage
    with pytest.raises(AssertionError) as caught:
        deepspeed.initialize(model=model, optimizer=torch.optim.Adam(model.parameters()), config=config)
    return str(caught.value)


@pytest.mark.support(SECTION, "pipeline modules", "refused", "by DeepSpeed itself, at stage 3")
def test_pipeline_modules_have_no_stage_3(rank_pool: RankPool) -> None:
    for text in rank_pool.run(build_a_pipeline, 2, 3, timeout=60):
        assert "ZeRO-3 are incompatible with pipeline parallelism" in text


VERBS = (
    ("verify",),
    ("plan", "--world-size", "3"),
    ("reshard", "OUT", "--world-size", "3"),
    ("export", "OUT"),
    ("convert", "OUT", "--to", "fsdp2"),
    ("diff", "SRC"),
    ("latest",),
    ("inspect",),
)


@pytest.mark.support(
    "Using it",
    "tensor parallel checkpoints of a DeepSpeed before 0.19.8 on the command line",
    "refused",
    "`verify` and `latest` say sound or damaged, `inspect` shows one rank",
)
@pytest.mark.parametrize("elastic", [True, False], ids=["elastic", "rigid"])
def test_the_command_line_refuses_tensor_parallel_checkpoints(
    rank_pool: RankPool, tmp_path: Path, elastic: bool
) -> None:
    job = Job(batch=12, elastic=elastic, installed=elastic)
    rank_pool.run(use_sliced, 2, job, 2, str(tmp_path / "run"), save=True)
    assert len(list(tmp_path.rglob("*mp_rank_01*"))) == 2
    before = sorted(tmp_path.rglob("*"))
    paths = {"SRC": str(tmp_path / "run"), "OUT": str(tmp_path / "out")}
    for verb, *rest in VERBS if elastic else VERBS[-1:]:
        words = (paths.get(word, word) for word in ("SRC", *rest))
        done = run_command(verb, *words, env={"COLUMNS": "1000"})
        said = done.stdout + done.stderr
        judges = verb in ("verify", "latest")  # checksums need no layout
        assert (done.returncode == 0) is judges, (verb, said)
        assert judges or "of the same tensor parallel size resumes it at any data parallel size" in said, (verb, said)
        assert verb != "verify" or "not supported" in said, said
        assert "damaged" not in said and "Traceback" not in said, (verb, said)
    assert sorted(tmp_path.rglob("*")) == before
