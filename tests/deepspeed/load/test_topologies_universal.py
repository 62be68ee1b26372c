"""Universal Checkpoint as a second referee of changed topologies: DeepSpeed's own conversion of the same files.

Where what it loads differs from what zeroelastic loads, the run that saved says who is right: its state is gathered by
``topologies.logical_state``.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
from stock_programs import ds_to_universal
from topologies import TopologyJob, differences, load_and_gather, save_trained

import zeroelastic
from zeroelastic.errors import UnsupportedError
from zeroelastic.testing import RankPool


class Case(NamedTuple):
    """What saves and what resumes, on a number of ranks each, and in what Universal Checkpoint differs from it.

    These are the last parts of entries of the logical state.
    """

    src_ranks: int
    src: TopologyJob
    dst_ranks: int
    dst: TopologyJob
    wrong: frozenset[str] = frozenset()


LLAMA, AUTOEP, MOE = (TopologyJob(model, precision="bf16") for model in ("llama", "autoep", "moe"))
FIRST_GROUP = frozenset({"group/lr", "group/weight_decay"})
"""At stage 3 it gives every optimizer group the hyper-parameters of the first one."""
BUFFERS = frozenset({"value"})
"""It does not restore buffers of AutoEP's models."""
EXPERTS = frozenset({"fp32", "weight", "exp_avg", "exp_avg_sq"})
"""It gives each expert parallel rank the experts of the first one."""

CASES = {
    "AutoTP, stage 3": Case(4, replace(LLAMA, tp=2), 2, LLAMA, FIRST_GROUP),
    "AutoTP, stage 2": Case(4, replace(LLAMA, tp=2, stage=2), 4, replace(LLAMA, tp=4, stage=2)),
    "AutoTP, stage 1": Case(2, replace(LLAMA, tp=2, stage=1), 2, replace(LLAMA, stage=1)),
    "AutoTP, stage 2, from 1": Case(2, replace(LLAMA, stage=2), 2, replace(LLAMA, tp=2, stage=2)),
    "AutoEP, stage 3": Case(4, replace(AUTOEP, ep=2), 4, replace(AUTOEP, ep=4), BUFFERS),
    "AutoEP, stage 2": Case(4, replace(AUTOEP, ep=2, stage=2), 2, replace(AUTOEP, stage=2), BUFFERS),
    "MoE, ep 1": Case(2, replace(MOE, stage=2), 1, replace(MOE, stage=2)),
    "MoE, ep 2": Case(2, replace(MOE, stage=2), 4, replace(MOE, ep=2, stage=2), EXPERTS),
}


SWEPT = {"AutoTP, stage 2", "AutoTP, stage 1", "AutoEP, stage 2", "MoE, ep 1"}
"""Cases that only `make sweep` runs."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.sweep] * (name in SWEPT)) for name in CASES])
def test_universal_checkpoint_loads_the_same_values_but_where_it_is_wrong(
    topology_pool: RankPool, tmp_path: Path, name: str
) -> None:
    case = CASES[name]
    saved = topology_pool.run(save_trained, case.src_ranks, case.src, str(tmp_path / "run"))[0]
    loaded = topology_pool.run(load_and_gather, case.dst_ranks, case.dst.other(), str(tmp_path / "run"), "t")[0]
    assert differences(saved, loaded) == []
    (tmp_path / "universal").mkdir()
    ds_to_universal(tmp_path / "run" / "t", tmp_path / "universal" / "t", "--inject_missing_state")
    if name != "AutoTP, stage 2, from 1":
        with pytest.raises(UnsupportedError, match=r"cannot be taken yet.*zeroelastic reshard"):
            zeroelastic.convert(tmp_path / "universal", tmp_path / "native", from_="universal", world_size=2)
    stock = replace(case.dst.other(), installed=False, config={"checkpoint": {"load_universal": True}})
    found = topology_pool.run(load_and_gather, case.dst_ranks, stock, str(tmp_path / "universal"), "t")[0]
    wrong = differences(saved, found)
    assert {next((end for end in case.wrong if key.endswith(end)), key) for key in wrong} == case.wrong
