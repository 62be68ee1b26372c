"""What DeepSpeed alone is going to load, compared with the run first: the sizes of its groups, and its parameters.

DeepSpeed copies flat buffers by position and compares the data parallel size only (``_load_zero_checkpoint``, 0.19.8).
Buffers of another arrangement may have the same length: those of experts over 2 ranks and over 1 have. A rank whose
own file is missing would raise alone, and the others would wait for it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from zeroelastic.checkpoint.tag_files import TensorParallel, other_tp_size
from zeroelastic.deepspeed.engine import Engine
from zeroelastic.deepspeed.load.request import LoadRequest
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
from zeroelastic.io.paths import FilePath
from zeroelastic.torch_file.header import read_torch_file

Table = Mapping[Any, Any]

_AUTO_EP = ("ds_autoep_layers", "autoep_layers")
"""The entries of a model states file that list the layers of AutoEP."""

_DATA_FIRST = "use_data_before_expert_parallelism"
"""The option of the configuration that puts the ranks of an expert apart: whose experts a rank has depends on it."""


class _Arrangement(NamedTuple):
    """How many ranks share what, and the trained parameters in flat order. None and empty: not known.

    ``expert_sizes`` are the sizes of all expert parallel groups; ``data_first`` is the option of that name.
    """

    data_size: int | None
    tensor_size: int | None
    expert_sizes: frozenset[int]
    data_first: bool | None
    shapes: Mapping[str, tuple[int, ...]]


def refuse_other_arrangement(engine: Engine, tag_dir: FilePath, request: LoadRequest, why: str) -> None:
    """Raise UnsupportedError where this run, left to DeepSpeed because of ``why``, is arranged unlike the save.

    Each rank reads the headers of its own files. A load of weights only goes by name, so that only the tensor parallel
    size counts. Raises MissingFileError where some ranks lack a file that others have, and CheckpointError for one that
    is damaged; what cannot be compared is left to DeepSpeed. The same on every rank. Collective.
    """
    if not isinstance(tag_dir, Path):
        return

    def look() -> list[str]:
        names = _own_files(engine, tag_dir, request)
        gone = [name for name in names if not os.path.exists(tag_dir / name)]
        _compare(engine, tag_dir, [name for name in names if name not in gone], request, why)
        return gone

    missing = all_gather_of_or_raise(look, lambda gone: gone)[1]
    if any(missing) and not all(missing):
        gone = sorted({name for names in missing for name in names})
        raise MissingFileError(f"{tag_dir}: some ranks do not find {some(gone)}. The checkpoint is incomplete.")


def _own_files(engine: Engine, tag_dir: Path, request: LoadRequest) -> list[str]:
    """The names of the files that DeepSpeed is going to read on this rank: model states, then its optimizer file."""
    where = str(tag_dir.parent), tag_dir.name
    paths = [engine._get_ckpt_name(*where)]
    if engine.zero_optimization() and not request.weights_only:
        paths.append(engine._get_zero_ckpt_name(*where))
    return [os.path.basename(path) for path in paths]


def _compare(engine: Engine, tag_dir: Path, names: Sequence[str], request: LoadRequest, why: str) -> None:
    roots = [_root(tag_dir / name) for name in names]
    model = next((root for root in roots if "module" in root or "dp_world_size" in root), {})
    optimizer = next((root for root in roots if "optimizer_state_dict" in root), {})
    saved, live = _saved(model, optimizer), _live(engine)
    if saved.tensor_size not in (None, live.tensor_size):
        live_tp = TensorParallel(size=live.tensor_size or 1)
        raise other_tp_size(tag_dir, saved.tensor_size, live_tp, stage=engine.zero_optimization_stage())
    if request.weights_only:
        return
    differ = []
    zero = engine.zero_optimization()  # without ZeRO every rank has all of the optimizer's state
    if zero and saved.data_size not in (None, live.data_size):
        differ.append(f"data parallel size {saved.data_size}, and the run has {live.data_size}")
    experts, own_experts = (_sizes(sizes) for sizes in (saved.expert_sizes, live.expert_sizes))
    if saved.expert_sizes and experts != own_experts:
        differ.append(f"expert parallel size {experts}, and the run has {own_experts}")
    elif experts != "1" and saved.data_first not in (None, live.data_first):
        differ.append(f'"{_DATA_FIRST}" {saved.data_first}, and the run has {live.data_first}')
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


def _saved(model: Table, optimizer: Table) -> _Arrangement:
    state, config = _table(optimizer.get("optimizer_state_dict")), optimizer.get("ds_config")
    data_size = _size(model.get("dp_world_size"))
    layers = next((layers for layers in map(model.get, _AUTO_EP) if isinstance(layers, list)), [])
    tables = model.get("param_shapes")
    return _Arrangement(
        data_size,
        _size(model.get("mp_world_size")),
        _expert_sizes(state.get("partition_count"), data_size)
        or frozenset(filter(None, (_size(_table(layer).get("ep_size")) for layer in layers))),
        bool(config.get(_DATA_FIRST, False)) if isinstance(config, Mapping) else None,
        _shapes(tables) if isinstance(tables, list) else {},
    )


def _live(engine: Engine) -> _Arrangement:
    count = getattr(engine.optimizer, "partition_count", None)
    data_size = int(engine.seq_dp_world_size)
    modules = engine.module.modules() if getattr(engine, "has_moe_layers", False) else ()
    by_module = (_size(getattr(module, "ep_size", None)) for module in modules)
    return _Arrangement(
        data_size,
        int(engine.mp_world_size),
        _expert_sizes(count, data_size) or frozenset(filter(None, by_module)),
        bool(engine._config._param_dict.get(_DATA_FIRST, False)),
        _shapes(engine._get_zero_param_shapes()) if engine.zero_optimization() else {},
    )


def _table(value: object) -> Table:
    return value if isinstance(value, Mapping) else {}


def _size(value: object) -> int | None:
    return value if type(value) is int and value > 0 else None


def _expert_sizes(count: object, data_size: int | None) -> frozenset[int]:
    """The sizes of expert parallel groups, from how many ranks each optimizer group is cut for."""
    if not isinstance(count, list) or data_size is None:
        return frozenset()
    return frozenset(data_size // size for size in map(_size, count) if size is not None)


def _sizes(sizes: frozenset[int]) -> str:
    return ", ".join(map(str, sorted(sizes - {1}))) or "1"


def _shapes(tables: Sequence[object]) -> dict[str, tuple[int, ...]]:
    """The parameters of a file or a run that have a name and a shape, in flat order."""
    return {
        str(name): tuple(map(int, shape))
        for table in tables
        if isinstance(table, Mapping)
        for name, shape in table.items()
        if isinstance(shape, tuple)
    }
