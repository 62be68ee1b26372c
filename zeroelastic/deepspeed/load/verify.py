"""Verifies a load: digests of the live state, in its own layout, against the commit record."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt
import torch

from zeroelastic.checkpoint.commit_record import CommitRecord
from zeroelastic.checkpoint.open import Checkpoint
from zeroelastic.checkpoint.optimizer_file import FP32, FROZEN, Shard
from zeroelastic.core.digest import ParamContent, combine, content_root, stream_seed
from zeroelastic.deepspeed.engine import Engine
from zeroelastic.deepspeed.fill import Filled
from zeroelastic.deepspeed.live.digests import (
    differences,
    gather_over_tp,
    local_digests,
    sum_over_ranks,
    whole_contents,
    with_saved_kinds,
)
from zeroelastic.deepspeed.live.live_optimizer import LiveOptimizer
from zeroelastic.deepspeed.load.preflight import LoadPlan
from zeroelastic.deepspeed.load.request import LoadRequest
from zeroelastic.deepspeed.node_local.visibility import FileVisibility
from zeroelastic.deepspeed.options import Options
from zeroelastic.distributed.collective import all_gather
from zeroelastic.errors import CheckpointError, DigestMismatchError, UnreadableError, ZeroElasticError
from zeroelastic.executors.dispatch import digest_range
from zeroelastic.io.paths import FilePath
from zeroelastic.io.storage import file_sizes, read_range
from zeroelastic.torch_file.header import DTYPE_BYTES, Extent
from zeroelastic.torch_file.zip_reader import check_archive

_NAMED = 8
_CHUNK_BYTES = 4 << 20
_ROOT_DIGITS = 12
_INCOMPARABLE = "content roots are not comparable, because the run does not train the parameters of the save"


Stream = tuple[str, str]
"""A parameter and a state key."""


@dataclass(frozen=True, slots=True)
class Verification:
    """The saved and the loaded content root, whether they match, and why that is not known.

    ``wrong`` is every (parameter, state key) that differs; ``matches`` is False also where the live state has more.
    """

    saved_root: str | None
    loaded_root: str | None
    matches: bool | None
    note: str | None
    wrong: tuple[Stream, ...] = ()

    @property
    def failed(self) -> bool:
        """Whether this rank saw that the live state is not what was saved."""
        return self.matches is False


def verify(
    engine: Engine, live: LiveOptimizer, load_plan: LoadPlan, filled: Filled, request: LoadRequest
) -> Verification:
    """Digest the live state and compare with the commit record. Collective.

    With ``"verify": "read"`` the digests are those of the bytes as they were read, where each went to the address at
    which the live state has it; what comes later is not seen. Tensors that were cast are compared by the digest of
    what was read; so are master weights that the run then rounds to 16 bits (load_from_fp32_weights is off). Where it
    has ``failed`` on any rank, ``raise_mismatch`` has to be called on all.
    """
    checkpoint = load_plan.checkpoint
    if not request.options.verifies_content:
        saved_root = checkpoint.record.content_root if checkpoint.record is not None else None
        return Verification(saved_root, None, None, _unverified(request.options))
    actual = _actual(engine, live, load_plan, filled, request)
    if checkpoint.record is None:
        root = _root(live, actual.contents)
        return Verification(None, root, None, "saved without a commit record: nothing to compare with")
    saved_root = checkpoint.record.content_root
    expected = _expected(checkpoint.record, live, load_plan)
    wrong = _compare(expected, actual, load_plan, weights_only=request.weights_only)
    # each tensor parallel rank has parameters of its own; what decides about collectives is alike on all
    facts = gather_over_tp(live, (bool(wrong), actual.num_cast, load_plan.membership.same_params))
    if any(differs for differs, _, _ in facts):
        return Verification(saved_root, None, False, None, tuple(wrong))
    same_params = all(same for _, _, same in facts)
    if any(num_cast for _, num_cast, _ in facts) or actual.from_16_bit or request.weights_only:
        what = [f"{actual.num_cast} tensors cast to this run's dtype (compared as read)"] if actual.num_cast else []
        what += ["master weights rounded to 16 bits (load_from_fp32_weights is off)"] if actual.from_16_bit else []
        what += ["weights only"] if request.weights_only else []
        what += [_INCOMPARABLE] if not load_plan.membership.same_params else []
        return Verification(saved_root, None, None, f"digests of what was loaded match the record; {', '.join(what)}")
    contents = with_saved_kinds(actual.contents, expected.contents)
    root = _root(live, contents)
    if same_params:
        ours, theirs = root, saved_root
    else:
        ours = _root(live, [content for content in contents if content.param.name in expected.common])
        theirs = _root(live, expected.contents)
    if ours != theirs:  # the live state has something that the saved one has not
        return Verification(theirs, ours, False, None)
    if not same_params:
        return Verification(saved_root, root, None, f"digests of what was restored match the record; {_INCOMPARABLE}")
    return Verification(saved_root, root, True, None)


def raise_mismatch(live: LiveOptimizer, verified: Verification, load_plan: LoadPlan) -> NoReturn:
    """Raise DigestMismatchError, where ``verify`` has failed on any rank, in the same words on all. Collective.

    It names parameters, state keys and, where the shards carry digests of their own, the files.
    """
    own = sorted({*verified.wrong})  # the same on all ranks of a data parallel group
    parts = gather_over_tp(live, (len(own), own[:_NAMED]))
    num_wrong = sum(number for number, _ in parts)
    if num_wrong:
        named = sorted(stream for _, streams in parts for stream in streams)[:_NAMED]
        raise DigestMismatchError(_describe(own, named, num_wrong, live, load_plan))
    roots = all_gather((verified.loaded_root, verified.saved_root) if verified.failed else None)
    ours, theirs = (str(root)[:_ROOT_DIGITS] for root in next(found for found in roots if found is not None))
    raise DigestMismatchError(
        f"{load_plan.checkpoint.tag_dir}: everything that was saved is live, but the live state's content root is "
        f"{ours} and the saved one {theirs}: the optimizer holds state that the checkpoint does not. Do not train on "
        "it; load into a new engine."
    )


class _Actual(NamedTuple):
    """What is live: its contents, and digests by (parameter, state key) of what they cannot show.

    ``cast`` are digests as read of tensors that are kept in another dtype, or rounded (``from_16_bit``); ``changed``
    those of parameters that only the save, or only the run, trains.
    """

    contents: list[ParamContent]
    cast: dict[Stream, int]
    changed: dict[Stream, int]
    from_16_bit: bool

    @property
    def num_cast(self) -> int:
        """How many tensors are kept in another dtype than that of the save."""
        return sum(key != FP32 or not self.from_16_bit for _, key in self.cast)


class _Expected(NamedTuple):
    """What the commit record says of the parameters that both sides have (``common``).

    ``digests`` are of every tensor of the record, by (parameter, state key).
    """

    contents: list[ParamContent]
    digests: dict[Stream, int]
    common: frozenset[str]


def _actual(engine: Engine, live: LiveOptimizer, load_plan: LoadPlan, filled: Filled, request: LoadRequest) -> _Actual:
    """Digests of the live state over all ranks. Collective."""
    with_frozen = load_plan.model.frozen is not None
    local = local_digests(live, weights_only=request.weights_only, with_frozen=with_frozen, read=filled.read_digests)
    contents = whole_contents(live, local, device=engine.device)
    cast = _sums(live, filled.cast_digests, engine.device)
    changed = _sums(live, filled.changed_digests, engine.device)
    from_16_bit = not engine.zero_load_from_fp32_weights()
    return _Actual(contents, cast, changed, from_16_bit)


def _expected(record: CommitRecord, live: LiveOptimizer, load_plan: LoadPlan) -> _Expected:
    """What the record says, without what this load leaves alone."""
    membership = load_plan.membership
    saved = [content for content in record.contents() if content.tp_rank == live.tp.rank]
    digests = {(c.param.name, key): digest for c in saved for key, (_, digest) in c.tensors.items()}
    common = frozenset((*membership.restored, *membership.frozen))
    if not membership.same_params:  # the report names the others; changed ones are compared by digest
        saved = [content for content in saved if content.param.name in common]
    if load_plan.model.frozen is None:
        saved = [content for content in saved if FROZEN not in content.tensors]
    return _Expected(saved, digests, common)


def _compare(expected: _Expected, actual: _Actual, load_plan: LoadPlan, *, weights_only: bool) -> list[Stream]:
    """Every (parameter, state key) that is not what the record says."""
    wrong = [stream for stream, digest in actual.changed.items() if expected.digests.get(stream) != digest]
    if not load_plan.membership.same_params:
        recorded = {content.param.name for content in expected.contents}
        wrong += [(name, "the parameter itself") for name in sorted(expected.common - recorded)]
    present = {(c.param.name, key) for c in expected.contents for key in c.tensors}
    wrong += [
        stream for stream, digest in actual.cast.items() if stream in present and expected.digests[stream] != digest
    ]
    as_read: dict[str, set[str]] = {}
    for name, key in actual.cast:
        as_read.setdefault(name, set()).add(key)
    rounded = {FP32} if actual.from_16_bit else set()
    comparable = [
        replace(c, tensors=_without(c.tensors, as_read.get(c.param.name, set()) | rounded)) for c in expected.contents
    ]
    return wrong + differences(comparable, actual.contents, weights_only=weights_only)


def _unverified(options: Options) -> str:
    return f'content not verified ("verify": "{options.verify}")'


def _without(tensors: Mapping[str, tuple[str, int]], keys: Collection[str]) -> dict[str, tuple[str, int]]:
    return {key: value for key, value in tensors.items() if key not in keys}


def _root(live: LiveOptimizer, contents: list[ParamContent]) -> str:
    """The content root over all tensor parallel ranks. Collective."""
    return content_root(content for part in gather_over_tp(live, contents) for content in part)


def _sums(live: LiveOptimizer, digests: Mapping[Stream, int], device: torch.device) -> dict[Stream, int]:
    """Partial digests added up over all ranks, which have the same keys; sorted. Collective where there are any."""
    streams = sorted(digests)
    if not streams:
        return {}
    totals = sum_over_ranks([digests[stream] for stream in streams], device=device, group=live.dp_group)
    return dict(zip(streams, totals, strict=True))


def _describe(
    own: Sequence[Stream], named: Sequence[Stream], num_wrong: int, live: LiveOptimizer, load_plan: LoadPlan
) -> str:
    """The message: what is wrong on any rank, with the damaged files that some ranks look for. Collective.

    The first rank of each data parallel group looks; if it does not see all files, the reader of each file does.
    """
    visibility = load_plan.visibility
    looks = (
        live.rank == 0
        if visibility is None
        else any(visibility.reader(name) == visibility.rank for name in visibility.names)
    )
    found = all_gather(_damaged_files(own[:_NAMED], load_plan.checkpoint, visibility) if looks and own else None)
    reports = [report for report in found if report is not None]
    damaged = [report for report in reports if report.files]
    files = " ".join(report.text for report in damaged or reports if report.text)
    names = ", ".join(f"{name}: {key}" for name, key in named)
    more = " ..." if num_wrong > _NAMED else ""
    differ = "1 tensor differs" if num_wrong == 1 else f"{num_wrong} tensors differ"
    return (
        f"{load_plan.checkpoint.tag_dir}: {differ} from what the commit record says was saved: "
        f"{names}{more}. {files} The checkpoint is damaged."
    )


class _Damage(NamedTuple):
    """The damaged files that one rank found, and a sentence that names them, or else what is known."""

    files: tuple[str, ...]
    text: str


def _damaged_files(wrong: Sequence[Stream], checkpoint: Checkpoint, visibility: FileVisibility | None) -> _Damage:
    """The files whose payload is not what their own digests or checksums state, among those that this rank reads."""
    names = sorted({name for name, _ in wrong})
    bad: set[str] = set()
    holders: set[str] = set()
    for rank, path in enumerate(checkpoint.optim_files):
        if visibility is not None and visibility.reader(path.name) != visibility.rank:
            continue
        try:
            shard = checkpoint.shard(rank)
            for name in names:
                index = shard.layout.index().get(name)
                if index is None or shard.layout.owned(rank)[1][index] == 0:
                    continue
                holders.add(shard.path.name)
                if shard.digests is None:
                    if _contradicts_itself(shard.path, shard.size):
                        bad.add(shard.path.name)
                    break
                if _part_digest(shard, index) != _recorded(shard, shard.digests, index):
                    bad.add(shard.path.name)
        except (ZeroElasticError, OSError) as error:  # the others wait for this sentence
            return _Damage((), f"({error})")
    if any(key == FROZEN for _, key in wrong):
        models = [
            path
            for path in checkpoint.model_files
            if visibility is None or visibility.reader(path.name) == visibility.rank
        ]
        labels = {path: path.name if visibility is None else visibility.label(path.name) for path in models}
        holders |= set(labels.values())
        sizes = file_sizes(checkpoint.tag_dir)
        bad |= {labels[path] for path in models if _contradicts_itself(path, sizes.get(path.name, 0))}
    if bad:
        return _Damage(tuple(sorted(bad)), f"Damaged: {', '.join(sorted(bad))}.")
    if not holders:
        return _Damage((), "")
    more = " ..." if len(holders) > _NAMED else ""
    return _Damage((), f"They are in {', '.join(sorted(holders)[:_NAMED])}{more}.")


def _contradicts_itself(path: FilePath, size: int) -> bool:
    """Whether a file, read as a whole, does not have the checksums that it states."""
    try:
        check_archive(path, size)
    except UnreadableError:  # cannot be decided
        return False
    except CheckpointError:
        return True
    return False


def _recorded(shard: Shard, digests: Extent, index: int) -> int:
    return int(_read(shard.path, digests.offset + 8 * index, 8).view("<u8")[0])


def _part_digest(shard: Shard, index: int) -> int:
    """The sum over state keys of the digests of the shard's part of one parameter, from the file."""
    start, length = (int(column[index]) for column in shard.layout.owned(shard.rank))
    sub_group, name, total = int(shard.layout.sub_group[index]), shard.layout.params[index].name, 0
    for key in shard.tensor_keys[sub_group]:
        itemsize, offset = DTYPE_BYTES[shard.extents[key].dtype[sub_group]], int(shard.extents[key].offset[index])
        seed = stream_seed(name, key)
        for done in range(0, length * itemsize, _CHUNK_BYTES):
            data = _read(shard.path, offset + done, min(_CHUNK_BYTES, length * itemsize - done))
            total = combine(total, digest_range(data, itemsize, seed=seed, start=start + done // itemsize))
    return total


def _read(path: FilePath, offset: int, nbytes: int) -> npt.NDArray[np.uint8]:
    data = read_range(path, offset, nbytes)
    if len(data) != nbytes:
        raise CheckpointError(f"{path}: ends at byte {offset + len(data)}. The file is truncated.")
    return np.frombuffer(data, dtype=np.uint8)
