"""The commit of a save: its files read back, the commit record, and the rename that makes the tag.

The files of a rank are read back by the readers of a load, headers alone, and compared with the run that saved them. A
save that a load of the same run would refuse is not committed.
"""

from __future__ import annotations

import json
import logging
import shutil
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist

from zeroelastic._version import __version__
from zeroelastic.checkpoint.commit_record import (
    RECORD_NAME,
    RECORD_VERSION,
    CheckpointFormat,
    CommitRecord,
    Versions,
    record_text,
)
from zeroelastic.checkpoint.model_states import ModelStates, model_states_of
from zeroelastic.checkpoint.optimizer_reader import open_shard
from zeroelastic.checkpoint.param_table import param_records, params_digest
from zeroelastic.checkpoint.saved_state import frozen_part, trained_part
from zeroelastic.checkpoint.tensor_parallel import TensorParallel
from zeroelastic.core.digest import ParamContent, content_root
from zeroelastic.core.layout import Layout, Param
from zeroelastic.deepspeed.engine import Engine
from zeroelastic.deepspeed.engine_state import Lineage
from zeroelastic.deepspeed.save.barrier import SaveBarrier
from zeroelastic.deepspeed.save.written import Written, gather_written
from zeroelastic.errors import CheckpointError, SaveError, UnreadableError, UnsafePickleError, UnsupportedError
from zeroelastic.io.atomic import sync_path, write_atomically
from zeroelastic.io.paths import FilePath
from zeroelastic.io.storage import file_names, file_size
from zeroelastic.tags.tag_directory import carry_over, publish_tag
from zeroelastic.torch_file.header import Blocks, read_torch_file
from zeroelastic.torch_file.safe_unpickler import allow_globals

logger = logging.getLogger(__name__)


def new_save_id() -> str:
    """An identity for one save, which every file of it has: 32 hexadecimal digits."""
    return uuid.uuid4().hex


@dataclass(frozen=True, slots=True)
class Expected:
    """What the two files of a rank have to say: its place, the step, and the parameters as they were when it saved.

    ``frozen`` are None where they are excluded from the save. ``allow_globals`` are those of the run's options.
    """

    rank: int
    tp: TensorParallel
    global_steps: int
    layout: Layout
    groups: tuple[tuple[str, ...], ...]
    frozen: tuple[Param, ...] | None
    allow_globals: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PendingCommit:
    """A save that was handed to its writer: all that the commit record says but the sizes of the files.

    ``contents`` are of the state at the moment of the save, over all ranks; ``trained`` names the trained parameters
    among them, and ``written`` this rank's module states and optimizer file in ``staging_dir``, the hidden directory
    that becomes ``tag_dir``, which is ``place`` without the symbolic links that led there when the save began; they
    have to say what is ``expected``. Ranks that see the same directory have the same one of ``heads``, by rank: the
    first of them, which ``acts`` for all. ``latest`` is the file that is to name the tag, or None.
    """

    tag_dir: FilePath
    place: Path
    tag: str
    save_id: str
    checkpoint_format: CheckpointFormat
    expected: Expected
    train_batch_size: int
    written: tuple[str, str]
    staging_dir: Path
    heads: tuple[int, ...]
    acts: bool
    lineage: Lineage
    lost_micro_batches: int
    latest: FilePath | None
    fsync: bool
    contents: tuple[ParamContent, ...] = ()
    trained: frozenset[str] = frozenset()


def acts(heads: Sequence[int]) -> bool:
    """Whether this rank is the first that sees its directory."""
    return heads[dist.get_rank()] == dist.get_rank()


