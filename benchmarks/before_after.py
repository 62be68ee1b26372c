"""Compare the speed of two versions of zeroelastic: save, load, load at another size and reshard, in turns.

    python benchmarks/before_after.py --before ../old-checkout [--repeats 7] [--out benchmarks/results]

Each repeat runs both versions, one after the other, in an order that alternates; the ratio after / before is taken
within a repeat. Times are those of the slowest rank, without the start of processes and engines. The page cache is
warm: every file was written a moment ago.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from report import REPOSITORY, benchmark_arguments, commit_of, describe, machine, spread, table, write_results

JOB = r"""
import json, sys, time
from pathlib import Path

from zeroelastic.testing import run_ranks

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "zero_optimization": {"stage": 3, "elastic_checkpoint": True, "sub_group_size": 20_000_000},
}


def timed(fn):
    import torch, torch.distributed as dist
    dist.barrier()
    begin = time.perf_counter()
    fn()
    seconds = torch.tensor([time.perf_counter() - begin])
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds)


def work(folder, hidden, layers, saves):
    import deepspeed, torch, zeroelastic

    zeroelastic.install()
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(hidden, hidden) for _ in range(layers)))
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=CONFIG)
    engine.backward(engine(torch.ones(1, hidden, dtype=torch.bfloat16)).sum())
    engine.step()
    found = {}
    if saves:
        engine.save_checkpoint(folder, tag="warm")
        found["save"] = timed(lambda: engine.save_checkpoint(folder, tag="t"))
        engine.load_checkpoint(folder, tag="t")
        found["load"] = timed(lambda: engine.load_checkpoint(folder, tag="t"))
    else:
        engine.load_checkpoint(folder, tag="t")
        found["load at another size"] = timed(lambda: engine.load_checkpoint(folder, tag="t"))
    return found


if __name__ == "__main__":
    folder, hidden, layers = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    found = run_ranks(work, 2, folder, hidden, layers, True, timeout=600)[0]
    found.update(run_ranks(work, 3, folder, hidden, layers, False, timeout=600)[0])
    print("RESULT " + json.dumps(found))
"""

RESHARD = r"""
import sys, time
import zeroelastic.cli.app
from zeroelastic.cli.app import main
begin = time.perf_counter()
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
print("RESULT " + str(time.perf_counter() - begin))
"""


def measure(tree: Path, hidden: int, layers: int) -> dict[str, float]:
    """The seconds of each operation with the package of one checkout."""
    env = dict(os.environ, PYTHONPATH=str(tree), OMP_NUM_THREADS="1", DS_ACCELERATOR="cpu")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "job.py").write_text(JOB)
        (Path(folder) / "verb.py").write_text(RESHARD)
        ckpt = f"{folder}/ckpt"

        def run(*arguments: str) -> str:
            done = subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True)
            lines = [line[7:] for line in done.stdout.splitlines() if line.startswith("RESULT ")]
            if done.returncode or not lines:
                raise SystemExit(done.stdout + done.stderr)
            return lines[-1]

        found: dict[str, float] = json.loads(run(f"{folder}/job.py", ckpt, str(hidden), str(layers)))
        found["reshard"] = float(
            run(f"{folder}/verb.py", "reshard", ckpt, f"{folder}/out", "--world-size", "3", "--tag", "t")
        )
        return found


def main() -> None:
    parser = benchmark_arguments(__doc__)
    parser.add_argument("--before", type=Path, required=True, help="a checkout of the version to compare with")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=48, help="48 layers of 1024: 50 million parameters")
    args = parser.parse_args()
    trees = {"before": args.before.resolve(), "after": REPOSITORY}
    about = machine()
    runs: list[dict[str, dict[str, float]]] = []
    for repeat in range(args.repeats):
        order = list(trees) if repeat % 2 == 0 else list(reversed(trees))
        runs.append({side: measure(trees[side], args.hidden, args.layers) for side in order})
        print(json.dumps(runs[-1]), flush=True)
    rows = []
    for name in runs[0]["before"]:
        before, after = ([run[side][name] for run in runs] for side in trees)
        least, middle, most = spread([b / a for a, b in zip(before, after, strict=True)])
        ratio = f"{middle:.2f} ({least:.2f} to {most:.2f})"
        rows.append([name, f"{median(before):.3f}", f"{median(after):.3f}", ratio])
    commits = {side: commit_of(tree)[:7] for side, tree in trees.items()}
    params = args.layers * args.hidden * (args.hidden + 1)
    lines = [
        f"# Before and after: {commits['before']} and {commits['after']}",
        "",
        *describe(about),
        "",
        f"{params / 1e6:.0f} million parameters, AdamW under bf16, saved on 2 ranks and loaded on 2 and 3; "
        f"{args.repeats} repeats, medians.",
        "",
        *table(["operation", "before, s", "after, s", "after / before (least to most)"], rows),
    ]
    document = {"machine": about, "commits": commits, "runs": runs}
    write_results(args.out, "before_after", document, "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
