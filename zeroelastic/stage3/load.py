"""Loading: a surveyed checkpoint into the live engine at any world size, in place, and the report of it."""

from __future__ import annotations

import copy
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from deepspeed.runtime.fp16 import loss_scaler as ds_loss_scaler

from zeroelastic.agree import gather, settle
from zeroelastic.digest import ScalarValue
from zeroelastic.errors import CheckpointError, UnsafePickleError
from zeroelastic.report import ResumeReport
from zeroelastic.shard import FP32, FROZEN, OptionValue, ScalerState
from zeroelastic.stage3.fill import Filled, Target, fill
from zeroelastic.stage3.live import LiveState, read_live
from zeroelastic.stage3.options import Options
from zeroelastic.stage3.proof import Proof, prove
from zeroelastic.stage3.survey import Survey, check_batch
from zeroelastic.torchfile import DTYPE_BYTES, DType

logger = logging.getLogger(__name__)

_FRAGMENTS = "frozen_param_fragments"


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the caller of load_checkpoint asked us for; the rest is DeepSpeed's own part of the load."""

    optimizer_states: bool
    module_only: bool

    @property
    def weights_only(self) -> bool:
        """Whether optimizer state, hyper-parameters and loss scale stay as the run has them."""
        return self.module_only or not self.optimizer_states


def load(
    engine: Any,
    found: Survey,
    live: LiveState,
    *,
    tag_dir: Path,
    options: Options,
    wanted: Wanted,
    load_module: Callable[[], tuple[Any, Any]],
    began: float,
) -> tuple[tuple[Any, Any], ResumeReport]:
    """Fill the engine from a surveyed checkpoint. Collective.

    ``load_module`` runs DeepSpeed's own ``_load_checkpoint`` (module, counters, scheduler, client state) on the file
    that ``model_states_reader`` serves; ``began`` is when the whole load did (``time.perf_counter``). Returns its
    result and the report. Raises the same error on every rank.
    """
    notes: list[str] = []
    micro = engine.train_micro_batch_size_per_gpu() * engine.gradient_accumulation_steps()
    copies = engine.train_batch_size() // micro  # of the model: ranks that share a sequence take one batch
    batch = check_batch(found.train_batch_size, engine.train_batch_size(), copies, strict=options.strict)
    if batch is not None and not wanted.module_only:
        notes.append(batch)
    if not wanted.weights_only:
        notes += _lost_micro_batches(engine, found)
    optimizer = live.optimizer
    optimizer.checkpoint_event_prologue()
    outcome = settle(load_module)
    live = read_live(optimizer, engine.param_names)

    def fill_and_restore() -> Filled:
        filled = _fill(live, found, options, wanted)
        _restore(engine, live, found, wanted, notes)
        return filled

    filled = settle(fill_and_restore)
    optimizer.checkpoint_event_epilogue()
    proof = prove(
        live,
        found,
        filled,
        tag_dir,
        options=options,
        device=engine.device,
        weights_only=wanted.weights_only,
        from_16_bit=not engine.zero_load_from_fp32_weights(),
    )
    report = _report(engine, live, found, filled, proof, tag_dir, wanted, notes, began)
    return outcome, report


def accumulated_micro_batches(engine: Any) -> int:
    """How many micro batches were taken since the last optimizer step: their gradients wait in memory."""
    return int(engine.micro_steps % engine.gradient_accumulation_steps())


def _lost_micro_batches(engine: Any, found: Survey) -> list[str]:
    record = found.checkpoint.record
    lost, pending = record.lost_micro_batches if record is not None else 0, accumulated_micro_batches(engine)
    notes: list[str] = []
    if lost:
        notes.append(
            f"LOST: the gradients of {_count(lost, 'micro batch', 'micro batches')} that were accumulated when this "
            "was saved; accumulation begins anew"
        )
    if pending:
        notes.append(
            f"NOT LOST, though it should be: the gradients of {_count(pending, 'micro batch', 'micro batches')} that "
            "this engine accumulated before the load go into its next optimizer step"
        )
    return notes


