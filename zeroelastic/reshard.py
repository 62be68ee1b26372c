"""A native ZeRO-3 checkpoint at another world size, made from files without a training job, a rank at a time.

Each target rank's files are laid out, filled from the saved ranks' files in one pass that also digests what it moves,
and flushed. What every rank got adds up to the digests of the whole state, which are compared with the commit record
of the source, and become that of the target. Everything is written into a hidden directory beside the target and
renamed when it is complete; a run that was killed is taken up where it was, by the same command.
"""

from __future__ import annotations

import errno
import os
import shutil
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from zeroelastic._version import __version__
from zeroelastic.checkpoint import open_checkpoint
from zeroelastic.digest import ParamContent, content_root
from zeroelastic.errors import CheckpointError, DigestMismatchError, UsageError
from zeroelastic.extras import Extras, plan_extras, write_extras
from zeroelastic.global_batch import misfit_notes
from zeroelastic.native import NativeSource, NativeTarget, native_source, native_target
from zeroelastic.one_save import check_one_save
from zeroelastic.processes import Processes
from zeroelastic.publish import check_free
from zeroelastic.rank_writer import Progress, RankWriter, WrittenRank
from zeroelastic.record import (
    RECORD_NAME,
    RECORD_VERSION,
    CheckpointFormat,
    CommitRecord,
    Versions,
    param_records,
    record_text,
    sync_directory,
    write_atomically,
)
from zeroelastic.source import Source
from zeroelastic.staging import publish, staged, staged_bytes, sweep
from zeroelastic.state import SavedState, open_state
from zeroelastic.storage import FilePath
from zeroelastic.tag_names import LATEST
from zeroelastic.torchfile import directory_digest

LEAST_MEMORY = 64 << 20
"""The smallest ``max_memory``: buffers of a few threads and the tables of one rank."""

_THREAD_BYTES = 2 << 20
_NAMED = 8


@dataclass(frozen=True, slots=True)
class ReshardOptions:
    """What to make: for how many ranks, in which format, within how much memory.

    ``sub_group_size`` overrides the saved configuration's; ``verify`` reads the result again before it is published;
    ``fsync`` makes it durable before that. Raises UsageError for values that make no sense.
    """

    world_size: int
    format: CheckpointFormat = "elastic"
    sub_group_size: int | None = None
    max_memory: int = 1 << 30
    verify: bool = False
    fsync: bool = True

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise UsageError(f"a world size of {self.world_size} makes no sense; give 1 or more.")
        if self.sub_group_size is not None and self.sub_group_size < 1:
            raise UsageError(f"a sub_group_size of {self.sub_group_size} makes no sense; give 1 or more.")
        if self.max_memory < LEAST_MEMORY:
            raise UsageError(f"at least {LEAST_MEMORY >> 20} MiB of memory are needed.")


@dataclass(frozen=True, slots=True)
class ReshardPlan:
    """What a reshard is going to do: its source taken apart, its target's layout, and how much there is to move.

    ``nbytes`` is the payload that is moved; ``file_bytes`` the size of all rank files, padding and headers included.
    """

    source: Source
    state: SavedState
    native: NativeSource
    target: NativeTarget
    extras: Extras
    options: ReshardOptions

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return self.state.nbytes


@dataclass(frozen=True, slots=True)
class ReshardReport:
    """What a reshard did. ``resumed_ranks`` were already there from a run that had been killed.

    ``source_root`` is None where the source has no commit record; ``root`` is the content root of what was written.
    """

    path: str
    tag: str
    format: CheckpointFormat
    saved_world_size: int
    world_size: int
    bytes_moved: int
    file_bytes: int
    resumed_ranks: int
    source_root: str | None
    root: str
    verified: bool
    notes: tuple[str, ...]


def plan_reshard(source: Source, options: ReshardOptions) -> ReshardPlan:
    """Open every header of the source, check it, and lay the target out; nothing is written.

    Raises CheckpointError, UnsupportedError, UsageError.
    """
    state = open_state(open_checkpoint(source.tag_dir))
    native = native_source(state, sub_group_size=options.sub_group_size)
    target = native_target(native, options.world_size, options.format)
    saved_world_size = state.checkpoint.world_size
    extras = plan_extras(source, saved_world_size=saved_world_size, world_size=options.world_size)
    misfit = misfit_notes(native.train_batch_size, options.world_size, saved_world_size, state.head.ds_config)
    extras = replace(extras, notes=(*misfit, *extras.notes))
    return ReshardPlan(source, state, native, target, extras, options)


