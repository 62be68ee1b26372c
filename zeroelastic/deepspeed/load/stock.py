"""Loads that DeepSpeed does alone: ``install()`` must neither take them away nor hide that they would go wrong.

``choose_loader`` decides once who loads, before the checkpoint is opened for a load: DeepSpeed has runs that we do not
cover, and rigid checkpoints of the same size that only DeepSpeed reads. ``refuse_other_arrangement`` compares the sizes
of such a run's groups, and its parameters, with the save.

DeepSpeed goes by position: it copies the flat buffers of this rank's file into its own, whatever they are called, and
compares the data parallel size only. Buffers of another arrangement may have the same length: those of experts over 2
ranks and over 1 have. A rank whose own file is missing would raise alone, and the others would wait for it. Headers
alone are read, by the allow-list. Source: ``_load_checkpoint``, ``load_module_state_dict``, ``_load_zero_checkpoint``
(0.19.8).
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from zeroelastic.checkpoint.commit_record import RECORD_NAME, read_record
from zeroelastic.checkpoint.contradictions import (
    VALUE_FACTS,
    Values,
    other_directory,
    shard_facts,
    shard_values,
    values_sentence,
)
from zeroelastic.checkpoint.inventory import saved_sizes
from zeroelastic.checkpoint.model_states import model_states_of
from zeroelastic.checkpoint.optimizer_file import OptimizerHeader
from zeroelastic.checkpoint.optimizer_reader import RankSlices, open_shard
from zeroelastic.checkpoint.saved_layout import DATA_FIRST
from zeroelastic.checkpoint.tag_files import TensorParallel, other_tp_size, parse_rank_file, rank_files
from zeroelastic.deepspeed.engine import Engine
from zeroelastic.deepspeed.live.kinds import covered_live, kind_of, param_names, why_left_to_deepspeed
from zeroelastic.deepspeed.live.live_optimizer import LiveOptimizer
from zeroelastic.deepspeed.live.topology import tensor_parallel
from zeroelastic.deepspeed.load.load_plan import refuse_lost_state
from zeroelastic.deepspeed.options import VERIFY_LEVELS, LoadRequest, Verify
from zeroelastic.distributed.collective import all_gather_of_or_raise, all_or_raise
from zeroelastic.distributed.partners import require_partners
from zeroelastic.errors import (
    CheckpointError,
    MissingFileError,
    NewerFormatError,
    OldFormatError,
    UnsafePickleError,
    UnsupportedError,
    some,
)
from zeroelastic.io.paths import FilePath, local_path
from zeroelastic.io.storage import file_sizes
from zeroelastic.runs.names import read_latest
from zeroelastic.torch_file.header import read_torch_file
from zeroelastic.torch_file.zip_check import check_archive

Table = Mapping[Any, Any]

_AUTO_EP = ("ds_autoep_layers", "autoep_layers")
"""The entries of a model states file that list the layers of AutoEP."""


class Loader(NamedTuple):
    """Who loads a tag: DeepSpeed alone because of ``reason``, or this package into ``live``, as ``request`` says.

    ``values`` are the optimizer's numbers in this rank's file, where DeepSpeed has them if those of other ranks differ.
    """

    live: LiveOptimizer | None
    request: LoadRequest
    reason: str | None = None
    values: Values | None = None


def choose_loader(engine: Engine, tag_dir: FilePath, request: LoadRequest) -> Loader:
    """Decide who loads a tag: alike on every rank. Collective.

    DeepSpeed has what every rank leaves to it: a configuration that we do not cover, if as many ranks saved the tag,
    and else a checkpoint that only DeepSpeed reads (``_why_only_deepspeed_reads``). The option ``verify`` has no one
    default: the least of any rank holds. Raises UnsupportedError where the run is not covered and DeepSpeed cannot load
    the tag either.
    """

    local = local_path(tag_dir)  # DeepSpeed reads no URLs

    def look() -> Loader:
        try:
            live = covered_live(engine, engine.optimizer)
        except UnsupportedError as error:
            # into an engine without an optimizer DeepSpeed loads nothing
            if kind_of(engine.optimizer) is None or local is None or not _is_of_this_size(engine, local):
                raise UnsupportedError(f"{tag_dir}: {error}") from None
            return Loader(None, request, str(error))
        if local is None:
            return Loader(live, request)
        return Loader(live, request, *_why_only_deepspeed_reads(engine, live, local, request))

    def part(loader: Loader) -> tuple[Verify, str | None, tuple[int, int] | None, Values | None]:
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
        refuse_other_arrangement(engine, local, request, reasons[0] or "")
        return Loader(None, request, reasons[0])
    assert own.live is not None, "else there is a reason"
    level = min((level for level, *_ in found), key=VERIFY_LEVELS.index)
    if level != request.options.verify:
        request = replace(request, options=request.options.model_copy(update={"verify": level}))
    return Loader(own.live, request if own.live.trains else replace(request, load_optimizer_states=False))


def _values_of_ranks(tag_dir: FilePath, tables: Sequence[tuple[tuple[int, int], Values]]) -> str | None:
    """Why DeepSpeed has a tag whose ranks differ in numbers that the optimizer computes from a rank's own part.

    ``tables`` are the numbers of each rank, by its tensor parallel and its data parallel rank.
    """
    for tp_rank in sorted({place[0] for place, _ in tables}):
        sentence = values_sentence([(rank, values) for (tp, rank), values in tables if tp == tp_rank])
        if sentence is not None:
            return f"{tag_dir}: {sentence}"
    return None


def _values(shard: OptimizerHeader) -> Values:
    """The optimizer's numbers in a file, and a hash of all else that the files of one save have in common."""
    common = [shard_facts(shard)[fact] for fact in sorted(shard_facts(shard).keys() - VALUE_FACTS)]
    numbers = {what: (key, value) for what, (key, value) in shard_values(shard).items() if key != "params"}
    return {**numbers, "the save": ("save", hashlib.sha256(repr(common).encode()).hexdigest())}


