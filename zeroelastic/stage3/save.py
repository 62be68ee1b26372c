"""Saving: the elastic state dict, and the commit record that is written before ``latest`` names the tag."""

from __future__ import annotations

import logging
import os
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from zeroelastic._version import __version__
from zeroelastic.agree import broadcast
from zeroelastic.digest import ParamContent, combine, content_root
from zeroelastic.errors import CheckpointError, SaveError, UnreadableError, UnsafePickleError, UnsupportedError
from zeroelastic.patching import patched
from zeroelastic.record import (
    RECORD_NAME,
    RECORD_VERSION,
    CheckpointFormat,
    CommitRecord,
    Versions,
    param_records,
    record_text,
    write_atomically,
)
from zeroelastic.save_place import carry_over, put_in_place
from zeroelastic.shard import ELASTIC_VERSION
from zeroelastic.stage3.contents import LocalDigests
from zeroelastic.stage3.lineage import Lineage
from zeroelastic.stage3.live import LiveState
from zeroelastic.stage3.optimizers import class_path
from zeroelastic.stage3.read_back import Expected, read_back
from zeroelastic.stage3.residence import is_away
from zeroelastic.stage3.roll_call import RollCall
from zeroelastic.storage import file_sizes

logger = logging.getLogger(__name__)


def new_save_id() -> str:
    """The identity of one save, the same in every file of it: 32 hexadecimal digits. Collective."""
    return broadcast(uuid.uuid4().hex)


def elastic_state_dict(
    optimizer: DeepSpeedZeroOptimizer_Stage3,
    live: LiveState,
    *,
    save_id: str,
    train_batch_size: int,
    alias: bool,
    share_storage: bool = True,
    digests: torch.Tensor | None = None,
) -> dict[str, Any]:
    """The optimizer's state in the elastic format (docs/format.md); its tensors are views of the live ones.

    ``alias`` adds the stock nested ``optimizer_state_dict`` over the same storages, which makes the file loadable by
    stock DeepSpeed. Without ``share_storage`` (an engine that writes every tensor on its own) lean tensors are
    contiguous clones and there is no alias. ``digests`` (see ``digest_sums``) go into the file so that damage can be
    traced to it. Padding of the live buffers is set to zero, here and on disk.
    """
    zero_padding(live)
    state: dict[str, Any] = optimizer._rigid_state_dict()
    nested = state.pop("optimizer_state_dict")
    away = [i for i in range(live.layout.num_sub_groups) if live.residence.differs_from_stock(i)]
    if away:  # DeepSpeed's state dict has nothing of what is on NVMe or with the backup optimizer
        number = _numbers(live)
        nested = {**nested, "state": {**nested["state"], **{number[i]: dict(live.state(i)) for i in away}}}
        state["fp32_flat_groups"] = [live.fp32(i) for i in range(live.layout.num_sub_groups)]
    start, owned = live.layout.owned(live.rank)
    base: list[dict[str, Any]] = []
    tables: list[dict[str, list[Any]]] = []
    for i in range(live.layout.num_sub_groups):
        members = np.flatnonzero(live.layout.sub_group == i).tolist()
        tensors, scalars = live.split_state(i)
        entry: dict[str, Any] = {}
        for key, value in live.state(i).items():
            if key in tensors:
                lean = [
                    tensors[key][int(live.layout.offset[p]) : int(live.layout.offset[p] + owned[p])] for p in members
                ]
                entry[key] = lean if share_storage else [tensor.clone() for tensor in lean]
            else:
                assert key in scalars
                entry[key] = value
        base.append(entry)
        tables.append(
            {
                "names": [live.layout.params[p].name for p in members],
                "shapes": [live.layout.params[p].shape for p in members],
                "offsets": [int(start[p]) for p in members],
                "numels": [int(owned[p]) for p in members],
            }
        )
    state["base_optimizer_state"] = base
    state["zeroelastic"] = {
        "format_version": ELASTIC_VERSION,
        "save_id": save_id,
        "world_size": live.layout.world_size,
        "rank": live.rank,
        "train_batch_size": train_batch_size,
        "sub_groups": tables,
        "param_groups": [
            {**{key: value for key, value in group.items() if key != "params"}, "params": list(names)}
            for group, names in zip(optimizer.optimizer.param_groups, live.groups, strict=True)
        ],
        "optimizer": class_path(optimizer.optimizer),
    }
    grad_scaler = getattr(optimizer, "torch_autocast_gradscaler", None)
    if grad_scaler is not None:
        state["zeroelastic"]["grad_scaler"] = grad_scaler.state_dict()
    if live.tp.size > 1:
        state["zeroelastic"] |= {"tp_rank": live.tp.rank, "tp_size": live.tp.size}
    if digests is not None:
        state["zeroelastic"]["digests"] = digests
    if alias and share_storage:
        state["optimizer_state_dict"] = nested
    return state


def _numbers(live: LiveState) -> dict[int, int]:
    """The number of each sub-group in a state dict of torch's, which counts group by group."""
    group_of = [live.optimizer.sub_group_to_group_id[i] for i in range(live.layout.num_sub_groups)]
    return {i: number for number, i in enumerate(sorted(range(len(group_of)), key=lambda i: (group_of[i], i)))}


