"""Loading: a surveyed checkpoint into the live engine at any world size, in place, and the report of it."""

from __future__ import annotations

import copy
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from deepspeed.runtime.fp16 import loss_scaler as ds_loss_scaler

from zeroelastic.agree import gather, settle
from zeroelastic.digest import ScalarValue
from zeroelastic.errors import CheckpointError, UnsafePickleError
from zeroelastic.report import ResumeReport
from zeroelastic.shard import FP32, FROZEN, OptionValue
from zeroelastic.stage3.fill import Filled, Part, Target, fill
from zeroelastic.stage3.live import LiveState, read_live
from zeroelastic.stage3.module_keys import ModuleKeys
from zeroelastic.stage3.moved import changes, clear_fresh, fresh_state, join, moved_parts, with_moved_digests
from zeroelastic.stage3.optimizers import SavedGroup, changed_class, options_to_set, state_dtype
from zeroelastic.stage3.options import Options
from zeroelastic.stage3.precision import restore_scales
from zeroelastic.stage3.proof import Proof, prove
from zeroelastic.stage3.relay import Relayed, fill_from_others, module_file
from zeroelastic.stage3.schedule import rearranged
from zeroelastic.stage3.survey import Survey, check_batch, saved_groups
from zeroelastic.torchfile import DTYPE_BYTES

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
    load_module: Callable[[str], tuple[Any, Any]],
    keys: ModuleKeys,
    began: float,
) -> tuple[tuple[Any, Any], ResumeReport]:
    """Fill the engine from a surveyed checkpoint. Collective.

    ``load_module`` runs DeepSpeed's own ``_load_checkpoint`` (module, counters, scheduler, client state) on the file
    that ``model_states_reader`` serves from the path that it is given, and leaves in ``keys`` what the module finds
    missing; ``began`` is when the whole load did (``time.perf_counter``). Returns its result and the report. Raises the
    same error on every rank.
    """
    notes: list[str] = []
    reset: list[str] = []
    micro = engine.train_micro_batch_size_per_gpu() * engine.gradient_accumulation_steps()
    copies = engine.train_batch_size() // micro  # of the model: ranks that share a sequence take one batch
    batch = check_batch(found.train_batch_size, engine.train_batch_size(), copies, strict=options.strict)
    if batch is not None and not wanted.module_only:
        notes.append(batch)
    if not wanted.weights_only:
        notes += _lost_micro_batches(engine, found)
    optimizer = live.optimizer
    if getattr(optimizer, "offloaded_states", None):
        optimizer.reload_states()
    optimizer.checkpoint_event_prologue()
    with module_file(found.sight, found.model, executor=options.executor) as (module_path, relayed):
        outcome = settle(partial(load_module, module_path))
    live = read_live(optimizer, engine.param_names)

    def read() -> _Filling:
        return _fill(live, found, options, wanted, notes)

    def restore(filling: _Filling) -> Filled:
        filled = _complete(live, found, filling, wanted)
        _restore(engine, live, found, wanted, notes, reset)
        return filled

    if found.sight is None:
        filled = settle(lambda: restore(read()))
        payload = Relayed()
    else:
        parts, own = settle(read)
        complete, payload = fill_from_others(found.sight, parts, own, executor=options.executor)
        filled = settle(lambda: restore(_Filling(parts, complete)))
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
    changed = changes(live, found, keys, weights_only=wanted.weights_only)
    cost = _Cost(filled, relayed, payload)
    report = _report(engine, live, found, cost, proof, tag_dir, wanted, notes, reset, changed, began)
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


class _Filling(NamedTuple):
    """What is filled, and what came of it so far."""

    parts: Sequence[Part]
    filled: Sequence[Filled]