def commit(save: PendingCommit, barrier: SaveBarrier) -> int:
    """Make the files of a save durable, write its record and put the tag in place, on all ranks or none; then `latest`.

    Returns the bytes of all files on rank 0, and 0 on the others.

    Everything that the record names has been written, by whatever process. Raises SaveError on every rank when a file
    is missing, cannot be made durable, or is not what other ranks see of it, or a rank does not arrive: then the tag is
    what it was before the save. Collective.
    """
    with discarded_on_failure(save.staging_dir, acts=save.acts), barrier.attribute_failures():
        own = barrier.all_or_raise(lambda: _settled_files(save, barrier), "its files were made durable")
        # for those who write a record: rank 0, or heads
        committed_at, unreadable, written = gather_written(own, save.written, to_all=any(save.heads))
        barrier.all_or_raise(lambda: _recorded(save, barrier, written, committed_at), "its commit record was written")
        barrier.all_or_raise(lambda: _publish_tag(save) if save.acts else None, "it was put in place")
    if not unreadable:
        save.lineage.commit(save.save_id, committed_at)
    barrier.outcome_note = "The checkpoint is complete; load it by its tag."
    if save.latest is not None:
        barrier.all_or_raise(lambda: _point_latest(save) if save.acts else None, "`latest` was written")
    if dist.get_rank() != 0:
        return 0
    # Ranks that see one directory may name the same file: that of the whole module, at stages 1 and 2.
    of_all = zip(save.heads, written, strict=True)
    return sum({(head, name): size for head, own in of_all for name, size in own.sizes.items()}.values())


def _settled_files(save: PendingCommit, barrier: SaveBarrier) -> Written:
    """Make this rank's files durable, read them back as a load would, and leave their sizes to another rank."""
    not_before = save.lineage.next_time(time.time() if dist.get_rank() == 0 else 0.0)
    sizes: dict[str, int] = {}
    paths = [save.staging_dir / name for name in save.written]
    try:
        for path in paths:
            sizes[path.name] = path.stat().st_size
            if save.fsync:
                sync_path(path)
        barrier.leave_note(json.dumps(sizes))
        directories = read_back(
            paths[0],
            paths[1],
            save.expected,
            format=save.checkpoint_format,
            save_id=save.save_id,
            contents=save.contents,
        )
    except UnreadableError as error:
        raise not_committed(save, str(error).rstrip(".")) from error
    except OSError as error:
        raise not_committed(save, f"{error.filename or save.tag_dir}: {error.strerror}") from error
    except (CheckpointError, UnsupportedError) as error:
        if save.checkpoint_format == "rigid" and isinstance(error, (UnsafePickleError, UnsupportedError)):
            return Written(sizes, {}, str(error), not_before)  # as stock DeepSpeed saves it
        raise not_committed(save, f"no load would take it: {str(error).rstrip('.')}") from error
    return Written(sizes, directories, None, not_before)


def _recorded(save: PendingCommit, barrier: SaveBarrier, written: Sequence[Written], committed_at: float) -> None:
    """Check what this rank sees of the files of another; the head of a directory also writes the record."""
    _check_sizes(save, barrier)
    if save.acts:
        _write_record(save, written, committed_at)


def _write_record(save: PendingCommit, written: Sequence[Written], committed_at: float) -> None:
    """The record of the whole save, in every directory that has a part of it; none where only DeepSpeed reads it."""
    found = file_names(save.staging_dir)
    here = [each.sizes if save.heads[rank] == dist.get_rank() else {} for rank, each in enumerate(written)]
    _require_seen(save, {rank: [name for name in sizes if name not in found] for rank, sizes in enumerate(here)})
    unreadable = next((each.unreadable for each in written if each.unreadable is not None), None)
    if unreadable is not None and dist.get_rank() == 0:
        logger.warning("%s: saved without a commit record, only DeepSpeed loads it: %s", save.tag_dir, unreadable)
    record = record_of(save, written, committed_at)
    try:
        carry_over(save.place, save.staging_dir)
        if unreadable is None:
            write_atomically(save.staging_dir / RECORD_NAME, record_text(record), sync=save.fsync)
    except OSError as error:
        raise not_committed(save, f"{error.filename or save.tag_dir}: {error.strerror}") from error


