"""The proof of a load: digests of the live state, in its own layout, against the commit record."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from zeroelastic.agree import gather
from zeroelastic.checkpoint import Checkpoint
from zeroelastic.digest import ParamContent, combine, content_root, stream_seed
from zeroelastic.errors import CheckpointError, DigestMismatchError, UnreadableError, ZeroElasticError
from zeroelastic.executors import digest_range
from zeroelastic.intact import check_records
from zeroelastic.shard import FP32, FROZEN, Shard
from zeroelastic.stage3.contents import (
    differences,
    local_digests,
    of_every_tp_rank,
    whole_contents,
    with_saved_kinds,
)
from zeroelastic.stage3.fill import Filled
from zeroelastic.stage3.live import LiveState
from zeroelastic.stage3.nodes import Sight
from zeroelastic.stage3.options import Options
from zeroelastic.stage3.survey import Survey
from zeroelastic.storage import FilePath, file_sizes, read_range
from zeroelastic.torchfile import DTYPE_BYTES, Extent

_NAMED = 8
_CHUNK_BYTES = 4 << 20
_DAMAGED = "Damaged:"
_INCOMPARABLE = "content roots are not comparable, because the run does not train the parameters of the save"


@dataclass(frozen=True, slots=True)
class Proof:
    """The saved and the loaded content root, whether they match, and why that is not known."""

    saved_root: str | None
    loaded_root: str | None
    matches: bool | None
    note: str | None


def prove(
    live: LiveState,
    found: Survey,
    filled: Filled,
    tag_dir: Path,
    *,
    options: Options,
    device: torch.device,
    weights_only: bool,
    from_16_bit: bool,
) -> Proof:
    """Digest the live state and compare with the commit record. Collective.

    What was cast on the way is compared by the digest of what was read; so are master weights that the run then rounds
    to 16 bits (``from_16_bit``). Raises DigestMismatchError on every rank, naming parameters, state keys and, where
    the shards carry digests of their own, the files.
    """
    record = found.checkpoint.record
    saved_root = record.content_root if record is not None else None
    if options.verify != "full":
        return Proof(saved_root, None, None, _unverified(options))
    with_frozen = found.model.frozen is not None
    local = local_digests(live, weights_only=weights_only, with_frozen=with_frozen)
    contents = whole_contents(live, local, device=device)
    cast = sorted(filled.cast_digests)
    if record is None:
        root = _root(live, contents)
        return Proof(None, root, None, "saved without a commit record: nothing to compare with")
    membership = found.membership
    saved = [content for content in record.contents() if content.tp_rank == live.tp.rank]
    moved = sorted(filled.moved_digests)
    recorded = {(c.param.name, key): digest for c in saved for key, (_, digest) in c.tensors.items()}
    moved_sums = _sums(live, filled.moved_digests, moved, device)
    wrong = [stream for stream in moved if recorded.get(stream) != moved_sums[stream]]
    common = {*membership.restored, *membership.frozen}
    if not membership.same_params:  # what is named in the report, and what has moved, is not alike on both sides
        saved = [c for c in saved if c.param.name in common]
        wrong += [(name, "the parameter itself") for name in sorted(common - {c.param.name for c in saved})]
    if not with_frozen:
        saved = [replace(c, tensors=_without(c.tensors, {FROZEN})) for c in saved if FROZEN not in c.tensors]
    sums = _sums(live, filled.cast_digests, cast, device)
    digests = {(c.param.name, key): digest for c in saved for key, (_, digest) in c.tensors.items()}
    wrong += [stream for stream in cast if digests.get(stream, sums[stream]) != sums[stream]]
    if from_16_bit:
        saved = [replace(c, tensors=_without(c.tensors, {FP32})) for c in saved]
        cast = [stream for stream in cast if stream[1] != FP32]
    cast_keys: dict[str, set[str]] = {}
    for name, key in cast:
        cast_keys.setdefault(name, set()).add(key)
    comparable = [replace(c, tensors=_without(c.tensors, cast_keys.get(c.param.name, set()))) for c in saved]
    wrong += differences(comparable, contents, weights_only=weights_only)
    if any(gather(bool(wrong))):
        raise DigestMismatchError(_describe(live, wrong, found, tag_dir))
    if cast or from_16_bit or weights_only:
        what = [f"{len(cast)} tensors cast to this run's dtype (compared as read)"] if cast else []
        what += ["master weights rounded to 16 bits (load_from_fp32_weights is off)"] if from_16_bit else []
        what += ["weights only"] if weights_only else []
        what += [_INCOMPARABLE] if not membership.same_params else []
        return Proof(saved_root, None, None, f"digests of what was loaded match the record; {', '.join(what)}")
    contents = with_saved_kinds(contents, saved)
    root = _root(live, contents)
    same_params = all(of_every_tp_rank(live, membership.same_params))
    if not same_params:
        ours, theirs = _root(live, [c for c in contents if c.param.name in common]), _root(live, saved)
    else:
        ours, theirs = root, record.content_root
    if ours != theirs:  # the live state has something that the saved one has not
        raise DigestMismatchError(
            f"{tag_dir}: everything that was saved is live, but the live state's content root is {ours[:12]} and the "
            f"saved one {theirs[:12]}: the optimizer holds state that the checkpoint does not. Do not "
            "train on it; load into a new engine."
        )
    if not same_params:
        return Proof(saved_root, root, None, f"digests of what was restored match the record; {_INCOMPARABLE}")
    return Proof(saved_root, root, True, None)


def _unverified(options: Options) -> str:
    why = "" if "verify" in options.model_fields_set else ", the default where the native engine is not built"
    return f'content not verified ("verify": "{options.verify}"{why})'


def _without(tensors: Mapping[str, tuple[str, int]], keys: Collection[str]) -> dict[str, tuple[str, int]]:
    return {key: value for key, value in tensors.items() if key not in keys}


def _root(live: LiveState, contents: list[ParamContent]) -> str:
    """The content root over all tensor parallel ranks. Collective."""
    return content_root(content for part in of_every_tp_rank(live, contents) for content in part)


def _sums(
    live: LiveState,
    digests: Mapping[tuple[str, str], int],
    streams: Sequence[tuple[str, str]],
    device: torch.device,
) -> dict[tuple[str, str], int]:
    """Partial digests of some streams added up over all ranks. Collective."""
    if not streams:
        return {}
    partial = np.array([digests[stream] for stream in streams], dtype=np.uint64)
    table = torch.from_numpy(partial.view(np.int64)).to(device)
    dist.all_reduce(table, group=live.optimizer.dp_process_group)
    return dict(zip(streams, table.cpu().numpy().view(np.uint64).tolist(), strict=True))


def _describe(live: LiveState, wrong: Sequence[tuple[str, str]], found: Survey, tag_dir: Path) -> str:
    """The message; who looks for damaged files tells all. Collective.

    That is the first rank of each data parallel group; where it does not see all files, a rank that sees them for each.
    """
    sight = found.sight
    looks = live.rank == 0 if sight is None else any(sight.reader(name) == sight.rank for name in sight.names)
    told = gather(_damaged_files(wrong[:_NAMED], found.checkpoint, sight) if looks and wrong else "")
    damaged = [sentence for sentence in told if sentence.startswith(_DAMAGED)]
    files = " ".join(filter(None, damaged or told))
    everywhere = {(tp_rank, *stream) for tp_rank, part in gather((live.tp.rank, list(wrong))) for stream in part}
    wrong = sorted((name, key) for _, name, key in everywhere)
    named = ", ".join(f"{name}: {key}" for name, key in wrong[:_NAMED])
    more = " ..." if len(wrong) > _NAMED else ""
    return (
        f"{tag_dir}: {len(wrong)} tensors differ from what the commit record says was saved: {named}{more}. {files} "
        "The checkpoint is damaged; resume from another tag. The engine now holds damaged state: do not train on it."
    )


def _damaged_files(wrong: Sequence[tuple[str, str]], checkpoint: Checkpoint, sight: Sight | None) -> str:
    """A sentence that names the files whose payload is not what their own digests or checksums say, as far as known."""
    names = sorted({name for name, _ in wrong})
    bad: set[str] = set()
    holders: set[str] = set()
    for rank, path in enumerate(checkpoint.optim_files):
        if sight is not None and sight.reader(path.name) != sight.rank:
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
            return f"({error})"
    if any(key == FROZEN for _, key in wrong):
        models = [path for path in checkpoint.model_files if sight is None or sight.reader(path.name) == sight.rank]
        holders |= {path.name for path in models}
        sizes = file_sizes(checkpoint.tag_dir)
        bad |= {path.name for path in models if _contradicts_itself(path, sizes.get(path.name, 0))}
    if bad:
        return f"{_DAMAGED} {', '.join(sorted(bad))}."
    if not holders:
        return ""
    return f"They are in {', '.join(sorted(holders)[:_NAMED])}{' ...' if len(holders) > _NAMED else ''}."


def _contradicts_itself(path: FilePath, size: int) -> bool:
    """Whether a file, read as a whole, does not have the checksums that it states."""
    try:
        check_records(path, size)
    except UnreadableError:  # nobody knows
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
        itemsize, offset = DTYPE_BYTES[shard.pieces[key].dtype[sub_group]], int(shard.pieces[key].offset[index])
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
