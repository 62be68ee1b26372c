"""What saving costs, system by system, for the same live state in one run.

    python benchmarks/bench_save.py --out benchmarks/results          # 200M parameters on 4 ranks
    python benchmarks/bench_save.py --small --repeats 1 --out /tmp/x  # a few million parameters, half a minute

Writes save.json (every sample) and save.md (the tables). README.md says how it is measured.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from figures import times
from load_systems import (
    FEW_ROUNDS,
    KEYS,
    TAG,
    Job,
    Run,
    filesystem,
    fill_with_noise,
    job_arguments,
    owned_params,
    sharded_tensors,
    temporary_job,
)
from meter import Cost, Meter, files_below, others_share, touch_free_memory
from report import describe, machine, noise, write_results

from zeroelastic.checkpoint.commit_record import read_record
from zeroelastic.core.digest import stream_seed
from zeroelastic.testing import RankPool
from zeroelastic.torch_file.save import DigestRange, write_torch_file

_BLOCK = 1 << 20
_MIB = 1 << 20
_TIMEOUT_S = 3600.0


@dataclass(frozen=True)
class System:
    """A way to save. ``prepare`` returns the measured part, which takes the directory and whether to make it durable.

    ``check`` returns what is wrong with the result; it may be collective. ``whole_engine`` tells a save of everything
    from a rank's optimizer file alone. ``long`` ones have fewer rounds, and save once in a process.
    """

    name: str
    title: str
    prepare: Callable[[Run], Callable[[Path, bool], object]]
    check: Callable[[Run, Path], Sequence[str]]
    whole_engine: bool = False
    long: bool = False


@dataclass(frozen=True)
class Sample:
    """One save on one rank; ``first`` tells the first of a process; ``wrong`` names what was not saved right."""

    system: str
    durable: bool
    first: bool
    round: int
    cost: Cost
    file_bytes: int
    wrong: tuple[str, ...]


@dataclass(frozen=True)
class Row:
    """One system, durable or not, the ``first`` save of a process or a later one.

    Seconds are of the slowest rank: min, median, max over rounds.
    ``written`` is what all ranks together wrote over the bytes of the state; memory is of the worst rank and round.
    """

    system: str
    durable: bool
    first: bool
    seconds: tuple[float, float, float]
    cpu_seconds: float
    written: float
    extra_rss: int
    other_cpu: float
    verified: bool
    raw_seconds: tuple[float, ...]


def optimizer_state(run: Run) -> dict[str, Any]:
    """DeepSpeed's argument to its checkpoint engine for this rank's optimizer file, in the elastic format."""
    run.use_zeroelastic("full")
    return {"optimizer_state_dict": run.engine.optimizer.state_dict(), "ds_version": "0"}


def shard_path(run: Run, directory: Path) -> Path:
    return directory / f"bf16_zero_pp_rank_{run.rank}_mp_rank_00_optim_states.pt"


def write_plain(*, reserve: bool) -> Callable[[Run], Callable[[Path, bool], object]]:
    """The bytes of the shard from memory that is touched, and nothing else: every rank its own file."""

    def prepare(run: Run) -> Callable[[Path, bool], object]:
        tensors = [tensor.view(torch.uint8).numpy() for tensor in run.tensors().values()]

        def write(directory: Path, durable: bool) -> None:
            descriptor = os.open(shard_path(run, directory), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            if reserve:
                libc = ctypes.CDLL(None, use_errno=True)
                nbytes = ctypes.c_int64(sum(len(tensor) for tensor in tensors))
                libc.fallocate64(descriptor, 0, ctypes.c_int64(0), nbytes)
            for tensor in tensors:
                view = memoryview(tensor)
                while view:
                    view = view[os.write(descriptor, view[:_BLOCK]) :]
            if durable:
                os.fsync(descriptor)
            os.close(descriptor)

        return write

    return prepare


def check_plain(run: Run, directory: Path) -> list[str]:
    data = np.memmap(shard_path(run, directory), dtype=np.uint8, mode="r")
    at, wrong = 0, []
    for key, tensor in run.tensors().items():
        mine = tensor.view(torch.uint8).numpy()
        if not np.array_equal(data[at : at + len(mine)], mine):
            wrong.append(f"{key} was not written right")
        at += len(mine)
    return wrong


def write_with_torch(run: Run) -> Callable[[Path, bool], object]:
    """``torch.save`` of the shard, as stock DeepSpeed does."""
    state = optimizer_state(run)

    def write(directory: Path, durable: bool) -> None:
        torch.save(state, shard_path(run, directory))
        if durable:
            sync(shard_path(run, directory))

    return write


def write_ourselves(*, digests: bool) -> Callable[[Run], Callable[[Path, bool], object]]:
    """The same file by zeroelastic's writer, with or without the content digests."""

    def prepare(run: Run) -> Callable[[Path, bool], object]:
        state = optimizer_state(run)
        ranges = [
            DigestRange(tensor[offset : offset + owned], stream_seed(name, key), start)
            for key, tensor in run.tensors().items()
            for name, _, offset, start, owned in owned_params(run)
        ]

        def write(directory: Path, durable: bool) -> None:
            write_torch_file(state, shard_path(run, directory), digest_ranges=ranges if digests else (), sync=durable)

        return write

    return prepare


