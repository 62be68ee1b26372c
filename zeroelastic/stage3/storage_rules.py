"""Which checkpoint writers and directories our saves and loads can do without, and which they cannot."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from deepspeed.io import fast_file_writer

from zeroelastic.agree import broadcast, gather, settle, together
from zeroelastic.checkpoint import TensorParallel, open_checkpoint, open_model_states, rank_files, saved_sizes
from zeroelastic.errors import CheckpointError, MissingFileError, OldFormatError, SaveError, UnsupportedError
from zeroelastic.stage3.live import LiveState
from zeroelastic.storage import file_sizes
from zeroelastic.torchfile import read_torch_file


def refuse_unwritable(engine: Any, optimizer: Any) -> None:
    """Raise UnsupportedError, naming it, for a ``checkpoint`` block whose files could not be loaded again."""
    config: Mapping[str, Any] = engine._config.checkpoint_config
    writer: Mapping[str, Any] | None = config.get("writer")
    problem = None
    if not config.get("checkpoint_serialization", True):
        problem = (
            '"checkpoint_serialization": false writes torch.save\'s old format without a zip archive, whose payload '
            "cannot be addressed. Leave it out"
        )
    elif writer is not None and writer["type"] == "MOCK":
        problem = 'the checkpoint writer "mock" writes nothing. Use "python" or "fast"'
    elif writer is not None and writer["type"] == "FAST" and not _fast_writer_exists():
        problem = (
            'the checkpoint writer "fast" needs DeepSpeed\'s op "utils", which it does not have for this accelerator. '
            'Use "type": "python"'
        )
    elif writer is not None and writer["decoupled"] and _on_nvme(optimizer):
        problem = (
            "a decoupled checkpoint writer reads state in place while it writes, and with NVMe offload there is none. "
            'Use "decoupled": false'
        )
    if problem is not None:
        raise UnsupportedError(
            f"elastic checkpoints do not cover this: {problem}, or save with elastic_checkpoint off and resume at the "
            "world size that saved."
        )


def _fast_writer_exists() -> bool:
    return str(fast_file_writer.UtilsBuilder.__name__) != "NotImplementedBuilder"


def _on_nvme(optimizer: Any) -> bool:
    return bool(getattr(optimizer, "swap_optimizer", False) or getattr(optimizer, "params_in_nvme_and_cpu", False))


def directory_heads(tag_dir: Path) -> tuple[int, ...]:
    """For each rank the first of those that see the same directory where the tag is going to be. Collective.

    Found out by files that the ranks make there for a moment. Raises SaveError on every rank where one cannot.
    """
    stem = f".zeroelastic.{broadcast(uuid.uuid4().hex)}"
    place, rank = tag_dir.parent, dist.get_rank()

    def probe(number: int) -> Path:
        return place / f"{stem}.{number}"

    def make() -> None:
        try:
            place.mkdir(parents=True, exist_ok=True)
            probe(rank).touch()
        except OSError as error:
            raise SaveError(f"{tag_dir}: cannot be written: {error.strerror}. Nothing was saved.") from error

    settle(make)
    heads = gather(next(number for number in range(rank + 1) if number == rank or probe(number).exists()))
    probe(rank).unlink(missing_ok=True)
    return tuple(heads)


def leave_to_stock(error: OldFormatError, tag_dir: Path, live: LiveState, *, node_local: bool) -> None:
    """Return if DeepSpeed alone can load what we cannot read, else raise: the same on every rank. Collective.

    It can where each rank finds its own files of a rigid checkpoint, saved by as many ranks.
    """

    def look() -> bool:
        return loads_in_stock(tag_dir, live.rank, live.layout.world_size, live.tp, node_local=node_local)

    if not all(together(look)[1]):
        raise error


def loads_in_stock(tag_dir: Path, rank: int, world_size: int, tp: TensorParallel, *, node_local: bool) -> bool:
    """Whether DeepSpeed alone can load this rank's part: the same number of ranks saved it, as a rigid checkpoint."""
    try:
        return open_checkpoint(tag_dir, near_rank=rank, tp=tp).world_size == world_size
    except UnsupportedError:
        return saved_sizes(tag_dir) == (world_size, tp.size)
    except OldFormatError:
        return _counted(tag_dir) == world_size
    except MissingFileError:
        return node_local and own_rigid_files(tag_dir, rank, world_size)
    except CheckpointError:  # of a layout that is not covered: only the sizes count
        return saved_sizes(tag_dir) == (world_size, tp.size)


def _counted(tag_dir: Path) -> int:
    """How many ranks have model states here, by the names of the files."""
    return len(rank_files(tag_dir, file_sizes(tag_dir))[1])


def own_rigid_files(tag_dir: Path, rank: int, world_size: int) -> bool:
    """Whether this rank's two files are here, and are a rigid checkpoint's of this many ranks."""
    try:
        optim, models = rank_files(tag_dir, file_sizes(tag_dir))
        if rank not in optim or rank not in models:
            return False
        if open_model_states(tag_dir / models[rank], rank, world_size=None).world_size != world_size:
            return False
        root = read_torch_file(tag_dir / optim[rank]).root
    except CheckpointError:
        return False
    state = root.get("optimizer_state_dict") if isinstance(root, dict) else None
    return isinstance(state, dict) and "base_optimizer_state" not in state
