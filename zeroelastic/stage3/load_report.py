"""The report of a load: what it cost over all ranks, what is exact, and what is not."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from zeroelastic.agree import gather
from zeroelastic.inspection import client_state_keys
from zeroelastic.report import ResumeReport
from zeroelastic.shard import FP32
from zeroelastic.stage3.fill import Filled
from zeroelastic.stage3.live import LiveState
from zeroelastic.stage3.proof import Proof
from zeroelastic.stage3.relay import Relayed
from zeroelastic.stage3.survey import Survey


class LoadCost(NamedTuple):
    """What a load cost this rank: for its own state, and for the module states and the payload of others."""

    filled: Filled
    module: Relayed
    payload: Relayed


def load_report(
    engine: Any,
    live: LiveState,
    found: Survey,
    spent: LoadCost,
    proof: Proof,
    tag_dir: Path,
    *,
    client_state: Any,
    weights_only: bool,
    notes: list[str],
    lost: list[str],
    changed: tuple[str, ...],
    began: float,
) -> ResumeReport:
    """The report, the same on every rank: figures are the largest of any rank unless they say otherwise. Collective.

    ``lost`` is what of the loss scale was not restored, ``began`` when the load did (``time.perf_counter``); ``notes``
    is added to.
    """
    checkpoint = found.checkpoint
    opened = {*checkpoint.opened, *spent.filled.files, *spent.module.files, *spent.payload.files}
    headers = checkpoint.header_bytes + found.checked_bytes + _module_bytes(found) + spent.module.bytes_read
    read_here = spent.filled.bytes_read + spent.payload.bytes_read
    wire = (spent.module.sent + spent.payload.sent, spent.module.received + spent.payload.received)
    cost = (spent.filled.bytes_owned, read_here, headers, len(opened), time.perf_counter() - began, *wire)
    costs = gather(cost)
    owned, read, header_bytes, files, seconds, sent, received = (max(column) for column in zip(*costs, strict=True))
    if found.sight is not None:
        short = found.sight.short_sighted
        notes.append(
            f"node-local disks: {count(len(short), 'rank')} of {len(costs)} ({_some_ranks(short)}) did not see all "
            "files, and had them read and sent by ranks that did"
        )
    exact, rederived, reset = _inventory(engine, live, found, client_state, weights_only=weights_only)
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
    if found.model.path.name in found.checkpoint.away:
        return 0
    return found.model.size - sum(nbytes for _, nbytes in found.model.fragments())


def _inventory(
    engine: Any, live: LiveState, found: Survey, client_state: Any, *, weights_only: bool
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    membership = found.membership
    exact = [count(len(membership.restored), "parameter")]
    rederived: list[str] = []
    reset: list[str] = []
    states = sorted({key for keys in found.head.tensor_keys for key in keys} - {FP32})
    scalars = sorted({key for entry in found.head.scalars for key in entry})
    if not (engine.fp16_enabled() or engine.bfloat16_enabled()):
        pass  # the master weights are the weights
    elif engine.zero_load_from_fp32_weights():
        rederived.append("16-bit weights from the fp32 master weights")
    else:
        rederived.append("fp32 master weights from 16-bit copies (load_from_fp32_weights is off)")
    if weights_only:
        scale = " and loss scale" if engine.fp16_enabled() else ""
        reset.append(f"optimizer state{',' if scale else ' and'} hyper-parameters{scale} (not asked for)")
    else:
        exact.append(f"optimizer state ({', '.join((*states, *scalars)) or 'none was saved'})")
        matched = sum(match.source is not None for match in membership.groups)
        exact.append(f"hyper-parameters of {count(matched, 'group')}")
    if membership.frozen:
        exact.append(count(len(membership.frozen), "frozen parameter"))
    if membership.excluded:
        named = ", ".join(membership.excluded)
        reset.append(f"{count(len(membership.excluded), 'frozen parameter')} (excluded from the save): {named}")
    saved, current = found.checkpoint.world_size, live.layout.world_size
    each = _kept_by_each_rank(engine, client_state)
    if each and current > saved:
        rederived.append(f"{each} of {_ranks(saved, current)} from saved rank 0")
    if each and current < saved:
        reset.append(f"{each} of saved {_ranks(current, saved)} (no longer there)")
    return tuple(exact), tuple(rederived), tuple(reset)


def _kept_by_each_rank(engine: Any, client_state: Any) -> str:
    """What there is that each rank saves for itself, in words; empty where there is nothing."""
    users = set(client_state_keys(client_state or {})) - {"zeroelastic"}  # the position in the data, the same on all
    there = {"buffers": bool(engine._get_buffer_names()), "client state": bool(users)}
    return " and ".join(what for what, is_there in there.items() if is_there)


def count(number: int, what: str, several: str = "") -> str:
    """A number and the noun for it: "1 rank", "2 ranks"."""
    return f"{number} {what}" if number == 1 else f"{number} {several or what + 's'}"


def _ranks(first: int, end: int) -> str:
    return f"rank {first}" if end - first == 1 else f"ranks {first} to {end - 1}"