def check_shard(run: Run, directory: Path) -> list[str]:
    """The file as torch loads it, against the live tensors: flat master weights, lean parts of each moment."""
    state = torch.load(shard_path(run, directory), mmap=True, weights_only=False)["optimizer_state_dict"]
    moments = state["base_optimizer_state"][0]
    live = run.tensors()
    wrong = [] if _equal(state["fp32_flat_groups"][0], live["fp32"]) else ["fp32 was not saved right"]
    for key in moments.keys() - {"step"}:
        parts = zip(owned_params(run), moments[key], strict=True)
        if not all(_equal(part, live[key][offset : offset + owned]) for (_, _, offset, _, owned), part in parts):
            wrong.append(f"{key} was not saved right")
    return wrong


def _equal(saved: torch.Tensor, live: torch.Tensor) -> bool:
    return torch.equal(saved.view(torch.int32), live.view(torch.int32))


def save_engine(*, elastic: bool) -> Callable[[Run], Callable[[Path, bool], object]]:
    """``engine.save_checkpoint`` with zeroelastic: module states, digests and commit record included."""

    def prepare(run: Run) -> Callable[[Path, bool], object]:
        run.use_zeroelastic("full")
        run.engine._config.zero_config.elastic_checkpoint = elastic

        def save(directory: Path, durable: bool) -> None:
            run.engine._config._param_dict["zeroelastic"] = {"fsync": durable}
            run.engine.save_checkpoint(os.fspath(directory), tag=TAG)

        return save

    return prepare


def save_stock(run: Run) -> Callable[[Path, bool], object]:
    """``engine.save_checkpoint`` of DeepSpeed alone, which never flushes: each rank's files are flushed after it."""
    run.use_stock()

    def save(directory: Path, durable: bool) -> None:
        run.engine.save_checkpoint(os.fspath(directory), tag=TAG)
        if durable:
            sync(shard_path(run, directory / TAG))
            sync(directory / TAG / f"zero_pp_rank_{run.rank}_mp_rank_00_model_states.pt")

    return save


def check_committed(run: Run, directory: Path) -> list[str]:
    """The shard, and the commit record against digests made from the live tensors."""
    wrong = check_shard(run, directory / TAG)
    record = read_record(directory / TAG)
    assert record is not None
    return wrong + list(run.differences(whole_engine=False, record=record))


def check_stock(run: Run, directory: Path) -> list[str]:
    state = torch.load(shard_path(run, directory / TAG), mmap=True, weights_only=False)["optimizer_state_dict"]
    saved = {"fp32": state["fp32_flat_groups"][0]} | state["optimizer_state_dict"]["state"][0]
    return [f"{key} was not saved right" for key, tensor in run.tensors().items() if not _equal(saved[key], tensor)]


def check_rigid(run: Run, directory: Path) -> list[str]:
    record = read_record(directory / TAG)
    assert record is not None
    return check_stock(run, directory) + list(run.differences(whole_engine=False, record=record))


def save_dcp(run: Run) -> Callable[[Path, bool], object]:
    """``torch.distributed.checkpoint.save`` of the same state as sharded tensors."""
    import torch.distributed.checkpoint as dcp

    state = sharded_tensors(run)

    def save(directory: Path, durable: bool) -> None:
        dcp.save(state, storage_writer=dcp.FileSystemWriter(directory, sync_files=durable))

    return save