def reshard(
    plan: ReshardPlan, dst: Path, *, processes: Processes | None = None, progress: Progress | None = None
) -> ReshardReport:
    """Carry a plan out: ``dst`` is there in the end, complete, or not at all. Collective over ``processes``.

    A run that is killed, also by SIGTERM, leaves a hidden directory beside ``dst`` from which the same command goes
    on; one that fails or is interrupted leaves nothing. Raises UsageError (``dst`` exists, or lies in the source),
    DigestMismatchError when what was read is not what the source's commit record says, CheckpointError, OSError.

    Example::

        plan = plan_reshard(find_source("ckpt"), ReshardOptions(world_size=12))
        print(reshard(plan, Path("ckpt-12")).root)
    """
    processes = processes or Processes()
    dst = Path(os.path.abspath(dst))
    processes.first(lambda: sweep(dst.parent))
    processes.first(lambda: check_target(plan, dst))
    with staged(dst, _manifest(plan), processes) as (staging, save_id):
        writer = RankWriter(
            plan.native,
            plan.target,
            staging,
            plan.source.tag,
            save_id,
            threads=_threads(plan.options.max_memory),
            fsync=plan.options.fsync,
            progress=progress,
        )
        done = processes.settle(lambda: writer.write_ranks(processes))
        everything = [rank for part in processes.gather(done) for rank in part]
        alone = processes.size == 1 and plan.source.framework == "deepspeed"

        processes.settle(lambda: check_one_save(plan.source.tag_dir, alone=alone))
        return processes.first(lambda: _publish(plan, staging, dst, save_id, everything, writer.streams))


def check_target(plan: ReshardPlan, dst: Path) -> None:
    """Refuse a target that is there already or inside the source, and a disk that is too small.

    Raises UsageError, OSError.
    """
    root = plan.source.root
    check_free(dst, sources=(root,) if isinstance(root, Path) else ())
    free, needed = shutil.disk_usage(dst.parent).free + staged_bytes(dst), plan.nbytes
    if free < needed:
        raise OSError(errno.ENOSPC, f"{needed:,} bytes are needed and {free:,} are free", str(dst.parent))


def _manifest(plan: ReshardPlan) -> dict[str, object]:
    """What a run must have in common with one that was killed, to go on where it was."""
    state = plan.state
    files = (*state.checkpoint.optim_files, *state.checkpoint.model_files)
    record = state.checkpoint.record
    return {
        "zeroelastic": __version__,
        "source": str(plan.source.tag_dir),
        "files": {str(path): _identity(path) for path in files},
        "source_root": None if record is None else record.content_root,
        "world_size": plan.options.world_size,
        "format": plan.options.format,
        "sub_group_size": plan.native.sub_group_size,
    }


def _identity(path: FilePath) -> list[int]:
    if not isinstance(path, Path):
        info = path.system.info(path.path)
        return [int(info.get("size") or 0), zlib.crc32(repr(info.get("ETag") or info.get("mtime") or "").encode())]
    found = path.stat()
    return [found.st_size, found.st_mtime_ns]