@contextmanager
def offloaded_save(engine: Any, live: LiveState, *, elastic: bool) -> Iterator[None]:
    """While it lasts, DeepSpeed's save has frozen parameters on NVMe at hand, and makes no copy of swap files.

    DeepSpeed writes one element in place of a frozen parameter that is not in memory. Its copy of the swap files
    (``offloaded_tensors``) is left out of elastic saves, whose files hold all of it. After offload_states() nothing is
    gathered behind the save: DeepSpeed would gather persistent parameters from where other parameters' parts now lie.
    """
    original = engine._get_param_fragment_func
    on_nvme = dict(zip((param.name for param in live.frozen.params), live.frozen_tensors, strict=True))

    def fragment(param: Any) -> Any:
        name = engine.param_names.get(param)
        return on_nvme[name] if name in on_nvme and is_away(param) else original(param)

    without_copy = {"zero_nvme_offload_optimizer": lambda: False} if elastic else {}
    away = bool(getattr(live.optimizer, "offloaded_states", None))
    without_gather = {"checkpoint_event_epilogue": lambda: None} if away else {}
    with (
        patched(engine, _get_param_fragment_func=fragment, **without_copy),
        patched(live.optimizer, **without_gather),
    ):
        yield


def digest_sums(live: LiveState, digests: LocalDigests) -> torch.Tensor:
    """The sum over state keys of each trained parameter's partial digests: int64, shape ``(num_params,)``."""
    sums = dict.fromkeys((param.name for param in live.layout.params), 0)
    for (name, _), digest in zip(digests.streams, digests.partial, strict=True):
        if name in sums:
            sums[name] = combine(sums[name], digest)
    return torch.from_numpy(np.array(list(sums.values()), dtype=np.uint64).view(np.int64))


def zero_padding(live: LiveState) -> None:
    """Set the padding of every live flat buffer to zero; DeepSpeed leaves it uninitialised and never reads it."""
    for i in range(live.layout.num_sub_groups):
        tensors, _ = live.split_state(i)
        for gap in live.padding(i):
            for flat in (live.fp32(i), *tensors.values()):
                flat[gap].zero_()


@contextmanager
def met_after_writing(optimizer: DeepSpeedZeroOptimizer_Stage3, roll_call: RollCall) -> Iterator[None]:
    """While it lasts, the ranks meet when their files are written, before the collectives that end DeepSpeed's save."""
    original = optimizer.checkpoint_event_epilogue

    def epilogue() -> None:
        roll_call.meet("its files were written")
        original()

    with patched(optimizer, checkpoint_event_epilogue=epilogue):
        yield


@dataclass(frozen=True, slots=True)
class Uncommitted:
    """A save that was handed to its writer: all that the commit record says but the sizes of the files.

    ``contents`` are of the state at the moment of the save, over all ranks; ``trained`` names the trained parameters
    among them, and ``written`` this rank's module states and optimizer file in ``making``, the hidden directory that
    becomes ``tag_dir``, which is ``place`` without the symbolic links that led there when the save began; they have to
    say what is ``expected``. Ranks that see the same directory have the same one of ``heads``, by rank: the first of
    them, which acts for all.
    """

    tag_dir: Path
    place: Path
    tag: str
    save_id: str
    checkpoint_format: CheckpointFormat
    world_size: int
    expected: Expected
    train_batch_size: int
    contents: tuple[ParamContent, ...]
    trained: frozenset[str]
    written: tuple[str, str]
    making: Path
    heads: tuple[int, ...]
    lineage: Lineage
    tp_size: int = 1
    lost_micro_batches: int = 0

    @property
    def acts(self) -> bool:
        """Whether this rank does what one rank does for all that see its directory."""
        return acts(self.heads)


def acts(heads: Sequence[int]) -> bool:
    """Whether this rank is the first of those that see its directory."""
    return heads[dist.get_rank()] == dist.get_rank()


def commit(save: Uncommitted, roll_call: RollCall, *, fsync: bool) -> None:
    """Make the files of a save durable, write its record and put the tag in place, on all ranks or none. Collective.

    Everything that the record names has been written, by whatever process. Raises SaveError on every rank when a file
    is missing, cannot be made durable, or is not visible to the head, or a rank does not arrive: then the tag is what
    it was before the save.
    """
    with discarded_on_failure(save.making, acts=save.acts), roll_call.naming_the_lost():
        _, written = roll_call.together(lambda: _settled_files(save, fsync=fsync), "its files were made durable")
        committed_at = max(save.lineage.next_time(written[0].now), *(each.not_before for each in written))
        roll_call.settle(
            lambda: _write_record(save, written, committed_at) if save.acts else None, "its commit record was written"
        )
        roll_call.settle(lambda: _put_in_place(save) if save.acts else None, "it was put in place")
    if all(each.unreadable is None for each in written):
        save.lineage.commit(save.save_id, committed_at)
    roll_call.left = "The checkpoint is complete; load it by its tag."


