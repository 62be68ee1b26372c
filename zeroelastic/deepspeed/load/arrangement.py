"""How ranks share the parameters of a run that DeepSpeed alone loads, compared with the save.

DeepSpeed copies the flat buffers of this rank's file into its own by position, and compares the data parallel size
only. Buffers of another arrangement may have the same length: those of experts over 2 ranks and over 1 have. A rank
whose own file is missing would raise alone, and the others would wait for it. Only headers are read, by the allow-list.
Source: ``_load_checkpoint``, ``load_module_state_dict``, ``_load_zero_checkpoint`` (0.19.8).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from zeroelastic.checkpoint.inventory import saved_sizes
from zeroelastic.checkpoint.saved_layout import DATA_FIRST
from zeroelastic.checkpoint.tag_files import TensorParallel, other_tp_size, parse_rank_file, rank_files
from zeroelastic.deepspeed.engine import Engine
from zeroelastic.deepspeed.live.topology import tensor_parallel
from zeroelastic.distributed.collective import all_gather_of_or_raise
from zeroelastic.errors import (
    CheckpointError,
    MissingFileError,
    NewerFormatError,
    OldFormatError,
    UnsafePickleError,
    UnsupportedError,
    some,
)
from zeroelastic.io.storage import file_sizes
from zeroelastic.torch_file.header import read_torch_file

Table = Mapping[Any, Any]

_AUTO_EP = ("ds_autoep_layers", "autoep_layers")
"""The entries of a model states file that list the layers of AutoEP."""


def is_of_this_size(engine: Engine, tag_dir: Path) -> bool:
    """Return whether a tag was saved at the data and tensor parallel sizes of this run."""
    size, tp = dist.get_world_size(group=engine.optimizer.dp_process_group), tensor_parallel(engine.optimizer)
    try:
        return saved_sizes(tag_dir) == (size, tp.size)
    except OldFormatError:
        names = file_sizes(tag_dir)
        num_files = len(rank_files(tag_dir, names, tp.rank).optim)
        return num_files == size or (engine.use_node_local_storage() and own_names(engine, tag_dir)[1] in names)
    except CheckpointError:
        return False


def own_names(engine: Engine, tag_dir: Path) -> list[str]:
    """The names of this rank's module states and, with ZeRO, its optimizer file, as DeepSpeed looks for them."""
    where = str(tag_dir.parent), tag_dir.name
    paths = [engine._get_ckpt_name(*where)]
    if engine.zero_optimization():
        paths.append(engine._get_zero_ckpt_name(*where))
    return [os.path.basename(path) for path in paths]


def refuse_state_of_zero(engine: Engine, tag_dir: Path, *, weights_only: bool) -> None:
    """Raise UnsupportedError where a run without ZeRO would resume optimizer state from files of ZeRO.

    DeepSpeed ends in a TypeError, or in an empty AssertionError. Each rank looks at what it sees: not collective.
    """
    reads_zero = engine.zero_optimization() or getattr(engine, "save_zero_checkpoint", False)
    if reads_zero or engine.optimizer is None or not tag_dir.is_dir():
        return
    kinds = {file.kind for name in file_sizes(tag_dir) if (file := parse_rank_file(name)) is not None}
    own = tag_dir / os.path.basename(engine._get_ckpt_name(str(tag_dir.parent), tag_dir.name))
    if "optimizer" not in kinds or (own.exists() and (weights_only or _root(own).get("optimizer", 0) is not None)):
        return
    advice = "" if "model" in kinds else ", or take the weights alone with load_optimizer_states=False"
    raise UnsupportedError(
        f"{tag_dir}: has the files of a run with ZeRO (*_optim_states.pt), and this run is at stage 0, which "
        f"cannot load them. Set stage 1{advice}."
    )