def _publish(
    plan: ReshardPlan,
    staging: Path,
    dst: Path,
    save_id: str,
    done: Sequence[WrittenRank],
    streams: Sequence[tuple[str, str]],
) -> ReshardReport:
    """Compare with the source's record, write the target's, everything beside it, and rename it into place."""
    assert sorted(rank.rank for rank in done) == list(range(plan.options.world_size))
    totals = np.zeros(len(streams), dtype=np.uint64)
    for rank in done:
        totals += rank.digests
    digests = dict(zip(streams, totals.tolist(), strict=True))
    contents = plan.state.contents(digests)
    root = content_root(contents)
    source_record = plan.state.checkpoint.record
    _compare(plan, contents, root)
    source, state = plan.source, plan.state
    root_dir = staging / "root"
    files = {name: size for rank in done for name, size in sorted(rank.files.items())}
    found = {name: directory_digest(root_dir / source.tag / name) for name in files}
    at = None if source_record is None else source_record.committed_at
    record = CommitRecord(
        format_version=RECORD_VERSION,
        checkpoint_format=plan.options.format,
        save_id=save_id,
        tag=source.tag,
        world_size=plan.options.world_size,
        global_steps=state.models[0].global_steps,
        train_batch_size=plan.native.train_batch_size or 0,
        committed_at=None if at is None else round(at + 1e-6, 6),  # among the source's tags it comes next to it
        parent=None if source_record is None else source_record.save_id,
        versions=_versions(plan),
        files=files,
        directories={name: directory for name, directory in found.items() if directory is not None},
        params=param_records(contents, frozenset(param.name for param in plan.target.layout.params)),
        content_root=root,
    )
    write_atomically(root_dir / source.tag / RECORD_NAME, record_text(record))
    notes = [*plan.extras.notes, *write_extras(source, plan.extras, root_dir, identity=root)]
    if source.latest not in (None, source.tag):
        notes.append(f"the source's {LATEST} names {source.latest}; the target's names {source.tag}")
    write_atomically(root_dir / LATEST, source.tag.encode())
    if plan.options.verify:
        _verify(root_dir / source.tag)
    sync_directory(root_dir / source.tag)
    publish(staging, root_dir, dst)
    return ReshardReport(
        path=str(dst),
        tag=source.tag,
        format=plan.options.format,
        saved_world_size=state.checkpoint.world_size,
        world_size=plan.options.world_size,
        bytes_moved=sum(rank.bytes_moved for rank in done if not rank.resumed),
        file_bytes=sum(size for rank in done for size in rank.files.values()),
        resumed_ranks=sum(rank.resumed for rank in done),
        source_root=None if source_record is None else source_record.content_root,
        root=root,
        verified=plan.options.verify,
        notes=tuple(notes),
    )


def _threads(max_memory: int) -> int | None:
    """As many threads as usual, or fewer where the memory limit is tight."""
    most = max(1, (max_memory - LEAST_MEMORY // 2) // _THREAD_BYTES)
    return None if most >= len(os.sched_getaffinity(0)) else int(most)


def _versions(plan: ReshardPlan) -> Versions:
    record = plan.state.checkpoint.record
    saved = plan.native.optim_root.get("ds_version")
    return Versions(
        zeroelastic=__version__,
        deepspeed=record.versions.deepspeed if record is not None else saved if isinstance(saved, str) else "unknown",
        torch=record.versions.torch if record is not None else "unknown",
    )


def _compare(plan: ReshardPlan, contents: Sequence[ParamContent], root: str) -> None:
    """Raise DigestMismatchError when what was moved is not what the source's commit record says was saved."""
    record = plan.state.checkpoint.record
    if record is None or record.content_root == root:
        return
    saved = {content.param.name: content for content in record.contents()}
    wrong: list[str] = []
    for content in contents:
        other = saved.pop(content.param.name, None)
        if other is None:
            wrong.append(f"{content.param.name} (not in the record)")
            continue
        wrong += [
            f"{content.param.name}: {key}"
            for key in sorted({*content.tensors, *other.tensors})
            if content.tensors.get(key) != other.tensors.get(key)
        ]
        if {k: v.canonical() for k, v in content.scalars.items()} != {
            k: v.canonical() for k, v in other.scalars.items()
        }:
            wrong.append(f"{content.param.name}: scalars")
    wrong += [f"{name} (not in the files)" for name in saved]
    more = f" and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
    raise DigestMismatchError(
        f"{plan.source.tag_dir}: what was read differs from what its commit record says was saved: "
        f"{', '.join(wrong[:_NAMED])}{more}. The checkpoint is damaged: `zeroelastic verify` says where. Nothing was "
        "written."
    )


def _verify(tag_dir: Path) -> None:
    from zeroelastic.verification import verify_checkpoint

    report = verify_checkpoint(tag_dir)
    if not report.valid:
        raise CheckpointError(f"{tag_dir}: what was written does not read back: {report.problems[0]}")


__all__ = [
    "ReshardOptions",
    "ReshardPlan",
    "ReshardReport",
    "plan_reshard",
    "reshard",
]
