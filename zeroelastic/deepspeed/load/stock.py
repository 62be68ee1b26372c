"""Loads that DeepSpeed does alone: ``install()`` must neither take them away nor hide that they would go wrong.

``choose_loader`` decides once who loads, before the checkpoint is opened: DeepSpeed has runs that are not covered here,
and rigid checkpoints of the same size that only DeepSpeed reads. Source: ``_load_checkpoint``,
``_load_zero_checkpoint`` (0.19.8).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from zeroelastic.checkpoint import contradictions
from zeroelastic.checkpoint.commit_record import RECORD_NAME, read_record
from zeroelastic.checkpoint.optimizer_file import OptimizerHeader
from zeroelastic.checkpoint.tag_files import parse_rank_file
from zeroelastic.deepspeed.engine import Engine
from zeroelastic.deepspeed.live.kinds import covered_live, kind_of, param_names, why_left_to_deepspeed
from zeroelastic.deepspeed.live.live_optimizer import LiveOptimizer
from zeroelastic.deepspeed.load.arrangement import (
    Table,
    is_of_this_size,
    own_names,
    refuse_other_arrangement,
    refuse_state_of_zero,
    shapes_of,
    table_of,
)
from zeroelastic.deepspeed.load.compare import refuse_lost_state
from zeroelastic.deepspeed.options import VERIFY_LEVELS, LoadRequest, Verify
from zeroelastic.distributed.collective import all_gather_of_or_raise, all_or_raise
from zeroelastic.distributed.partners import require_partners
from zeroelastic.errors import CheckpointError, OldFormatError, UnsupportedError, some
from zeroelastic.executors.dispatch import Executor
from zeroelastic.io.paths import FilePath, local_path
from zeroelastic.io.storage import file_sizes
from zeroelastic.runs.names import read_latest
from zeroelastic.torch_file.header import read_torch_file
from zeroelastic.torch_file.zip_check import check_archive


def is_left_to_deepspeed(engine: Engine, request: LoadRequest) -> bool:
    """Return whether DeepSpeed loads any checkpoint: Universal ones, and runs that are not covered. Collective.

    Raises as ``refuse_other_arrangement`` where the files of such a run say how they are cut.
    """
    if engine.load_universal_checkpoint():
        return True
    if kind_of(engine.optimizer, to_load=True) is not None:
        return False
    if (directory := local_path(request.directory)) is not None:
        _check_left(engine, directory, request.tag, weights_only=request.weights_only)
    return True


def _check_left(engine: Engine, directory: Path, tag: str | None, *, weights_only: bool) -> None:
    if not (engine.zero_optimization() or getattr(engine, "has_moe_layers", False)):
        if (tag := tag if tag is not None else read_latest(directory)) is not None:
            refuse_state_of_zero(engine, directory / str(tag), weights_only=weights_only)
        return
    require_partners()
    tag = tag if tag is not None else all_or_raise(lambda: read_latest(directory))
    if tag is not None:
        why = why_left_to_deepspeed(engine.optimizer) or type(engine.optimizer).__name__
        refuse_other_arrangement(engine, directory / str(tag), why, weights_only=weights_only)


class LoaderChoice(NamedTuple):
    """Who loads a tag: DeepSpeed alone because of ``reason``, or this package into ``live``, as ``request`` says.

    ``values`` are the optimizer's numbers in this rank's file: DeepSpeed loads if other ranks have others.
    """

    live: LiveOptimizer | None
    request: LoadRequest
    reason: str | None = None
    values: contradictions.Values | None = None


def choose_loader(engine: Engine, tag_dir: FilePath, request: LoadRequest) -> LoaderChoice:
    """Decide who loads a tag, the same on every rank. Collective.

    DeepSpeed loads what every rank leaves to it: a configuration that is not covered, if as many ranks saved the tag,
    or a checkpoint that only DeepSpeed reads (``_why_only_deepspeed_reads``). The least ``verify`` of any rank holds.
    Raises UnsupportedError where the run is not covered and DeepSpeed cannot load the tag either.
    """

    local = local_path(tag_dir)  # DeepSpeed reads no URLs

    def look() -> LoaderChoice:
        try:
            live = covered_live(engine, engine.optimizer)
        except UnsupportedError as error:
            # into an engine without an optimizer DeepSpeed loads nothing
            if kind_of(engine.optimizer) is None or local is None or not is_of_this_size(engine, local):
                raise UnsupportedError(f"{tag_dir}: {error}") from None
            return LoaderChoice(None, request, str(error))
        if local is None:
            return LoaderChoice(live, request)
        return LoaderChoice(live, request, *_why_only_deepspeed_reads(engine, live, local, request))

    def part(loader: LoaderChoice) -> tuple[Verify, str | None, tuple[int, int] | None, contradictions.Values | None]:
        live = loader.live
        level = request.options.verify_level(on_gpu=live is not None and live.on_gpu)
        if live is None:
            return level, loader.reason, None, None
        rank, tp = live.sharing.place
        return level, loader.reason, (tp.rank, rank), loader.values

    own, found = all_gather_of_or_raise(look, part)
    reasons = [reason for _, reason, place, _ in found if place is None] or [reason for _, reason, *_ in found]
    if not any(reasons):
        tables = [(place, values) for *_, place, values in found if place is not None and values is not None]
        if len(tables) == len(found):
            reasons = [_values_of_ranks(tag_dir, tables)]
    if local is not None and None not in reasons:
        refuse_other_arrangement(engine, local, reasons[0] or "", weights_only=request.weights_only)
        return LoaderChoice(None, request, reasons[0])
    assert own.live is not None, "else there is a reason"
    level = min((level for level, *_ in found), key=VERIFY_LEVELS.index)
    if level != request.options.verify:
        request = replace(request, options=request.options.model_copy(update={"verify": level}))
    return LoaderChoice(own.live, request if own.live.trains else replace(request, load_optimizer_states=False))


def _values_of_ranks(tag_dir: FilePath, tables: Sequence[tuple[tuple[int, int], contradictions.Values]]) -> str | None:
    """Return why DeepSpeed loads: the optimizer computed numbers from each rank's own part, and they differ.

    ``tables`` are the numbers of each rank, by its tensor parallel and its data parallel rank.
    """
    for tp_rank in sorted({place[0] for place, _ in tables}):
        sentence = contradictions.values_sentence([(rank, values) for (tp, rank), values in tables if tp == tp_rank])
        if sentence is not None:
            return f"{tag_dir}: {sentence}"
    return None


def _values(shard: OptimizerHeader) -> contradictions.Values:
    """Return the optimizer's numbers in a file, and a hash of all else that the files of one save have in common."""
    facts, values = contradictions.shard_facts(shard), contradictions.shard_values(shard)
    common = [facts[fact] for fact in sorted(facts.keys() - contradictions.VALUE_FACTS)]
    numbers = {what: (key, value) for what, (key, value) in values.items() if key != "params"}
    return {**numbers, "the save": ("save", hashlib.sha256(repr(common).encode()).hexdigest())}