def _why_only_deepspeed_reads(
    engine: Engine, live: LiveOptimizer, tag_dir: Path, request: LoadRequest
) -> tuple[str | None, Values | None]:
    """Why only DeepSpeed reads this rank's files: the weights alone, or a rigid save of this size without a record.

    It reads the weights of the module where there are no optimizer files (stage 0, or they were removed), torch's old
    format, module states in which client state has replaced the names of the parameters, optimizer state that is not
    one value per element, and what ``_names_that_differ`` says. None where this package loads the tag, unless ranks
    differ in the numbers of the optimizer, which are the other result.
    """
    if not tag_dir.is_dir() or not live.trains:
        return None, None
    names = file_sizes(tag_dir)
    (rank, tp), sliced = live.sharing.place, live.layout.slices is not None
    kinds = [file.kind for name in names if (file := parse_rank_file(name)) is not None]
    if kinds == ["whole_model"] * tp.size and request.weights_only and not live.per_param:
        _check_module(engine, live, tag_dir, request)
        return f"{tag_dir}: has the weights of the module, and no optimizer files", None
    if RECORD_NAME in names:
        return None, None
    num_files = live.topology.data_size * tp.size
    if not engine.use_node_local_storage() and kinds.count("optimizer") != num_files:
        return None, None  # of another size by its names: no file is opened for it
    if not _is_of_this_size(engine, tag_dir):
        return None, None
    model_path, optim_path = (tag_dir / name for name in _own_names(engine, tag_dir))
    sharing, size = live.sharing, live.topology.data_size
    whole_names = {local: whole for local in sharing.maps if (whole := sharing.whole_name(local)) != local}
    try:
        states = read_torch_file(model_path, foreign="inert")
        if isinstance(states.root, dict) and not _names_params(states.root):
            return f"{tag_dir}: client state has replaced the names of the parameters in its files", None
        differ = _names_that_differ(engine, live, states.root, request) if isinstance(states.root, dict) else None
        model = model_states_of(states, rank, world_size=size, tp=tp if tp.size > 1 else None)
        shard = open_shard(
            optim_path,
            rank,
            world_size=size,
            rigid_params=model.sub_groups,
            tp_rank=tp.rank,
            slices=RankSlices(sharing.topology, sharing.rank, live.layout, whole_names) if sliced else None,
        )
        if not request.weights_only:
            refuse_lost_state(shard)
        if differ is not None:
            return f"{tag_dir}: {differ}", None
        return None, None if request.weights_only else _values(shard)
    except (OldFormatError, UnsupportedError) as error:
        return (None if sliced and isinstance(error, OldFormatError) else str(error)), None  # which says no slices
    except CheckpointError:  # the load says what is wrong
        return None, None


