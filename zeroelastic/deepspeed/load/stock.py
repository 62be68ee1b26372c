"""What DeepSpeed alone loads: ``install()`` must not take it away, and must not hide that it would go wrong.

``read_covered`` decides for configurations that we do not cover, ``stock_loads`` for checkpoints that we cannot read;
``refuse_other_arrangement`` then compares the sizes of the run's groups, and its parameters, with the save.

DeepSpeed goes by position: it copies the flat buffers of this rank's file into its own, whatever they are called, and
compares the data parallel size only. So a rigid checkpoint of the same size is left to it, where it would not put one
parameter into another. Buffers of another arrangement may have the same length: those of experts over 2 ranks and over
1 have. A rank whose own file is missing would raise alone, and the others would wait for it. Headers alone are read, by
the allow-list. Source: ``_load_checkpoint``, ``load_module_state_dict``, ``_load_zero_checkpoint`` (0.19.8).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from zeroelastic.checkpoint.commit_record import RECORD_NAME
from zeroelastic.checkpoint.model_states import open_model_states
from zeroelastic.checkpoint.open import open_checkpoint, rank_files, saved_sizes
from zeroelastic.checkpoint.optimizer_file import OF_THE_PARAMS
from zeroelastic.checkpoint.saved_layout import DATA_FIRST
from zeroelastic.checkpoint.tag_files import TensorParallel, other_tp_size, parse_rank_file
from zeroelastic.deepspeed.engine import Engine
from zeroelastic.deepspeed.live.kinds import covered_live, kind_of
from zeroelastic.deepspeed.live.live_optimizer import LiveOptimizer
from zeroelastic.deepspeed.live.optimizers import SCHEDULED
from zeroelastic.deepspeed.live.topology import tensor_parallel
from zeroelastic.deepspeed.options import VERIFY_LEVELS, LoadRequest, Options, Verify
from zeroelastic.distributed.collective import all_gather_of_or_raise, all_or_raise, any_rank
from zeroelastic.errors import (
    CheckpointError,
    LayoutMismatchError,
    MissingFileError,
    NewerFormatError,
    OldFormatError,
    UnsafePickleError,
    UnsupportedError,
    ZeroElasticError,
    some,
)
from zeroelastic.io.paths import FilePath
from zeroelastic.io.storage import file_sizes
from zeroelastic.torch_file.header import TensorRef, read_torch_file

Table = Mapping[Any, Any]

_AUTO_EP = ("ds_autoep_layers", "autoep_layers")
"""The entries of a model states file that list the layers of AutoEP."""


def read_covered(
    engine: Engine, tag_dir: FilePath, options: Options
) -> tuple[LiveOptimizer, Verify] | UnsupportedError:
    """The live state and how closely to verify it, or why DeepSpeed alone loads this: alike on every rank. Collective.

    The option ``verify`` has no one default: the least of any rank holds. A run that we do not cover is left to
    DeepSpeed, which loads a rigid checkpoint of the same world size. Raises UnsupportedError where the checkpoint is
    elastic or of another size, so that DeepSpeed cannot load it either.
    """

    def look() -> tuple[LiveOptimizer | None, Verify, tuple[str, bool] | None]:
        try:
            live = covered_live(engine, engine.optimizer)
        except UnsupportedError as error:
            # into an engine without an optimizer DeepSpeed loads nothing
            has_optimizer = kind_of(engine.optimizer) is not None
            return None, options.verify_level(on_gpu=False), (str(error), has_optimizer and stock_takes())
        return live, options.verify_level(on_gpu=live.on_gpu), None

    def stock_takes() -> bool:
        size, tp = dist.get_world_size(group=engine.optimizer.dp_process_group), tensor_parallel(engine.optimizer)
        node_local = engine.use_node_local_storage()
        return isinstance(tag_dir, Path) and _has_rigid_files(
            tag_dir, engine.global_rank, size, tp, node_local=node_local
        )

    (live, *_), outcomes = all_gather_of_or_raise(look, lambda found: found[1:])
    refusals = [refusal for _, refusal in outcomes if refusal is not None]
    if not refusals:
        assert live is not None
        return live, min((level for level, _ in outcomes), key=VERIFY_LEVELS.index)
    reason = refusals[0][0]
    if not all(loads for _, loads in refusals):
        raise UnsupportedError(f"{tag_dir}: {reason}")
    return UnsupportedError(reason)


def stock_loads(
    error: ZeroElasticError, engine: Engine, live: LiveOptimizer, tag_dir: FilePath, request: LoadRequest
) -> bool:
    """Whether DeepSpeed alone loads, on every rank, the checkpoint for which our load raised ``error``. Collective.

    It does for the weights alone of stage 0; for a file of torch's old format and for state that only DeepSpeed reads,
    where each rank finds its own files of a rigid checkpoint of this world size; and for a rigid checkpoint without a
    commit record that fits.
    Which experts or slices a rank has is compared before (``refuse_other_arrangement``); files of the old format do not
    say it.
    """
    if not isinstance(tag_dir, Path) or not live.trains:  # DeepSpeed reads no URLs
        return False
    has_slices = live.layout.slices is not None
    if isinstance(error, OldFormatError):
        place, node_local = _place_of(live), engine.use_node_local_storage()
        return not has_slices and _on_all_ranks(
            lambda: _has_rigid_files(tag_dir, place.rank, place.size, place.tp, node_local=node_local)
        )
    if not isinstance(error, (CheckpointError, LayoutMismatchError, UnsupportedError)):
        return False
    takes_weights = isinstance(error, UnsupportedError) and request.weights_only and not live.per_param
    if takes_weights and not has_slices and _on_all_ranks(lambda: _has_the_module_alone(tag_dir)):
        return True
    loads = isinstance(error, UnsupportedError) and _on_all_ranks(lambda: _only_stock_reads(tag_dir, live))
    loads = loads or _on_all_ranks(
        lambda: _fits(engine, live, tag_dir, request, damaged=isinstance(error, CheckpointError))
    )
    if loads and has_slices:
        refuse_other_arrangement(engine, tag_dir, request, str(error))
    return loads


class _Place(NamedTuple):
    """A rank among its data parallel and its tensor parallel peers, as DeepSpeed names files."""

    rank: int
    size: int
    tp: TensorParallel


def _place_of(live: LiveOptimizer) -> _Place:
    data_rank, tp = live.sharing.place
    return _Place(data_rank, live.topology.data_size, tp)


def _on_all_ranks(check: Callable[[], bool]) -> bool:
    return not any_rank(not all_or_raise(check))


def _has_the_module_alone(tag_dir: Path) -> bool:
    """Whether a tag is one file with all weights, as of stage 0, from which DeepSpeed takes them by name."""
    names = file_sizes(tag_dir)
    kinds = [file.kind for name in names if (file := parse_rank_file(name)) is not None]
    return kinds == ["whole_model"] and RECORD_NAME not in names


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
        f"none of them. Run `zeroelastic reshard {tag_dir} DST --stage 0` and load DST, set stage 1{advice}."
    )


def _only_stock_reads(tag_dir: Path, live: LiveOptimizer) -> bool:
    """Whether a rigid checkpoint of this world size holds state that only DeepSpeed can read."""
    place = _place_of(live)
    try:
        checkpoint = open_checkpoint(tag_dir, near_rank=place.rank, tp=place.tp)
    except UnsupportedError:  # another stage: our message says what is wrong
        return False
    except MissingFileError:  # on another node
        return _has_own_rigid_files(tag_dir, place.rank, place.size)
    try:
        if checkpoint.world_size == place.size:
            checkpoint.shard(place.rank)
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
        optim = rank_files(tag_dir, file_sizes(tag_dir), tp.rank).optim
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
        model = open_model_states(tag_dir / files.models[own], own, world_size=None)
        if (model.world_size, model.tensor_size) != (world_size, 1):
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
    names, (data_rank, size, tp) = file_sizes(tag_dir), _place_of(live)
    files: dict[tuple[str, int], str] = {}
    for name in names:
        file = parse_rank_file(name)
        if file is not None and file.tp_rank == tp.rank:
            files[file.kind, file.rank] = name
    models = [("model", rank) for rank in range(size)] if live.per_param else [("whole_model", 0)]
    everything = {*models, *(("optimizer", rank) for rank in range(size))}
    all_here = files.keys() == everything
    own_model = models[data_rank if live.per_param else 0]
    own = {own_model, ("optimizer", data_rank)}
    enough_here = engine.use_node_local_storage() and own <= files.keys() <= everything
    if RECORD_NAME in names or not (all_here or enough_here):
        return False
    model = read_torch_file(tag_dir / files[own_model], foreign="inert").root
    sizes = (size, tp.size)
    if not isinstance(model, dict) or (model.get("dp_world_size"), model.get("mp_world_size")) != sizes:
        return False
    if damaged and _is_table(model.get("param_shapes")):
        return False
    if not _module_fits(engine, live, model, strict=request.strict_module) or _mixes(live, model.get("param_shapes")):
        return False
    if not request.load_optimizer_states and live.per_param:  # DeepSpeed then merges what `latest` names
        latest = tag_dir.parent / "latest"
        return all_here and latest.is_file() and latest.read_text().strip() == tag_dir.name
    root = read_torch_file(tag_dir / files["optimizer", data_rank]).root
    return _state_fits(live, _table(root).get("optimizer_state_dict"))


def _state_fits(live: LiveOptimizer, state: object) -> bool:
    """Whether DeepSpeed's own load accepts the ``optimizer_state_dict`` of a rigid file, given as its header."""
    if not isinstance(state, dict) or state.get("zero_stage") not in live.stages_in_files:
        return False
    if live.per_param and "base_optimizer_state" in state:  # elastic
        return False
    flats_key, nested_key = (
        ("fp32_flat_groups", "optimizer_state_dict")
        if live.per_param
        else ("single_partition_of_fp32_groups", "base_optimizer_state")
    )
    flats, groups, own = state.get(flats_key), _table(state.get(nested_key)).get("param_groups"), live.base.param_groups
    if not isinstance(flats, list) or not isinstance(groups, list) or len(groups) != len(own):
        return False
    for g, (group, mine) in enumerate(zip(groups, own, strict=True)):
        if not isinstance(group, dict) or mine.keys() - group.keys() - OF_THE_PARAMS - SCHEDULED:
            return False
        if live.per_param and len(set(group.get("params", ()))) != live.group_of.count(g):
            return False
    shapes = [flat.shape if isinstance(flat, TensorRef) else None for flat in flats]
    return shapes == [(numel,) for numel in live.numels_in_stock_files()]


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
    saved, here = [*_shapes(tables).items()], [(param.name, param.shape) for param in live.layout.params]
    names = {name for name, _ in saved} & {name for name, _ in here}
    return any(a != b and not names.isdisjoint((a[0], b[0])) for a, b in zip(saved, here, strict=False))


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
        """That of the trees of a rank's model states and optimizer file."""
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


def refuse_other_arrangement(engine: Engine, tag_dir: FilePath, request: LoadRequest, why: str) -> None:
    """Raise UnsupportedError where this run, left to DeepSpeed because of ``why``, is arranged unlike the save.

    Each rank reads the headers of its own files. A load of weights only goes by name, so that only the tensor parallel
    size counts. Raises MissingFileError where some ranks lack a file that others have, and CheckpointError for one that
    is damaged; what cannot be compared is left to DeepSpeed. The same on every rank. Collective.
    """
    if not isinstance(tag_dir, Path):
        return

    def look() -> list[str]:
        where = str(tag_dir.parent), tag_dir.name
        paths = [engine._get_ckpt_name(*where)]
        if engine.zero_optimization() and not request.weights_only:
            paths.append(engine._get_zero_ckpt_name(*where))
        files = [tag_dir / os.path.basename(path) for path in paths]
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
