"""Loading: a surveyed checkpoint into the live engine at any world size, in place, and the report of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from zeroelastic.agree import settle
from zeroelastic.digest import ScalarValue
from zeroelastic.one_save import check_one_save
from zeroelastic.report import ResumeReport
from zeroelastic.shard import FP32, FROZEN, OptionValue
from zeroelastic.stage3.contents import local_digests
from zeroelastic.stage3.fill import Filled, Part, Target, fill
from zeroelastic.stage3.live import LiveState, read_live
from zeroelastic.stage3.load_report import LoadCost, count, load_report
from zeroelastic.stage3.module_keys import ModuleKeys
from zeroelastic.stage3.moved import changes, clear_fresh, fresh_state, join, moved_parts, with_moved_digests
from zeroelastic.stage3.optimizers import SavedGroup, changed_class, options_to_set, state_dtype
from zeroelastic.stage3.options import Options
from zeroelastic.stage3.precision import restore_scales
from zeroelastic.stage3.proof import prove
from zeroelastic.stage3.relay import Relayed, fill_from_others, module_file
from zeroelastic.stage3.survey import Survey, check_batch, saved_groups
from zeroelastic.stage3.trained import param_names

logger = logging.getLogger(__name__)


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
    said: Sequence[str] = (),
    wanted: Wanted,
    load_module: Callable[[str], tuple[Any, Any]],
    keys: ModuleKeys,
    began: float,
    pending: int,
) -> tuple[tuple[Any, Any], ResumeReport]:
    """Fill the engine from a surveyed checkpoint. Collective.

    ``load_module`` runs DeepSpeed's own ``_load_checkpoint`` (module, counters, scheduler, client state) on the file
    that ``model_states_reader`` serves from the path that it is given, and leaves in ``keys`` what the module finds
    missing; ``began`` is when the whole load did (``time.perf_counter``); ``said`` goes into the report first;
    ``pending`` micro batches were accumulated before. Returns its result and the report. Raises the same error on
    every rank.
    """
    notes = list(said)
    reset: list[str] = []
    micro = engine.train_micro_batch_size_per_gpu() * engine.gradient_accumulation_steps()
    copies = engine.train_batch_size() // micro  # of the model: ranks that share a sequence take one batch
    batch = check_batch(found.train_batch_size, engine.train_batch_size(), copies, strict=options.strict)
    if batch is not None and not wanted.module_only:
        notes.append(batch)
    if not wanted.weights_only:
        notes += _lost_micro_batches(found, pending)
    optimizer = live.optimizer
    if getattr(optimizer, "offloaded_states", None):
        optimizer.reload_states()
    optimizer.checkpoint_event_prologue()
    with module_file(found.sight, found.model, executor=options.executor) as (module_path, relayed):
        outcome = settle(partial(load_module, module_path))
    live = read_live(optimizer, param_names(engine))
    from_16_bit = not engine.zero_load_from_fp32_weights()

    def read() -> _Filling:
        return _fill(live, found, options, wanted, notes)

    def restore(filling: _Filling) -> Filled:
        check_one_save(found.checkpoint.tag_dir)  # nothing is read after this
        filled = _complete(live, found, filling, wanted)
        if from_16_bit and options.verify == "full":
            filled = _with_read_weights(live, filled)
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
        from_16_bit=from_16_bit,
    )
    changed = changes(live, found, keys, weights_only=wanted.weights_only)
    report = load_report(
        engine,
        live,
        found,
        LoadCost(filled, relayed, payload),
        proof,
        tag_dir,
        client_state=outcome[1],
        weights_only=wanted.weights_only,
        notes=notes,
        lost=reset,
        changed=changed,
        began=began,
    )
    return outcome, report


def accumulated_micro_batches(engine: Any) -> int:
    """How many micro batches were taken since the last optimizer step: their gradients wait in memory."""
    return int(engine.micro_steps % engine.gradient_accumulation_steps())


def _lost_micro_batches(found: Survey, pending: int) -> list[str]:
    record = found.checkpoint.record
    lost = record.lost_micro_batches if record is not None else 0
    notes: list[str] = []
    if lost:
        notes.append(
            f"LOST: the gradients of {count(lost, 'micro batch', 'micro batches')} that were accumulated when this "
            "was saved; accumulation begins anew"
        )
    if pending:
        notes.append(
            f"NOT LOST, though it should be: the gradients of {count(pending, 'micro batch', 'micro batches')} that "
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


def _with_read_weights(live: LiveState, filled: Filled) -> Filled:
    """With the digests of the master weights as they were read, which are going to be rounded."""
    local = local_digests(live, weights_only=True, with_frozen=False)
    return replace(filled, cast_digests={**local.table(), **filled.cast_digests})


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
