"""The cost of a save for training: in the foreground and in the background, interleaved in one run.

    python benchmarks/bench_background.py --out benchmarks/results          # 40M parameters, on 1 rank and on 2
    python benchmarks/bench_background.py --small --rounds 2 --out /tmp/x   # a few million parameters, half a minute

Each round takes some steps, saves in the background and goes on stepping until that is committed, takes some steps,
saves and waits, and takes some steps. A step that ran from its beginning to its end while a save was written is
compared with the steps of the same round before and after that save, so that a machine that changes its pace from one
second to the next does not count. Two kinds of steps: micro batches, which are shorter than the writing, and optimizer
steps, which may be longer: of these, all that overlap the writing count, and for how long is said. Every rank computes
with one thread, and every file is flushed to the device.

By default glibc is told to keep what a step frees for the next one. Else it goes back to the system after each step and
comes again page by page, which takes half of the step; that is measured too, on the fewest ranks, as "memory given
back". Writes background.json (every sample) and background.md.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import mean, median
from typing import Any

sys.path.insert(0, os.fspath(Path(__file__).resolve().parent))

import torch
import torch.distributed as dist
from bench_load import filesystem
from meter import _busy_cpu_seconds
from report import NOISY, describe, machine, spread, table

from zeroelastic.checkpoint.commit_record import read_record
from zeroelastic.testing import RankPool

_TAG = "tag"
_TIMEOUT_S = 3600.0
_TOKENS = 8
_KEEP = {"MALLOC_MMAP_THRESHOLD_": str(1 << 33), "MALLOC_TRIM_THRESHOLD_": str(1 << 34)}  # see mallopt(3)
_KINDS = {"micro batches": 1 << 20, "optimizer steps": 1}  # and how many batches make an optimizer step
_WIDTH, _SMALL_WIDTH = 1024, 512


@dataclass(frozen=True)
class Round:
    """Seconds of one round on one rank.

    ``before`` and ``after`` are steps without a save, next to ``during``: those that began while it was written, with
    the seconds of each for which it still was. ``whole`` is from the call of the save in the background until it is
    committed; ``others`` the share of the processors that other processes used.
    """

    before: list[float]
    during: list[float]
    overlap: list[float]
    after: list[float]
    waited: float
    snapshot: float
    whole: float
    others: float
    snapshot_bytes: int

    @property
    def covered(self) -> list[float]:
        """The steps that ended before the writing did."""
        return [step for step, overlap in zip(self.during, self.overlap, strict=True) if overlap >= step]

    @property
    def plain(self) -> float:
        """Seconds of a step without a save, in the middle of this round."""
        return mean([mean(self.before), mean(self.after)])


def build(num_layers: int, width: int) -> Any:
    """An engine that trains fp32 weights with Adam and saves all of its state."""
    import deepspeed

    import zeroelastic

    zeroelastic.install()
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(num_layers)))
    config = {
        "train_micro_batch_size_per_gpu": _TOKENS,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": 3, "elastic_checkpoint": True},
        "zeroelastic": {"async_save": True},
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


@contextmanager
def keeping_memory(kept: bool) -> Iterator[None]:
    """Let processes that are started meanwhile keep freed memory, or use glibc's default."""
    before = {name: os.environ.pop(name, None) for name in _KEEP}
    if kept:
        os.environ.update(_KEEP)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def share_of_others() -> Callable[[], float]:
    """Begins to count; what is returned tells the share of the processors that no rank of this run has used since."""
    busy, own, clock = _busy_cpu_seconds(), time.process_time(), time.perf_counter()

    def share() -> float:
        ours = torch.tensor(time.process_time() - own, dtype=torch.float64)
        dist.all_reduce(ours)
        return max(0.0, _busy_cpu_seconds() - busy - float(ours)) / (
            (time.perf_counter() - clock) * (os.cpu_count() or 1)
        )

    return share


