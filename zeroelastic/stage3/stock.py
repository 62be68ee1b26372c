"""Whether DeepSpeed alone loads a checkpoint that a load of ours refuses: what ``install()`` must not take away.

DeepSpeed goes by position: it copies the flat buffers of this rank's file into its own, whatever they are called. So a
rigid checkpoint of the same size is left to it, where it would not put one parameter into another. Headers alone are
read, by the allow-list. Source: ``_load_checkpoint``, ``load_module_state_dict``, ``_rigid_load_state_dict`` (0.19.8).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zeroelastic.agree import together
from zeroelastic.checkpoint import parse_rank_file
from zeroelastic.errors import CheckpointError
from zeroelastic.record import RECORD_NAME
from zeroelastic.stage3.live import LiveState
from zeroelastic.stage3.optimizers import SCHEDULED
from zeroelastic.storage import file_sizes
from zeroelastic.torchfile import TensorRef, read_torch_file

Table = Mapping[Any, Any]


def stock_loads(
    engine: Any, live: LiveState, tag_dir: Path, *, strict: bool, optimizer_states: bool, damaged: bool
) -> bool:
    """Whether every rank finds a rigid checkpoint of this world size, without a commit record, that fits. Collective.

    ``strict`` and ``optimizer_states`` are what the caller of the load asks for. What is ``damaged`` fits only where it
    merely seems so, because client state has taken the place of the parameters' names.
    """

    def look() -> bool:
        try:
            return _fits(engine, live, tag_dir, strict=strict, optimizer_states=optimizer_states, damaged=damaged)
        except CheckpointError:
            return False

    return all(together(look)[1])


def _fits(engine: Any, live: LiveState, tag_dir: Path, *, strict: bool, optimizer_states: bool, damaged: bool) -> bool:
    names = file_sizes(tag_dir)
    files: dict[tuple[str, int], str] = {}
    for name in names:
        file = parse_rank_file(name)
        if file is not None and file.tp_rank == live.tp.rank:
            files[file.kind, file.rank] = name
    size = live.layout.world_size
    if RECORD_NAME in names or files.keys() != {(kind, r) for kind in ("optimizer", "model") for r in range(size)}:
        return False
    model = read_torch_file(tag_dir / files["model", live.rank], foreign="inert").root
    if not isinstance(model, dict) or (model.get("dp_world_size"), model.get("mp_world_size")) != (
        size,
        live.tp.size,
    ):
        return False
    if damaged and _is_table(model.get("param_shapes")):
        return False
    if not _module_fits(engine, live, model, strict=strict) or _mixes(live, model.get("param_shapes")):
        return False
    if not optimizer_states:  # DeepSpeed then merges what `latest` names
        latest = tag_dir.parent / "latest"
        return latest.is_file() and latest.read_text().strip() == tag_dir.name
    root = read_torch_file(tag_dir / files["optimizer", live.rank]).root
    return _optimizer_fits(live, root.get("optimizer_state_dict") if isinstance(root, dict) else None)


def _module_fits(engine: Any, live: LiveState, model: Table, *, strict: bool) -> bool:
    saved = model.get("module")
    if not isinstance(saved, dict):
        return False
    own = engine.module.state_dict()
    if strict and saved.keys() != own.keys():
        return False
    params = {name for name, _ in engine.module.named_parameters(remove_duplicate=False)}
    for name in (saved.keys() & own.keys()) - params:
        if isinstance(saved[name], TensorRef) and saved[name].shape != tuple(own[name].shape):
            return False
    fragments = model.get("frozen_param_fragments")
    if not isinstance(fragments, dict):
        return True
    looked_for = [param for param in engine.module.parameters() if not (param.requires_grad and param.ds_numel > 0)]
    parts = [(fragments.get(engine.param_names[param]), param.ds_tensor.numel()) for param in looked_for]
    return all(isinstance(part, TensorRef) and part.numel == numel for part, numel in parts)


def _is_table(tables: Any) -> bool:
    """Whether this names parameters and their shapes by sub-group."""
    return isinstance(tables, list) and all(isinstance(table, dict) for table in tables)


def _mixes(live: LiveState, tables: Any) -> bool:
    """Whether a parameter would get what another one's place holds, as far as the file names its parameters."""
    if not _is_table(tables):
        return False
    saved = [(name, tuple(shape)) for table in tables for name, shape in table.items() if isinstance(shape, tuple)]
    here = [(param.name, param.shape) for param in live.layout.params]
    names = {name for name, _ in saved} & {name for name, _ in here}
    return any(a != b and not names.isdisjoint((a[0], b[0])) for a, b in zip(saved, here, strict=False))


def _optimizer_fits(live: LiveState, state: object) -> bool:
    if not isinstance(state, dict) or state.get("zero_stage") != 3 or "base_optimizer_state" in state:
        return False
    flats, nested = state.get("fp32_flat_groups"), state.get("optimizer_state_dict")
    groups = nested.get("param_groups") if isinstance(nested, dict) else None
    if not isinstance(flats, list) or not isinstance(groups, list):
        return False
    own = live.optimizer.optimizer.param_groups
    counts = [sum(live.optimizer.sub_group_to_group_id[i] == g for i in range(len(flats))) for g in range(len(own))]
    return (
        [flat.shape if isinstance(flat, TensorRef) else None for flat in flats]
        == [(int(numel),) for numel in live.layout.sub_group_numel]
        and len(groups) == len(own)
        and all(
            isinstance(group, dict)
            and len(set(group.get("params", ()))) == count
            and not mine.keys() - group.keys() - SCHEDULED
            for group, mine, count in zip(groups, own, counts, strict=True)
        )
    )
