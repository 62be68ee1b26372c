"""Saving: the elastic state dict, and the commit record that is written before ``latest`` names the tag."""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from zeroelastic._version import __version__
from zeroelastic.agree import broadcast, settle, together
from zeroelastic.digest import combine, content_root
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
from zeroelastic.shard import ELASTIC_VERSION
from zeroelastic.stage3.contents import LocalDigests, of_every_tp_rank, whole_contents
from zeroelastic.stage3.live import LiveState
from zeroelastic.stage3.optimizers import class_path
from zeroelastic.stage3.options import Options


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


def commit(
    tag_dir: Path,
    live: LiveState,
    *,
    options: Options,
    device: torch.device,
    save_id: str,
    checkpoint_format: CheckpointFormat,
    written: tuple[str, ...],
    global_steps: int,
    train_batch_size: int,
    lost_micro_batches: int,
    digests: LocalDigests,
) -> None:
    """Make this save's files durable and write the commit record; on return every rank knows it is there. Collective.

    ``written`` are the names of this rank's files, ``digests`` those of what they hold. Raises the same error on every
    rank when one of them is missing or cannot be made durable.
    """
    trainable = frozenset(param.name for param in live.layout.params)
    parts = of_every_tp_rank(live, (whole_contents(live, digests, device=device), trainable))

    def settle_files() -> dict[str, int]:
        sizes: dict[str, int] = {}
        for name in written:
            sizes[name] = (tag_dir / name).stat().st_size
            if options.fsync:
                _sync_file(tag_dir / name)
        if options.fsync:
            sync_directory(tag_dir)
        return sizes

    _, sizes = together(settle_files)

    def write() -> None:
        if dist.get_rank() != 0:
            return
        record = CommitRecord(
            format_version=RECORD_VERSION,
            checkpoint_format=checkpoint_format,
            save_id=save_id,
            tag=tag_dir.name,
            world_size=live.layout.world_size,
            tp_size=live.tp.size,
            global_steps=global_steps,
            train_batch_size=train_batch_size,
            lost_micro_batches=lost_micro_batches,
            versions=Versions(zeroelastic=__version__, deepspeed=deepspeed.__version__, torch=str(torch.__version__)),
            files={name: size for part in sizes for name, size in sorted(part.items())},
            params=sorted(
                (param for contents, trained in parts for param in param_records(contents, trained)),
                key=lambda param: (param.name, param.tp_rank),
            ),
            content_root=content_root(content for contents, _ in parts for content in contents),
        )
        write_atomically(tag_dir / RECORD_NAME, record_text(record))

    settle(write)


def _sync_file(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def written_files(engine: Any, save_dir: Path, tag: str) -> tuple[str, ...]:
    """The names under which DeepSpeed writes this rank's files at stage 3."""
    paths = (engine._get_ckpt_name(str(save_dir), tag), engine._get_zero_ckpt_name(str(save_dir), tag))
    return tuple(Path(path).name for path in paths)
