"""What resuming a stage 2 run costs, at the same size and at another, and whether it is right.

    python benchmarks/bench_stage2.py --out benchmarks/results           # 113M parameters, 4 -> 3 ranks
    python benchmarks/bench_stage2.py --small --rounds 1 --out /tmp/x    # a few hundred thousand parameters

A stage 2 run with ``round_robin_gradients`` saves by DeepSpeed alone. Then, in turn, round after round: DeepSpeed and
zeroelastic load it at the same size; zeroelastic and Universal Checkpoint load it on one rank fewer, the latter after
it was converted, three times. Each sample is the first load of new processes, whose engine has not stepped; a later
load of the same engine follows. After each load the master weights are gathered from the flat buffers and compared,
outside the measured time. Page cache warm. Writes stage2.json (every sample) and stage2.md.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, os.fspath(Path(__file__).resolve().parent))

import torch
import torch.distributed as dist
from meter import touch_free_memory
from report import describe, machine, table

from zeroelastic.testing import RankPool

_TIMEOUT_S = 1800.0
_RANKS = 4
_CONVERSIONS = 3
_TAG = "global_step1"

SYSTEMS = {
    "stock": "DeepSpeed, 4 -> 4",
    "same": "zeroelastic, 4 -> 4",
    "same-read": 'zeroelastic, 4 -> 4, `"verify": "read"`',
    "same-quick": 'zeroelastic, 4 -> 4, `"verify": "quick"`',
    "other": "zeroelastic, 4 -> 3",
    "other-read": 'zeroelastic, 4 -> 3, `"verify": "read"`',
    "other-quick": 'zeroelastic, 4 -> 3, `"verify": "quick"`',
    "convert": "Universal Checkpoint, convert",
    "universal": "Universal Checkpoint, load, 4 -> 3",
}


Load = tuple[float, float | None, dict[str, str]]
"""Seconds of one load on one rank, those of zeroelastic's report, and afterwards a hash of each parameter's weights."""


@dataclass(frozen=True)
class Sample:
    """One load, or the conversion: seconds of the slowest rank, and how many of the parameters came out wrong.

    ``first`` tells the first load of a process from a later one; ``reported`` are the seconds of zeroelastic's report.
    """

    system: str
    first: bool
    round: int
    seconds: float
    reported: float | None
    wrong: int
    num_params: int


def build(width: int, layers: int, *, installed: bool, universal: bool = False, verify: str = "full") -> Any:
    """An engine that has not stepped: stage 2, bf16, AdamW."""
    import deepspeed

    import zeroelastic

    zeroelastic.install() if installed else zeroelastic.uninstall()
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers)))
    config: dict[str, Any] = {
        "train_batch_size": 12,
        "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "checkpoint": {"load_universal": universal},
        "zero_optimization": {"stage": 2, "round_robin_gradients": True},
    }
    if installed:
        config["zeroelastic"] = {"verify": verify}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def masters(engine: Any) -> dict[str, str]:
    """A hash of the master weights of each parameter, on rank 0. Collective.

    They lie where the parameter's 16-bit weight lies in the group's buffer.
    """
    found: dict[str, str] = {}
    optimizer = engine.optimizer
    columns = (optimizer.bit16_groups, optimizer.single_partition_of_fp32_groups, optimizer.bit16_groups_flat)
    for params, own, weights in zip(*columns, strict=True):
        first = dist.get_rank() == 0
        whole = torch.empty(own.numel() * dist.get_world_size() if first else 0)
        dist.gather(own.detach(), list(whole.split(own.numel())) if first else None)
        for param in params if first else ():
            begin = (param.data_ptr() - weights.data_ptr()) // weights.element_size()
            values = whole[begin : begin + param.numel()].numpy()
            found[optimizer.param_names[param]] = hashlib.sha256(values).hexdigest()
    return found


def save(directory: str, width: int, layers: int) -> dict[str, str]:
    engine = build(width, layers, installed=False)
    data = torch.ones(12 // dist.get_world_size(), width, dtype=torch.bfloat16)
    engine.backward(engine(data).float().pow(2).mean())
    engine.step()
    engine.save_checkpoint(directory)
    return masters(engine)


def loads(system: str, directory: str, width: int, layers: int) -> tuple[Load, Load]:
    """The first load of this process and a later one, on this rank."""
    options = {"universal": system == "universal", "verify": system.partition("-")[2] or "full"}
    engine = build(width, layers, installed=_is_ours(system), **options)
    if dist.get_rank() == 0:
        touch_free_memory(13 * layers * (width * width + width))  # of the state that is made
    return _load(system, engine, directory), _load(system, engine, directory)


def _is_ours(system: str) -> bool:
    return system.startswith(("same", "other"))


def _load(system: str, engine: Any, directory: str) -> Load:
    with torch.no_grad():
        for group in engine.optimizer.single_partition_of_fp32_groups:
            group.zero_()
    dist.barrier()
    began = time.perf_counter()
    engine.load_checkpoint(directory, tag="universal" if system == "universal" else _TAG)
    dist.barrier()
    seconds, report = time.perf_counter() - began, getattr(engine, "zeroelastic_report", None)
    return seconds, None if report is None else report.seconds, masters(engine)


def convert(directory: Path) -> float:
    """Seconds of ds_to_universal, with as many workers as there are processors."""
    shutil.rmtree(directory / "universal", ignore_errors=True)
    count = str(os.cpu_count() or 1)
    began = time.perf_counter()
    subprocess.run(
        [
            *(sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"),
            *("--input_folder", str(directory / _TAG), "--output_folder", str(directory / "universal")),
            *("--num_extract_workers", count, "--num_merge_workers", count),
        ],
        check=True,
        capture_output=True,
        timeout=_TIMEOUT_S,
    )
    return time.perf_counter() - began


def measure(directory: Path, rounds: int, width: int, layers: int) -> list[Sample]:
    shape = str(directory), width, layers
    with RankPool(_RANKS, store="tcp") as pool:
        truth = pool.run(save, _RANKS, *shape, timeout=_TIMEOUT_S)[0]
        samples = [
            Sample("convert", True, number, convert(directory), None, 0, len(truth))
            for number in range(min(rounds, _CONVERSIONS))
        ]
        for number in range(rounds):
            for system in [system for system, title in SYSTEMS.items() if "4 ->" in title]:
                ranks = _RANKS if "4 -> 4" in SYSTEMS[system] else _RANKS - 1
                by_rank = pool.run(loads, ranks, system, *shape, timeout=_TIMEOUT_S)
                for first, found in zip((True, False), zip(*by_rank, strict=True), strict=True):
                    seconds, reported, live = max(load[0] for load in found), found[0][1], found[0][2]
                    wrong = sum(live[key] != value for key, value in truth.items())
                    samples.append(Sample(system, first, number, seconds, reported, wrong, len(truth)))
                    print(f"{system}: {seconds:.2f} s, {wrong} of {len(truth)} parameters wrong", flush=True)
    return samples


def report(samples: list[Sample], num_params: int) -> str:
    def seconds(system: str, first: bool = True) -> list[float]:
        return [sample.seconds for sample in samples if (sample.system, sample.first) == (system, first)]

    rows = [
        (
            title,
            f"{median(seconds(system)):.2f} s",
            f"{min(seconds(system)):.2f} - {max(seconds(system)):.2f}",
            f"{median(seconds(system, False)):.2f} s" if seconds(system, False) else "",
            ""
            if system == "convert"
            else " / ".join(str(sample.wrong) for sample in samples if sample.system == system)
            + f" of {samples[0].num_params}",
        )
        for system, title in SYSTEMS.items()
    ]
    universal = median(seconds("convert")) + median(seconds("universal"))
    reported = [sample.reported / sample.seconds for sample in samples if sample.reported is not None]
    return "\n".join(
        [
            "# Resuming a stage 2 run",
            "",
            *describe(machine()),
            "",
            f"{num_params / 1e6:.1f}M parameters, bf16, AdamW, `round_robin_gradients`, saved by DeepSpeed alone on "
            f"{_RANKS} ranks; {len(seconds('stock'))} rounds, "
            f"{len(seconds('convert'))} conversions, page cache warm.",
            "",
            *table(
                (
                    "system",
                    "first load of a process, median",
                    "min - max",
                    "a later load, median",
                    "parameters wrong, by load",
                ),
                rows,
            ),
            "",
            f"First loads: Universal Checkpoint, converted and loaded, over zeroelastic on {_RANKS - 1} ranks: "
            f"{universal / median(seconds('other')):.1f} times the seconds "
            f'(`"verify": "read"`: {universal / median(seconds("other-read")):.1f}, '
            f'"quick": {universal / median(seconds("other-quick")):.1f}). zeroelastic over DeepSpeed at the same size: '
            f"{median(seconds('same')) / median(seconds('stock')):.2f} "
            f'("read": {median(seconds("same-read")) / median(seconds("stock")):.2f}, '
            f'"quick": {median(seconds("same-quick")) / median(seconds("stock")):.2f}); on {_RANKS - 1} ranks '
            f"{median(seconds('other')) / median(seconds('stock')):.2f} "
            f'("read": {median(seconds("other-read")) / median(seconds("stock")):.2f}). Seconds of zeroelastic\'s '
            f"report over those of the call, barrier included: {min(reported):.3f} to {max(reported):.3f}.",
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--small", action="store_true")
    arguments = parser.parse_args()
    width, layers = (128, 8) if arguments.small else (3072, 12)
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="stage2-") as scratch:
        samples = measure(Path(scratch), arguments.rounds, width, layers)
    num_params = layers * (width * width + width)
    document = {"machine": machine(), "num_params": num_params, "samples": [asdict(sample) for sample in samples]}
    (arguments.out / "stage2.json").write_text(json.dumps(document, indent=1) + "\n")
    (arguments.out / "stage2.md").write_text(report(samples, num_params))
    print((arguments.out / "stage2.md").read_text())


if __name__ == "__main__":
    main()