class _Arrangement(NamedTuple):
    """How many ranks share what, and the trained parameters in flat order. None and empty: not known.

    ``experts`` lists the sizes of all expert parallel groups, ``data_first`` is the option of that name.
    """

    data_size: int | None
    tensor_size: int | None
    experts: str | None
    data_first: bool | None
    shapes: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, model: Table, optimizer: Table) -> _Arrangement:
        """Read it from the trees of a rank's model states and optimizer file."""
        state, config = table_of(optimizer.get("optimizer_state_dict")), optimizer.get("ds_config")
        data_size, count = _size(model.get("dp_world_size")), state.get("partition_count")
        layers = next((layers for layers in map(model.get, _AUTO_EP) if isinstance(layers, list)), [])
        by_layer = {size for layer in layers if (size := _size(table_of(layer).get("ep_size")))}
        if isinstance(count, list) and data_size is not None:  # how many ranks each optimizer group is cut for
            by_layer = {data_size // size for size in map(_size, count) if size is not None} or by_layer
        tables = model.get("param_shapes")
        return cls(
            data_size,
            _size(model.get("mp_world_size")),
            (", ".join(map(str, sorted(by_layer - {1}))) or "1") if by_layer else None,
            bool(config.get(DATA_FIRST, False)) if isinstance(config, Mapping) else None,
            shapes_of(tables) if isinstance(tables, list) else {},
        )


def _current(engine: Engine) -> _Arrangement:
    modules = engine.module.modules() if getattr(engine, "has_moe_layers", False) else ()
    model = {
        "dp_world_size": int(engine.seq_dp_world_size),
        "mp_world_size": int(engine.mp_world_size),
        "param_shapes": engine._get_zero_param_shapes() if engine.zero_optimization() else None,
        _AUTO_EP[0]: [{"ep_size": getattr(module, "ep_size", None)} for module in modules],
    }
    state = {"partition_count": getattr(engine.optimizer, "partition_count", None)}
    return _Arrangement.of(model, {"optimizer_state_dict": state, "ds_config": engine._config._param_dict})


def refuse_other_arrangement(engine: Engine, tag_dir: Path, why: str, *, weights_only: bool) -> None:
    """Raise UnsupportedError where this run, left to DeepSpeed because of ``why``, is arranged unlike the save.

    Each rank reads its own files' headers. Weights alone load by name: only the tensor parallel size counts.
    Raises MissingFileError where some ranks lack a file that others have, CheckpointError for a damaged one; DeepSpeed
    gets what cannot be compared. Collective.
    """

    def look() -> list[str]:
        names = own_names(engine, tag_dir)
        files = [tag_dir / name for name in (names[:1] if weights_only else names)]
        roots = [_root(file) for file in files if os.path.exists(file)]
        _compare(engine, tag_dir, roots, why, weights_only=weights_only)
        return [file.name for file in files if not os.path.exists(file)]

    missing = all_gather_of_or_raise(look, lambda gone: gone)[1]
    if any(missing) and not all(missing):
        gone = sorted({name for names in missing for name in names})
        raise MissingFileError(f"{tag_dir}: some ranks do not find {some(gone)}. The checkpoint is incomplete.")


def _compare(engine: Engine, tag_dir: Path, roots: Sequence[Table], why: str, *, weights_only: bool) -> None:
    model = next((root for root in roots if "module" in root or "dp_world_size" in root), {})
    optimizer = next((root for root in roots if "optimizer_state_dict" in root), {})
    saved, live = _Arrangement.of(model, optimizer), _current(engine)
    if saved.tensor_size not in (None, live.tensor_size):
        live_tp = TensorParallel(size=live.tensor_size or 1)
        raise other_tp_size(tag_dir, saved.tensor_size, live_tp, stage=engine.zero_optimization_stage())
    if weights_only:
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
            f"({why.partition(' (')[0]}). With other settings than the saved ones it would fail, or put the state of "
            f"one parameter into another. Resume with the saved settings{advice}."
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


def table_of(value: object) -> Table:
    return value if isinstance(value, Mapping) else {}


def _size(value: object) -> int | None:
    return value if type(value) is int and value > 0 else None


def shapes_of(tables: Sequence[object]) -> dict[str, tuple[int, ...]]:
    """The parameters of a file or a run that have a name and a shape, in flat order."""
    return {
        str(name): tuple(map(int, shape))
        for table in tables
        if isinstance(table, Mapping)
        for name, shape in table.items()
        if isinstance(shape, tuple)
    }