def _why_only_deepspeed_reads(
    engine: Engine, live: LiveOptimizer, tag_dir: Path, request: LoadRequest
) -> tuple[str | None, contradictions.Values | None]:
    """Return why only DeepSpeed reads this rank's files, and the optimizer's numbers; None where the load is ours.

    It reads the weights of the module where there are no optimizer files (stage 0, or they were removed), and of rigid
    saves of this size without a record: torch's old format, module states in which client state has replaced the names
    of the parameters, optimizer state that is not one value per element, and what ``_names_that_differ`` says.
    """
    if not tag_dir.is_dir() or not live.trains:
        return None, None
    names = file_sizes(tag_dir)
    tp = live.sharing.place[1]
    kinds = [file.kind for name in names if (file := parse_rank_file(name)) is not None]
    if kinds == ["whole_model"] * tp.size and request.weights_only and not live.per_param:
        if request.options.verify != "off":
            _check_module(engine, live, tag_dir, executor=request.options.host_io_engine)
        return f"{tag_dir}: has the weights of the module, and no optimizer files", None
    if RECORD_NAME in names:
        return None, None
    num_files = live.topology.data_size * tp.size
    if not engine.use_node_local_storage() and kinds.count("optimizer") != num_files:
        return None, None  # of another size by its names: no file is opened for it
    if not is_of_this_size(engine, tag_dir):
        return None, None
    model_path, optim_path = (tag_dir / name for name in own_names(engine, tag_dir))
    try:
        states = read_torch_file(model_path, foreign="inert")
        if isinstance(states.root, dict) and not _names_params(states.root):
            return f"{tag_dir}: client state has replaced the names of the parameters in its files", None
        differ = None
        if isinstance(states.root, dict) and request.options.on_mismatch == "error":
            differ = _names_that_differ(engine, live, states.root, strict_module=request.strict_module)
        _, shard = live.sharing.open_files(states, optim_path, live.layout)
        if not request.weights_only:
            refuse_lost_state(shard)
        if differ is not None:
            return f"{tag_dir}: {differ}", None
        return None, None if request.weights_only else _values(shard)
    except (OldFormatError, UnsupportedError) as error:
        says_slices = not isinstance(error, OldFormatError)
        return (str(error) if says_slices or not live.sharing.has_slices else None), None
    except CheckpointError:  # the load says what is wrong
        return None, None


