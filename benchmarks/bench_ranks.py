"""What each rank asks of the file system, the key-value store and the network at 8 to 16,384 ranks.

    python benchmarks/bench_ranks.py --out benchmarks/results

Ranks are threads of one process that take turns (simulated_ranks.py). They run the real code over real files that as
many ranks saved, in a directory that all of them see:

* a load up to the first tensor: ``latest``, the tag, ``preflight`` with ``"verify": "quick"``, by the first and the
  last eight ranks;
* the commit of a save by every rank: announced to the others, files read back, the record, the tag, ``latest``.

Writes ranks.json. Counts, unlike times, do not depend on the machine.
"""

from __future__ import annotations

import functools
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import report
import torch.distributed as dist
from simulated_ranks import COUNTED, SimulatedRanks

from zeroelastic.checkpoint.open import open_checkpoint
from zeroelastic.checkpoint.tag_files import NO_TENSOR_PARALLEL
from zeroelastic.deepspeed.engine_state import Lineage
from zeroelastic.deepspeed.live.topology import Sharing
from zeroelastic.deepspeed.load.preflight import preflight
from zeroelastic.deepspeed.load.tag_choice import choose_tag
from zeroelastic.deepspeed.options import LoadRequest, Options
from zeroelastic.deepspeed.save.barrier import SaveBarrier
from zeroelastic.deepspeed.save.commit import PendingCommit
from zeroelastic.deepspeed.save.directory import Directory
from zeroelastic.distributed.partners import require_partners
from zeroelastic.runs.tag_directory import make_staging_dir, open_tag
from zeroelastic.testing import sample

WORLD_SIZES = (8, 64, 512, 4096, 16_384)


@contextmanager
def saved_by(world_size: int) -> Iterator[Path]:
    """A directory with one tag of a small model, saved by ``world_size`` ranks; its tensors are made once."""
    with (
        tempfile.TemporaryDirectory() as directory,
        mock.patch.object(sample, "_values", functools.cache(sample._values)),
    ):
        sample.write_sample(Path(directory), world_size=world_size, steps=(1,), hidden=8, layers=1)
        yield Path(directory)


def few_ranks(world_size: int) -> list[int]:
    """The ranks of the first and of the last node."""
    return sorted({*range(min(8, world_size)), *range(max(0, world_size - 8), world_size)})


_NO_GROUP: Any = None
"""The ranks have no process group: what they send is counted."""


def measure(world_size: int) -> dict[str, dict[str, Any]]:
    """The counts of a load and of the commit of a save, by ``world_size`` ranks."""
    with saved_by(world_size) as directory:
        return {"load": measure_load(directory, world_size), "commit": measure_commit(directory, world_size)}


def measure_load(directory: Path, world_size: int) -> dict[str, Any]:
    """The counts of a load, up to the first tensor, by as many ranks as saved."""
    checkpoint = open_checkpoint(directory / "global_step1")
    head, frozen = checkpoint.shard(0), checkpoint.model_states(0).frozen
    groups = tuple(group.params for group in head.groups)
    request = LoadRequest(
        str(directory), options=Options(verify="quick"), load_module_only=True, load_module_strict=False
    )
    ranks = SimulatedRanks(world_size, few_ranks(world_size))

    def load(rank: int) -> None:
        live: Any = SimpleNamespace(
            per_param=True,
            trains=True,
            rank=rank,
            topology=checkpoint.topology,
            layout=head.layout,
            whole=head.layout,
            groups=groups,
            frozen=frozen,
            whole_frozen=frozen,
            tp=NO_TENSOR_PARALLEL,
            optimizer=None,
        )
        tag, _ = choose_tag(directory, None)
        tag_dir = open_tag(directory / str(tag))
        assert isinstance(tag_dir, Path)
        plan = preflight(tag_dir, live, request, lambda model: None)
        ranks.count("header bytes", plan.checkpoint.header_bytes)

    ranks.run(load)
    return _row(world_size, ranks)