def _fill(live: LiveState, found: Survey, options: Options, wanted: Wanted, notes: list[str]) -> _Filling:
    """Master weights, optimizer tensors and frozen parameters, in place; notes what is cast."""
    targets: list[Target] = []
    for i, (keys, source) in enumerate(zip(found.tensor_keys, found.state_sources, strict=True)):
        if source is None:
            if not wanted.weights_only:
                fresh_state(live, i)
            continue
        for key in keys:
            dtype = found.head.pieces[key].dtype[source]
            kept = state_dtype(live.stepper(i), live.group(i), key, live.fp32(i).dtype) or getattr(torch, dtype)
            targets.append(Target(key, i, destination(live, i, key, kept), dtype))
        if not wanted.weights_only:
            drop_state(live, i, keep=(*keys, *found.scalars[i]))
    if not wanted.weights_only:
        rebind_muon_momentum(live)
    notes += _casts(targets)
    pieces = {rank: shard.pieces for rank, shard in found.shards.items()}
    parts = [Part(found.plan, pieces, targets), *moved_parts(live, found)]
    if found.frozen_plan is not None:
        plan = found.frozen_plan
        assert found.model.frozen_pieces is not None
        index = plan.src.index()
        frozen_targets = [
            Target(FROZEN, p, live.frozen_tensors[p].view(-1), found.model.frozen_pieces.dtype[index[param.name]])
            for p, param in zip(plan.dst.sub_group.tolist(), plan.dst.params, strict=True)
            if live.frozen_tensors[p].numel()
        ]
        notes += _casts(frozen_targets)
        frozen_pieces = {rank: {FROZEN: piece} for rank, piece in found.frozen_pieces.items()}
        parts.append(Part(plan, frozen_pieces, frozen_targets))
    away = found.checkpoint.away
    filled = [fill(*part, executor=options.executor, away=away) for part in parts]
    return _Filling(parts, filled)


def _complete(live: LiveState, found: Survey, filling: _Filling, wanted: Wanted) -> Filled:
    """What is to be done when everything that was read is in place: fresh state, padding, digests of what has moved."""
    for i in range(live.layout.num_sub_groups):
        if not wanted.weights_only and found.state_sources[i] is not None:
            clear_fresh(live, found, i)
        tensors, _ = ({}, {}) if wanted.weights_only else live.split_state(i)
        for gap in live.padding(i):
            for flat in (live.fp32(i), *tensors.values()):
                flat[gap].zero_()
    owned = live.frozen.owned(live.rank)[1]
    for p, tensor in enumerate(live.frozen_tensors):
        tensor.view(-1)[int(owned[p]) :].zero_()
    moved = [part.plan is found.unfrozen_plan or part.plan is found.newly_frozen_plan for part in filling.parts]
    return join(
        [
            with_moved_digests(part, filled, live.rank) if has_moved else filled
            for part, filled, has_moved in zip(filling.parts, filling.filled, moved, strict=True)
        ]
    )


def _casts(targets: Sequence[Target]) -> list[str]:
    """A sentence for each kind of tensor that is not kept in the dtype that it was saved in."""
    names = {FP32: "master weights", FROZEN: "frozen parameters"}
    casts = {(names.get(t.key, t.key), t.dtype, str(t.tensor.dtype).removeprefix("torch.")) for t in targets if t.cast}
    return [f"{what}: cast from {saved} to {live}" for what, saved, live in sorted(casts)]


def rebind_muon_momentum(live: LiveState) -> None:
    """Let Muon step with the momentum that the state now holds, where DeepSpeed keeps it outside of the state too."""
    optimizer = live.optimizer
    buffers = getattr(optimizer, "muon_momentum_buffer_partitioned_groups_flat", None) or {}
    for i, buffer in list(buffers.items()):
        state = optimizer.optimizer.state[optimizer.fp32_partitioned_groups_flat[i]]
        held = state.setdefault("momentum_buffer", torch.zeros_like(buffer))
        if held is not buffer:
            held.swappable, held.ds_id = getattr(buffer, "swappable", False), getattr(buffer, "ds_id", None)
            buffers[i] = held


def destination(live: LiveState, sub_group: int, key: str, dtype: torch.dtype) -> torch.Tensor:
    """The live tensor that a key fills: the one that is there, or a new one with the saved dtype."""
    swapped = live.residence.writable(sub_group, key)
    if swapped is not None:
        return swapped
    flat = live.fp32(sub_group)
    if key == FP32:
        return flat
    state = live.residence.own_state(sub_group)
    current = state.get(key)
    if not (isinstance(current, torch.Tensor) and current.shape == flat.shape and current.dtype == dtype):
        current = torch.zeros(flat.shape, dtype=dtype, device=flat.device)
        state[key] = current
    return current.detach()


def drop_state(live: LiveState, sub_group: int, *, keep: tuple[str, ...]) -> None:
    """Forget live state that the checkpoint does not have; a checkpoint from before the first step has none."""
    state = live.residence.own_state(sub_group)
    live.residence.drop(sub_group, [key for key in state if key not in keep])
    if not state and keep == (FP32,):
        live.residence.forget(sub_group)