def _check_module(engine: Engine, live: LiveOptimizer, tag_dir: Path, request: LoadRequest) -> None:
    """Raise CheckpointError unless this rank's module states are those of the commit record, where there is one.

    Of the ranks that read a file, the first compares its payload with the checksums, which the record states.
    """
    record, path = read_record(tag_dir), tag_dir / _own_names(engine, tag_dir)[0]
    if record is None or request.options.verify == "off":
        return
    file = read_torch_file(path, foreign="inert")
    if file.directory != record.directories.get(path.name, file.directory):
        raise CheckpointError(other_directory(path))
    if live.rank == 0:
        check_archive(path, file.size, executor=request.options.host_io_engine)


def _names_that_differ(engine: Engine, live: LiveOptimizer, model: Table, request: LoadRequest) -> str | None:
    """Say which other parameters a checkpoint names, although DeepSpeed, which goes by position, loads it.

    With ``load_module_strict=False`` the trained parameters may have other names, if their shapes are the run's in the
    same order. At stage 3 DeepSpeed saves no parameter that requires a gradient and that no optimizer group has.
    """
    if request.options.on_mismatch != "error":
        return None
    saved = [_shapes([table]) for table in model["param_shapes"]]
    current = [_shapes([table]) for table in engine._get_zero_param_shapes()]
    if [list(table.values()) for table in saved] != [list(table.values()) for table in current]:
        return None
    names, theirs = ([name for table in tables for name in table] for tables in (current, saved))
    if not request.strict_module:
        other = next(((was, now) for was, now in zip(theirs, names, strict=True) if was != now), None)
        return None if other is None else f"names the parameter {other[0]} that the run names {other[1]}"
    if not live.per_param or names != theirs:
        return None
    frozen = {param.name: math.prod(param.shape) for param in live.frozen.params}
    listed = _table(model.get("frozen_param_shapes"))
    missing = [name for name, numel in frozen.items() if numel and name not in listed]
    wanted = {name for param, name in param_names(engine).items() if param.requires_grad}
    if not missing or not wanted.issuperset(missing):
        return None
    return f"lacks {some(missing)}, which no optimizer group has, and which keeps the value of the run"


def _names_params(model: Table) -> bool:
    """Whether module states list the trained and the frozen parameters, unless none are frozen."""
    tables, frozen = model.get("param_shapes"), model.get("frozen_param_shapes")
    listed = isinstance(tables, list) and all(isinstance(table, Mapping) for table in tables)
    return listed and (frozen is None or isinstance(frozen, Mapping))


def _is_of_this_size(engine: Engine, tag_dir: Path) -> bool:
    """Whether as many data parallel and tensor parallel ranks saved a tag as this run has."""
    size, tp = dist.get_world_size(group=engine.optimizer.dp_process_group), tensor_parallel(engine.optimizer)
    try:
        return saved_sizes(tag_dir) == (size, tp.size)
    except OldFormatError:
        names = file_sizes(tag_dir)
        num_files = len(rank_files(tag_dir, names, tp.rank).optim)
        return num_files == size or (engine.use_node_local_storage() and _own_names(engine, tag_dir)[1] in names)
    except CheckpointError:
        return False


def _own_names(engine: Engine, tag_dir: Path) -> list[str]:
    """The names of this rank's module states and optimizer file, as DeepSpeed looks for them."""
    where = str(tag_dir.parent), tag_dir.name
    return [os.path.basename(path) for path in (engine._get_ckpt_name(*where), engine._get_zero_ckpt_name(*where))]


