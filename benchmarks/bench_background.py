"""What a save costs training: one that is waited for, and one in the background, interleaved in one run.

    python benchmarks/bench_background.py --out benchmarks/results          # 40M parameters, on 1 rank and on 2
    python benchmarks/bench_background.py --small --rounds 2 --out /tmp/x   # a few million parameters, half a minute

Each round trains some steps without a save, saves and waits, and saves in the background while training goes on; where
it begins with moves on from round to round. Every rank computes with one thread, and every file is flushed to the
device. Writes background.json (every sample) and background.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, os.fspath(Path(__file__).resolve().parent))

import torch
import torch.distributed as dist
from bench_load import filesystem
from meter import _busy_cpu_seconds
from report import NOISY, describe, machine, spread, table

from zeroelastic.record import read_record
from zeroelastic.testing import RankPool

_TAG = "tag"
_TIMEOUT_S = 3600.0
_TOKENS = 48
_WIDTH, _SMALL_WIDTH = 1024, 512
_ARMS = ("without", "waited", "background")


@dataclass(frozen=True)
class Round:
    """Seconds of one round on one rank. ``steps`` are without a save, ``during`` those that ended while it was written.

    ``whole`` is from the call of the save in the background until it is committed; ``others`` the share of the
    processors that other processes used.
    """

    steps: list[float]
    during: list[float]
    waited: float
    snapshot: float
    whole: float
    others: float
    snapshot_bytes: int


def build(num_layers: int, width: int) -> Any:
    """An engine that trains fp32 weights with Adam, all of whose state is saved."""
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
        "zeroelastic": {"background_save": True},
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


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


def measure(directory: str, num_layers: int, width: int, rounds: int, num_steps: int) -> list[Round]:
    """All rounds on this rank."""
    import zeroelastic
    from zeroelastic.stage3.background import background_of, saving_in_background
    from zeroelastic.stage3.pending import pending_of

    engine = build(num_layers, width)
    batch = torch.randn(_TOKENS, width)

    def step() -> float:
        began = time.perf_counter()
        engine.backward(engine(batch).pow(2).mean())
        engine.step()
        return time.perf_counter() - began

    def save(arm: str) -> float:
        folder = Path(directory) / arm
        if dist.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
            os.sync()
        dist.barrier()
        began = time.perf_counter()
        with saving_in_background(engine, arm == "background"):
            engine.save_checkpoint(os.fspath(folder), tag=_TAG)
        return time.perf_counter() - began

    def run_round(number: int) -> Round:
        found: dict[str, Any] = {}
        others = share_of_others()
        for arm in _ARMS[number % 3 :] + _ARMS[: number % 3]:
            if arm == "without":
                found["steps"] = [step() for _ in range(num_steps)]
            elif arm == "waited":
                found["waited"] = save(arm)
            else:
                found["snapshot"] = save(arm)
                pending, during = pending_of(engine), []
                assert pending is not None
                while True:
                    seconds = step()
                    still = torch.tensor(int(not pending.is_done()))
                    dist.all_reduce(still, op=dist.ReduceOp.MIN)
                    during.append(seconds)  # the last one began while the save was written, and outlasted it
                    if not int(still):
                        break
                zeroelastic.wait_for_save(engine)
                assert pending.seconds is not None
                found["during"], found["whole"] = during, pending.seconds
                assert read_record(Path(directory) / arm / _TAG) is not None
        return Round(**found, others=others(), snapshot_bytes=background_of(engine).memory.nbytes)

    for _ in range(3):
        step()
    first = run_round(0)  # allocates the snapshot, which later ones use again: reported on its own
    return [first, *(run_round(number) for number in range(1, rounds + 1))]


def summarise(ranks: list[list[Round]]) -> dict[str, Any]:
    """Of the slowest rank in each round; the first round, which allocates, is left out of all but its snapshot."""
    worst = {
        name: [max(getattr(rank, name) for rank in together) for together in zip(*ranks, strict=True)]
        for name in ("waited", "snapshot", "whole", "others")
    }
    steps = [median(one.steps) for one in ranks[0]]
    during = [median(one.during) if one.during else None for one in ranks[0]]
    ratios = [now / alone for now, alone in zip(during[1:], steps[1:], strict=True) if now is not None]
    return {
        "step": spread(steps[1:]),
        "step_while_writing": spread([value for value in during[1:] if value is not None]),
        "ratio": spread(ratios),
        "steps_while_writing": sum(len(one.during) for one in ranks[0][1:]),
        "waited": spread(worst["waited"][1:]),
        "snapshot": spread(worst["snapshot"][1:]),
        "first_snapshot": worst["snapshot"][0],
        "whole": spread(worst["whole"][1:]),
        "stall_ratio": spread([a / b for a, b in zip(worst["waited"][1:], worst["snapshot"][1:], strict=True)]),
        "others": median(worst["others"][1:]),
        "snapshot_bytes": max(one.snapshot_bytes for rank in ranks for one in rank),
    }


def _cell(values: tuple[float, float, float], digits: int = 3) -> str:
    low, middle, high = (f"{value:.{digits}f}" for value in values)
    return f"{middle} ({low} - {high})"


def text_of(document: dict[str, Any]) -> str:
    """The results as Markdown."""
    results: dict[str, dict[str, Any]] = document["results"]
    head = ["seconds: median (least - greatest)", *(f"{ranks} rank{'s' if ranks != '1' else ''}" for ranks in results)]
    rows = [
        ["a step without a save", *(_cell(found["step"]) for found in results.values())],
        [
            "a step begun while a save is written",
            *(_cell(found["step_while_writing"]) for found in results.values()),
        ],
        ["**ratio of the two**", *(_cell(found["ratio"], 2) for found in results.values())],
        ["training stalls for a save that is waited for", *(_cell(found["waited"]) for found in results.values())],
        ["training stalls for a snapshot", *(_cell(found["snapshot"]) for found in results.values())],
        ["**times shorter**", *(_cell(found["stall_ratio"], 1) for found in results.values())],
        ["the first snapshot, which allocates", *(f"{found['first_snapshot']:.3f}" for found in results.values())],
        ["from the call to the commit, in the background", *(_cell(found["whole"]) for found in results.values())],
        ["snapshot per rank, MiB", *(f"{found['snapshot_bytes'] / 2**20:.0f}" for found in results.values())],
        ["such steps", *(str(found["steps_while_writing"]) for found in results.values())],
        ["processors in the hands of others", *(f"{found['others']:.0%}" for found in results.values())],
    ]
    lines = ["# Saving in the background", "", *describe(document["machine"]), ""]
    lines += [
        f"{document['numel']:,} parameters, fp32 with AdamW, {document['filesystem']}, flushed to the device; "
        f"{document['rounds']} rounds, one thread per rank.",
        "",
        *table(head, rows),
    ]
    noisy = [ranks for ranks, found in results.items() if found["others"] > NOISY]
    if noisy:
        lines += ["", f"Others used more than {NOISY:.0%} of the processors (ranks: {', '.join(noisy)})."]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=40, help=f"linear layers of {_WIDTH}^2 weights")
    parser.add_argument("--small", action="store_true", help="few and small layers: to test the benchmark itself")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=8, help="steps without a save in each round")
    parser.add_argument("--directory", type=Path, help="where checkpoints are put for the time being; not in memory")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="directory of the results")
    arguments = parser.parse_args()
    about = machine() | {"deepspeed": version("deepspeed")}
    num_layers, width = (6, _SMALL_WIDTH) if arguments.small else (arguments.layers, _WIDTH)
    results: dict[str, Any] = {}
    samples: dict[str, Any] = {}
    with (
        tempfile.TemporaryDirectory(prefix="bench-background-", dir=arguments.directory) as directory,
        RankPool(max(arguments.ranks)) as pool,
    ):
        where = filesystem(Path(directory).resolve())
        for ranks in arguments.ranks:
            place = f"{directory}/{ranks}"
            found = pool.run(
                measure, ranks, place, num_layers, width, arguments.rounds, arguments.steps, timeout=_TIMEOUT_S
            )
            results[str(ranks)] = summarise(found)
            samples[str(ranks)] = [[asdict(one) for one in rank] for rank in found]
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
