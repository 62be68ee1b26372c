"""Process groups and communication features: what is resumed at another world size is what was saved, bit for bit.

How ranks talk to each other while they train must not show in a checkpoint, and what is kept beside the partitions (the
secondary copies of hpZ, persistent parameters) must not survive a load. Same job and same comparison as in
test_resume.py; each feature goes up or down.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import training
from extended import with_swept
from saved_files import flip, logged, record_again, record_of, swap
from saves import Saved, check_resumed
from sliced_model import TP_BATCH, ByHand, HostQuantizer, SlicedModel, build_sliced, use_sliced
from training import Job, Outcome, of_all, resume, train_and_save

from zeroelastic.checkpoint.open import open_checkpoint
from zeroelastic.checkpoint.tag_files import TensorParallel
from zeroelastic.errors import UnsupportedError, ZeroElasticError
from zeroelastic.testing import RankPool, compare_states

SECTION = "Parallelism and communication"


def run_with(change: Callable[[Job], None], function: Callable[..., Any], job: Job, *args: Any, **kwargs: Any) -> Any:
    """On a rank: change how models or engines are built (processes are not reused), then run the job."""
    change(job)
    return function(job, *args, **kwargs)


def unchanged(job: Job) -> None:
    """The standard job."""


def train_then_resume(job: Job, directory: str, **load: Any) -> Outcome:
    """Train before loading, so that everything that is made while training is there, and stale, at the load."""
    build = training.build_engine

    def trained(job: Job) -> Any:
        engine = build(job)
        training.train_step(engine, 77)
        return engine

    training.build_engine = trained  # type: ignore[assignment]
    return resume(job, directory, **load)


def there_and_back(
    rank_pool: RankPool,
    directory: Path,
    job: Job,
    *,
    change: Callable[[Job], None] = unchanged,
    other_change: Callable[[Job], None] | None = None,
    sizes: tuple[int, int] = (2, 4),
    load: Callable[..., Outcome] = resume,
) -> None:
    """Save on so many ranks and resume on others; compare everything."""
    saved = Saved(str(directory), rank_pool.run(run_with, sizes[0], change, train_and_save, job, str(directory))[0])
    outcomes = rank_pool.run(run_with, sizes[1], other_change or change, load, job.other(), saved.directory)
    check_resumed(saved, outcomes, job)
    assert outcomes[0].report.root_matches


@pytest.mark.support("Using it", "loading into a run that has trained", "exact")
@pytest.mark.support(SECTION, "hpZ (`zero_hpz_partition_size`)", "exact", "secondary copies are dropped by a load")
def test_hpz(rank_pool: RankPool, tmp_path: Path) -> None:
    """Loaded into an engine that has trained, so that every parameter, frozen ones too, has a stale secondary copy."""
    job = Job(zero={"zero_hpz_partition_size": 2})
    there_and_back(rank_pool, tmp_path, job, load=train_then_resume)


def with_ulysses(job: Job) -> None:
    """Two ranks share a sequence: the module of groups that HF Trainer and ALST hand to deepspeed.initialize."""
    import deepspeed
    from deepspeed.runtime.sequence_parallel import parallel_state_sp

    deepspeed.init_distributed()
    parallel_state_sp.initialize_sequence_parallel(2)
    initialize = deepspeed.initialize
    deepspeed.initialize = lambda **kwargs: initialize(mpu=parallel_state_sp, **kwargs)


@pytest.mark.support(
    "Parallelism and communication",
    "Ulysses sequence parallelism",
    "exact",
    "through an `mpu` with sequence data parallel groups",
)
def test_sequence_parallel(rank_pool: RankPool, tmp_path: Path) -> None:
    job = Job(config={"sequence_parallel_size": 2})
    there_and_back(rank_pool, tmp_path, job, change=with_ulysses, sizes=(4, 2))


def under_zero_init(job: Job) -> None:
    """Models are partitioned while they are built."""
    import deepspeed

    def build_model(job: Job) -> torch.nn.Module:
        torch.manual_seed(4321 if job.perturb else 1234)
        with deepspeed.zero.Init(config_dict_or_path=training.ds_config(job)):
            model = training.TinyModel(job.frozen, job.extra)
        model.batches_seen = model.batches_seen.float()  # made in bf16, in there
        return model

    training.build_model = build_model  # type: ignore[assignment]


@pytest.mark.support("Parallelism and communication", "models built under `deepspeed.zero.Init`", "exact")
def test_zero_init(rank_pool: RankPool, tmp_path: Path) -> None:
    job = Job(groups=1)  # under zero.Init no parameter has dimensions to tell groups by
    there_and_back(rank_pool, tmp_path / "b", job, change=under_zero_init, other_change=unchanged, sizes=(3, 2))
    there_and_back(rank_pool, tmp_path / "c", job, change=unchanged, other_change=under_zero_init, sizes=(3, 2))


def with_a_block(job: Job, leaf: bool = False) -> None:
    """The standard model with a block of two layers, which are gathered together, as experts would be, if ``leaf``."""
    build = training.build_model

    def build_model(job: Job) -> torch.nn.Module:
        from deepspeed.utils import set_z3_leaf_modules

        model = build(job)
        model.block = torch.nn.Sequential(torch.nn.Linear(16, 9), torch.nn.Tanh(), torch.nn.Linear(9, 16))
        if leaf:
            assert set_z3_leaf_modules(model, [torch.nn.Sequential]) == [model.block]
        return model

    training.build_model = build_model  # type: ignore[assignment]


def with_a_leaf_module(job: Job) -> None:
    with_a_block(job, leaf=True)


@pytest.mark.support("Parallelism and communication", "`leaf` modules", "exact")
def test_leaf_modules(rank_pool: RankPool, tmp_path: Path) -> None:
    job = Job(extra="block")
    one, other = with_a_leaf_module, with_a_block
    there_and_back(rank_pool, tmp_path / "a", job, change=one, other_change=other, sizes=(2, 3))
    there_and_back(rank_pool, tmp_path / "b", job, change=other, other_change=one, sizes=(3, 2))


def with_quantized_weights(job: Job) -> None:
    """Weights are int8 on the wire (qwZ)."""
    from deepspeed.runtime.zero import partition_parameters

    partition_parameters.CUDAQuantizer = HostQuantizer


def with_quantized_gradients(job: Job) -> None:
    """Gradients are rounded on the wire (qgZ), which DeepSpeed does between nodes: here every rank is one."""
    from deepspeed.runtime.comm.coalesced_collectives import reduce_scatter_coalesced
    from deepspeed.runtime.zero import stage3

    def rounded(tensors: Any, groups: object) -> Any:
        HostQuantizer.calls += 1
        return [(part * 64).round() / 64 for part in reduce_scatter_coalesced(tensors, torch.distributed.group.WORLD)]

    stage3.all_to_all_quant_reduce = rounded


def wire_job(job: Job, directory: str, *, save: bool) -> tuple[dict[str, Any], dict[str, str], Any]:
    """What is saved or loaded, but the gathered 16-bit weights: they went over the wire. And that some did."""
    run = train_and_save(job, directory, after=0) if save else resume(job, directory, after=1)
    assert HostQuantizer.calls > 0, "nothing was quantised"
    state = {key: value for key, value in run.state.items() if not key.startswith("weight/")}
    return state, run.gathered, run.report


QUANTISED = "; DeepSpeed's CUDA op replaced by torch in the tests"


@pytest.mark.parametrize(
    ("option", "change"),
    [
        pytest.param(
            "zero_quantized_weights",
            with_quantized_weights,
            marks=pytest.mark.support(SECTION, "qwZ (`zero_quantized_weights`)", "exact", "wire only" + QUANTISED),
        ),
        pytest.param(
            "zero_quantized_gradients",
            with_quantized_gradients,
            marks=pytest.mark.support(SECTION, "qgZ (`zero_quantized_gradients`)", "exact", "wire only" + QUANTISED),
        ),
    ],
)
def test_quantised_communication(
    rank_pool: RankPool, tmp_path: Path, option: str, change: Callable[[Job], None]
) -> None:
    """Quantised on the wire, never in a checkpoint: master weights, moments and frozen weights are the saved ones."""
    job = Job(zero={option: True})
    saved, gathered, _ = rank_pool.run(run_with, 3, change, wire_job, job, str(tmp_path), save=True)[0]
    for state, found, report in rank_pool.run(run_with, 2, change, wire_job, job.other(), str(tmp_path), save=False):
        assert compare_states(saved, state) == []
        assert found == gathered
        assert report.root_matches  # frozen weights included


def save_in_the_middle(job: Job, directory: str) -> tuple[Outcome, list[str]]:
    """Two steps, then two of the six micro batches of a third."""
    engine = training.build_engine(job)
    for step in range(2):
        training.train_step(engine, step)
    part_of_a_step(engine)
    said = logged("", logging.WARNING)
    state, gathered = training.look(engine)
    engine.save_checkpoint(directory, client_state={"note": "hello"})
    return Outcome(state, gathered, []), [text for text in said if "LOST" in text]


def part_of_a_step(engine: Any) -> None:
    for seed in range(2):
        tokens = torch.randint(0, training.VOCABULARY, (10, 5), generator=torch.Generator().manual_seed(seed))
        engine.backward(engine(tokens, tokens.roll(1, 1)))
        engine.step()


@pytest.mark.support(
    "Using it", "saving while gradients accumulate", "exact", "gradients are not saved: how many are lost is said"
)
@pytest.mark.parametrize("elastic", with_swept((True, False), {False}), ids=["elastic", "rigid"])
def test_gradient_accumulation_in_flight(rank_pool: RankPool, tmp_path: Path, elastic: bool) -> None:
    job = Job(micro=10, elastic=elastic)
    saves = rank_pool.run(save_in_the_middle, 2, job, str(tmp_path))
    assert [len(warnings) for _, warnings in saves] == [1, 0], "rank 0 speaks, once"
    assert "gradients of 2 of 6 micro batches" in saves[0][1][0]
    outcomes = rank_pool.run(resume, 3, job.other(), str(tmp_path), before=2, after=0)
    check_resumed(Saved(str(tmp_path), saves[0][0]), outcomes, job)
    assert "LOST: the gradients of 2 micro batches" in outcomes[0].report.text()
    assert record_of(tmp_path / "global_step2").lost_micro_batches == 2


BOUNDARIES = {
    "stage 1": (Job(micro=10, stage=1), 1),
    "stage 1, fp32 gradients": (Job(micro=10, stage=1, config={"data_types": {"grad_accum_dtype": "fp32"}}), 1),
    "stage 2": (Job(micro=10, stage=2), 2),
    "stage 3": (Job(micro=10), 2),
    "stage 2, unmanaged": (Job(micro=10, stage=2, config={"managed_gradient_accumulation": False}), 2),
}
"""Runs, and of how many of two micro batches the optimizer knows that they wait."""


def save_around_a_step(job: Job, directory: str) -> list[str]:
    """Two steps of three micro batches each, whose end the caller decides; a save, two more micro batches, a save."""
    engine = training.build_engine(job)
    said = logged("", logging.WARNING)
    managed = job.config.get("managed_gradient_accumulation", True)

    def micro_batch(seed: int, *, is_last: bool) -> None:
        tokens = torch.randint(0, training.VOCABULARY, (10, 5), generator=torch.Generator().manual_seed(seed))
        if managed:
            engine.set_gradient_accumulation_boundary(is_last)
        engine.backward(engine(tokens, tokens.roll(1, 1)))
        if is_last:
            engine.step()

    for number in range(6):
        micro_batch(number, is_last=number % 3 == 2)
    engine.save_checkpoint(directory, tag="after")
    assert [text for text in said if "LOST" in text] == []
    for number in range(2):
        micro_batch(number, is_last=False)
    engine.save_checkpoint(directory, tag="between")
    return [text for text in said if "LOST" in text]


@pytest.mark.parametrize("name", BOUNDARIES)
def test_gradients_are_told_of_where_the_caller_decides_when_to_step(
    rank_pool: RankPool, tmp_path: Path, name: str
) -> None:
    """As accelerate does: it calls ``engine.step()`` once for each optimizer step, whatever the configuration says."""
    job, known = BOUNDARIES[name]
    said = rank_pool.run(save_around_a_step, 2, job, str(tmp_path))
    assert [len(warnings) for warnings in said] == [1, 0]
    assert f"gradients of at least {known} micro batches" in said[0][0]
    assert record_of(tmp_path / "after").lost_micro_batches == 0
    assert record_of(tmp_path / "between").lost_micro_batches == known


def save_before_the_step(job: Job, directory: str, block: str) -> list[int]:
    """Saves before and after a step, and two where gradients wait for it: of how many micro batches each says so."""
    engine = training.build_engine(job)
    tokens = torch.randint(0, training.VOCABULARY, (10, 5), generator=torch.Generator().manual_seed(1))
    training.train_step(engine, 0)
    engine.save_checkpoint(directory, tag="before")
    with getattr(engine, block)() if block else nullcontext():
        engine.backward(engine(tokens, tokens.roll(1, 1)))
        engine.save_checkpoint(directory, tag="within")
    engine.save_checkpoint(directory, tag="between")
    if block == "no_sync":  # which leaves gradients that are not reduced
        engine.backward(engine(tokens, tokens.roll(1, 1)))
    engine.step()
    engine.save_checkpoint(directory, tag="after")
    return [record_of(Path(directory) / tag).lost_micro_batches for tag in ("before", "within", "between", "after")]


@pytest.mark.parametrize(
    ("stage", "block"),
    [(1, ""), (2, ""), (3, ""), (1, "no_sync"), (2, "coalesce_grad_reduction"), (3, "coalesce_grad_reduction")],
)
def test_gradients_are_told_of_between_backward_and_step(
    rank_pool: RankPool, tmp_path: Path, stage: int, block: str
) -> None:
    assert rank_pool.run(save_before_the_step, 2, Job(stage=stage), str(tmp_path), block)[0] == [0, 1, 1, 0]


def test_gradients_that_are_pending_at_a_load_are_told_of(rank_pool: RankPool, tmp_path: Path) -> None:
    job = Job(micro=10)
    rank_pool.run(train_and_save, 2, job, str(tmp_path), after=0)
    texts = rank_pool.run(load_in_the_middle, 3, job.other(), str(tmp_path))
    assert "GRADIENTS KEPT: those of 2 micro batches" in texts[0] and "LOST: the" not in texts[0]


def load_in_the_middle(job: Job, directory: str) -> str:
    engine = training.build_engine(job)
    part_of_a_step(engine)
    engine.load_checkpoint(directory)
    return str(engine.zeroelastic_report.text())


# Tensor parallelism without maps: every tensor parallel rank is a ZeRO-3 run of its own, over its data parallel ranks.


@pytest.fixture(scope="module")
def sliced_job() -> Job:
    return Job(batch=TP_BATCH, sub_group_size=90)


def by_tp_rank(results: list[tuple[int, Outcome]]) -> list[list[Outcome]]:
    """The outcomes of each tensor parallel rank's data parallel ranks."""
    split = [[outcome for rank, outcome in results if rank == tp_rank] for tp_rank in range(2)]
    assert all(len(outcomes) == len(results) // 2 for outcomes in split)
    return split


@pytest.fixture(scope="module")
def sliced_save(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory, sliced_job: Job) -> list[Saved]:
    """What each of two tensor parallel ranks saved, over two data parallel ranks each."""
    directory = str(tmp_path_factory.mktemp("sliced"))
    split = by_tp_rank(rank_pool.run(use_sliced, 4, sliced_job, 2, directory, save=True))
    assert split[0][0].state != split[1][0].state, "the ranks do not differ, so that no mix-up would show"
    return [Saved(directory, outcomes[0]) for outcomes in split]


@pytest.mark.support(
    SECTION, "AutoTP of a DeepSpeed before 0.19.8", "exact", "the data parallel size changes, the other may not"
)
def test_tensor_parallel_there_and_back(
    rank_pool: RankPool, sliced_save: list[Saved], sliced_job: Job, tmp_path: Path
) -> None:
    """2 x 2 -> 2 x 1 -> 2 x 2: the root is the same in between, new data parallel ranks find what is theirs."""
    target = str(tmp_path)
    results = rank_pool.run(use_sliced, 2, sliced_job.other(), 2, sliced_save[0].directory, target=target)
    for saved, outcomes in zip(sliced_save, by_tp_rank(results), strict=True):
        check_resumed(saved, outcomes, sliced_job)
        report = outcomes[0].report
        assert report.root_matches and report.loaded_root == sliced_save[0].root
        assert (report.saved_world_size, report.world_size) == (2, 1)
    assert Saved(target, sliced_save[0].outcome).root == sliced_save[0].root
    results = rank_pool.run(use_sliced, 4, sliced_job.other(), 2, target)
    for saved, outcomes in zip(sliced_save, by_tp_rank(results), strict=True):
        for outcome in outcomes:
            assert compare_states(saved.outcome.state, outcome.state) == []
            assert outcome.losses == pytest.approx(saved.outcome.losses, rel=training.LOSS_RTOL["bf16"])


def test_tensor_parallel_record(sliced_save: list[Saved]) -> None:
    """Every parameter of every tensor parallel rank is in it, once, with digests of its own."""
    record = record_of(sliced_save[0].tag_dir)
    assert (record.world_size, record.tp_size, len(record.files)) == (2, 2, 8)
    keys = [(content.param.name, content.tp_rank) for content in record.contents()]
    names = sorted(name for name, _ in SlicedModel().named_parameters())
    assert keys == [(name, tp_rank) for name in names for tp_rank in (0, 1)]
    digests = {key: content.tensors for key, content in zip(keys, record.contents(), strict=True)}
    for layer in ("blocks.0.up_proj.weight", "blocks.2.down_proj.weight"):
        assert digests[layer, 0] != digests[layer, 1]
    assert digests["blocks.2.norm.weight", 0] == digests["blocks.2.norm.weight", 1]  # a copy


def test_stock_tensor_parallel_checkpoint_resumes(rank_pool: RankPool, sliced_job: Job, tmp_path: Path) -> None:
    """One that DeepSpeed wrote alone; and one of ours, loaded by DeepSpeed alone at the same size."""
    directory = str(tmp_path / "stock")
    job = replace(sliced_job, elastic=False, installed=False)
    split = by_tp_rank(rank_pool.run(use_sliced, 4, job, 2, directory, save=True))
    saves = [Saved(directory, outcomes[0]) for outcomes in split]
    assert not (saves[0].tag_dir / "zeroelastic.json").exists()
    results = rank_pool.run(use_sliced, 2, sliced_job.other(), 2, directory)
    for saved, outcomes in zip(saves, by_tp_rank(results), strict=True):
        check_resumed(saved, outcomes, sliced_job)
        assert outcomes[0].report.format == "rigid"


def test_stock_loads_elastic_tensor_parallel_checkpoint(
    rank_pool: RankPool, sliced_save: list[Saved], sliced_job: Job
) -> None:
    results = rank_pool.run(use_sliced, 4, replace(sliced_job, installed=False), 2, sliced_save[0].directory)
    for saved, outcomes in zip(sliced_save, by_tp_rank(results), strict=True):
        assert outcomes[0].report is None
        for outcome in outcomes:
            assert compare_states(saved.outcome.state, outcome.state) == []


def attempt_sliced(job: Job, tp_size: int, directories: list[str]) -> list[tuple[str, str]]:
    training.build_engine = lambda job: build_sliced(job, tp_size)  # type: ignore[assignment]
    return training.attempt_each(job, directories)


@pytest.mark.support(
    SECTION, "a changed tensor parallel size, saved before 0.19.8", "refused", "`ds_to_universal` first, from 2 or more"
)
def test_changed_tensor_parallel_size_is_refused(
    rank_pool: RankPool, sliced_save: list[Saved], sliced_job: Job, tmp_path: Path
) -> None:
    """With a commit record, and without."""
    shutil.copytree(sliced_save[0].directory, tmp_path / "two")
    rank_pool.run(use_sliced, 2, sliced_job, 1, str(tmp_path / "one"), save=True)
    for name, tp_size in (("two", 1), ("one", 2)):
        shutil.copytree(tmp_path / name, tmp_path / f"{name} without")
        (tmp_path / f"{name} without" / "global_step3" / "zeroelastic.json").unlink()
        directories = [str(tmp_path / name), str(tmp_path / f"{name} without")]
        said = of_all(rank_pool.run(attempt_sliced, 2, sliced_job.other(), tp_size, directories))
        for kind, text in said:
            assert kind in ("UnsupportedError", "UndescribedSlicesError")
            assert f"tensor parallel size {3 - tp_size}, and the run has {tp_size}" in text
            assert ("ds_to_universal" in text) == (tp_size == 1), "DeepSpeed converts none of size 1 at stage 3"


def damage_a_slice(tag: Path) -> str:
    shard = open_checkpoint(tag, tp=TensorParallel(1, 2)).shard(1)
    offset = int(shard.extents["exp_avg"].offset[shard.layout.index()["blocks.1.up_proj.weight"]])
    flip(tag / shard.path.name, offset + 5, 0x10)
    return f"blocks.1.up_proj.weight: exp_avg. Damaged: {shard.path.name}."


def swap_tensor_parallel_ranks(tag: Path) -> str:
    swap(*(tag / f"bf16_zero_pp_rank_0_mp_rank_{tp_rank:02d}_optim_states.pt" for tp_rank in (0, 1)))
    record_again(tag)  # which knows by their sizes
    return "was written as tensor parallel rank 1; its name says rank 0"


def lose_a_file(tag: Path) -> str:
    (tag / "zero_pp_rank_1_mp_rank_01_model_states.pt").unlink()
    return "zero_pp_rank_1_mp_rank_01_model_states.pt"


def mix_two_saves(tag: Path) -> str:
    """Both data parallel files of tensor parallel rank 1 are of another save; its own ranks see nothing wrong."""
    for path in tag.glob("*mp_rank_01_optim_states.pt"):
        state = torch.load(path, weights_only=False)
        state["optimizer_state_dict"]["zeroelastic"]["save_id"] = "0" * 32
        torch.save(state, path)
    record_again(tag)
    return "belongs to save 00000000"


def test_damage_in_one_tensor_parallel_rank_stops_all(
    rank_pool: RankPool, sliced_save: list[Saved], sliced_job: Job, tmp_path: Path
) -> None:
    wanted: dict[str, str] = {}
    for damage in (swap_tensor_parallel_ranks, lose_a_file, mix_two_saves, damage_a_slice):
        directory = shutil.copytree(sliced_save[0].directory, tmp_path / damage.__name__)
        wanted[str(directory)] = damage(directory / "global_step3")
    said = of_all(rank_pool.run(load_sliced_errors, 4, sliced_job.other(), list(wanted), timeout=120))
    assert all(want in error for want, error in zip(wanted.values(), said, strict=True)), said


def load_sliced_errors(job: Job, directories: list[str]) -> list[str]:
    engine, errors = build_sliced(job, 2), []
    for directory in directories:
        with pytest.raises(ZeroElasticError) as caught:
            engine.load_checkpoint(directory)
        errors.append(str(caught.value))
    return errors


@pytest.mark.support(
    "Parallelism and communication",
    "`deepspeed.zero.Init` before AutoTP",
    "refused",
    "what AutoTP does not slice is cut over all ranks",
)
def test_zero_init_before_tensor_parallelism_is_refused(rank_pool: RankPool, sliced_job: Job) -> None:
    """It partitions what AutoTP does not slice over all ranks, so that no rank's file is of one group."""
    said = of_all(rank_pool.run(build_sliced_under_zero_init, 4, sliced_job))
    assert "parameter " in said and "is partitioned over 4 ranks, the model over 2" in said
    assert "build the model without it" in said


def build_sliced_under_zero_init(job: Job) -> str:
    import deepspeed

    with deepspeed.zero.Init(config_dict_or_path=training.ds_config(job)):
        model = SlicedModel()
    with pytest.raises(UnsupportedError) as caught:
        build_sliced(replace(job, groups=1), 2, model)
    return str(caught.value)


def use_by_hand(job: Job, directory: str, *, save: bool = False, **load: Any) -> tuple[int, Outcome]:
    """Tensor parallel ranks of other widths, sliced by the user's own code."""
    import deepspeed

    deepspeed.init_distributed()
    mpu = ByHand(2)
    initialize = deepspeed.initialize
    deepspeed.initialize = lambda **kwargs: initialize(mpu=mpu, **kwargs)
    model = SlicedModel()
    for block in model.blocks:
        width = 7 + 4 * mpu.get_model_parallel_rank()
        block.up_proj, block.down_proj = torch.nn.Linear(10, width), torch.nn.Linear(width, 10)
    model.blocks[2].requires_grad_(False)
    build = build_sliced
    globals()["build_sliced"] = lambda job, tp_size: build(job, 1, model)
    return use_sliced(job, 1, directory, save=save, **load)


@pytest.mark.support(SECTION, "model parallelism through an `mpu`", "exact", "of the same size; slices may be uneven")
def test_custom_mpu(rank_pool: RankPool, sliced_job: Job, tmp_path: Path) -> None:
    job = replace(sliced_job, sub_group_size=60)
    split = by_tp_rank(rank_pool.run(use_by_hand, 4, job, str(tmp_path), save=True))
    results = rank_pool.run(use_by_hand, 2, job.other(), str(tmp_path))
    for saved, outcomes in zip(split, by_tp_rank(results), strict=True):
        check_resumed(Saved(str(tmp_path), saved[0]), outcomes, job)
        assert outcomes[0].report.root_matches