def measure(directory: str, num_layers: int, width: int, accumulation: int, rounds: int, num_steps: int) -> list[Round]:
    """All rounds on this rank."""
    import zeroelastic
    from zeroelastic.deepspeed.save.background import BackgroundSave, background_of, saving_in_background
    from zeroelastic.deepspeed.save.pending import pending_of

    engine = build(num_layers, width)
    batch = torch.randn(_TOKENS, width)

    def step() -> float:
        began = time.perf_counter()
        engine.backward(engine(batch).pow(2).mean())
        engine.step()
        return time.perf_counter() - began

    def steps() -> list[float]:
        return [step() for _ in range(num_steps)]

    def save(*, background: bool) -> float:
        folder = Path(directory) / ("background" if background else "waited")
        if dist.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
            os.sync()
        dist.barrier()
        began = time.perf_counter()
        with saving_in_background(engine, background):
            engine.save_checkpoint(os.fspath(folder), tag=_TAG)
        return time.perf_counter() - began

    def steps_while_writing(pending: BackgroundSave) -> tuple[list[float], list[float]]:
        """And of each the seconds until the save was committed, at most its own."""
        begins, during = [], []
        while True:
            begins.append(time.monotonic())
            during.append(step())
            still = torch.tensor(int(not pending.is_done()))
            dist.all_reduce(still, op=dist.ReduceOp.MAX)
            if not int(still):
                break
        assert pending.ended is not None
        end = pending.ended
        left = [max(0.0, end - began) for began in begins]
        return during, [min(seconds, rest) for seconds, rest in zip(during, left, strict=True)]

    def run_round() -> Round:
        others = share_of_others()
        step()
        before = steps()
        snapshot = save(background=True)
        pending = pending_of(engine)
        assert isinstance(pending, BackgroundSave)
        during, overlap = steps_while_writing(pending)
        zeroelastic.wait_for_save(engine)
        assert pending.seconds is not None
        assert read_record(Path(directory) / "background" / _TAG) is not None
        after = steps()
        return Round(
            before=before,
            during=during,
            overlap=overlap,
            after=after,
            waited=save(background=False),
            snapshot=snapshot,
            whole=pending.seconds,
            others=others(),
            snapshot_bytes=background_of(engine).memory.nbytes,
        )

    steps()  # from here on there are moments
    engine.set_train_batch_size(_TOKENS * accumulation * dist.get_world_size())
    return [run_round() for _ in range(rounds + 1)]  # the first allocates the snapshot, which later ones use again


def summarise(ranks: list[list[Round]]) -> dict[str, Any]:
    """Of the slowest rank in each round; the first round, which allocates, is left out of all but its snapshot."""
    worst = {
        name: [max(getattr(rank, name) for rank in together) for together in zip(*ranks, strict=True)]
        for name in ("waited", "snapshot", "whole", "others")
    }
    rounds = ranks[0][1:]
    covered = [mean(one.covered) / one.plain for one in rounds if one.covered]
    touched = [
        (mean(one.during) / one.plain, sum(one.overlap) / sum(one.during)) for one in rounds if sum(one.overlap) > 0
    ]
    return {
        "step": spread([one.plain for one in rounds]),
        "covered_ratio": spread(covered) if covered else None,
        "covered_interval": interval(covered) if covered else None,
        "covered_steps": sum(len(one.covered) for one in rounds),
        "ratio": spread([ratio for ratio, _ in touched]),
        "interval": interval([ratio for ratio, _ in touched]),
        "coverage": median(share for _, share in touched),
        "steps_while_writing": sum(len(one.during) for one in rounds),
        "waited": spread(worst["waited"][1:]),
        "snapshot": spread(worst["snapshot"][1:]),
        "first_snapshot": worst["snapshot"][0],
        "whole": spread(worst["whole"][1:]),
        "stall_ratio": spread([a / b for a, b in zip(worst["waited"][1:], worst["snapshot"][1:], strict=True)]),
        "others": median(worst["others"][1:]),
        "snapshot_bytes": max(one.snapshot_bytes for rank in ranks for one in rank),
    }


def interval(values: list[float]) -> tuple[float, float]:
    """The 95 % interval of a median: of 2,000 resamples (bootstrap, percentiles)."""
    chosen = random.Random(0)
    medians = sorted(median(chosen.choices(values, k=len(values))) for _ in range(2000))
    return medians[50], medians[1949]


def _cell(values: tuple[float, float, float], digits: int = 3) -> str:
    low, middle, high = (f"{value:.{digits}f}" for value in values)
    return f"{middle} ({low} - {high})"


