"""The cost of reading a save's files back before it is committed: headers only, on the critical path.

    python benchmarks/bench_read_back.py --out benchmarks/results          # 50M parameters, on 1 rank and on 2
    python benchmarks/bench_read_back.py --small --rounds 2 --out /tmp/x   # a few million parameters, seconds

Each round saves in both formats, elastic and rigid, with files flushed to the device and without. Of each save two
figures are taken on every rank: the whole call of ``save_checkpoint``, and within it the reading back. The share is
that of the slowest rank's reading in the slowest rank's save. Writes read_back.json (every sample) and read_back.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
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
from bench_load import filesystem
from report import describe, machine, table

from zeroelastic.testing import RankPool

_TIMEOUT_S = 1800.0
_RANKS = (1, 2)


@dataclass(frozen=True)
class Sample:
    """One save on one rank: seconds of the whole, and of reading its files back."""

    elastic: bool
    flushed: bool
    round: int
    save: float
    read_back: float


def build(num_layers: int, width: int, *, elastic: bool, flushed: bool) -> Any:
    """An engine that trains fp32 weights with Adam, after one step."""
    import deepspeed

    import zeroelastic

    zeroelastic.install()
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(num_layers)))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": 3, "elastic_checkpoint": elastic},
        "zeroelastic": {"fsync": flushed},
    }
    engine = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config)[0]
    engine.backward(engine(torch.ones(1, width)).mean())
    engine.step()
    return engine


def measure(directory: str, num_layers: int, width: int, rounds: int, elastic: bool, flushed: bool) -> list[Sample]:
    """The saves of one setting on this rank; the first is not counted."""
    from zeroelastic.deepspeed.save import commit

    read_back, spent = commit.read_back, [0.0]

    def timed(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return read_back(*args, **kwargs)
        finally:
            spent[0] += time.perf_counter() - began

    engine = build(num_layers, width, elastic=elastic, flushed=flushed)
    commit.read_back = timed
    samples: list[Sample] = []
    for number in range(rounds + 1):
        spent[0] = 0.0
        dist.barrier()
        began = time.perf_counter()
        engine.save_checkpoint(directory, tag="tag")
        samples.append(Sample(elastic, flushed, number, time.perf_counter() - began, spent[0]))
    return samples[1:]


def main() -> None:
    """Measure every setting, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory of read_back.json and read_back.md")
    parser.add_argument("--rounds", type=int, default=5, help="saves of each setting")
    parser.add_argument("--small", action="store_true", help="a small model, for a test")
    parser.add_argument("--directory", type=Path, help="where checkpoints are written")
    options = parser.parse_args()
    num_layers, width = (8, 256) if options.small else (48, 1024)
    about = machine()
    raw: dict[str, Any] = {}
    rows: list[list[str]] = []
    with tempfile.TemporaryDirectory(dir=options.directory) as place, RankPool(max(_RANKS), store="tcp") as pool:
        about["filesystem"] = filesystem(Path(place))
        for ranks in _RANKS:
            for elastic in (True, False):
                for flushed in (True, False):
                    directory = Path(place, "ckpt")
                    found = pool.run(
                        measure, ranks, str(directory), num_layers, width, options.rounds, elastic, flushed,
                        timeout=_TIMEOUT_S,
                    )  # fmt: skip
                    shutil.rmtree(directory)
                    rounds = list(zip(*found, strict=True))
                    saves = [max(sample.save for sample in each) for each in rounds]
                    reads = [max(sample.read_back for sample in each) for each in rounds]
                    shares = [read / save for read, save in zip(reads, saves, strict=True)]
                    name = f"{ranks} rank{'s' if ranks > 1 else ''}, {'elastic' if elastic else 'rigid'}"
                    raw[f"{name}, {'flushed' if flushed else 'not flushed'}"] = [
                        [asdict(sample) for sample in each] for each in found
                    ]
                    low, high = min(shares), max(shares)
                    rows.append(
                        [
                            name,
                            "yes" if flushed else "no",
                            f"{median(saves):.3f} s",
                            f"{median(reads) * 1e3:.1f} ms",
                            f"{median(shares):.1%} ({low:.1%} - {high:.1%})",
                        ]
                    )
    numel = num_layers * (width * width + width)
    lines = [
        "# What reading back costs a save",
        "",
        *describe(about),
        "",
        f"{numel / 1e6:.0f}M parameters in {2 * num_layers} tensors, fp32 with Adam; {options.rounds} saves of each "
        "setting, medians; in brackets the smallest and the largest share.",
        "",
        *table(["save", "flushed", "whole save", "read back", "share"], rows, text_columns=2),
        "",
    ]
    options.out.mkdir(parents=True, exist_ok=True)
    document = {"machine": about, "numel": numel, "rounds": options.rounds, "samples": raw}
    (options.out / "read_back.json").write_text(json.dumps(document, indent=1) + "\n")
    (options.out / "read_back.md").write_text("\n".join(lines))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