def _restore(engine: Any, live: LiveState, found: Survey, wanted: Wanted, notes: list[str], reset: list[str]) -> None:
    """Scalars, hyper-parameters and loss scale, then the 16-bit weights from the master weights."""
    optimizer = live.optimizer
    if not wanted.weights_only:
        for i, scalars in enumerate(found.scalars):
            for key, value in scalars.items():
                set_scalar(live, i, key, live_value(value))
        notes += _converted(found)
        notes += set_groups(live, _sources(found))
        said, lost = restore_scales(optimizer, found.head, engine._config._param_dict)
        notes += said
        reset += lost
    finish_weights(live, from_16_bit=not engine.zero_load_from_fp32_weights())


def finish_weights(live: LiveState, *, from_16_bit: bool) -> None:
    """Bring the 16-bit weights in line with the master weights, and partition what is kept whole in memory.

    ``from_16_bit`` then rounds the master weights to what the 16-bit weights hold.
    """
    optimizer = live.optimizer
    for i in range(live.layout.num_sub_groups):
        with live.residence.in_memory(i):
            optimizer._reassign_or_swap_out_partitioned_parameters(i)
        low = optimizer.fp16_partitioned_groups_flat[i]
        if from_16_bit:
            live.fp32(i).copy_(live.fp32(i).to(optimizer.dtype) if low is None else low)
    for param in optimizer.module.parameters():
        if getattr(param, "ds_secondary_tensor", None) is not None:
            param.ds_secondary_tensor = None
    if len(optimizer.persistent_parameters) > 0:
        optimizer.persistent_parameters[0].partition(optimizer.persistent_parameters)
    live.residence.sync()


def set_scalar(live: LiveState, sub_group: int, key: str, value: object) -> None:
    """Set a replicated value of a sub-group's state; a 0-dim tensor becomes one of its own, never an alias."""
    owner = live.optimizer.fp32_partitioned_groups_flat[sub_group]
    state = live.residence.own_state(sub_group)
    if key == "step" and isinstance(value, (int, float)) and live.residence.is_backup(sub_group):
        value = torch.tensor(float(value))  # torch's AdamW, which is the backup optimizer, counts in a tensor
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


def _sources(found: Survey) -> list[SavedGroup | None]:
    """The saved group that each live one takes its hyper-parameters from; None for those that keep their own."""
    groups = saved_groups(found.head)
    return [None if match.source is None else groups[match.source] for match in found.membership.groups]


def set_groups(live: LiveState, groups: Sequence[SavedGroup | None]) -> list[str]:
    """Set the hyper-parameters of every group that takes saved ones; what differs from them comes back as sentences."""
    optimizer = live.optimizer.optimizer
    notes: dict[str, None] = {}
    for saved, group in zip(groups, optimizer.param_groups, strict=True):
        if saved is None:
            continue
        changed = changed_class(saved, optimizer)
        taken, left, own = options_to_set(saved, optimizer, group)
        for option, choice in taken.items():
            set_option(group, option, choice)
        for note in (
            changed,
            f"hyper-parameters of the checkpoint that this optimizer does not have: {', '.join(left)}"
            if left
            else None,
            f"hyper-parameters that are the run's own: {', '.join(own)}" if own else None,
        ):
            if note is not None:
                notes[note] = None
    return list(notes)


def _converted(found: Survey) -> list[str]:
    """A sentence for each scalar that the run's optimizer keeps in another form than the saved one did."""
    saved = {(key, value.kind) for entry in found.head.scalars for key, value in entry.items()}
    live = {(key, value.kind) for entry in found.scalars for key, value in entry.items()}
    return [
        f"{key}: the same number, as {_kind_name(kind)} here and as "
        f"{' or '.join(sorted(_kind_name(other) for name, other in saved if name == key))} in the checkpoint"
        for key, kind in sorted(live - saved)
    ]


def _kind_name(kind: str) -> str:
    return f"a Python {kind.removeprefix('py')}" if kind.startswith("py") else f"a {kind} tensor"


def live_value(value: ScalarValue) -> object:
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


class _Cost(NamedTuple):
    """What a load cost this rank: for its own state, and for the module states and the payload of others."""

    filled: Filled
    module: Relayed
    payload: Relayed