def _ratio(values: tuple[float, float, float] | None, bounds: tuple[float, float] | None) -> str:
    if values is None or bounds is None:
        return "none was"
    return f"**{values[1]:.2f}** ({bounds[0]:.2f} - {bounds[1]:.2f})"


def text_of(document: dict[str, Any]) -> str:
    """The results as Markdown."""
    results: dict[str, dict[str, Any]] = document["results"]
    found = list(results.values())
    head = ["seconds: median (least - greatest)", *results]
    rows = [
        ["a step without a save", *(_cell(one["step"]) for one in found)],
        [
            "a step wholly while a save is written, over one without: median (its 95 % interval)",
            *(_ratio(one["covered_ratio"], one["covered_interval"]) for one in found),
        ],
        ["such steps", *(str(one["covered_steps"]) for one in found)],
        [
            "a step begun while a save is written, over one without",
            *(_ratio(one["ratio"], one["interval"]) for one in found),
        ],
        ["such steps", *(str(one["steps_while_writing"]) for one in found)],
        ["the share of these in which it was written", *(f"{one['coverage']:.0%}" for one in found)],
        ["training stalls for a save that is waited for", *(_cell(one["waited"]) for one in found)],
        ["training stalls for a snapshot", *(_cell(one["snapshot"]) for one in found)],
        ["**times shorter**", *(_cell(one["stall_ratio"], 1) for one in found)],
        ["the first snapshot, which allocates", *(f"{one['first_snapshot']:.3f}" for one in found)],
        ["from the call to the commit, in the background", *(_cell(one["whole"]) for one in found)],
        ["snapshot per rank, MiB", *(f"{one['snapshot_bytes'] / 2**20:.0f}" for one in found)],
        ["processors in the hands of others", *(f"{one['others']:.0%}" for one in found)],
    ]
    lines = ["# Saving in the background", "", *describe(document["machine"]), ""]
    lines += [
        f"{document['numel']:,} parameters, fp32 with AdamW, {document['filesystem']}, flushed to the device; "
        f"{document['rounds']} rounds, one thread per rank.",
        "",
        *table(head, rows),
    ]
    noisy = [name for name, one in results.items() if one["others"] > NOISY]
    if noisy:
        lines += ["", f"Others used more than {NOISY:.0%} of the processors ({', '.join(noisy)})."]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=40, help=f"linear layers of {_WIDTH}^2 weights")
    parser.add_argument("--small", action="store_true", help="few and small layers: to test the benchmark itself")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--steps", type=int, default=2, help="steps before and after each save in the background")
    parser.add_argument("--directory", type=Path, help="where checkpoints are put for the time being; not in memory")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="directory of the results")
    arguments = parser.parse_args()
    about = machine() | {"deepspeed": version("deepspeed")}
    num_layers, width = (6, _SMALL_WIDTH) if arguments.small else (arguments.layers, _WIDTH)
    results: dict[str, Any] = {}
    samples: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="bench-background-", dir=arguments.directory) as directory:
        where = filesystem(Path(directory).resolve())
        for kept, ranks in [*((True, ranks) for ranks in arguments.ranks), (False, min(arguments.ranks))]:
            with keeping_memory(kept), RankPool(ranks, store="tcp") as pool:
                for kind, accumulation in _KINDS.items():
                    name = f"{kind}, {ranks} rank{'s' if ranks != 1 else ''}{'' if kept else ', memory given back'}"
                    found = pool.run(
                        measure,
                        ranks,
                        f"{directory}/{ranks}",
                        num_layers,
                        width,
                        accumulation,
                        arguments.rounds,
                        arguments.steps,
                        timeout=_TIMEOUT_S,
                    )
                    results[name] = summarise(found)
                    samples[name] = [[asdict(one) for one in rank] for rank in found]
    document = {
        "machine": about | {"load_average_after": os.getloadavg()[0]},
        "filesystem": where,
        "numel": num_layers * (width * width + width),
        "rounds": arguments.rounds,
        "results": results,
        "samples": samples,
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "background.json").write_text(json.dumps(document, indent=1) + "\n")
    text = text_of(document)
    (arguments.out / "background.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