def check_left(engine: Engine, request: LoadRequest) -> None:
    """Check what DeepSpeed does not, of a run that is left to it and whose files say how they are cut. Collective."""
    if local_path(request.directory) is None:
        return
    if not (engine.zero_optimization() or getattr(engine, "has_moe_layers", False)):
        if (tag := request.tag if request.tag is not None else read_latest(request.directory)) is not None:
            refuse_state_of_zero(engine, Path(request.load_dir) / str(tag), request)
        return
    require_partners()
    tag = request.tag if request.tag is not None else all_or_raise(lambda: read_latest(request.directory))
    if tag is not None:
        why = why_left_to_deepspeed(engine.optimizer) or type(engine.optimizer).__name__
        refuse_other_arrangement(engine, Path(request.load_dir) / str(tag), request, why)


def refuse_state_of_zero(engine: Engine, tag_dir: Path, request: LoadRequest) -> None:
    """Raise UnsupportedError where a run without ZeRO is to go on from optimizer state in files of ZeRO.

    DeepSpeed ends in a TypeError, or in an empty AssertionError. Not collective: each rank looks at what it sees.
    """
    reads_zero = engine.zero_optimization() or getattr(engine, "save_zero_checkpoint", False)
    if reads_zero or engine.optimizer is None or not tag_dir.is_dir():
        return
    kinds = {file.kind for name in file_sizes(tag_dir) if (file := parse_rank_file(name)) is not None}
    own = tag_dir / os.path.basename(engine._get_ckpt_name(str(tag_dir.parent), tag_dir.name))
    if "optimizer" not in kinds or (
        own.exists() and (request.weights_only or _root(own).get("optimizer", 0) is not None)
    ):
        return
    advice = "" if "model" in kinds else ", or take the weights alone with load_optimizer_states=False"
    raise UnsupportedError(
        f"{tag_dir}: has the files of a run with ZeRO (*_optim_states.pt), and this run has stage 0, which loads "
        f"none of them. Set stage 1{advice}."
    )


