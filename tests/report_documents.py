"""Documents of verbs for tests of reports: those that no small checkpoint gives, in the form that ``--json`` prints."""

from __future__ import annotations

from typing import Any


def inspect_document(sample: dict[str, Any], num_params: int, world_size: int) -> dict[str, Any]:
    """The document on a sample checkpoint as if it had many parameters and ranks, at stage 3."""
    of_one = sample["params"][0]
    params, sub_groups, offset = [], [], 0
    for number in range(num_params):
        numel = 1 << 24 if number % 9 == 0 else 4096 * (1 + number % 500)
        name = f"model.layers.{number // 12}.block_{number % 12}.self_attn.q_proj.weight"
        place = {"sub_group": len(sub_groups), "offset": offset}
        params.append({**of_one, "name": name, "numel": numel, "shape": [numel], "bytes": 12 * numel, **place})
        offset += -(-numel // world_size)
        if offset > num_params * 1000 or number == num_params - 1:
            sub_groups.append(offset)
            offset = 0
    layout = {"split": "param", "sub_group_numel": sub_groups}
    totals = {**sample["totals"], "params": num_params}
    return {**sample, "params": params, "world_size": world_size, "layout": layout, "totals": totals}


def verify_document(sample: dict[str, Any], world_size: int, damaged: range) -> dict[str, Any]:
    """The document on a sample checkpoint as if it had many ranks, of which some have a damaged optimizer file."""
    names = {
        "optimizer": "bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt",
        "model": "zero_pp_rank_{}_mp_rank_00_model_states.pt",
    }
    files = [
        {"name": name.format(rank), "rank": rank, "kind": kind, "bytes": 10**9 + rank}
        for rank in range(world_size)
        for kind, name in names.items()
    ]
    problems = [
        {
            "file": names["optimizer"].format(rank), "sentence": f"exp_avg of layer.{rank} is damaged",
            "param": f"layer.{rank}", "key": "exp_avg", "offset": rank * 10**6, "bytes": 4096,
        }
        for rank in damaged
    ]  # fmt: skip
    facts = {"ok": not problems, "world_size": world_size, "num_files": len(files)}
    return {**sample, **facts, "files": files, "problems": problems}


def plan_document(sample: dict[str, Any], world_size: int, target_world_size: int, reads_from: int) -> dict[str, Any]:
    """The document of a plan in which every target rank reads from ``reads_from`` saved ranks, in the same place."""
    of_one = sample["ranks"][0]
    ranks = []
    for target in range(target_world_size):
        first = min(target * world_size // target_world_size, world_size - reads_from)
        sources = [
            {"rank": rank, "optimizer_bytes": 10**6 * (1 + rank % 3), "frozen_bytes": 0}
            for rank in range(first, first + reads_from)
        ]
        ranks.append({**of_one, "rank": target, "bytes_read": 10**9 + target, "sources": sources})
    return {**sample, "world_size": world_size, "target_world_size": target_world_size, "ranks": ranks}


def diff_document(sample: dict[str, Any], num_tensors: int) -> dict[str, Any]:
    """The document of a diff in which very many tensors differ."""
    of_one = sample["tensors"][0]
    tensors = [
        {**of_one, "param": f"model.layers.{number}.weight", "relative_norm": 1 / (1 + number)}
        for number in range(num_tensors)
    ]
    return {**sample, "tensors": tensors, "num_tensors": num_tensors}