def _fill(live: LiveState, found: Survey, options: Options, wanted: Wanted) -> Filled:
    """Master weights, optimizer tensors and frozen parameters, in place."""
    targets: list[Target] = []
    index = found.head.layout.index()
    for i, keys in enumerate(found.tensor_keys):
        first = live.layout.params[int(np.argmax(live.layout.sub_group == i))].name
        source = int(found.head.layout.sub_group[index[first]])
        for key in keys:
            dtype = found.head.pieces[key].dtype[source]
            targets.append(Target(key, i, destination(live, i, key, getattr(torch, dtype)), dtype))
        if not wanted.weights_only:
            drop_state(live, i, keep=(*keys, *found.scalars[i]))
    pieces = {rank: shard.pieces for rank, shard in found.shards.items()}
    filled = fill(found.plan, pieces, targets, executor=options.executor)
    for i in range(live.layout.num_sub_groups):
        tensors, _ = ({}, {}) if wanted.weights_only else live.split_state(i)
        for gap in live.padding(i):
            for flat in (live.fp32(i), *tensors.values()):
                flat[gap].zero_()
    if found.frozen_plan is None:
        return filled
    assert found.model.frozen_pieces is not None
    index = found.frozen_plan.src.index()
    frozen_targets = [
        Target(FROZEN, p, tensor.view(-1), found.model.frozen_pieces.dtype[index[live.frozen.params[p].name]])
        for p, tensor in enumerate(live.frozen_tensors)
        if tensor.numel()
    ]
    frozen_pieces = {rank: {FROZEN: piece} for rank, piece in found.frozen_pieces.items()}
    frozen = fill(found.frozen_plan, frozen_pieces, frozen_targets, executor=options.executor)
    owned = live.frozen.owned(live.rank)[1]
    for p, tensor in enumerate(live.frozen_tensors):
        tensor.view(-1)[int(owned[p]) :].zero_()
    return Filled(
        bytes_read=filled.bytes_read + frozen.bytes_read,
        bytes_owned=filled.bytes_owned + frozen.bytes_owned,
        files=tuple(dict.fromkeys((*filled.files, *frozen.files))),
        cast_digests={**filled.cast_digests, **frozen.cast_digests},
    )


def destination(live: LiveState, sub_group: int, key: str, dtype: torch.dtype) -> torch.Tensor:
    """The live tensor that a key fills: the one that is there, or a new one with the saved dtype."""
    flat = live.fp32(sub_group)
    if key == FP32:
        return flat
    owner = live.optimizer.fp32_partitioned_groups_flat[sub_group]
    state = live.optimizer.optimizer.state[owner]
    current = state.get(key)
    if not (isinstance(current, torch.Tensor) and current.shape == flat.shape and current.dtype == dtype):
        current = torch.zeros(flat.shape, dtype=dtype, device=flat.device)
        state[key] = current
    return current.detach()


def drop_state(live: LiveState, sub_group: int, *, keep: tuple[str, ...]) -> None:
    """Forget live state that the checkpoint does not have; a checkpoint from before the first step has none."""
    owner = live.optimizer.fp32_partitioned_groups_flat[sub_group]
    state = live.optimizer.optimizer.state.get(owner)
    if state is None:
        return
    for key in [key for key in state if key not in keep]:
        del state[key]
    if not state and keep == (FP32,):
        live.optimizer.optimizer.state.pop(owner)


def _restore(engine: Any, live: LiveState, found: Survey, wanted: Wanted, notes: list[str]) -> None:
    """Scalars, hyper-parameters and loss scale, then the 16-bit weights from the master weights."""
    optimizer = live.optimizer
    if not wanted.weights_only:
        for i, scalars in enumerate(found.scalars):
            for key, value in scalars.items():
                set_scalar(live, i, key, _live_value(value))
        for live_group, saved in zip(optimizer.optimizer.param_groups, found.head.groups, strict=True):
            for option, choice in saved.options.items():
                set_option(live_group, option, choice)
        if _precision(found.head.ds_config) == _precision(engine._config._param_dict):
            _set_scaler(optimizer, found.head.scaler)
        else:
            notes.append(
                f"saved with {_precision(found.head.ds_config)}, running with "
                f"{_precision(engine._config._param_dict)}: the loss scale is the run's own"
            )
    finish_weights(live, from_16_bit=not engine.zero_load_from_fp32_weights())


def finish_weights(live: LiveState, *, from_16_bit: bool) -> None:
    """Bring the 16-bit weights in line with the master weights, and partition what is kept whole in memory.

    ``from_16_bit`` then rounds the master weights to what the 16-bit weights hold.
    """
    optimizer = live.optimizer
    for i in range(live.layout.num_sub_groups):
        optimizer._reassign_or_swap_out_partitioned_parameters(i)
        low = optimizer.fp16_partitioned_groups_flat[i]
        if from_16_bit and low is not None:
            live.fp32(i).copy_(low)
    for param in optimizer.module.parameters():
        if getattr(param, "ds_secondary_tensor", None) is not None:
            param.ds_secondary_tensor = None
    if len(optimizer.persistent_parameters) > 0:
        optimizer.persistent_parameters[0].partition(optimizer.persistent_parameters)


