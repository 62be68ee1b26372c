"""Which checkpoint writers and directories our saves cover."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from deepspeed.io import fast_file_writer

from zeroelastic.deepspeed.engine import Engine
from zeroelastic.deepspeed.live.live_optimizer import LiveOptimizer
from zeroelastic.deepspeed.patching import patched
from zeroelastic.distributed.collective import all_gather_or_raise, all_or_raise, broadcast
from zeroelastic.errors import SaveError, UnreadableError, UnsupportedError
from zeroelastic.io.paths import FilePath

NOT_SEEN = (
    "This rank does not see the directory that another one made for the save: the directory is not the same on all "
    'nodes, which "use_node_local_storage": true allows.'
)


def refuse_unwritable(engine: Engine) -> None:
    """Raise UnsupportedError for a ``checkpoint`` block of the configuration whose files could not be loaded again."""
    config: Mapping[str, Any] = engine._config.checkpoint_config
    writer: Mapping[str, Any] | None = config.get("writer")
    no_fast_writer = str(fast_file_writer.UtilsBuilder.__name__) == "NotImplementedBuilder"
    problem = None
    if not config.get("checkpoint_serialization", True):
        problem = (
            '"checkpoint_serialization": false writes torch.save\'s old format without a zip archive, whose payload '
            "cannot be addressed. Leave it out"
        )
    elif writer is not None and writer["type"] == "MOCK":
        problem = 'the checkpoint writer "mock" writes nothing. Use "python" or "fast"'
    elif writer is not None and writer["type"] == "FAST" and no_fast_writer:
        problem = (
            'the checkpoint writer "fast" needs DeepSpeed\'s op "utils", which it does not have for this accelerator. '
            'Use "type": "python"'
        )
    elif writer is not None and writer["decoupled"]:
        problem = (
            'a decoupled checkpoint writer writes after save_checkpoint has returned. Use "decoupled": false, with '
            '"async_save": true in the "zeroelastic" block for saves in the background'
        )
    if problem is not None:
        raise UnsupportedError(
            f"elastic checkpoints do not cover this: {problem}, or save with elastic_checkpoint off and resume at the "
            "world size that saved."
        )


def refuse_experts_on_nodes(engine: Engine, live: LiveOptimizer) -> None:
    """Raise UnsupportedError for a run whose nodes keep their own files, and whose experts each have one file."""
    if live.sharing.expert_sizes and not live.per_param and engine.use_node_local_storage():
        raise UnsupportedError(
            '"use_node_local_storage" does not go with mixture-of-experts layers at ZeRO stages 1 and 2: DeepSpeed '
            "writes the file of the module and of each expert on one node only, and reads them on every node. Save to "
            "a directory that all nodes share."
        )


def refuse_to_exclude_experts(live: LiveOptimizer) -> None:
    """Raise UnsupportedError for frozen experts that are to be left out: DeepSpeed writes their files all the same."""
    names = [param.name for members in live.local_params(live.frozen) for param in members]
    experts = [name for name in names if name in live.sharing.expert_sizes]
    if experts and not live.per_param:
        raise UnsupportedError(
            'a save without frozen weights ("frozen": "exclude", exclude_frozen_parameters) does not go with frozen '
            f"experts, as {experts[0]}, at ZeRO stages 1 and 2: DeepSpeed writes the files of experts all the same. "
            "Save with them."
        )


def directory_leaders(tag_dir: Path) -> tuple[int, ...]:
    """For each rank, the first rank that sees the same parent directory of the tag. Collective.

    The ranks create files there for a moment to find out. A rank that does not see the one of rank 0 lists the
    directory, which has those of the ranks of its node. Raises SaveError on every rank if any rank cannot.
    """
    stem = f".zeroelastic.{broadcast(uuid.uuid4().hex)}."
    place, rank = tag_dir.parent, dist.get_rank()
    probe = place / f"{stem}{rank}"

    def make() -> None:
        with saves_nothing(tag_dir):
            place.mkdir(parents=True, exist_ok=True)
            probe.touch()

    def leader() -> int:
        if (place / f"{stem}0").exists():
            return 0
        with saves_nothing(tag_dir):
            seen = [name.removeprefix(stem) for name in os.listdir(place) if name.startswith(stem)]
        return min([rank, *map(int, seen)])

    all_or_raise(make)
    try:
        return tuple(all_gather_or_raise(leader)[1])
    finally:
        probe.unlink(missing_ok=True)


@contextmanager
def saves_nothing(tag_dir: FilePath) -> Iterator[None]:
    """An error of the disk within becomes the SaveError of a save that has not begun."""
    try:
        yield
    except SaveError:
        raise
    except UnreadableError as error:
        raise SaveError(f"{tag_dir}: cannot be written: {error} Nothing was saved.") from error
    except OSError as error:
        raise SaveError(
            f"{tag_dir}: cannot be written: {error.strerror} ({error.filename or tag_dir}). Nothing was saved, and "
            "`latest` is unchanged."
        ) from error


@contextmanager
def one_module_writer(engine: Engine, live: LiveOptimizer, leaders: Sequence[int]) -> Iterator[None]:
    """While it lasts, one rank of each directory writes the file of the whole module of ZeRO stages 1 and 2.

    Of a run with tensor parallelism it is one of each tensor parallel rank, as each has a file of its own.

    DeepSpeed has local rank 0 do it under ``use_node_local_storage``. Where the launcher's local ranks are not those
    that share a disk, several ranks would write into one file, or none. Ranks that see one directory have the same one
    of ``leaders`` (``directory_leaders``). Every file lists tied parameters, which DeepSpeed does on rank 0 alone.
    Source: ``DeepSpeedEngine._configure_checkpointing``, ``_get_shared_params`` (0.19.8). Collective.
    """
    if live.per_param or not engine.use_node_local_storage():
        yield
        return
    rank = dist.get_rank()
    of_same_slices = (other for other in range(rank) if live.topology.place(other)[1] == live.topology.place(rank)[1])
    place_on_node = [leaders[other] for other in of_same_slices].count(leaders[rank])
    chooses = getattr(engine.checkpoint_engine, "is_data_parallel_writer", None)
    writes = bool(chooses(place_on_node)) if chooses is not None else place_on_node == 0
    tied = broadcast(all_or_raise(engine._get_shared_params))
    with patched(engine, save_non_zero_checkpoint=writes, _get_shared_params=lambda: tied):
        yield
