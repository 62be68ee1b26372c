"""Whether DeepSpeed alone loads a checkpoint that a load of ours refuses: what ``install()`` must not take away.

``read_covered`` decides for configurations that we do not cover, ``stock_loads`` for checkpoints that we cannot read.

DeepSpeed goes by position: it copies the flat buffers of this rank's file into its own, whatever they are called. So a
rigid checkpoint of the same size is left to it, where it would not put one parameter into another. Headers alone are
read, by the allow-list. Source: ``_load_checkpoint``, ``load_module_state_dict``, ``_rigid_load_state_dict`` (0.19.8).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from zeroelastic.checkpoint.commit_record import RECORD_NAME
from zeroelastic.checkpoint.model_states import open_model_states
from zeroelastic.checkpoint.open import open_checkpoint, rank_files, saved_sizes
from zeroelastic.checkpoint.tag_files import TensorParallel, parse_rank_file
from zeroelastic.deepspeed.engine import Engine
from zeroelastic.deepspeed.live.kinds import covered_live, kind_of
from zeroelastic.deepspeed.live.live_optimizer import LiveOptimizer, tensor_parallel
from zeroelastic.deepspeed.load.request import LoadRequest
from zeroelastic.deepspeed.options import VERIFY_LEVELS, Options, Verify
from zeroelastic.distributed.collective import all_gather_of_or_raise, all_or_raise, any_rank
from zeroelastic.errors import (
    CheckpointError,
    LayoutMismatchError,
    MissingFileError,
    OldFormatError,
    UnsupportedError,
    ZeroElasticError,
)
from zeroelastic.io.paths import FilePath
from zeroelastic.io.storage import file_sizes
from zeroelastic.torch_file.header import TensorRef, read_torch_file

Table = Mapping[Any, Any]


def read_covered(
    engine: Engine, tag_dir: FilePath, options: Options
) -> tuple[LiveOptimizer, Verify] | UnsupportedError:
    """The live state and how closely to verify it, or why DeepSpeed alone loads this: alike on every rank. Collective.

    The option ``verify`` has no one default: the least of any rank holds. A run that we do not cover is left to
    DeepSpeed, which loads a rigid checkpoint of the same world size. Raises UnsupportedError where the checkpoint is
    elastic or of another size, so that DeepSpeed cannot load it either.
    """

    def look() -> tuple[LiveOptimizer | None, tuple[str, bool] | None]:
        try:
            return covered_live(engine, engine.optimizer), None
        except UnsupportedError as error:
            if kind_of(engine.optimizer) is None:  # an engine without an optimizer, into which DeepSpeed loads nothing
                return None, (str(error), False)
            world_size = dist.get_world_size(group=engine.optimizer.dp_process_group)
            node_local, tp = engine.use_node_local_storage(), tensor_parallel(engine.optimizer)
            loads = isinstance(tag_dir, Path) and _has_rigid_files(
                tag_dir, engine.global_rank, world_size, tp, node_local=node_local
            )
            return None, (str(error), loads)

    def outcome(found: tuple[LiveOptimizer | None, tuple[str, bool] | None]) -> tuple[tuple[str, bool] | None, Verify]:
        on_gpu = found[0] is not None and found[0].on_gpu
        return found[1], options.verify_level(on_gpu=on_gpu)

    (live, _), outcomes = all_gather_of_or_raise(look, outcome)
    refusals = [refusal for refusal, _ in outcomes if refusal is not None]
    if not refusals:
        assert live is not None
        levels = {level for _, level in outcomes}
        return live, next(level for level in VERIFY_LEVELS if level in levels)
    reason = refusals[0][0]
    if not all(loads for _, loads in refusals):
        raise UnsupportedError(f"{tag_dir}: {reason}")
    return UnsupportedError(reason)


def stock_loads(
    error: ZeroElasticError, engine: Engine, live: LiveOptimizer, tag_dir: FilePath, request: LoadRequest
) -> bool:
    """Whether DeepSpeed alone loads, on every rank, the checkpoint for which our load raised ``error``. Collective.

    It does for a file of torch's old format and for state that only DeepSpeed reads, where each rank finds its own
    files of a rigid checkpoint of this world size; and for a rigid checkpoint without a commit record that fits.
    """
    if not isinstance(tag_dir, Path) or not live.trains:  # DeepSpeed reads no URLs
        return False
    if isinstance(error, OldFormatError):
        node_local = engine.use_node_local_storage()
        return _on_all_ranks(
            lambda: _has_rigid_files(tag_dir, live.rank, live.layout.world_size, live.tp, node_local=node_local)
        )
    if not isinstance(error, (CheckpointError, LayoutMismatchError, UnsupportedError)):
        return False
    if isinstance(error, UnsupportedError) and _on_all_ranks(lambda: _only_stock_reads(tag_dir, live)):
        return True
    return _on_all_ranks(lambda: _fits(engine, live, tag_dir, request, damaged=isinstance(error, CheckpointError)))


def _on_all_ranks(check: Callable[[], bool]) -> bool:
    return not any_rank(not all_or_raise(check))


def _only_stock_reads(tag_dir: Path, live: LiveOptimizer) -> bool:
    """Whether a rigid checkpoint of this world size holds state that only DeepSpeed can read."""
    try:
        checkpoint = open_checkpoint(tag_dir, near_rank=live.rank, tp=live.tp)
    except UnsupportedError:  # another stage: our message says what is wrong
        return False
    except MissingFileError:  # on another node
        return _has_own_rigid_files(tag_dir, live.rank, live.layout.world_size)
    try:
        if checkpoint.world_size == live.layout.world_size:
            checkpoint.shard(live.rank)
        return False
    except UnsupportedError:
        return checkpoint.record is None or checkpoint.record.checkpoint_format != "elastic"


def _has_rigid_files(tag_dir: Path, rank: int, world_size: int, tp: TensorParallel, *, node_local: bool) -> bool:
    """Whether DeepSpeed alone can load this rank's part: as many ranks saved it, as a rigid checkpoint."""
    try:
        return open_checkpoint(tag_dir, near_rank=rank, tp=tp).world_size == world_size
    except UnsupportedError:
        return saved_sizes(tag_dir) == (world_size, tp.size)
    except OldFormatError:
        optim = rank_files(tag_dir, file_sizes(tag_dir)).optim
        return len(optim) == world_size or (node_local and rank in optim)
    except MissingFileError:
        return node_local and _has_own_rigid_files(tag_dir, rank, world_size)
    except CheckpointError:  # of a layout that is not covered: only the sizes count
        return saved_sizes(tag_dir) == (world_size, tp.size)