def record_of(save: PendingCommit, written: Sequence[Written], committed_at: float) -> CommitRecord:
    """The record of a save, of what each rank has written, as this rank states it."""
    # At stages 1 and 2 every node has a file of the whole module, under one name: its record states its own.
    own_last = [*written, written[dist.get_rank()]]
    return CommitRecord(
        format_version=RECORD_VERSION,
        checkpoint_format=save.checkpoint_format,
        save_id=save.save_id,
        tag=save.tag,
        world_size=save.expected.layout.world_size,
        tp_size=save.expected.tp.size,
        global_steps=save.expected.global_steps,
        train_batch_size=save.train_batch_size,
        lost_micro_batches=save.lost_micro_batches,
        committed_at=committed_at,
        parent=save.lineage.save_id,
        run=save.lineage.run,
        trained_params=params_digest(
            content.param for content in save.contents if content.tp_rank == 0 and content.param.name in save.trained
        ),
        versions=Versions(zeroelastic=__version__, deepspeed=deepspeed.__version__, torch=str(torch.__version__)),
        files={name: size for each in own_last for name, size in sorted(each.sizes.items())},
        directories={name: digest for each in own_last for name, digest in sorted(each.directories.items())},
        params=param_records(save.contents, save.trained),
        content_root=content_root(save.contents),
    )


def _publish_tag(save: PendingCommit) -> None:
    """The one rename that makes the tag."""
    try:
        publish_tag(save.staging_dir, save.place, sync=save.fsync)
    except OSError as error:
        raise not_committed(save, f"{error.filename or save.tag_dir}: {error.strerror}") from error


def _point_latest(save: PendingCommit) -> None:
    assert isinstance(save.latest, Path)
    try:
        write_atomically(save.latest, save.tag.encode(), sync=save.fsync)
    except OSError as error:
        raise SaveError(
            f"{save.latest}: cannot be written: {error.strerror}. The checkpoint {save.tag} is complete; load it by "
            "its tag."
        ) from error


@contextmanager
def discarded_on_failure(staging_dir: Path, *, acts: bool) -> Iterator[None]:
    """Remove what was made of a save when it fails, on the rank that ``acts``: the one that made the directory."""
    try:
        yield
    except Exception:
        if acts:
            shutil.rmtree(staging_dir, ignore_errors=True)
        raise