def set_scalar(live: LiveState, sub_group: int, key: str, value: object) -> None:
    """Set a replicated value of a sub-group's state; a 0-dim tensor becomes one of its own, never an alias."""
    owner = live.optimizer.fp32_partitioned_groups_flat[sub_group]
    state = live.optimizer.optimizer.state[owner]
    if not isinstance(value, torch.Tensor):
        state[key] = value
        return
    current = state.get(key)
    if isinstance(current, torch.Tensor) and current.dim() == 0 and current.dtype == value.dtype:
        current.copy_(value)
        return
    group = live.optimizer.optimizer.param_groups[live.optimizer.sub_group_to_group_id[sub_group]]
    on_device = group.get("capturable") or group.get("fused")  # torch keeps step beside the parameter only for these
    state[key] = value.detach().clone().to(owner.device if on_device else "cpu")


def _live_value(value: ScalarValue) -> object:
    dtype = getattr(torch, value.kind, None)
    return torch.tensor(value.value, dtype=dtype) if isinstance(dtype, torch.dtype) else value.value


def set_option(group: dict[str, Any], option: str, value: OptionValue) -> None:
    """Set a hyper-parameter in place; a tensor keeps its identity, which compiled optimizers rely on."""
    current = group.get(option)
    if isinstance(current, torch.Tensor) and isinstance(value, (int, float)):
        current.fill_(value)
    elif isinstance(current, list) and isinstance(value, tuple):
        group[option] = list(value)
    else:
        group[option] = value


def _set_scaler(optimizer: Any, saved: ScalerState | None) -> None:
    if saved is None:
        return
    kind = getattr(ds_loss_scaler, saved.class_name)
    scaler = optimizer.loss_scaler if type(optimizer.loss_scaler) is kind else kind.__new__(kind)
    for key, value in saved.attributes.items():
        setattr(scaler, key, getattr(torch, value.name) if isinstance(value, DType) else value)
    optimizer.loss_scaler = scaler
    optimizer.dynamic_loss_scale = saved.dynamic
    optimizer.overflow = saved.overflow


def _precision(config: Mapping[str, Any]) -> str:
    for name, key in (("bf16", "bf16"), ("bf16", "bfloat16"), ("fp16", "fp16")):
        block = config.get(key)
        if isinstance(block, Mapping) and block.get("enabled"):
            return name
    return "fp32"


def _report(
    engine: Any,
    live: LiveState,
    found: Survey,
    filled: Filled,
    proof: Proof,
    tag_dir: Path,
    wanted: Wanted,
    notes: list[str],
    began: float,
) -> ResumeReport:
    checkpoint = found.checkpoint
    opened = {*checkpoint.opened, *filled.files}
    headers = checkpoint.header_bytes + _module_bytes(found)
    cost = (filled.bytes_owned, filled.bytes_read, headers, len(opened), time.perf_counter() - began)
    costs = gather(cost)
    owned, read, header_bytes, files, seconds = (max(column) for column in zip(*costs, strict=True))
    exact, rederived, reset = _inventory(engine, live, found, wanted)
    if checkpoint.stale_files:
        notes.append(f"ignored {len(checkpoint.stale_files)} files of an older save in this directory")
    if proof.note is not None:
        notes.append(proof.note)
    if live.tp.size > 1:
        notes.append(
            f"each of {live.tp.size} tensor parallel ranks: the ranks above are those of its data parallel group"
        )
    return ResumeReport(
        path=str(tag_dir),
        format=found.format,
        saved_world_size=checkpoint.world_size,
        world_size=live.layout.world_size,
        bytes_owned=int(owned),
        bytes_read=int(read),
        header_bytes=int(header_bytes),
        files_opened=int(files),
        total_bytes_read=int(sum(cost[1] for cost in costs)),
        seconds=float(seconds),
        saved_root=proof.saved_root,
        loaded_root=proof.loaded_root,
        root_matches=proof.matches,
        exact=exact,
        rederived=rederived,
        reset=reset,
        notes=tuple(notes),
    )