def _has_own_rigid_files(tag_dir: Path, rank: int, world_size: int) -> bool:
    """Whether this rank's two files, of which one may be its node's, are a rigid checkpoint's of this many ranks."""
    try:
        files = rank_files(tag_dir, file_sizes(tag_dir))
        own = 0 if files.whole_model else rank
        if rank not in files.optim or own not in files.models:
            return False
        if open_model_states(tag_dir / files.models[own], own, world_size=None).world_size != world_size:
            return False
        root = read_torch_file(tag_dir / files.optim[rank]).root
    except CheckpointError:
        return False
    state = root.get("optimizer_state_dict") if isinstance(root, dict) else None
    if not isinstance(state, dict):
        return False
    base = state.get("base_optimizer_state")
    return isinstance(base, dict) and "param_groups" in base if files.whole_model else base is None


def _fits(engine: Engine, live: LiveOptimizer, tag_dir: Path, request: LoadRequest, *, damaged: bool) -> bool:
    """Whether this is a rigid checkpoint of this world size, without a commit record, that fits.

    A checkpoint that is ``damaged`` fits only if client state has replaced the names of the parameters, so that the
    checkpoint merely seems to be damaged.
    """
    try:
        return _files_fit(engine, live, tag_dir, request, damaged=damaged)
    except CheckpointError:
        return False


def _files_fit(engine: Engine, live: LiveOptimizer, tag_dir: Path, request: LoadRequest, *, damaged: bool) -> bool:
    names = file_sizes(tag_dir)
    files: dict[tuple[str, int], str] = {}
    for name in names:
        file = parse_rank_file(name)
        if file is not None and file.tp_rank == live.tp.rank:
            files[file.kind, file.rank] = name
    size = live.layout.world_size
    models = [("model", rank) for rank in range(size)] if live.per_param else [("whole_model", 0)]
    everything = {*models, *(("optimizer", rank) for rank in range(size))}
    all_here = files.keys() == everything
    own = {models[live.rank if live.per_param else 0], ("optimizer", live.rank)}
    enough_here = engine.use_node_local_storage() and own <= files.keys() <= everything
    if RECORD_NAME in names or not (all_here or enough_here):
        return False
    model = read_torch_file(tag_dir / files[models[live.rank if live.per_param else 0]], foreign="inert").root
    sizes = (size, live.tp.size)
    if not isinstance(model, dict) or (model.get("dp_world_size"), model.get("mp_world_size")) != sizes:
        return False
    if damaged and _is_table(model.get("param_shapes")):
        return False
    if not _module_fits(engine, live, model, strict=request.strict_module) or _mixes(live, model.get("param_shapes")):
        return False
    if not request.load_optimizer_states and live.per_param:  # DeepSpeed then merges what `latest` names
        latest = tag_dir.parent / "latest"
        return all_here and latest.is_file() and latest.read_text().strip() == tag_dir.name
    root = read_torch_file(tag_dir / files["optimizer", live.rank]).root
    return live.takes_stock_state(root.get("optimizer_state_dict") if isinstance(root, dict) else None)


def _module_fits(engine: Engine, live: LiveOptimizer, model: Table, *, strict: bool) -> bool:
    saved = model.get("module")
    if not isinstance(saved, dict):
        return False
    own = engine.module.state_dict()
    if strict and saved.keys() != own.keys():
        return False
    parted = {name for name, _ in engine.module.named_parameters(remove_duplicate=False)} if live.per_param else set()
    for name in (saved.keys() & own.keys()) - parted:
        if isinstance(saved[name], TensorRef) and saved[name].shape != tuple(own[name].shape):
            return False
    fragments = model.get("frozen_param_fragments")
    if not isinstance(fragments, dict) or not live.per_param:
        return True
    params: Iterator[Any] = engine.module.parameters()
    looked_for = [param for param in params if not (param.requires_grad and param.ds_numel > 0)]
    parts = [(fragments.get(engine.param_names[param]), param.ds_tensor.numel()) for param in looked_for]
    return all(isinstance(part, TensorRef) and part.numel == numel for part, numel in parts)


def _is_table(tables: Any) -> bool:
    """Whether this names parameters and their shapes by sub-group."""
    return isinstance(tables, list) and all(isinstance(table, dict) for table in tables)


def _mixes(live: LiveOptimizer, tables: Any) -> bool:
    """Whether a parameter would get what another one's place holds, as far as the file names its parameters."""
    if not _is_table(tables):
        return False
    saved = [(name, tuple(shape)) for table in tables for name, shape in table.items() if isinstance(shape, tuple)]
    here = [(param.name, param.shape) for param in live.layout.params]
    names = {name for name, _ in saved} & {name for name, _ in here}
    return any(a != b and not names.isdisjoint((a[0], b[0])) for a, b in zip(saved, here, strict=False))
