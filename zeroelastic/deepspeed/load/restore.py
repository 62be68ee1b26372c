"""Fill the live engine from a checked checkpoint, at any world size, in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from zeroelastic.checkpoint.extents import TensorExtents
from zeroelastic.checkpoint.optimizer_file import FP32, FROZEN, WEIGHTS
from zeroelastic.checkpoint.tag_files import check_one_save
from zeroelastic.deepspeed.engine import Engine
from zeroelastic.deepspeed.fill import Digests, FillItem, FillJob, ReadDigests, Target, fill
from zeroelastic.deepspeed.live.digests import LiveStreams, known_digests, local_digests, own_parts
from zeroelastic.deepspeed.live.live_optimizer import LiveOptimizer
from zeroelastic.deepspeed.live.own_weights import has_own_weights
from zeroelastic.deepspeed.live.replicated import restore_clipping, restore_scales, set_groups
from zeroelastic.deepspeed.load.compare import saved_groups
from zeroelastic.deepspeed.load.load_plan import LoadPlan
from zeroelastic.deepspeed.load.module_states import load_module
from zeroelastic.deepspeed.load.notes import LoadNotes, note_module_files
from zeroelastic.deepspeed.node_local.peers import fill_from_others, module_file
from zeroelastic.distributed.collective import all_or_raise, any_rank
from zeroelastic.io.paths import local_path


@dataclass(frozen=True, slots=True)
class Restored:
    """The return value of DeepSpeed's own part of a load, and partial digests of the payload that was read.

    ``cast`` are of tensors that were cast or are rounded afterwards, ``changed`` of those that only the save, or only
    the run, trains.
    """

    loaded: tuple[Any, Any]
    read: ReadDigests
    cast: Digests
    changed: Digests


def restore(engine: Engine, load_plan: LoadPlan, notes: LoadNotes) -> Restored:
    """Fill the engine from a checked checkpoint. Collective; raises the same error on every rank."""
    live, options, checkpoint = load_plan.live, load_plan.request.options, load_plan.checkpoint
    live.begin_load()
    with (
        live.filling(),
        module_file(checkpoint, load_plan.model, notes.cost, executor=options.io_engine) as module_path,
    ):

        def load_and_fill() -> tuple[tuple[Any, Any], list[FillJob]]:
            loaded = load_module(engine, load_plan, module_path, notes)
            live.refresh()
            return loaded, _fill(load_plan)

        if checkpoint.inventory.reads_payload:  # and waits for no other rank until it is complete
            restored = all_or_raise(lambda: _complete(engine, load_plan, *load_and_fill(), notes))
        else:
            loaded, filled = all_or_raise(load_and_fill)
            fill_from_others(checkpoint, filled, notes.cost)
            restored = all_or_raise(lambda: _complete(engine, load_plan, loaded, filled, notes))
    live.end_load()
    if load_plan.weights_plan is not None:
        notes.own_weights = any_rank(has_own_weights(live))
    note_module_files(load_plan, notes)
    return restored


def _complete(
    engine: Engine, load_plan: LoadPlan, loaded: tuple[Any, Any], filled: Sequence[FillJob], notes: LoadNotes
) -> Restored:
    """Set padding, fresh state, scalars and weights, when all payload is in its place."""
    live = load_plan.live
    check_one_save(load_plan.tag_dir)  # nothing is read after this
    for i, state in enumerate(load_plan.states):
        if not load_plan.weights_only and state.source is not None:
            _clear_fresh(load_plan, i)
    live.zero_padding(weights_only=load_plan.weights_only)
    live.zero_frozen_padding()
    changing = [move.plan for move in load_plan.moves if move.changes]
    moved = [part for part in filled if any(part.plan is plan for plan in changing)]
    others = [part for part in filled if part not in moved]
    read = {stream: found for part in others for stream, found in part.read_digests.items()}
    cast = {stream: digest for part in others for stream, digest in part.cast_digests.items()}
    if load_plan.request.options.verifies_content and not engine.zero_load_from_fp32_weights():
        # of the master weights as they were read, which are going to be rounded
        cast = {**local_digests(live, weights_only=True, with_frozen=False, read=read).sums(), **cast}
    changed = {stream: d for part in moved for stream, d in _changed_digests(part, live.rank).items()}
    for part in filled:
        notes.cost.bytes_owned += part.bytes_owned
        notes.cost.bytes_read += part.bytes_read
        notes.cost.files |= part.files.keys()
    notes.texts += (text for part in others for text in _casts(part.targets))
    _restore_values(engine, live, load_plan, filled[0].rounded, notes)
    return Restored(loaded, read, cast, changed)


def _fill(load_plan: LoadPlan) -> list[FillJob]:
    """Fill master weights and optimizer tensors, then parameters frozen on either side, in place."""
    live, weights_only, options = load_plan.live, load_plan.weights_only, load_plan.request.options
    inventory, targets = load_plan.checkpoint.inventory, list[Target]()
    on_disk = local_path(load_plan.tag_dir) is not None
    for i, (source, keys, scalars) in enumerate(load_plan.states):
        if source is None:
            if not weights_only:
                live.reset_state(i)
            continue
        for key in keys:
            dtype = load_plan.head.extents[key].dtype[source]
            kept = live.state_dtype(i, key) or getattr(torch, dtype)
            makes_weights = key == FP32 and on_disk and load_plan.weights_plan is None
            rounded = live.rounded(i) if makes_weights else None  # made in the pass that reads a disk
            targets.append(Target(key, i, live.destination(i, key, kept), dtype, rounded))
        if not weights_only:
            live.drop_state(i, keep=(*keys, *scalars))
    if not weights_only:
        live.state_filled()
    extents = {rank: load_plan.checkpoint.extents(rank) for rank in load_plan.shards}
    parts: list[FillItem] = [(load_plan.plan, extents, targets), *_frozen_parts(load_plan), *_weights_parts(load_plan)]
    return [
        fill(
            *part,
            executor=options.io_engine,
            remote_files=() if inventory.reads_payload else inventory.remote_files,
            digest=options.verify == "read",
        )
        for part in parts
    ]


def _casts(targets: Sequence[Target]) -> list[str]:
    """Return a sentence for each kind of tensor that is not kept in the dtype that it was saved in."""
    names = {FP32: "master weights", FROZEN: "frozen parameters"}
    casts = {(names.get(t.key, t.key), t.dtype, str(t.tensor.dtype).removeprefix("torch.")) for t in targets if t.cast}
    return [f"{what}: cast from {saved} to {live}" for what, saved, live in sorted(casts)]


def _frozen_parts(load_plan: LoadPlan) -> list[FillItem]:
    """Return the parameters that either side has frozen; each is its own target."""
    live, here = load_plan.live, load_plan.live.layout.index()
    parts: list[FillItem] = []
    for move in load_plan.moves:
        plan, extents, targets = move.plan, move.extents, list[Target]()
        saved_dtypes = load_plan.head.extents[FP32].dtype
        if move.key == FROZEN:
            pieces = [load_plan.model.frozen_extents, *(piece[FROZEN] for piece in extents.values())]
            saved_dtypes = {i: dtype for piece in pieces for i, dtype in piece.dtype.items()}
        place = plan.src.index()
        for p, param in zip(plan.dst.sub_group.tolist(), plan.dst.params, strict=True):
            if not param.numel and not move.changes:
                continue
            if move.trains:
                tensor = live.fp32(int(live.layout.sub_group[here[param.name]]))
            else:
                tensor = live.frozen_tensor(p).view(-1)
            own = str(tensor.dtype).removeprefix("torch.")  # of an expert that this rank reads nothing of
            saved = saved_dtypes.get(int(plan.src.sub_group[place[param.name]]), own)
            targets.append(Target(move.key, p, tensor, saved))
        parts.append((plan, extents, targets))
    return parts


def _weights_parts(load_plan: LoadPlan) -> list[FillItem]:
    """Return the weights of the model, where they are not made from the master weights."""
    plan, places = load_plan.weights_plan, load_plan.model.weight_places
    if plan is None:
        return []
    found = [places[param.name] for param in plan.src.params]
    dtypes, offsets = zip(*found, strict=True)
    extents = TensorExtents(load_plan.model.path, dict(enumerate(dtypes)), np.array(offsets, dtype=np.int64))
    targets: list[Target] = []
    for i in sorted(set(plan.dst.sub_group.tolist())):
        weights = load_plan.live.weights(i)
        assert weights is not None, "planned for these"
        targets.append(Target(WEIGHTS, i, weights, dtypes[0]))
    return [(plan, {0: {WEIGHTS: extents}}, targets)]


def _changed_digests(part: FillJob, rank: int) -> Digests:
    """Return the digest of every target of a moved part, under the saved state key.

    They are computed on reading where a tensor was cast or its place is known; else from the live tensor.
    """
    dst, targets = part.plan.dst, part.targets
    pieces = [
        own.piece(dst.params[own.param].name, targets[own.param].key, targets[own.param].tensor)
        for own in own_parts(dst, rank)
    ]
    live = [piece for piece in pieces if piece.stream not in part.cast_digests]
    digests = LiveStreams(tuple(live), {}).digest(known_digests(live, part.read_digests)).sums()
    return {**part.cast_digests, **digests}


def _clear_fresh(load_plan: LoadPlan, sub_group: int) -> None:
    """Zero the state of parameters that are new to the optimizer, in a sub-group with restored parameters."""
    live, restored = load_plan.live, frozenset(load_plan.diff.restored)
    tensors, _ = live.split_state(sub_group)
    places, lengths = live.layout.buffer_offset(live.rank).tolist(), live.layout.owned(live.rank)[1].tolist()
    for p in np.flatnonzero(live.layout.sub_group == sub_group).tolist():
        if live.layout.params[p].name not in restored:
            for key, tensor in tensors.items():
                tensor[places[p] : places[p] + lengths[p]].fill_(live.initial_value(sub_group, key))


def _restore_values(
    engine: Engine, live: LiveOptimizer, load_plan: LoadPlan, rounded: Mapping[int, int], notes: LoadNotes
) -> None:
    """Set scalars, hyper-parameters and loss scale, then the 16-bit weights from the master weights.

    ``rounded`` says by sub-group how many elements of the 16-bit weights are made already.
    """
    if not load_plan.weights_only:
        for i, state in enumerate(load_plan.states):
            for key, value in state.scalars.items():
                live.set_scalar(i, key, value)
        saved, matches = saved_groups(load_plan.head), load_plan.diff.groups
        groups = [None if match.source is None else saved[match.source] for match in matches]
        notes.texts += [*_converted(load_plan), *set_groups(live, groups)]
        if own := live.own_options():
            notes.texts.append(
                "the part of optimizer group 0 that partial offload leaves on the GPU has the run's own "
                f"{', '.join(own)}: DeepSpeed copies these when the engine is made, and no scheduler or load sets them"
            )
        scale_notes, notes.lost = restore_scales(live, load_plan.head, engine._config._param_dict)
        notes.texts += [*scale_notes, *restore_clipping(live, load_plan.head.clip_grad)]
    numels = live.layout.owned_numels(live.rank)
    whole = {i for i, numel in rounded.items() if numel == numels[i]}
    restored = None if load_plan.weights_plan is None else load_plan.weights_plan.dst
    live.finish_weights(from_16_bit=not engine.zero_load_from_fp32_weights(), rounded=whole, restored=restored)


def _converted(load_plan: LoadPlan) -> list[str]:
    """Return a sentence for each scalar that the run's optimizer keeps in another form than the saved one did."""
    saved = {(key, value.kind) for entry in load_plan.head.scalars for key, value in entry.items()}
    live = {(key, value.kind) for state in load_plan.states for key, value in state.scalars.items()}
    return [
        f"{key}: the same number, as {_kind_name(kind)} here and as "
        f"{' or '.join(sorted(_kind_name(other) for name, other in saved if name == key))} in the checkpoint"
        for key, kind in sorted(live - saved)
    ]


def _kind_name(kind: str) -> str:
    return f"a Python {kind.removeprefix('py')}" if kind.startswith("py") else f"a {kind} tensor"
