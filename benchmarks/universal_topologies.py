"""Changes of topology, by zeroelastic and by Universal Checkpoint: is the state the same, and what does it take?

    python benchmarks/universal_topologies.py --out benchmarks/results --directory /a/disk
    python benchmarks/universal_topologies.py --small --out /tmp/x --directory /tmp/x  # tests the benchmark itself

A run with zeroelastic trains three steps and saves. Then other processes resume from that checkpoint at another
topology: once with zeroelastic, once with stock DeepSpeed from what ``ds_to_universal`` makes of the same files. The
state is gathered by code that belongs to neither (tests/topologies.py) and compared with that of the run that saved.
Seconds are of ``ds_to_universal``, which is a process of its own, and of ``engine.load_checkpoint()``, the slowest
rank's, in a process that has not loaded before. Writes topology_universal.json and topology_universal.md.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from report import Others, benchmark_arguments, describe, machine, noise, table, write_results

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests")]

from stock_programs import ds_to_universal  # noqa: E402
from topologies import PRELOADED, TopologyJob, build, differences, logical_hashes, train  # noqa: E402

from zeroelastic.testing import RankPool  # noqa: E402

LLAMA, AUTOEP, MOE = (TopologyJob(model, precision="bf16") for model in ("llama", "autoep", "moe"))


@dataclass(frozen=True)
class Change:
    """What saves and what resumes, each on a number of ranks."""

    kind: str
    src_ranks: int
    src: TopologyJob
    dst_ranks: int
    dst: TopologyJob


CHANGES = (
    Change("AutoTP", 4, replace(LLAMA, tp=2, stage=3), 2, replace(LLAMA, stage=3)),
    Change("AutoTP", 4, replace(LLAMA, tp=2, stage=2), 4, replace(LLAMA, tp=4, stage=2)),
    Change("AutoTP", 4, replace(LLAMA, tp=2, stage=1), 2, replace(LLAMA, stage=1)),
    Change("AutoTP", 2, replace(LLAMA, stage=3), 2, replace(LLAMA, tp=2, stage=3)),
    Change("AutoTP", 2, replace(LLAMA, stage=2), 2, replace(LLAMA, tp=2, stage=2)),
    Change("AutoTP", 4, replace(LLAMA, tp=2, stage=3), 2, replace(LLAMA, tp=2, stage=2)),
    Change("AutoEP", 4, replace(AUTOEP, ep=2, stage=3), 4, replace(AUTOEP, ep=4, stage=3)),
    Change("AutoEP", 4, replace(AUTOEP, ep=2, stage=2), 2, replace(AUTOEP, stage=2)),
    Change("AutoEP, frozen weights", 4, replace(AUTOEP, ep=2, stage=3, frozen=True), 2, replace(AUTOEP, frozen=True)),
    Change("MoE", 4, replace(MOE, ep=2, stage=2), 4, replace(MOE, ep=4, stage=2)),
    Change("MoE", 2, replace(MOE, stage=2), 4, replace(MOE, ep=2, stage=2)),
)


@dataclass(frozen=True)
class Row:
    """One change by one way: seconds, bytes that were read of those that were wanted, and what differs.

    ``wrong`` counts entries of the logical state by their last part; ``error`` is the first line of what was raised.
    """

    kind: str
    src: str
    dst: str
    way: str
    convert_s: float
    load_s: float
    bytes_read: int
    bytes_owned: int
    entries: int
    wrong: dict[str, int]
    error: str
    other_cpu: float


def save(job: TopologyJob, directory: str) -> dict[str, Any]:
    engine = build(job)
    train(engine, 0, 3)
    engine.save_checkpoint(directory, tag="t")
    return logical_hashes(engine)


def resume(job: TopologyJob, directory: str) -> tuple[dict[str, Any], float, int, int]:
    """The state, the seconds of the load, and what the report says was read and was owned."""
    import torch.distributed as dist

    engine = build(job)
    dist.barrier()
    begin = time.perf_counter()
    path, _ = engine.load_checkpoint(directory, tag="t")
    seconds = time.perf_counter() - begin
    assert path is not None
    report = getattr(engine, "zeroelastic_report", None)
    read = (0, 0) if report is None else (report.bytes_read, report.bytes_owned)
    return logical_hashes(engine), seconds, *read


def named(ranks: int, job: TopologyJob) -> str:
    return f"stage {job.stage}, {ranks} ranks, {f'tp {job.tp}' if job.model == 'llama' else f'ep {job.ep}'}"


def measure(pool: RankPool, change: Change, width: int, directory: Path) -> list[Row]:
    """The rows of a change, one for each way."""
    src, dst = (replace(job, width=width) for job in (change.src, change.dst))
    saved = pool.run(save, change.src_ranks, src, str(directory / "run"))[0]
    rows = []
    for way in ("zeroelastic", "Universal Checkpoint"):
        others, convert_s, load_s, bytes_read, bytes_owned, error = Others(), 0.0, 0.0, 0, 0, ""
        wrong: Counter[str] = Counter()
        job, source = dst.other(), directory / "run"
        try:
            if way != "zeroelastic":
                source = directory / "universal"
                source.mkdir()
                begin = time.perf_counter()
                ds_to_universal(directory / "run" / "t", source / "t", "--inject_missing_state")
                convert_s = time.perf_counter() - begin
                job = replace(job, installed=False, config={"checkpoint": {"load_universal": True}})
            found = pool.run(resume, change.dst_ranks, job, str(source))
            load_s = max(seconds for _, seconds, _, _ in found)
            bytes_read, bytes_owned = found[0][2:]
            wrong.update(last_part(key) for key in differences(saved, found[0][0]))
        except subprocess.CalledProcessError as failed:
            error = f"ds_to_universal: {failed.stderr.strip().splitlines()[-1]}"
        except Exception as failed:
            error = str(failed).splitlines()[0].partition(" failed first: ")[2] or str(failed)[:200]
        rows.append(
            Row(
                kind=change.kind,
                src=named(change.src_ranks, src),
                dst=named(change.dst_ranks, dst),
                way=way,
                convert_s=convert_s,
                load_s=load_s,
                bytes_read=bytes_read,
                bytes_owned=bytes_owned,
                entries=len(saved),
                wrong=dict(wrong),
                error=error,
                other_cpu=others.share(),
            )
        )
    return rows


def last_part(key: str) -> str:
    """What kind of entry of the logical state a key is of."""
    if key.startswith("buffer/"):
        return "buffer"
    return key.rpartition("/")[2] if not key.startswith("engine/") else key


def outcome(row: Row) -> str:
    if row.error:
        return f"fails: `{row.error}`"
    if not row.wrong:
        return "the same"
    what = ", ".join(f"{count} {key}" for key, count in sorted(row.wrong.items()))
    return f"**differs**: {what}"


def tables(document: dict[str, Any], rows: Sequence[Row]) -> str:
    """The results as Markdown."""
    lines = [
        "# Changes of topology, by zeroelastic and by Universal Checkpoint",
        "",
        *describe(document["machine"]),
        "",
        "State: all weights, optimizer state, hyper-parameters by tensor, buffers and counters of models "
        f"{document['width']} times as wide as the tests', compared bit for bit with the run that saved. Read / owned: "
        "bytes of state that the worst rank reads, over those that it has.",
        "",
        *table(
            ["experts or layers", "saved", "resumed", "by", "convert s", "load s", "read / owned", "state",
             "others' cpu"],
            [
                [row.kind, row.src, row.dst, row.way, f"{row.convert_s:.1f}" if row.convert_s else "",
                 f"{row.load_s:.2f}" if row.load_s else "",
                 f"{row.bytes_read / row.bytes_owned:.3f}" if row.bytes_owned else "", outcome(row),
                 f"{row.other_cpu:.0%}"]
                for row in rows
            ],
        ),
    ]  # fmt: skip
    lines += noise([row.other_cpu for row in rows])
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = benchmark_arguments(__doc__)
    parser.add_argument("--width", type=int, default=32, help="how many times as wide as in the tests")
    arguments = parser.parse_args()
    about = machine()
    width = 1 if arguments.small else arguments.width
    rows = []
    with RankPool(4, preload=PRELOADED) as pool:
        for change in CHANGES[:: 5 if arguments.small else 1]:
            print(change.kind, change.src_ranks, change.dst_ranks, file=sys.stderr, flush=True)
            with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
                rows += measure(pool, change, width, Path(directory))
    about["load_average_after"] = os.getloadavg()[0]
    document = {"machine": about, "width": width, "rows": [asdict(row) for row in rows]}
    write_results(arguments.out, "topology_universal", document, tables(document, rows))


if __name__ == "__main__":
    main()
