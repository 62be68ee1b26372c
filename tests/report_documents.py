"""Documents of verbs for tests of reports: those that no small checkpoint gives, in the form that ``--json`` prints."""

from __future__ import annotations

from typing import Any


def prove_document(*, proved: bool = True) -> dict[str, Any]:
    """A proof from 2 to 3 ranks over 5 steps; one that is not proved differs in the third loss."""
    first = [2.5, 2.25, 2.0, 1.9, 1.85]
    other = [2.5, 2.2500002, 2.0000001, 1.9, 1.8500003]
    if not proved:
        other[2] = 2.1
    root = "0123456789abcdef" * 4
    sentence = "the losses agree" if proved else "the losses differ by 5.0e-02 at step 3"
    runs = (("reference size", 2), ("reference size again", 2), ("other size", 3), ("back", 2))
    return {
        "schema_version": 1,
        "ok": proved,
        "verdict": "PROVED" if proved else "NOT PROVED",
        "reasons": [] if proved else [sentence],
        "checks": [
            {"name": "state after the load", "ok": True, "sentence": "55 entries are equal bit for bit", "details": []},
            {"name": "losses", "ok": proved, "sentence": sentence, "details": ["step 1: equal"]},
            {"name": "samples", "ok": None, "sentence": "the script does not say which samples it saw", "details": []},
        ],
        "source": {
            "path": "/scratch/run/global_step100", "format": "elastic", "world_size": 2, "step": 100, "num_files": 4,
            "num_params": 19, "num_tensors": 55, "bytes_read": 240_000,
        },
        "content_roots": {
            "recorded": root, "files": root, "loaded_at_reference_size": root, "loaded_at_other_size": root,
            "saved_at_other_size": root, "loaded_back": None if not proved else root,
        },
        "steps": 5,
        "tolerance": 1e-4,
        "losses": {"reference size": first, "reference size again": first, "other size": other},
        "runs": [
            {
                "role": role, "world_size": size, "seconds": 12.5, "finished": True, "record": f"{role}/record.json",
                "record_sha256": root, "saves_skipped": 1, "precision": "bf16", "device": "cpu", "global_batch": 24,
                "accumulation": 1, "samples": [None], "loads": 1, "resume_report": None,
            }
            for role, size in runs
        ],
        "script": ["train.py", "--steps", "200"],
        "command": ["zeroelastic", "prove"],
        "versions": {"zeroelastic": "0.1.0", "torch": "2.13.0", "deepspeed": "0.19.8"},
        "machine": {"host": "node0", "kernel": "6.1", "cores": 8, "device": "cpu"},
        "written": "2026-11-24 02:00:00 +0000",
        "signed_off_by": None,
        "digest": root,
    }  # fmt: skip


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