def check_dcp(run: Run, directory: Path) -> list[str]:
    import torch.distributed.checkpoint as dcp

    kept = {key: tensor.clone() for key, tensor in run.tensors().items()}
    for tensor in run.tensors().values():
        tensor.zero_()
    dcp.load(sharded_tensors(run), checkpoint_id=directory)
    wrong = []
    for key, tensor in run.tensors().items():
        if not _equal(kept[key], tensor):
            wrong.append(f"{key} was not saved right")
        tensor.copy_(kept[key])
    return wrong


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


SYSTEMS = (
    System("plain", "plain write of the same bytes (ceiling)", write_plain(reserve=False), check_plain),
    System("reserved", "the same into reserved space", write_plain(reserve=True), check_plain),
    System("file", "zeroelastic's writer, no digests", write_ourselves(digests=False), check_shard),
    System("file-digests", "zeroelastic's writer, digests", write_ourselves(digests=True), check_shard),
    System("torch", "torch.save", write_with_torch, check_shard),
    System("elastic", "save_checkpoint, zeroelastic, elastic", save_engine(elastic=True), check_committed, True),
    System("rigid", "save_checkpoint, zeroelastic, rigid", save_engine(elastic=False), check_rigid, True),
    System("stock", "save_checkpoint, DeepSpeed alone", save_stock, check_stock, True),
    System("dcp", "torch DCP save", save_dcp, check_dcp, long=True),
)
OURS = ("file", "file-digests", "elastic", "rigid")
COMPARED = ("plain", "reserved", "torch", "stock", "dcp")
TITLES = {system.name: system.title for system in SYSTEMS}


def measure(job: Job, names: Sequence[str], durable: bool, number: int) -> tuple[dict[str, int], list[Sample]]:
    """The state's size, and this rank's samples of one round: of each system its first save, and a later one."""
    run = Run(job)
    fill_with_noise(run)
    samples = []
    for system in (system for system in SYSTEMS if system.name in names):
        for first in (True,) if system.long else (True, False):
            samples.append(_measure(run, system, durable=durable, number=number, first=first))
    layout = run.live().layout
    numel = int(layout.numel.sum())
    return {"num_params": layout.num_params, "numel": numel, "state_bytes": 4 * len(KEYS) * numel}, samples


def run_all(job: Job, names: Sequence[str], rounds: int) -> tuple[dict[str, int], list[tuple[Sample, ...]]]:
    """The state's size, and all samples, of each save those of all ranks.

    Systems take turns within a round, and each round begins with another one. A save of an engine has new processes
    each time; the other systems share one set in a round.
    """
    state: dict[str, int] = {}
    groups: list[tuple[Sample, ...]] = []
    with RankPool() as pool:
        for number in range(1, rounds + 1):
            turns = [system for system in SYSTEMS if system.name in names and not (system.long and number > FEW_ROUNDS)]
            together = [system.name for system in turns if not system.whole_engine]
            parts = [together] * bool(together) + [[system.name] for system in turns if system.whole_engine]
            first = (number - 1) % len(parts)
            for durable in (False, True):
                for part in parts[first:] + parts[:first]:
                    results = pool.run(measure, job.save_ranks, job, part, durable, number, timeout=_TIMEOUT_S)
                    state = results[0][0]
                    groups += zip(*(samples for _, samples in results), strict=True)
    return state, groups


def _measure(run: Run, system: System, *, durable: bool, number: int, first: bool) -> Sample:
    directory = run.job.directory / system.name
    if run.rank == 0:
        directory.mkdir()
        os.sync()  # nothing that was written or removed before is still under way
    save = system.prepare(run)
    touch_free_memory(2 * run.owned_bytes())  # for the page cache, and for copies in memory
    dist.barrier()
    meter = Meter(directory)
    dist.barrier()
    meter.start()
    save(directory, durable)
    dist.barrier()
    cost = meter.stop()
    del save
    wrong = tuple(system.check(run, directory)) if number == 1 else ()
    file_bytes = sum(file.stat().st_size for file in files_below(directory))
    dist.barrier()
    if run.rank == 0:
        shutil.rmtree(directory)  # the page cache is empty for the next one, not full of this one
    return Sample(system.name, durable, first, number, cost, file_bytes, wrong)


