"""Run every reproduction against the DeepSpeed of this environment, and print what it does: make deepspeed-faults."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent
STEPS: dict[str, list[tuple[int, list[str]]]] = {
    "round_robin": [(2, [])],
    "autoep_size": [(2, ["save", "2"]), (2, ["load", "1"])],
    "frozen_experts": [(2, [])],
    "more_ranks": [(1, []), (2, [])],
    "latest_first": [(2, [])],
    "no_optimizer": [(1, [])],
}
"""The launches of each: how many ranks, and the arguments behind the directory."""


def results(name: str, timeout: float = 240.0) -> list[str]:
    """What the launches of one reproduction print."""
    with tempfile.TemporaryDirectory() as folder:
        lines: list[str] = []
        for ranks, arguments in STEPS[name]:
            launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
            ran = subprocess.run(
                [*launch, str(HERE / f"{name}.py"), folder, *arguments],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=timeout,
            )
            found = [line.removeprefix("RESULT ") for line in ran.stdout.splitlines() if line.startswith("RESULT ")]
            if ran.returncode:
                raise SystemExit(f"{name} failed:\n{ran.stdout}")
            lines += [line.replace(folder, "DIR") for line in sorted(found)]
    return lines


if __name__ == "__main__":
    print(f"DeepSpeed {version('deepspeed')}, torch {version('torch')}")
    for name in STEPS:
        print(f"\n{name}.py: {(HERE / f'{name}.py').read_text().splitlines()[0].strip(chr(34))}")
        print("\n".join(f"  {line}" for line in results(name)), flush=True)