def _module_bytes(found: Survey) -> int:
    """What DeepSpeed reads of the module states file: all of it but the frozen fragments, which are mapped."""
    model = found.model
    if model.frozen is None or model.frozen_pieces is None:
        return model.size
    sizes = np.array(
        [DTYPE_BYTES[model.frozen_pieces.dtype[i]] for i in range(model.frozen.num_params)], dtype=np.int64
    )
    return model.size - int((model.frozen.part * sizes).sum())


def _inventory(
    engine: Any, live: LiveState, found: Survey, wanted: Wanted
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    exact = [_count(live.layout.num_params, "parameter")]
    rederived: list[str] = []
    reset: list[str] = []
    states = sorted({key for keys in found.head.tensor_keys for key in keys} - {FP32})
    scalars = sorted({key for entry in found.head.scalars for key in entry})
    if engine.zero_load_from_fp32_weights():
        rederived.append("16-bit weights from the fp32 master weights")
    else:
        rederived.append("fp32 master weights from 16-bit copies (load_from_fp32_weights is off)")
    if wanted.weights_only:
        reset.append("optimizer state, hyper-parameters and loss scale (not asked for)")
    else:
        exact.append(f"optimizer state ({', '.join((*states, *scalars)) or 'none was saved'})")
        exact.append(f"hyper-parameters of {_count(len(found.head.groups), 'group')}")
    if live.frozen.num_params and found.model.frozen is not None:
        exact.append(_count(live.frozen.num_params, "frozen parameter"))
    elif live.frozen.num_params:
        reset.append(f"{_count(live.frozen.num_params, 'frozen parameter')} (excluded from the save)")
    saved, current = found.checkpoint.world_size, live.layout.world_size
    if current > saved:
        rederived.append(f"buffers and client state of {_ranks(saved, current)} from saved rank 0")
    if current < saved:
        reset.append(f"buffers and client state of saved {_ranks(current, saved)} (no longer there)")
    return tuple(exact), tuple(rederived), tuple(reset)


def _count(number: int, what: str, several: str = "") -> str:
    return f"{number} {what}" if number == 1 else f"{number} {several or what + 's'}"


def _ranks(first: int, end: int) -> str:
    return f"rank {first}" if end - first == 1 else f"ranks {first} to {end - 1}"


@contextmanager
def model_states_reader(engine: Any, found: Survey, *, safe_load: bool) -> Iterator[None]:
    """While it lasts, DeepSpeed reads the module states once, from the file of the survey, without frozen payload."""
    original = engine.checkpoint_engine
    engine.checkpoint_engine = _ModelStatesReader(original, found, safe_load)
    try:
        yield
    finally:
        engine.checkpoint_engine = original


class _ModelStatesReader:
    """Stands in for the checkpoint engine while the module states are loaded; everything else is the original's."""

    def __init__(self, original: Any, found: Survey, safe_load: bool) -> None:
        self._original, self._found, self._safe_load = original, found, safe_load
        self._loaded: dict[str, Any] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def load(self, path: str, map_location: Any = None) -> Any:
        """DeepSpeed's loader asks twice for the same file; the second time it gets the first result."""
        if os.fspath(path) not in self._found.model_paths:
            return self._original.load(path, map_location=map_location)
        if self._loaded is None:  # of its tensor parallel peers' files it looks at what is in this rank's own, too
            self._loaded = self._read(str(self._found.model.path))
        return dict(self._loaded)

    def _read(self, path: str) -> dict[str, Any]:
        frozen = self._found.model.frozen
        if frozen is None or not frozen.numel.any():
            return self._unpickle(path, mmap=False)
        state = self._unpickle(path, mmap=True)  # maps the payload, so that fragments left out are never read
        state[_FRAGMENTS] = None  # DeepSpeed then leaves frozen parameters to us
        return copy.deepcopy(state)  # nothing may keep a mapping of a file that a later save overwrites

    def _unpickle(self, path: str, *, mmap: bool) -> dict[str, Any]:
        try:
            with torch.serialization.safe_globals(_safe_classes() if self._safe_load else []):
                state = torch.load(path, map_location="cpu", mmap=mmap, weights_only=self._safe_load)
        except Exception as error:
            if self._safe_load:
                raise UnsafePickleError(f'{path}: refused by "safe_load": {error}') from None
            raise CheckpointError(f"{path}: {error}") from error
        if not isinstance(state, dict):
            raise CheckpointError(f"{path}: is not a DeepSpeed model states file.")
        return state


def _safe_classes() -> list[Any]:
    from deepspeed.runtime.zero.config import ZeroStageEnum

    return [ZeroStageEnum, ds_loss_scaler.LossScaler, ds_loss_scaler.DynamicLossScaler]