def _report(
    engine: Any,
    live: LiveState,
    found: Survey,
    spent: _Cost,
    proof: Proof,
    tag_dir: Path,
    wanted: Wanted,
    notes: list[str],
    lost: list[str],
    changed: tuple[str, ...],
    began: float,
) -> ResumeReport:
    checkpoint = found.checkpoint
    opened = {*checkpoint.opened, *spent.filled.files, *spent.module.files, *spent.payload.files}
    headers = checkpoint.header_bytes + _module_bytes(found) + spent.module.bytes_read
    read_here = spent.filled.bytes_read + spent.payload.bytes_read
    wire = (spent.module.sent + spent.payload.sent, spent.module.received + spent.payload.received)
    cost = (spent.filled.bytes_owned, read_here, headers, len(opened), time.perf_counter() - began, *wire)
    costs = gather(cost)
    owned, read, header_bytes, files, seconds, sent, received = (max(column) for column in zip(*costs, strict=True))
    if found.sight is not None:
        short = found.sight.short_sighted
        notes.append(
            f"node-local disks: {_count(len(short), 'rank')} of {len(costs)} ({_some_ranks(short)}) did not see all "
            "files, and had them read and sent by ranks that did"
        )
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
        reset=(*reset, *lost),
        notes=tuple(notes),
        changed=changed,
        bytes_sent=int(sent),
        bytes_received=int(received),
    )


def _some_ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"


def _module_bytes(found: Survey) -> int:
    """What DeepSpeed reads of the module states file: all of it but the frozen fragments, which are mapped."""
    model = found.model
    if model.path.name in found.checkpoint.away:
        return 0
    if model.frozen is None or model.frozen_pieces is None:
        return model.size
    sizes = np.array(
        [DTYPE_BYTES[model.frozen_pieces.dtype[i]] for i in range(model.frozen.num_params)], dtype=np.int64
    )
    return model.size - int((model.frozen.part * sizes).sum())


def _inventory(
    engine: Any, live: LiveState, found: Survey, wanted: Wanted
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    membership = found.membership
    exact = [_count(len(membership.restored), "parameter")]
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
        matched = sum(match.source is not None for match in membership.groups)
        exact.append(f"hyper-parameters of {_count(matched, 'group')}")
    if membership.frozen:
        exact.append(_count(len(membership.frozen), "frozen parameter"))
    if membership.excluded:
        named = ", ".join(membership.excluded)
        reset.append(f"{_count(len(membership.excluded), 'frozen parameter')} (excluded from the save): {named}")
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
def model_states_reader(engine: Any, found: Survey, path: str, *, safe_load: bool) -> Iterator[None]:
    """While it lasts, DeepSpeed reads the module states of the survey once, from ``path``, without frozen payload."""
    original = engine.checkpoint_engine
    reader = _ModelStatesReader(original, found, path, safe_load, engine.lr_scheduler)
    engine.checkpoint_engine, engine._zeroelastic_module_paths = reader, reader.paths
    try:
        yield
    finally:
        engine.checkpoint_engine = original
        del engine._zeroelastic_module_paths


class _ModelStatesReader:
    """Stands in for the checkpoint engine while the module states are loaded; everything else is the original's."""

    def __init__(self, original: Any, found: Survey, path: str, safe_load: bool, scheduler: Any) -> None:
        self._original, self._found, self._path = original, found, path
        # DeepSpeed wants one for each tensor parallel rank, and that of its own to exist.
        away = found.model.path.name in found.checkpoint.away
        self.paths = (path,) * found.checkpoint.tp.size if away else found.model_paths
        self._safe_load, self._scheduler = safe_load, scheduler
        self._loaded: dict[str, Any] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def load(self, path: str, map_location: Any = None) -> Any:
        """DeepSpeed's loader asks twice for the same file; the second time it gets the first result."""
        if os.fspath(path) not in self.paths:
            return self._original.load(path, map_location=map_location)
        if self._loaded is None:  # of its tensor parallel peers' files it looks at what is in this rank's own, too
            self._loaded = self._read()
        return dict(self._loaded)

    def _read(self) -> dict[str, Any]:
        frozen = self._found.model.frozen
        mapped = frozen is not None and bool(frozen.numel.any())
        state = self._unpickle(mmap=mapped)  # maps the payload, so that fragments left out are never read
        state[_FRAGMENTS] = None  # DeepSpeed then leaves frozen parameters to us
        schedule = state.get("lr_scheduler")
        if self._scheduler is not None and isinstance(schedule, Mapping) and not self._found.membership.same_groups:
            state["lr_scheduler"] = rearranged(schedule, self._scheduler.state_dict(), self._found.membership.groups)
        # nothing may keep a mapping of a file that a later save overwrites
        return copy.deepcopy(state) if mapped else state

    def _unpickle(self, *, mmap: bool) -> dict[str, Any]:
        path = self._found.model.path
        try:
            with torch.serialization.safe_globals(_safe_classes() if self._safe_load else []):
                state = torch.load(self._path, map_location="cpu", mmap=mmap, weights_only=self._safe_load)
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