def _check_module(engine: Engine, live: LiveOptimizer, tag_dir: Path, *, executor: Executor) -> None:
    """Raise CheckpointError unless this rank's module states are those of the commit record, where there is one.

    The first of the ranks that read a file also compares its payload with the checksums.
    """
    record, path = read_record(tag_dir), tag_dir / own_names(engine, tag_dir)[0]
    if record is None:
        return
    file = read_torch_file(path, foreign="inert")
    if file.directory != record.directories.get(path.name, file.directory):
        raise CheckpointError(contradictions.other_directory(path))
    if live.rank == 0:
        check_archive(path, file.size, executor=executor)


def _names_that_differ(engine: Engine, live: LiveOptimizer, model: Table, *, strict_module: bool) -> str | None:
    """Return which other parameters a checkpoint names, although DeepSpeed, which goes by position, loads it.

    With ``load_module_strict=False`` the trained parameters may have other names, if their shapes are the run's in the
    same order. At stage 3 DeepSpeed saves no parameter that requires a gradient and that no optimizer group has.
    """
    saved = [shapes_of([table]) for table in model["param_shapes"]]
    current = [shapes_of([table]) for table in engine._get_zero_param_shapes()]
    if [list(table.values()) for table in saved] != [list(table.values()) for table in current]:
        return None
    names, theirs = ([name for table in tables for name in table] for tables in (current, saved))
    if not strict_module:
        other = next(((was, now) for was, now in zip(theirs, names, strict=True) if was != now), None)
        return None if other is None else f"names the parameter {other[0]} that the run names {other[1]}"
    if not live.per_param or names != theirs:
        return None
    frozen = {param.name: math.prod(param.shape) for param in live.frozen.params}
    listed = table_of(model.get("frozen_param_shapes"))
    missing = [name for name, numel in frozen.items() if numel and name not in listed]
    wanted = {name for param, name in param_names(engine).items() if param.requires_grad}
    if not missing or not wanted.issuperset(missing):
        return None
    return f"lacks {some(missing)}, which no optimizer group has, and which keeps the value of the run"


def _names_params(model: Table) -> bool:
    """Return whether module states list the trained parameters, and the frozen ones if there are any."""
    tables, frozen = model.get("param_shapes"), model.get("frozen_param_shapes")
    listed = isinstance(tables, list) and all(isinstance(table, Mapping) for table in tables)
    return listed and (frozen is None or isinstance(frozen, Mapping))
