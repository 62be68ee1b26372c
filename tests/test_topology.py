"""Process groups and communication features: what is resumed at another world size is what was saved, bit for bit.

How ranks talk to each other while they train must not show in a checkpoint, and what is kept beside the partitions (the
secondary copies of hpZ, persistent parameters) must not survive a load. Same job and same comparison as in
test_resume.py; each feature goes up and down once.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import training
from test_resume import Saved, check_resumed
from training import Job, Outcome, resume, train_and_save

from zeroelastic.testing import RankPool

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
    tmp_path: Path,
    job: Job,
    *,
    change: Callable[[Job], None] = unchanged,
    other_change: Callable[[Job], None] | None = None,
    other: Job | None = None,
    pairs: tuple[tuple[int, int], ...] = ((2, 4), (4, 2)),
    load: Callable[..., Outcome] = resume,
) -> list[Outcome]:
    """Save and resume at every pair of world sizes; compare everything. The outcomes of the last resume."""
    saves: dict[int, Saved] = {}
    outcomes: list[Outcome] = []
    for save_world_size, world_size in pairs:
        if save_world_size not in saves:
            directory = str(tmp_path / f"save{save_world_size}")
            made = rank_pool.run(run_with, save_world_size, change, train_and_save, job, directory)
            saves[save_world_size] = Saved(directory, made[0])
        saved = saves[save_world_size]
        outcomes = rank_pool.run(
            run_with, world_size, other_change or change, load, other or job.other(), saved.directory
        )
        check_resumed(saved, outcomes, job)
        assert outcomes[0].report.root_matches
    return outcomes


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


def test_sequence_parallel(rank_pool: RankPool, tmp_path: Path) -> None:
    job = Job(config={"sequence_parallel_size": 2})
    there_and_back(rank_pool, tmp_path, job, change=with_ulysses)


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


def test_zero_init(rank_pool: RankPool, tmp_path: Path) -> None:
    job = Job(groups=1)  # under zero.Init no parameter has dimensions to tell groups by
    there_and_back(rank_pool, tmp_path / "a", job, change=under_zero_init, pairs=((2, 3),))
    there_and_back(rank_pool, tmp_path / "b", job, change=under_zero_init, other_change=unchanged, pairs=((3, 2),))
    there_and_back(rank_pool, tmp_path / "c", job, change=unchanged, other_change=under_zero_init, pairs=((3, 2),))


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


def test_leaf_modules(rank_pool: RankPool, tmp_path: Path) -> None:
    job = Job(extra="block")
    one, other = with_a_leaf_module, with_a_block
    there_and_back(rank_pool, tmp_path / "a", job, change=one, other_change=other, pairs=((2, 3),))
    there_and_back(rank_pool, tmp_path / "b", job, change=other, other_change=one, pairs=((3, 2),))


BUCKETS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "overlap_comm": ({"overlap_comm": True}, {"overlap_comm": False}),
    "contiguous_gradients": ({"contiguous_gradients": True}, {"contiguous_gradients": False}),
    "buckets": (
        {"reduce_bucket_size": 100, "stage3_prefetch_bucket_size": 50, "stage3_max_live_parameters": 100},
        {"reduce_bucket_size": 10**7, "stage3_prefetch_bucket_size": 10**6, "stage3_max_reuse_distance": 0},
    ),
    "persistence": ({"stage3_param_persistence_threshold": 1000}, {"stage3_param_persistence_threshold": 0}),
    "reduce_scatter": ({"reduce_scatter": True}, {"reduce_scatter": False}),
}


@pytest.mark.parametrize("name", BUCKETS)
def test_communication_settings_may_differ(rank_pool: RankPool, tmp_path: Path, name: str) -> None:
    one, other = BUCKETS[name]
    there_and_back(rank_pool, tmp_path / "a", Job(zero=one), other=Job(zero=other).other(), pairs=((2, 3),))
    there_and_back(rank_pool, tmp_path / "b", Job(zero=other), other=Job(zero=one).other(), pairs=((3, 2),))