def measure_commit(directory: Path, world_size: int) -> dict[str, Any]:
    """The counts of a save from its first barrier to ``latest``, but for what DeepSpeed and the writer of files do.

    The save has the files of the tag in ``directory``, which it replaces.
    """
    tag_dir = directory / "global_step1"
    checkpoint = open_checkpoint(tag_dir)
    head, frozen, record = checkpoint.shard(0), checkpoint.model_states(0).frozen, checkpoint.record
    assert record is not None
    contents = tuple(record.contents())
    trained = record.params.trained
    names = [(checkpoint.model_files[rank].name, checkpoint.optim_files[rank].name) for rank in range(world_size)]
    aside = directory / "aside"
    os.rename(tag_dir, aside)
    staging_dir = make_staging_dir(tag_dir, record.save_id)
    for name in record.files:
        os.rename(aside / name, staging_dir / name)
    (directory / "latest").unlink()
    places: list[Directory] = []
    for rank in range(world_size):
        with mock.patch.object(dist, "get_rank", return_value=rank):
            leaders = (0,) * world_size
            places.append(Directory(directory, tag_dir.name, record.save_id, leaders, save_latest=True, fsync=True))
    ranks = SimulatedRanks(world_size)

    def save(rank: int) -> None:
        require_partners()
        barrier = SaveBarrier(tag_dir, timeout_s=600.0)
        barrier.leave_note(record.save_id)
        barrier.wait("begin")
        assert barrier.note_of(0) == record.save_id
        barrier.wait("write")
        pending = PendingCommit(
            tag=tag_dir.name,
            save_id=record.save_id,
            checkpoint_format="elastic",
            sharing=Sharing(checkpoint.topology, rank, _NO_GROUP),
            global_steps=1,
            layout=head.layout,
            sub_groups=[
                [
                    param
                    for param, own in zip(head.layout.params, head.layout.sub_group.tolist(), strict=True)
                    if own == i
                ]
                for i in range(head.layout.num_sub_groups)
            ],
            groups=tuple(group.params for group in head.groups),
            frozen=None if frozen is None else frozen.params,
            allow_globals=(),
            train_batch_size=24,
            file_names=names[rank],
            lineage=Lineage(),
            lost_micro_batches=0,
            contents=contents,
            trained=trained,
        )
        places[rank].commit(pending, barrier)
        barrier.close()

    ranks.run(save)
    committed = open_checkpoint(tag_dir).record
    assert committed is not None and committed.files == record.files
    assert (directory / "latest").read_text() == tag_dir.name
    return _row(world_size, ranks)


def _row(world_size: int, ranks: SimulatedRanks) -> dict[str, Any]:
    """Of all ranks together: what one rank does, for each rank that is not simulated."""
    counted = (*COUNTED, "header bytes")
    others = [count for rank, count in ranks.counts.items() if rank]
    together: Counter[str] = sum(ranks.counts.values(), Counter())
    left = world_size - len(ranks.ranks)
    return {
        "world_size": world_size,
        "rank 0": {what: ranks.counts[0][what] for what in counted},
        "rank 1": {what: ranks.counts[1][what] for what in counted},
        "worst": {what: max(count[what] for count in others) for what in counted},
        "all": {what: together[what] + left * ranks.counts[ranks.ranks[-1]][what] for what in counted},
    }


FILE_OPERATIONS = ("listed", "looked at", "opened", "changed")


def main() -> None:
    parser = report.benchmark_arguments(__doc__)
    parser.add_argument("--world-sizes", type=int, nargs="+", default=list(WORLD_SIZES))
    arguments = parser.parse_args()
    measured = [measure(world_size) for world_size in arguments.world_sizes]
    results = {part: [each[part] for each in measured] for part in measured[0]}
    report.write_result(arguments.out, "ranks", {"machine": report.machine(), **results})


if __name__ == "__main__":
    main()
