"""Compares what all ranks have read of files without digests with the CRC-32 that these files state."""

from __future__ import annotations

import pickle
import zlib

import torch.distributed as dist

from zeroelastic.checkpoint.read_ranges import Comparison, ReadFiles, ReadRanges, compare_files
from zeroelastic.checkpoint.tag_files import parse_rank_file
from zeroelastic.deepspeed.load.preflight import LoadPlan
from zeroelastic.distributed.collective import all_gather, all_or_raise
from zeroelastic.distributed.exchange import all_to_all_bytes
from zeroelastic.errors import counted
from zeroelastic.executors.dispatch import Executor, host_executor


def compare_checksums(load_plan: LoadPlan, read: ReadFiles, executor: Executor) -> tuple[str, int]:
    """Compare the records that the ranks have read together; a clause on it, and the bytes read here. Collective.

    One rank gets the ranges of a file from all and puts them together. Raises DigestMismatchError on every rank where a
    record has another checksum, CheckpointError, UnreadableError.
    """
    checkpoint = load_plan.checkpoint
    top = str(checkpoint.tag_dir)
    by_owner: dict[int, dict[str, ReadRanges]] = {}
    for path, ranges in read.items():
        name = str(path).removeprefix(top).lstrip("/")
        by_owner.setdefault(_owner(load_plan, name), {})[name] = ranges
    arrived = all_to_all_bytes({owner: pickle.dumps(files) for owner, files in by_owner.items()})
    parts: dict[str, list[ReadRanges]] = {}
    for data in arrived.values():
        for name, ranges in pickle.loads(data).items():
            parts.setdefault(name, []).append(ranges)
    files = {checkpoint.tag_dir / name: ReadRanges.joined(found) for name, found in sorted(parts.items())}
    own = all_or_raise(lambda: compare_files(files, checkpoint.archives, host_executor(executor)))
    total = Comparison()
    for other in all_gather(own):
        total = total.plus(other)
    total.check()
    of_fsdp2 = parse_rank_file(load_plan.head.path.name) is None  # which no verb verifies
    advice = "" if of_fsdp2 else f"; `zeroelastic verify {top}` checks all of them"
    return _clause(total, advice), own.bytes_read


def _owner(load_plan: LoadPlan, name: str) -> int:
    """The rank that puts the ranges of a file together: one that has read it, where ranks take parts in turn."""
    visibility, file, ranks = load_plan.visibility, parse_rank_file(name), dist.get_world_size()
    if visibility is not None:
        return visibility.reader(name)
    if file is None:
        return zlib.crc32(name.encode()) % ranks
    topology = load_plan.checkpoint.topology
    saved = file.rank * topology.tensor_size + file.tp_rank
    return saved * ranks // topology.world_size % ranks


def _clause(total: Comparison, advice: str) -> str:
    parts: list[str] = []
    if total.num_compared:
        parts.append(f"what was read has the CRC-32 that its files state ({counted(total.num_compared, 'record')})")
    if total.num_partial:
        parts.append(f"NOT CHECKED: {counted(total.num_partial, 'record')} read in part{advice}")
    if total.num_unstated:
        parts.append(f"NOT CHECKED: {counted(total.num_unstated, 'record')} of files that state no CRC-32")
    return "; ".join(parts) or "nothing was read"