class _Arrangement(NamedTuple):
    """How many ranks share what, and the trained parameters in flat order. None and empty: not known.

    ``experts`` are the sizes of all expert parallel groups, as text; ``data_first`` is the option of that name.
    """

    data_size: int | None
    tensor_size: int | None
    experts: str | None
    data_first: bool | None
    shapes: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, model: Table, optimizer: Table) -> _Arrangement:
        """Read it from the trees of a rank's model states and optimizer file."""
        state, config = _table(optimizer.get("optimizer_state_dict")), optimizer.get("ds_config")
        data_size, count = _size(model.get("dp_world_size")), state.get("partition_count")
        layers = next((layers for layers in map(model.get, _AUTO_EP) if isinstance(layers, list)), [])
        by_layer = {size for layer in layers if (size := _size(_table(layer).get("ep_size")))}
        if isinstance(count, list) and data_size is not None:  # how many ranks each optimizer group is cut for
            by_layer = {data_size // size for size in map(_size, count) if size is not None} or by_layer
        tables = model.get("param_shapes")
        return cls(
            data_size,
            _size(model.get("mp_world_size")),
            (", ".join(map(str, sorted(by_layer - {1}))) or "1") if by_layer else None,
            bool(config.get(DATA_FIRST, False)) if isinstance(config, Mapping) else None,
            _shapes(tables) if isinstance(tables, list) else {},
        )


def _live(engine: Engine) -> _Arrangement:
    modules = engine.module.modules() if getattr(engine, "has_moe_layers", False) else ()
    model = {
        "dp_world_size": int(engine.seq_dp_world_size),
        "mp_world_size": int(engine.mp_world_size),
        "param_shapes": engine._get_zero_param_shapes() if engine.zero_optimization() else None,
        _AUTO_EP[0]: [{"ep_size": getattr(module, "ep_size", None)} for module in modules],
    }
    state = {"partition_count": getattr(engine.optimizer, "partition_count", None)}
    return _Arrangement.of(model, {"optimizer_state_dict": state, "ds_config": engine._config._param_dict})


def refuse_other_arrangement(engine: Engine, tag_dir: Path, request: LoadRequest, why: str) -> None:
    """Raise UnsupportedError where this run, left to DeepSpeed because of ``why``, is arranged unlike the save.

    Each rank reads the headers of its own files. A load of weights only goes by name, so that only the tensor parallel
    size counts. Raises MissingFileError where some ranks lack a file that others have, and CheckpointError for one that
    is damaged; what cannot be compared is left to DeepSpeed. The same on every rank. Collective.
    """

    def look() -> list[str]:
        both = engine.zero_optimization() and not request.weights_only
        files = [tag_dir / name for name in _own_names(engine, tag_dir)[: 1 + both]]
        _compare(engine, tag_dir, [_root(file) for file in files if os.path.exists(file)], request, why)
        return [file.name for file in files if not os.path.exists(file)]

    missing = all_gather_of_or_raise(look, lambda gone: gone)[1]
    if any(missing) and not all(missing):
        gone = sorted({name for names in missing for name in names})
        raise MissingFileError(f"{tag_dir}: some ranks do not find {some(gone)}. The checkpoint is incomplete.")


def _compare(engine: Engine, tag_dir: Path, roots: Sequence[Table], request: LoadRequest, why: str) -> None:
    model = next((root for root in roots if "module" in root or "dp_world_size" in root), {})
    optimizer = next((root for root in roots if "optimizer_state_dict" in root), {})
    saved, live = _Arrangement.of(model, optimizer), _live(engine)
    if saved.tensor_size not in (None, live.tensor_size):
        live_tp = TensorParallel(size=live.tensor_size or 1)
        raise other_tp_size(tag_dir, saved.tensor_size, live_tp, stage=engine.zero_optimization_stage())
    if request.weights_only:
        return
    differ = []
    zero = engine.zero_optimization()  # without ZeRO every rank has all of the optimizer's state
    if zero and saved.data_size not in (None, live.data_size):
        differ.append(f"data parallel size {saved.data_size}, and the run has {live.data_size}")
    if saved.experts not in (None, live.experts or "1"):
        differ.append(f"expert parallel size {saved.experts}, and the run has {live.experts or '1'}")
    elif saved.experts not in (None, "1") and saved.data_first not in (None, live.data_first):
        differ.append(f'"{DATA_FIRST}" {saved.data_first}, and the run has {live.data_first}')
    advice = "; load_checkpoint(load_optimizer_states=False) takes the weights alone" if differ else ""
    if not differ and zero:
        common = [name for name in saved.shapes if name in live.shapes]
        differ += [
            f"{name} {list(saved.shapes[name])} on a rank, which has {list(live.shapes[name])} in the run"
            for name in common
            if saved.shapes[name] != live.shapes[name]
        ]
        if common != [name for name in live.shapes if name in saved.shapes]:
            differ.append("its parameters in another order than the run's")
    if differ:
        raise UnsupportedError(
            f"{tag_dir}: was saved with {some(differ, 3, separator='; with ')}. DeepSpeed alone loads this run "
            f"({why.partition(' (')[0]}), and resumes it only as it was saved: it would fail, or put the state of one "
            f"parameter into another. Resume with what saved{advice}."
        )


def _root(path: Path) -> Table:
    """The tree of a file, or nothing where only DeepSpeed can read it."""
    try:
        root = read_torch_file(path, foreign="inert").root
    except (OldFormatError, NewerFormatError, UnsafePickleError):
        return {}
    if not isinstance(root, dict):
        raise CheckpointError(f"{path}: is no file of a DeepSpeed checkpoint.")
    return root


def _table(value: object) -> Table:
    return value if isinstance(value, Mapping) else {}


def _size(value: object) -> int | None:
    return value if type(value) is int and value > 0 else None


def _shapes(tables: Sequence[object]) -> dict[str, tuple[int, ...]]:
    """The parameters of a file or a run that have a name and a shape, in flat order."""
    return {
        str(name): tuple(map(int, shape))
        for table in tables
        if isinstance(table, Mapping)
        for name, shape in table.items()
        if isinstance(shape, tuple)
    }
