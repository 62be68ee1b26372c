"""Digests of running engines with experts and tensor parallelism: of whole tensors, the same at every topology."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from topologies import TopologyJob, build, logical_state, train

from zeroelastic.core.digest import stream_seed
from zeroelastic.executors.dispatch import digest_range
from zeroelastic.testing import RankPool


def digests_of(job: TopologyJob, *, spoil: bool = False) -> tuple[dict[str, int], dict[str, int], tuple[str, ...]]:
    """The digests by our layouts and those of the referee's whole tensors; and the copies that differ."""
    from zeroelastic.deepspeed.live.digests import CopiesDifferError, local_digests, whole_contents
    from zeroelastic.deepspeed.live.kinds import param_names, read_live

    engine = build(job)
    train(engine, 0, 2)
    live = read_live(engine.optimizer, param_names(engine))
    logical = logical_state(engine)
    if spoil and live.rank == 0:
        live.fp32(1).add_(1)  # norms and biases, of some of which tensor parallel ranks have copies
    try:
        contents = whole_contents(live, local_digests(live), device=torch.device("cpu"))
    except CopiesDifferError as error:
        return {}, {}, tuple(f"{name}/{key}" for name, key in error.tensors)
    found: dict[str, int] = {}
    wanted: dict[str, int] = {}
    for content in contents:
        for key, (dtype, digest) in content.tensors.items():
            tensor: Any = logical[f"{content.param.name}/{'weight' if key == 'frozen' else key}"]
            assert tuple(tensor.shape) == content.param.shape and str(tensor.dtype) == f"torch.{dtype}"
            raw = tensor.contiguous().view(-1).view(torch.uint8).numpy()
            seed = stream_seed(content.param.name, key)
            found[f"{content.param.name}/{key}"] = digest
            wanted[f"{content.param.name}/{key}"] = digest_range(raw, tensor.element_size(), seed=seed, start=0)
        if "frozen" not in content.tensors:
            assert content.scalars["step"].value == 2
    trained = {f"{tensor.name}/fp32" for tensor in live.whole.whole_tensors}
    assert trained <= found.keys() and len({key.split("/")[0] for key in found}) == len(
        {key.split("/")[0] for key in logical if key.endswith("/weight")}
    )
    return found, wanted, ()


JOBS = {
    "llama, tp 2, stage 3": (TopologyJob("llama", tp=2), 4),
    "qwen3, tp 2, stage 2": (TopologyJob("qwen3", tp=2, stage=2, frozen=True), 4),
    "neox, tp 4, stage 3, bf16": (TopologyJob("neox", tp=4, precision="bf16"), 4),
    "llama, tp 2, stage 1, adapters": (TopologyJob("llama", tp=2, stage=1, adapters=True), 2),
    "autoep 2, stage 3": (TopologyJob("autoep", ep=2), 4),
    "autoep 4, stage 2": (TopologyJob("autoep", ep=4, stage=2), 4),
    "moe 2, stage 2": (TopologyJob("moe", ep=2, stage=2), 4),
}


@pytest.mark.parametrize("name", JOBS)
def test_digests_are_those_of_whole_tensors(topology_pool: RankPool, name: str) -> None:
    job, ranks = JOBS[name]
    for found, wanted, differing in topology_pool.run(digests_of, ranks, replace(job, elastic=False), timeout=180):
        assert found == wanted and found and not differing


COPIED = ("norm.weight/fp32", "o_proj.bias/fp32", "down_proj.bias/fp32")


def test_copies_that_differ_are_named(topology_pool: RankPool) -> None:
    job = TopologyJob("llama", tp=2, stage=2, elastic=False)
    for *_, differing in topology_pool.run(digests_of, 4, job, spoil=True):
        assert differing and all(name.endswith(COPIED) for name in differing), differing