def summarise(rounds: Sequence[Sequence[Sample]], state_bytes: int) -> Row:
    """One row from all rounds of a system; each round has a sample of every rank."""
    seconds = [max(sample.cost.seconds for sample in ranks) for ranks in rounds]
    samples = [sample for ranks in rounds for sample in ranks]
    others = [others_share([sample.cost for sample in ranks]) for ranks in rounds]
    return Row(
        system=samples[0].system,
        durable=samples[0].durable,
        first=samples[0].first,
        seconds=(min(seconds), median(seconds), max(seconds)),
        cpu_seconds=median(sum(sample.cost.cpu_seconds for sample in ranks) for ranks in rounds),
        written=max(sample.file_bytes for sample in samples) / state_bytes,
        extra_rss=max(sample.cost.extra_rss for sample in samples),
        other_cpu=median(others),
        verified=not any(sample.wrong for sample in samples),
        raw_seconds=tuple(seconds),
    )


def tables(document: dict[str, Any], rows: Sequence[Row]) -> str:
    """The results as Markdown."""
    about, state = document["machine"], document["state"]
    lines = [
        f"# Saving on {document['ranks']} ranks",
        "",
        f"{state['numel']:,} parameters in {state['num_params']} tensors, {state['state_bytes'] / 1e9:.2f} GB of fp32 "
        f"state; {document['filesystem']}, DeepSpeed {about['deepspeed']}.",
        "",
        *describe(about),
    ]
    for durable, first in ((durable, first) for durable in (False, True) for first in (True, False)):
        found = {row.system: row for row in rows if (row.durable, row.first) == (durable, first)}
        lines += [
            "",
            ("## Flushed to the device" if durable else "## Into the page cache")
            + (": the first save of a process" if first else ": a later save of the same process"),
            "",
            "| system | s min | median | max | GB/s of state | written / state | extra peak MiB | cpu-s | "
            "others' cpu | verified |",
            "|---|--:|--:|--:|--:|--:|--:|--:|--:|---|",
        ]
        for row in found.values():
            low, middle, high = row.seconds
            lines.append(
                f"| {TITLES[row.system]} | {low:.3f} | {middle:.3f} | {high:.3f} | "
                f"{state['state_bytes'] / middle / 1e9:.2f} | {row.written:.3f} | {row.extra_rss / _MIB:.1f} | "
                f"{row.cpu_seconds:.2f} | {row.other_cpu:.0%} | {'yes' if row.verified else '**NO**'} |"
            )
        ours = [name for name in OURS if name in found]
        lines += [
            "",
            "How many times longer than zeroelastic (median over rounds; for plain writes, the share of their speed "
            "that zeroelastic reaches):",
            "",
            "| | " + " | ".join(TITLES[name] for name in ours) + " |",
            "|---|" + "--:|" * len(ours),
        ]
        for name in COMPARED:
            if name in found:
                cells = [f"{times(vars(found[mine]), vars(found[name])):.2f}" for mine in ours]
                lines.append(f"| {TITLES[name]} | " + " | ".join(cells) + " |")
    lines += noise([row.other_cpu for row in rows])
    return "\n".join(lines) + "\n"


def main() -> None:
    every = [system.name for system in SYSTEMS]
    parser = job_arguments(__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--systems", nargs="+", choices=every, default=every)
    arguments = parser.parse_args()
    about = machine() | {"deepspeed": version("deepspeed")}
    with temporary_job("bench-save", arguments, arguments.ranks, arguments.ranks) as job:
        where = filesystem(job.directory)
        state, groups = run_all(job, arguments.systems, arguments.repeats)
    by_system: dict[tuple[str, bool, bool], list[Sequence[Sample]]] = {}
    for ranks in groups:
        by_system.setdefault((ranks[0].system, ranks[0].durable, ranks[0].first), []).append(ranks)
    order = list(TITLES)
    rows = [summarise(rounds, state["state_bytes"]) for rounds in by_system.values()]
    rows.sort(key=lambda row: (row.durable, not row.first, order.index(row.system)))
    document = {
        "machine": about | {"load_average_after": os.getloadavg()[0]},
        "filesystem": where,
        "ranks": job.save_ranks,
        "model": job.model,
        "state": state,
        "rows": [asdict(row) for row in rows],
        "samples": [asdict(sample) | {"rank": rank} for ranks in groups for rank, sample in enumerate(ranks)],
    }
    write_results(arguments.out, "save", document, tables(document, rows))
    wrong = {f"{sample.system}: {line}" for ranks in groups for sample in ranks for line in sample.wrong}
    if wrong:
        sys.exit("not saved right:\n  " + "\n  ".join(sorted(wrong)))


if __name__ == "__main__":
    main()
