"""Compare the files that two versions of zeroelastic write, byte for byte.

    python benchmarks/same_files.py --before ../old-checkout [--out benchmarks/results]

Both versions run the same jobs: real DeepSpeed saves (elastic and rigid, three precisions, 2 and 3 ranks) and every
verb of the command line that writes. Random ids, the clock and memory that DeepSpeed never initializes are fixed in
both. Asynchronous saves are left out: their configuration, which is part of the files, names an option that may have
been renamed; tests compare them with the others. Prints each file that
differs or that only one version writes, and exits with 1 if there is one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from report import REPOSITORY, commit_of

JOBS = r"""
import json, os, secrets, sys, time, uuid
from pathlib import Path

from zeroelastic.testing import run_ranks

BASE = {
    "train_micro_batch_size_per_gpu": 2,
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "gradient_clipping": 1.0,
}
ZERO = {"stage": 3, "sub_group_size": 10, "stage3_param_persistence_threshold": 8}
PRECISION = {
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 4}},
    "fp32": {},
}


def save(folder, elastic, precision):
    import deepspeed, torch, torch.distributed as dist
    import zeroelastic

    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
    torch.empty = torch.zeros  # DeepSpeed saves padding that it never writes to
    zeroelastic.install()
    torch.manual_seed(0)

    class Tiny(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Linear(4, 5)
            self.gain = torch.nn.Parameter(torch.ones(1))
            self.tail = torch.nn.Linear(4, 3)
            self.tied = torch.nn.Linear(4, 3, bias=False)
            self.tied.weight = self.tail.weight
            self.frozen = torch.nn.Parameter(torch.randn(7), requires_grad=False)
            self.register_buffer("seen", torch.arange(3.0))

        def forward(self, x):
            y = self.inner(x) * self.gain
            tail = self.tail(y[:, :4]).square().sum() + self.tied(x).sum()
            return tail + y.square().sum() * self.frozen.square().sum()

    time.time_ns, secrets.token_hex = lambda: 17 * 10**17, lambda nbytes: "0" * 2 * nbytes  # the id of the run
    model = Tiny()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        [{"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
         {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0}], lr=0.01)
    config = dict(BASE, **PRECISION[precision], zero_optimization=dict(ZERO, elastic_checkpoint=elastic))
    scheduler = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, lr_scheduler=scheduler)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[precision]
    torch.manual_seed(1 + dist.get_rank())
    numbers = iter(range(10**6))
    uuid.uuid4 = lambda: uuid.UUID(int=next(numbers))
    for step in range(2):
        engine.backward(engine(torch.randn(2, 4, dtype=dtype)))
        engine.step()
        real, time.time = time.time, lambda: 1.7e9
        try:
            engine.save_checkpoint(folder, client_state={"note": ["text", step, 0.5]})
        finally:
            time.time = real


def main():
    out = Path(sys.argv[1])
    for elastic in (True, False):
        for precision in PRECISION:
            for world_size in (2, 3):
                name = f"{'elastic' if elastic else 'rigid'}-{precision}-{world_size}"
                run_ranks(save, world_size, str(out / name), elastic, precision, timeout=300)
                print(name, flush=True)


if __name__ == "__main__":
    main()
"""

VERBS = r"""
import sys, time, uuid
numbers = iter(range(10**6))
uuid.uuid4 = lambda: uuid.UUID(int=next(numbers))
time.time = lambda: 1.7e9
from zeroelastic.cli.app import main
sys.argv[0] = "zeroelastic"
sys.exit(main())
"""


def run(tree: Path, out: Path) -> None:
    """Run all jobs and verbs with the package of one checkout."""
    out.mkdir(parents=True)
    env = dict(os.environ, PYTHONPATH=str(tree), PYTHONHASHSEED="0", OMP_NUM_THREADS="1", DS_ACCELERATOR="cpu")
    jobs = out.parent / f"jobs_{out.name}.py"
    jobs.write_text(JOBS)
    subprocess.run([sys.executable, str(jobs), str(out / "saved")], env=env, check=True)
    verbs = out.parent / "verbs.py"
    verbs.write_text(VERBS)
    saved = out / "saved"
    work = [
        *(["reshard", f"{saved}/{kind}-2", f"{out}/resharded/{kind}-{m}", "--world-size", f"{m}"]
          for kind in ("elastic-bf16", "rigid-bf16", "elastic-fp16", "rigid-fp32") for m in (1, 3, 5)),
        *(["export", f"{saved}/{kind}-3", f"{out}/exported/{kind}"] for kind in ("elastic-bf16", "rigid-fp32")),
        *(["convert", f"{saved}/{kind}-3", f"{out}/{to}/{kind}", "--to", to]
          for kind in ("elastic-bf16", "rigid-fp16") for to in ("universal", "dcp")),
        ["convert", f"{out}/universal/elastic-bf16", f"{out}/from-universal", "--from", "universal", "-n", "2"],
    ]  # fmt: skip
    for arguments in work:
        Path(arguments[2]).parent.mkdir(exist_ok=True)
        done = subprocess.run([sys.executable, str(verbs), *arguments], env=env, capture_output=True, text=True)
        print(f"{' '.join(arguments[:1])} {Path(arguments[2]).name}: exit {done.returncode}", flush=True)
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr)


def digests(root: Path) -> dict[str, str]:
    """The SHA-256 of every file below a directory, by its relative path."""
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(root.rglob("*"))
        if path.is_file() and not path.is_symlink()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--before", type=Path, required=True, help="a checkout of the version to compare with")
    parser.add_argument("--out", type=Path, help="directory for same_files.json")
    parser.add_argument("--work", type=Path, help="directory of what both write; what is there is kept")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = str(args.work.resolve()) if args.work else temporary
        Path(folder).mkdir(exist_ok=True)
        sides = {"before": args.before.resolve(), "after": REPOSITORY}
        for side, tree in sides.items():
            # One path for both sides, as verbs write the path of their source into what they make.
            if (Path(folder) / side).exists():
                continue
            run(tree, Path(folder) / "side")
            (Path(folder) / "side").rename(Path(folder) / side)
        before, after = digests(Path(folder) / "before"), digests(Path(folder) / "after")
    differ = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    for name in differ:
        print(f"differs: {name}" if name in before and name in after else f"only one has it: {name}")
    commits = {side: commit_of(tree)[:7] for side, tree in sides.items()}
    result = {"commits": commits, "files": len(before), "bytewise_equal": len(before) - len(differ), "differ": differ}
    print(json.dumps({key: value for key, value in result.items() if key != "differ"}))
    if args.out:
        (args.out / "same_files.json").write_text(json.dumps({**result, "sha256": after}, indent=1) + "\n")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
