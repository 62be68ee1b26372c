"""zeroelastic.deepspeed.save.commit.read_back: what a load would refuse is not committed, whatever wrote it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from saved_files import contents
from training import Job, build_engine, train_step

import zeroelastic
from zeroelastic.deepspeed.save import shard_writer
from zeroelastic.testing import RankPool


def lacks_a_moment(state: dict[str, Any]) -> None:
    state["base_optimizer_state"][0].pop("exp_avg")


def is_of_another_save(state: dict[str, Any]) -> None:
    state["zeroelastic"]["save_id"] = "0" * 32


def has_another_group(state: dict[str, Any]) -> None:
    state["zeroelastic"]["param_groups"][0]["params"].reverse()


def holds_an_object(state: dict[str, Any]) -> None:
    state["loss_scaler"].path = Path("x")


WRONG = {
    lacks_a_moment: "the state of parameters read back",
    is_of_another_save: "the save id read back",
    has_another_group: "the optimizer groups read back",
    holds_an_object: "pathlib",
}


def save_wrong(job: Job, directory: str) -> list[tuple[str, str]]:
    """Saves whose optimizer file is wrong on one rank, over a good one, and a good one after them."""
    engine = build_engine(job)
    train_step(engine, 0)
    engine.save_checkpoint(directory, tag="tag")
    zeroelastic.wait_for_save(engine)
    make, before, errors = shard_writer.elastic_state_dict, contents(Path(directory)), []
    for damage in WRONG:

        def made(*args: Any, damage: Any = damage, **kwargs: Any) -> dict[str, Any]:
            state = make(*args, **kwargs)
            if dist.get_rank() == 1:
                damage(state)
            return state

        shard_writer.elastic_state_dict = made
        try:
            engine.save_checkpoint(directory, tag="tag")
            zeroelastic.wait_for_save(engine)
        except Exception as error:
            errors.append((type(error).__name__, str(error)))
        vars(engine.optimizer.loss_scaler).pop("path", None)
    dist.barrier()
    assert contents(Path(directory)) == before
    shard_writer.elastic_state_dict = make
    engine.save_checkpoint(directory, tag="tag")
    zeroelastic.wait_for_save(engine)
    engine.destroy()
    return errors


def load(job: Job, directory: str) -> bool:
    engine = build_engine(job)
    engine.load_checkpoint(directory)
    return bool(engine.zeroelastic_report.root_matches)


def test_what_a_load_would_refuse_is_not_committed(rank_pool: RankPool, tmp_path: Path) -> None:
    job = Job()
    first, second = rank_pool.run(save_wrong, 2, job, str(tmp_path))
    assert first == second and len(first) == len(WRONG)
    for (error, text), words in zip(first, WRONG.values(), strict=True):
        assert error == "SaveError" and "not committed: no load would take it" in text and words in text
        assert "zero_pp_rank_1_mp_rank_00_optim_states.pt" in text and "`latest` is unchanged" in text
    assert all(rank_pool.run(load, 3, Job().other(), str(tmp_path)))