def _check_sizes(save: PendingCommit, barrier: SaveBarrier) -> None:
    """Raise SaveError if this rank does not see the files of another one as that one does.

    The other is half of their directory's ranks away, and so on another node wherever there are two or more.
    """
    mates = [rank for rank, head in enumerate(save.heads) if head == save.heads[dist.get_rank()]]
    other = mates[(mates.index(dist.get_rank()) + len(mates) // 2) % len(mates)]
    sizes = json.loads(barrier.note_of(other))
    _require_seen(save, {other: [name for name, size in sizes.items() if file_size(save.staging_dir / name) != size]})


def _require_seen(save: PendingCommit, unseen: Mapping[int, Sequence[str]]) -> None:
    """Raise SaveError if there are files, by the rank that wrote them, that this rank does not see as that one does."""
    ranks = [rank for rank, names in unseen.items() if names]
    if ranks:
        raise not_committed(
            save,
            f"rank {dist.get_rank()} does not see what rank{'s' if len(ranks) > 1 else ''} "
            f"{', '.join(map(str, ranks))} wrote "
            f"({', '.join(unseen[ranks[0]])}): the directory is not the same on all nodes (which "
            '"use_node_local_storage": true allows), or another save is using it',
        )


def not_committed(save: PendingCommit, why: str) -> SaveError:
    return SaveError(f"{save.tag_dir}: not committed: {why}. The tag is what it was before; `latest` is unchanged.")


def written_files(engine: Engine, save_dir: Path, tag: str) -> tuple[str, str]:
    """The names under which DeepSpeed writes the module states, of this rank or of its node, and the optimizer file."""
    model, optim = engine._get_ckpt_name(str(save_dir), tag), engine._get_zero_ckpt_name(str(save_dir), tag)
    return Path(model).name, Path(optim).name


def read_back(
    model_path: FilePath,
    optim_path: FilePath,
    expected: Expected,
    *,
    format: CheckpointFormat,
    save_id: str,
    contents: Iterable[ParamContent],
    through: Mapping[str, Blocks] | None = None,
) -> dict[str, str]:
    """The digest of the zip directory of each of a rank's files, by name.

    ``contents`` are what the commit record is going to say. ``through`` has what this rank has written, by name, where
    it is not on a disk: at stages 1 and 2 only one rank writes the module states. Raises CheckpointError or
    UnsupportedError for a file that a load does not read, CheckpointError for one that does not say what is
    ``expected``.
    """
    size, tp = expected.layout.world_size, expected.tp
    layout = expected.layout
    sub_groups = [
        [param for param, i in zip(layout.params, layout.sub_group.tolist(), strict=True) if i == number]
        for number in range(layout.num_sub_groups)
    ]
    blocks = through if through is not None else {}
    has_model = through is None or model_path.name in through
    with allow_globals(expected.allow_globals):
        model = (
            model_states_of(
                read_torch_file(model_path, foreign="inert", through=blocks.get(model_path.name), columns=True),
                expected.rank,
                world_size=size,
                tp=tp if tp.size > 1 else None,
            )
            if has_model
            else None
        )
        shard = open_shard(
            optim_path,
            expected.rank,
            world_size=size,
            rigid_params=sub_groups if model is None else model.sub_groups,
            tp_rank=tp.rank,
            through=blocks.get(optim_path.name),
        )
    parts = [trained_part({shard.rank: shard}, shard)]
    if model is not None and (frozen := frozen_part({model.rank: model})) is not None:
        parts.append(frozen)
    found = {
        param.name: (param.shape, dict(part.dtypes[p]), {k: v.canonical() for k, v in part.scalars[p].items()})
        for part in parts
        for p, param in enumerate(part.layout.params)
    }
    want = {
        content.param.name: (
            content.param.shape,
            {key: dtype for key, (dtype, _) in content.tensors.items()},
            {key: value.canonical() for key, value in content.scalars.items()},
        )
        for content in contents
        if content.tp_rank == tp.rank
    }
    if model is None:
        want = {name: facts for name, facts in want.items() if name in found}
    of_model = {} if model is None else _facts_of_model(model, expected, sub_groups)
    of_optimizer = {
        "the format": (shard.format, format),
        "the save id": (shard.save_id, save_id if format == "elastic" else None),
        "the trained parameters": (list(shard.layout.params), list(layout.params)),
        "the optimizer groups": ([group.params for group in shard.groups], list(expected.groups)),
        "the state of parameters": _differing(found, want),
    }
    for path, facts in ((model_path, of_model), (optim_path, of_optimizer)):
        for what, (got, wanted) in facts.items():
            if got != wanted:
                raise CheckpointError(f"{path}: {what} read back as {_brief(got)}; the run has {_brief(wanted)}.")
    directories = {} if model is None else {model_path.name: model.directory}
    return {**directories, optim_path.name: shard.directory}


def _facts_of_model(
    model: ModelStates, expected: Expected, sub_groups: Sequence[Sequence[Param]]
) -> dict[str, tuple[object, object]]:
    """What a module states file says, and what it has to."""
    return {
        "the step": (model.global_steps, expected.global_steps),
        "the trained parameters": ([list(table) for table in model.sub_groups], sub_groups),
        "the frozen parameters": (
            _by_name(None if model.frozen is None else model.frozen.params),
            _by_name(expected.frozen),
        ),
    }


def _by_name(params: Iterable[Param] | None) -> list[Param]:
    """At stage 1 a file does not tell whether there are no frozen parameters or whether they were excluded."""
    return sorted(params or (), key=lambda param: param.name)


def _differing(found: Mapping[str, object], want: Mapping[str, object]) -> tuple[object, object]:
    """The entries in which two tables differ, of either."""
    names = [name for name in dict.fromkeys([*want, *found]) if found.get(name) != want.get(name)]
    return {name: found.get(name) for name in names}, {name: want.get(name) for name in names}


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 400 else f"{text[:400]}..."
