"""Ends one world's engine and begins the next one's: hold, then fill and compare, or serve and leave."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from zeroelastic.checkpoint.optimizer_file import FP32, FROZEN
from zeroelastic.core.digest import content_root
from zeroelastic.core.layout import unpacked_layout
from zeroelastic.core.movement import Recut
from zeroelastic.deepspeed.engine import Engine, accumulated_micro_batches, options_of, refuse_merged
from zeroelastic.deepspeed.engine_state import begin_change, changing
from zeroelastic.deepspeed.live.digests import local_digests, whole_contents
from zeroelastic.deepspeed.live.kinds import covered_live, kind_of, why_left_to_deepspeed
from zeroelastic.deepspeed.live.live_optimizer import LiveOptimizer
from zeroelastic.deepspeed.live.replicated import difference, token_of
from zeroelastic.deepspeed.resize.move import NO_RUNS, HeldState, MoveCost, Runs, buffers_of, hold, move, runs_of
from zeroelastic.deepspeed.resize.run_state import (
    RunState,
    group_states,
    require_same_run,
    restore_module,
    restore_values,
    run_state_of,
)
from zeroelastic.deepspeed.run_objects import sampler_state
from zeroelastic.distributed.collective import all_gather_alike, all_gather_of_or_raise, all_or_raise
from zeroelastic.distributed.peers import Peers
from zeroelastic.errors import DigestMismatchError, UnsupportedError, with_remedy


@dataclass(frozen=True, slots=True)
class Leaving:
    """What a member keeps when its world ends: its tensors, and what is alike on all members."""

    held: HeldState
    state: RunState


def why_fixed(engine: Engine) -> str | None:
    """Why the state of an engine cannot go from memory to memory; None where it can. No collective."""
    if kind_of(engine.optimizer) is None:
        other = type(engine.optimizer).__name__ if engine.zero_optimization() else "ZeRO stage 0"
        what = why_left_to_deepspeed(engine.optimizer) or other
        return f"the state of a run with {what} does not move from memory to memory"
    try:
        live = covered_live(engine, engine.optimizer)
        hold(live)
        group_states(live)
    except UnsupportedError as error:
        return str(error)
    return None


def recuts_of(engine: Engine, world_size: int) -> tuple[Recut, ...]:
    """How the state of an engine would be cut on so many ranks: what is trained, and what is frozen. No collective."""
    live = covered_live(engine, engine.optimizer)
    held = hold(live)
    frozen = unpacked_layout(held.frozen.params, world_size)
    sizes = {  # the bytes that an element has
        key: next((flat.element_size() for flat in flats if flat is not None), 0) for key, flats in held.tensors.items()
    }
    frozen_bytes = sizes.pop(FROZEN)
    return (
        Recut(held.layout, live.layout_at(world_size), sum(sizes.values())),
        Recut(held.frozen, frozen, frozen_bytes),
    )


def leave_world(engine: Engine, client_state: Mapping[str, Any]) -> Leaving:
    """Keep the state of an engine, whose digests are computed. Collective over its world.

    Raises the same error on every rank: UnsupportedError for state that cannot move, such as values that differ by
    rank, and in the middle of an accumulation, whose gradients would be lost.
    """

    def held() -> tuple[LiveOptimizer, HeldState]:
        if accumulated_micro_batches(engine):
            raise UnsupportedError("a world changes between two optimizer steps, not in the middle of one.")
        live = covered_live(engine, engine.optimizer)
        live.begin_load()  # whatever is on its way between host and device arrives
        live.refresh()
        return live, hold(live)

    live, tensors = all_or_raise(held)
    root = _root(engine, live)
    keys = tuple(key for key in tensors.tensors if key != FROZEN)
    sampler = sampler_state(engine)
    state, tokens = all_gather_of_or_raise(
        lambda: run_state_of(engine, live, client_state, keys=keys, root=root, sampler=sampler),
        lambda state: token_of(state.values()),
    )
    if (different := difference(state.values(), tokens)) is not None:
        raise different
    return Leaving(tensors, state)


class Joined(NamedTuple):
    """What it cost this member to join the next world, and the content root, if it was compared."""

    moved: MoveCost
    root: str | None


def join_world(
    engine: Engine, leaving: Leaving | None, state: RunState, peers: Peers, peer_of: Sequence[int]
) -> Joined:
    """Fill an engine that was just built with the state of the world before. Collective over the new world and peers.

    ``leaving`` is what this member has of it, ``state`` what one of its members left. A member that had no part in it
    gets its buffers too. Members that are not in the new world call ``serve``. Raises the same error on every rank of
    the new world; DigestMismatchError where the content is not that of before.
    """

    def prepared() -> tuple[LiveOptimizer, Runs, list[torch.Tensor | None]]:
        live = covered_live(engine, engine.optimizer)
        refuse_merged(live.module, "state does not move from memory to memory")
        require_same_run(state, live)
        begin_change(engine)
        live.begin_load()
        restore_module(engine, state, state if leaving is None else leaving.state)
        live.refresh()
        filling.enter_context(live.filling())
        runs, targets = _targets(live, state)
        return live, runs, targets

    def completed() -> None:
        live.zero_padding()
        live.zero_frozen_padding()
        restore_values(live, state)
        live.finish_weights(from_16_bit=False)

    with with_remedy(), changing(engine):
        with ExitStack() as filling:
            live, runs, targets = all_or_raise(prepared)
            held = None if leaving is None else leaving.held
            moved = move(runs, targets, held, _sources(leaving, state), peers, peer_of)
            all_or_raise(completed)
        live.end_load()
        root = _root(engine, live)
        if root is not None and state.root is not None and root != state.root:
            raise DigestMismatchError(
                f"the content root was {state.root[:12]} before the change of size and is {root[:12]} after it.",
                remedy="Resume from a checkpoint.",
            )
    return Joined(moved, None if state.root is None else root)


def serve(leaving: Leaving, peers: Peers, peer_of: Sequence[int]) -> MoveCost:
    """Send what the members of the new world ask for. Collective over ``peers``."""
    return move(NO_RUNS, [], leaving.held, _sources(leaving, leaving.state), peers, peer_of)


def _sources(leaving: Leaving | None, state: RunState) -> list[torch.Tensor | None]:
    held = None if leaving is None else leaving.held
    return [] if held is None else buffers_of(state.keys, held.tensors, held.layout.num_sub_groups)


def _targets(live: LiveOptimizer, state: RunState) -> tuple[Runs, list[torch.Tensor | None]]:
    """The live tensors by number, and what is missing in them: all that this rank owns."""
    columns: dict[str, list[torch.Tensor | None]] = {key: [] for key in state.keys}
    for i, g in enumerate(live.group_of):
        dtypes = {FP32: live.fp32(i).dtype, **state.groups[g].dtypes}
        for key in state.keys:
            columns[key].append(live.destination(i, key, dtypes[key]) if key in dtypes else None)
        live.drop_state(i, keep=(*dtypes, *state.groups[g].scalars))
    live.state_filled()
    columns[FROZEN] = [live.frozen_tensor(p).view(-1) for p in range(live.frozen.num_params)]
    runs = runs_of(state.keys, (state.layout, state.frozen), live, columns)
    return runs, buffers_of(state.keys, columns, live.layout.num_sub_groups)


def _root(engine: Engine, live: LiveOptimizer) -> str | None:
    """The content root of the live state; none where the options of any rank say not to verify. Collective."""
    if not all(all_gather_alike(options_of(engine).verifies_content)):
        return None
    local = local_digests(live)
    return content_root(whole_contents(live, local, device=engine.device))
