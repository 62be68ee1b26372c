"""Verify a load: digests of the live state, in its own layout, against the commit record."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

import numpy as np

from zeroelastic.checkpoint.extents import TensorSlot, extent_windows
from zeroelastic.checkpoint.optimizer_file import FP32, FROZEN, OptimizerHeader
from zeroelastic.core.digest import DigestKey, ParamContent, ScalarValue, combine, content_root
from zeroelastic.core.plan import identity_plan
from zeroelastic.deepspeed.engine import Engine
from zeroelastic.deepspeed.live.digests import (
    CopiesDifferError,
    LocalDigests,
    gather_over_tp,
    local_digests,
    reduce_digests,
    whole_contents,
)
from zeroelastic.deepspeed.live.live_optimizer import LiveOptimizer
from zeroelastic.deepspeed.load.load_plan import LoadPlan
from zeroelastic.deepspeed.load.restore import Restored
from zeroelastic.deepspeed.load.saved_copies import digest_rows
from zeroelastic.distributed.collective import all_gather
from zeroelastic.errors import CheckpointError, DigestMismatchError, UnreadableError, ZeroElasticError
from zeroelastic.io.paths import FilePath
from zeroelastic.io.storage import file_sizes, read_range
from zeroelastic.torch_file.zip_check import check_archive

_NAMED = 8
_ROOT_DIGITS = 12
_ANY_DTYPE = "uint8"
_INCOMPARABLE = "content roots are not comparable, because the run does not have the parameters of the save"


TensorKey = tuple[str, str]
"""A whole tensor and a state key."""


@dataclass(frozen=True, slots=True)
class Verification:
    """The saved and the loaded content root, whether they match, and a note on that.

    ``wrong`` is every (parameter, state key) that differs; ``matches`` is False also where the live state has more.
    """

    saved_root: str | None
    loaded_root: str | None
    matches: bool | None
    note: str | None
    wrong: tuple[TensorKey, ...] = ()

    @property
    def failed(self) -> bool:
        """Whether this rank saw that the live state is not the saved one."""
        return self.matches is False


def verify(engine: Engine, load_plan: LoadPlan, restored: Restored) -> Verification:
    """Digest the live state and compare it with the commit record. Collective.

    With ``"verify": "read"`` the digests are of the bytes as they were read, where each went to the address at
    which the live state has it; later changes are not seen. Tensors that were cast, and master weights that the run
    then rounds to 16 bits (load_from_fp32_weights is off), are compared by the digest of what was read. If it has
    ``failed`` on any rank, ``raise_mismatch`` has to be called on all.
    """
    live, saved_root, request = load_plan.live, load_plan.checkpoint.inventory.content_root, load_plan.request
    if not request.options.verifies_content:
        note = f'content not verified ("verify": "{request.options.verify}")'
        return Verification(saved_root, None, None, note)
    diff, is_other_base = load_plan.diff, bool(load_plan.other_frozen)
    with_frozen = load_plan.checkpoint.names_frozen or load_plan.keeps_frozen
    same_params = diff.same_params and not is_other_base
    local = local_digests(live, weights_only=request.weights_only, with_frozen=with_frozen, read=restored.read)
    if saved_root is None:
        return _without_record(load_plan, local)
    try:
        contents = whole_contents(live, local)
    except CopiesDifferError as error:  # damage: one was saved
        return Verification(saved_root, None, False, None, error.tensors)
    cast, changed = (_sums(live, sums) for sums in (restored.cast, restored.changed))
    from_16_bit = not engine.zero_load_from_fp32_weights()
    num_cast = sum(key != FP32 or not from_16_bit for _, key in cast)
    recorded = {c.param.name: c for c in load_plan.checkpoint.inventory.contents() if c.tp_rank == live.tp.rank}
    common = {*diff.restored, *diff.frozen}
    if load_plan.keeps_frozen:
        common |= {*diff.excluded} - {*load_plan.other_frozen}
    saved = [  # without what this load leaves alone; the report names what only one side has
        content
        for name, content in recorded.items()
        if (same_params or name in common) and (with_frozen or FROZEN not in content.tensors)
    ]
    wrong = [
        (name, key)
        for (name, key), digest in changed.items()
        if name not in recorded or recorded[name].tensors.get(key, ("", None))[1] != digest
    ]
    if not same_params:
        wrong += [(name, "the parameter itself") for name in sorted(common - {c.param.name for c in saved})]
    wrong += differences(saved, _as_read(contents, cast, recorded), weights_only=request.weights_only)
    # each tensor parallel rank has parameters of its own; what decides about collectives is alike on all
    facts = gather_over_tp(live, (bool(wrong), num_cast, same_params))
    if any(differs for differs, _, _ in facts):
        return Verification(saved_root, None, False, None, tuple(wrong))
    all_same = all(same for _, _, same in facts)
    if any(number for _, number, _ in facts) or from_16_bit or request.weights_only:
        what = [f"{num_cast} tensors cast to this run's dtype (compared as read)"] if num_cast else []
        what += ["master weights rounded to 16 bits (load_from_fp32_weights is off)"] if from_16_bit else []
        what += ["weights only"] if request.weights_only else []
        what += [_INCOMPARABLE] if not all_same else []
        return Verification(saved_root, None, None, f"digests of what was loaded match the record; {', '.join(what)}")
    contents = with_saved_kinds(contents, saved)
    root = _root(live, contents)
    if all_same:
        ours, theirs = root, saved_root
    else:
        ours = _root(live, [content for content in contents if content.param.name in common])
        theirs = _root(live, saved)
    if ours != theirs:  # the live state has something that the saved one has not
        return Verification(theirs, ours, False, None)
    if not all_same:
        return Verification(saved_root, root, None, f"digests of what was restored match the record; {_INCOMPARABLE}")
    return Verification(saved_root, root, True, None)


def _without_record(load_plan: LoadPlan, local: LocalDigests) -> Verification:
    """The content root of the live state, where there is nothing to compare it with. Collective."""
    live = load_plan.live
    note = (
        "saved without a commit record, so without digests: NOT CHECKED. "
        f"`zeroelastic verify {load_plan.tag_dir}` compares its files with their checksums"
    )
    try:
        return Verification(None, _root(live, whole_contents(live, local)), None, note)
    except CopiesDifferError as error:
        return Verification(None, None, None, f"{note}; {error}")


def _as_read(
    contents: list[ParamContent], cast: Mapping[TensorKey, int], recorded: Mapping[str, ParamContent]
) -> list[ParamContent]:
    """Return live contents in which a tensor that is kept in another dtype, or rounded, counts as it was read."""
    read: dict[str, dict[str, tuple[str, int]]] = {}
    for (name, key), digest in cast.items():
        if name in recorded and key in recorded[name].tensors:
            read.setdefault(name, {})[key] = (recorded[name].tensors[key][0], digest)
    return [
        replace(content, tensors={**content.tensors, **read[content.param.name]})
        if content.param.name in read
        else content
        for content in contents
    ]


def differences(
    saved: Collection[ParamContent], live: Collection[ParamContent], *, weights_only: bool
) -> list[tuple[str, str]]:
    """Return every tensor and scalar in which two lists of contents differ, as (parameter, state key).

    Scalars are compared as numbers, because optimizers keep a step in different types. ``weights_only`` compares only
    master weights and frozen parameters.
    """
    found: list[tuple[str, str]] = []
    others = {content.param.name: content for content in live}
    wrong_scalars: dict[tuple[int, int], list[str]] = {}  # the parameters of a group share their scalars
    for content in saved:
        name, other = content.param.name, others.get(content.param.name)
        if other is None:
            found.append((name, "the parameter itself"))
            continue
        tensors = {k: v for k, v in content.tensors.items() if not weights_only or k in (FP32, FROZEN)}
        found += [(name, key) for key in sorted(tensors) if other.tensors.get(key) != tensors[key]]
        if weights_only:
            continue
        pair = id(content.scalars), id(other.scalars)
        if pair not in wrong_scalars:
            wrong_scalars[pair] = [
                key
                for key, value in sorted(content.scalars.items())
                if key not in other.scalars or other.scalars[key].number() != value.number()
            ]
        found += [(name, key) for key in wrong_scalars[pair]]
    return found


def with_saved_kinds(live: Collection[ParamContent], saved: Collection[ParamContent]) -> list[ParamContent]:
    """Return live contents with each scalar in the type of the saved one if both are the same number."""
    kept = {content.param.name: content.scalars for content in saved}
    none: Mapping[str, ScalarValue] = {}
    made: dict[tuple[int, int], Mapping[str, ScalarValue]] = {}  # the parameters of a group share their scalars
    found: list[ParamContent] = []
    for content in live:
        others = kept.get(content.param.name, none)
        pair = id(content.scalars), id(others)
        if pair not in made:
            made[pair] = {
                key: others[key] if key in others and others[key].number() == value.number() else value
                for key, value in content.scalars.items()
            }
        found.append(replace(content, scalars=made[pair]))
    return found


def raise_mismatch(verified: Verification, load_plan: LoadPlan) -> NoReturn:
    """Raise DigestMismatchError, the same on all ranks, where ``verify`` has failed on any. Collective.

    It names parameters, state keys and, where the shards carry digests of their own, the files.
    """
    live = load_plan.live
    own = sorted({*verified.wrong})  # the same on all ranks of a data parallel group
    parts = gather_over_tp(live, (len(own), own[:_NAMED]))
    num_wrong = sum(number for number, _ in parts)
    if num_wrong:
        named = sorted(stream for _, streams in parts for stream in streams)[:_NAMED]
        raise DigestMismatchError(_describe(own, named, num_wrong, load_plan))
    roots = all_gather((verified.loaded_root, verified.saved_root) if verified.failed else None)
    ours, theirs = (str(root)[:_ROOT_DIGITS] for root in next(found for found in roots if found is not None))
    raise DigestMismatchError(
        f"{load_plan.tag_dir}: everything that was saved is live, but the live state's content root is "
        f"{ours} and the saved one {theirs}: the optimizer holds state that the checkpoint does not. Do not train on "
        "it; load into a new engine."
    )


def _root(live: LiveOptimizer, contents: list[ParamContent]) -> str:
    """The content root over all tensor parallel ranks. Collective."""
    return content_root(content for part in gather_over_tp(live, contents) for content in part)


def _sums(live: LiveOptimizer, digests: Mapping[DigestKey, int]) -> dict[TensorKey, int]:
    """Add up partial digests of what was read, whatever its dtype, over all ranks. Collective where there are any.

    Without slices all ranks have some, or none has.
    """
    if not digests and live.whole.slices is None:
        return {}
    found = reduce_digests(live, {stream: (_ANY_DTYPE, digests[stream]) for stream in sorted(digests)})
    return {tensor: total for tensor, (_, total) in sorted(found.items())}


def _describe(own: Sequence[TensorKey], named: Sequence[TensorKey], num_wrong: int, load_plan: LoadPlan) -> str:
    """Name the tensors that differ on any rank, and the damaged files that some ranks look for. Collective.

    The first rank of each data parallel group looks; if it does not see all files, the reader of each file does.
    """
    inventory = load_plan.checkpoint.inventory
    looks = load_plan.live.rank == 0
    if not inventory.reads_headers:
        looks = any(inventory.reader(name) == inventory.rank for name in inventory.readers_of)
    found = all_gather(_damaged_files(own[:_NAMED], load_plan) if looks and own else None)
    reports = [report for report in found if report is not None]
    any_named = any(are_named for are_named, _ in reports)
    files = " ".join(text for are_named, text in reports if text and are_named == any_named)
    names = ", ".join(f"{name}: {key}" for name, key in named)
    more = " ..." if num_wrong > _NAMED else ""
    differ = "1 tensor differs" if num_wrong == 1 else f"{num_wrong} tensors differ"
    return f"{load_plan.tag_dir}: {differ} from the commit record: {names}{more}. {files} The checkpoint is damaged."


def _damaged_files(wrong: Sequence[TensorKey], load_plan: LoadPlan) -> tuple[bool, str]:
    """Return whether damaged files are known, and a sentence that names them, or else the files with the tensors.

    Damaged is a file, of those that this rank reads, whose payload is not what its own digests or checksums state.
    """
    checkpoint, inventory = load_plan.checkpoint, load_plan.checkpoint.inventory

    def is_read_here(path: FilePath) -> bool:
        return inventory.reads_for_all(path.name, shared=True)

    names = sorted({name for name, _ in wrong})
    bad: set[str] = set()
    holders: set[str] = set()
    for rank, path in enumerate(checkpoint.optim_files):
        if not is_read_here(path):
            continue
        try:
            shard = checkpoint.shard(rank)
            index = shard.layout.index()
            here = [index[name] for name in names if name in index and shard.layout.owned(rank)[1][index[name]]]
            if here:
                holders.add(path.name)
            if not here or shard.digests is None:
                is_bad = bool(here) and _contradicts_itself(path, shard.size)
            else:
                stated = [read_range(path, shard.digests.offset + 8 * at, 8) for at in here]
                is_bad = [_part_digest(shard, at).to_bytes(8, "little") for at in here] != stated
            bad |= {path.name} if is_bad else set()
        except (ZeroElasticError, OSError) as error:  # the others wait for this sentence
            return False, f"({error})"
    if any(key == FROZEN for _, key in wrong):
        sizes = file_sizes(checkpoint.tag_dir)
        experts = () if checkpoint.frozen.experts is None else checkpoint.expert_files
        for path in filter(is_read_here, (*checkpoint.model_files, *(checkpoint.tag_dir / name for name in experts))):
            label = inventory.label(path.name)
            holders.add(label)
            bad |= {label} if _contradicts_itself(path, sizes.get(path.name, 0)) else set()
    if bad:
        return True, f"Damaged: {', '.join(sorted(bad))}."
    more = " ..." if len(holders) > _NAMED else ""
    return False, f"They are in {', '.join(sorted(holders)[:_NAMED])}{more}." if holders else ""


def _contradicts_itself(path: FilePath, size: int) -> bool:
    """Return whether a file, read as a whole, does not have the checksums that it states."""
    try:
        check_archive(path, size)
    except UnreadableError:  # cannot be decided
        return False
    except CheckpointError:
        return True
    return False


def _part_digest(shard: OptimizerHeader, index: int) -> int:
    """Return the sum over state keys of the digests of the shard's part of one parameter, from the file."""
    layout, rank, total = shard.layout, shard.rank, 0
    sub_group = int(layout.sub_group[index])
    slots = [TensorSlot(key, sub_group, shard.extents[key].dtype[sub_group]) for key in shard.tensor_keys[sub_group]]
    plan = identity_plan(layout, rank)
    for rows in extent_windows(plan.take(np.flatnonzero(plan.src_param == index)), {rank: shard.extents}, slots):
        for digest in digest_rows(layout, rows, slots):
            total = combine(total, digest)
    return total
