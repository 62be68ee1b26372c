"""The promise of a save, over what runs save: it is refused by name and nothing has changed, or a load takes it.

``ZEROELASTIC_EXAMPLES=200 pytest tests/deepspeed/save/test_saves_load.py`` draws as many runs.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from changed_runs import (
    COUNTERS,
    FREE,
    REFUSED,
    add_a_group,
    freeze,
    register_a_buffer,
    register_a_parameter,
    rename,
    replace_a_module,
    thaw,
    thaw_and_freeze,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from saved_files import contents
from training import Job, build_engine, train_step

import zeroelastic
from zeroelastic.checkpoint.commit_record import read_record
from zeroelastic.testing import RankPool, compare_states, fingerprint, gather_state
from zeroelastic.verbs.verify.verify import verify_checkpoint

pytestmark = pytest.mark.extended

OF_THE_MODULE = {change.__name__: change for change in (freeze, thaw, thaw_and_freeze, rename, register_a_buffer)}
OF_THE_ENGINE = {change.__name__: change for change in (add_a_group, register_a_parameter, replace_a_module)}


@dataclass(frozen=True)
class Run:
    """A run that saves twice under one tag: as it was built, and after the change, with the client state."""

    job: Job
    tag: str
    change: str
    client_state: dict[str, Any]
    exclude: bool
    loaders: int

    def make_change(self, engine: Any) -> None:
        if self.change in OF_THE_MODULE:
            OF_THE_MODULE[self.change](engine.module)
        elif self.change:
            OF_THE_ENGINE[self.change](engine)


client_states = st.one_of(
    st.just({}),
    st.just(COUNTERS),
    st.just(FREE),
    st.sampled_from(sorted(REFUSED)).map(lambda key: {key: REFUSED[key]}),
)
jobs = st.builds(
    Job,
    optimizer=st.sampled_from(["adamw", "sgd", "plain_sgd", "adagrad"]),
    precision=st.sampled_from(["bf16", "fp32"]),
    elastic=st.booleans(),
    groups=st.integers(1, 2),
    frozen=st.booleans(),
    sub_group_size=st.sampled_from([60, 200, 10**6]),
    options=st.sampled_from([{}, {"async_save": True}]),
).filter(lambda job: job.optimizer != "adagrad" or job.groups == 1)  # DeepSpeed makes it anew, with one group
runs = st.builds(
    Run,
    job=jobs,
    tag=st.sampled_from(["step1", "epoch1/step5", "an epoch", "é"]),
    change=st.sampled_from(["", *OF_THE_MODULE, *OF_THE_ENGINE]),
    client_state=client_states,
    exclude=st.booleans(),
    loaders=st.integers(1, 3),
)


def save(run: Run, directory: str) -> tuple[str, dict[str, Any], bool]:
    """The error of the second save, the state that it saved, and whether the directory is what it was."""
    engine = build_engine(run.job)
    train_step(engine, 0)
    engine.save_checkpoint(directory, tag=run.tag)
    zeroelastic.wait_for_save(engine)
    before = contents(Path(directory))
    run.make_change(engine)
    try:
        engine.save_checkpoint(
            directory, tag=run.tag, client_state=run.client_state, exclude_frozen_parameters=run.exclude
        )
        zeroelastic.wait_for_save(engine)
    except Exception as error:
        dist.barrier()
        return f"{type(error).__name__}: {error}", {}, contents(Path(directory)) == before
    return "", {} if run.change in OF_THE_ENGINE else fingerprint(gather_state(engine)), False


def load(run: Run, directory: str) -> dict[str, Any]:
    engine = build_engine(run.job.other(options={}))
    run.make_change(engine)
    engine.load_checkpoint(directory, tag=run.tag, load_module_strict=not run.exclude)
    return fingerprint(gather_state(engine))


@settings(
    max_examples=int(os.environ.get("ZEROELASTIC_EXAMPLES", "4")),
    derandomize="ZEROELASTIC_EXAMPLES" not in os.environ,
    suppress_health_check=list(HealthCheck),
)
@pytest.mark.timeout(0 if "ZEROELASTIC_EXAMPLES" in os.environ else 300)
@given(run=runs)
def test_a_save_is_refused_by_name_or_loads_at_any_size(rank_pool: RankPool, run: Run) -> None:
    with tempfile.TemporaryDirectory() as directory:
        outcomes = rank_pool.run(save, 2, run, directory)
        error, state, unchanged = outcomes[0]
        assert [outcome[0] for outcome in outcomes] == [error, error]
        refused = run.change in OF_THE_ENGINE or any(REFUSED.get(key) == v for key, v in run.client_state.items())
        if error:
            assert refused and unchanged
            assert error.startswith("UnsupportedError: ") or not run.job.elastic, (
                "DeepSpeed alone has errors of its own"
            )
            return
        record = read_record(Path(directory) / run.tag)
        if record is None:
            assert refused and not run.job.elastic, "DeepSpeed alone saved it, as it does without zeroelastic"
            return
        assert not refused
        counters = {f"engine/{key}": value for key, value in run.client_state.items() if f"engine/{key}" in state}
        assert verify_checkpoint(Path(directory) / run.tag).problems == ()
        trained = {f"weight/{name}" for name in record.params.trained}
        for loaded in rank_pool.run(load, run.loaders, run, directory):
            different = compare_states(state | counters, loaded)
            assert [
                line
                for line in different
                if not (run.exclude and line.startswith("weight/") and line.partition(":")[0] not in trained)
            ] == []