class _Written(NamedTuple):
    """Sizes and zip directories' digests of a rank's files, why only DeepSpeed reads them, if so, and its clock.

    ``not_before``: the earliest time of a commit that this rank allows.
    """

    sizes: dict[str, int]
    directories: dict[str, str]
    unreadable: str | None
    now: float
    not_before: float


def _settled_files(save: Uncommitted, *, fsync: bool) -> _Written:
    """This rank's files, which are on the device then, and which a load has been found to take."""
    clock = time.time(), save.lineage.next_time(0.0)
    sizes: dict[str, int] = {}
    paths = [save.making / name for name in save.written]
    try:
        for path in paths:
            sizes[path.name] = path.stat().st_size
            if fsync:
                _sync_file(path)
        directories = read_back(
            paths[0],
            paths[1],
            save.expected,
            format=save.checkpoint_format,
            save_id=save.save_id,
            contents=save.contents,
        )
    except UnreadableError as error:
        raise _not_committed(save, str(error).rstrip(".")) from error
    except OSError as error:
        raise _not_committed(save, f"{error.filename or save.tag_dir}: {error.strerror}") from error
    except (CheckpointError, UnsupportedError) as error:
        if save.checkpoint_format == "rigid" and isinstance(error, (UnsafePickleError, UnsupportedError)):
            return _Written(sizes, {}, str(error), *clock)  # as stock DeepSpeed saves it
        raise _not_committed(save, f"no load would take it: {str(error).rstrip('.')}") from error
    return _Written(sizes, directories, None, *clock)


def _write_record(save: Uncommitted, written: Sequence[_Written], committed_at: float) -> None:
    """The record of the whole save, in every directory that has a part of it; none where only DeepSpeed reads it."""
    _check_visible(save, [each.sizes for each in written])
    unreadable = next((each.unreadable for each in written if each.unreadable is not None), None)
    if unreadable is not None and dist.get_rank() == 0:
        logger.warning("%s: saved without a commit record, only DeepSpeed loads it: %s", save.tag_dir, unreadable)
    record = CommitRecord(
        format_version=RECORD_VERSION,
        checkpoint_format=save.checkpoint_format,
        save_id=save.save_id,
        tag=save.tag,
        world_size=save.world_size,
        tp_size=save.tp_size,
        global_steps=save.expected.global_steps,
        train_batch_size=save.train_batch_size,
        lost_micro_batches=save.lost_micro_batches,
        committed_at=committed_at,
        parent=save.lineage.save_id,
        versions=Versions(zeroelastic=__version__, deepspeed=deepspeed.__version__, torch=str(torch.__version__)),
        files={name: size for each in written for name, size in sorted(each.sizes.items())},
        directories={name: digest for each in written for name, digest in sorted(each.directories.items())},
        params=param_records(save.contents, save.trained),
        content_root=content_root(save.contents),
    )
    try:
        carry_over(save.place, save.making)
        if unreadable is None:
            write_atomically(save.making / RECORD_NAME, record_text(record))
    except OSError as error:
        raise _not_committed(save, f"{error.filename or save.tag_dir}: {error.strerror}") from error


def _put_in_place(save: Uncommitted) -> None:
    """The one rename that makes the tag."""
    try:
        put_in_place(save.making, save.place)
    except OSError as error:
        raise _not_committed(save, f"{error.filename or save.tag_dir}: {error.strerror}") from error


@contextmanager
def discarded_on_failure(making: Path, *, acts: bool) -> Iterator[None]:
    """Remove what was made of a save when it fails, on the rank that ``acts``: the one that made the directory."""
    try:
        yield
    except Exception:
        if acts:
            shutil.rmtree(making, ignore_errors=True)
        raise


def _check_visible(save: Uncommitted, parts: Sequence[Mapping[str, int]]) -> None:
    """The head of a directory must see the files of all ranks whose head it is."""
    found = file_sizes(save.making)
    here = {rank: part for rank, part in enumerate(parts) if save.heads[rank] == dist.get_rank()}
    unseen = {rank: [name for name, size in part.items() if found.get(name) != size] for rank, part in here.items()}
    unseen = {rank: names for rank, names in unseen.items() if names}
    if unseen:
        first = min(unseen)
        raise _not_committed(
            save,
            f"rank {dist.get_rank()} does not see what rank{'s' if len(unseen) > 1 else ''} "
            f"{', '.join(map(str, unseen))} wrote "
            f"({', '.join(unseen[first])}): the directory is not the same on all nodes (which "
            '"use_node_local_storage": true allows), or another save is using it',
        )


def _not_committed(save: Uncommitted, why: str) -> SaveError:
    return SaveError(f"{save.tag_dir}: not committed: {why}. The tag is what it was before; `latest` is unchanged.")


def _sync_file(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def written_files(engine: Any, save_dir: Path, tag: str) -> tuple[str, str]:
    """The names under which DeepSpeed writes this rank's module states and optimizer file at stage 3."""
    model, optim = engine._get_ckpt_name(str(save_dir), tag), engine._get_zero_ckpt_name(str(save_dir), tag)
    return Path(model).name, Path(optim).name
