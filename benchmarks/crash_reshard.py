"""``kill -9`` at random moments of ``zeroelastic reshard``: the target is absent or complete, the source untouched.

    python benchmarks/crash_reshard.py --kills 50 --seed 0 --out benchmarks/results
    python benchmarks/crash_reshard.py --stages 3 2 --kills 50 --out benchmarks/results

Each round starts the command and kills it at a random moment: one round in four while the interpreter starts, the
others after the first file is begun. Then the target must not be there, or be whole (every byte is verified, and its
content root is the source's). One round in two the same command then runs to its end, which must succeed and give a
whole target; else the next round kills the same target again. The source is compared byte for byte after each round.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from report import REPOSITORY, write_result

from zeroelastic.checkpoint.commit_record import read_record
from zeroelastic.verbs.new_directory import staging_of
from zeroelastic.verbs.verify.verify import verify_checkpoint

sys.path.append(str(REPOSITORY / "examples/checkpoints"))

from sample import write_sample

TAG = "global_step1"


def fingerprint(directory: Path) -> dict[str, tuple[int, str]]:
    """Modification time and content of every file."""
    return {
        str(path.relative_to(directory)): (path.stat().st_mtime_ns, hashlib.sha256(path.read_bytes()).hexdigest())
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def start(
    src: Path, dst: Path, world_size: int, stage: int, output: int = subprocess.DEVNULL
) -> subprocess.Popen[bytes]:
    sizes = ["-n", str(world_size), "--stage", str(stage)]
    command = [sys.executable, "-m", "zeroelastic", "reshard", str(src), str(dst), *sizes, "--json"]
    return subprocess.Popen(command, env={**os.environ, "PYTHONPATH": os.fspath(REPOSITORY)}, stdout=output)


def check_whole(dst: Path, root: str) -> None:
    """The target is complete: raises what is wrong with it."""
    report = verify_checkpoint(dst / TAG)
    assert report.valid, report.problems
    record = read_record(dst / TAG)
    assert record is not None and record.content_root == root
    assert (dst / "latest").read_text() == TAG


def campaign(
    directory: Path, *, kills: int, seed: int, world_size: int = 16, stages: tuple[int, int] = (3, 3)
) -> dict[str, object]:
    """Run it, from a ZeRO stage to a ZeRO stage; raises at the first thing that is wrong."""
    chance = random.Random(seed)
    src, dst = directory / "src", directory / "dst"
    write_sample(src, world_size=4, steps=[1], hidden=192, layers=4, sub_group_size=10**9)
    if stages[0] != 3:
        src.rename(dst)
        assert start(dst, src, 4, stages[0]).wait(120) == 0
        shutil.rmtree(dst)
    before = fingerprint(src)
    record = read_record(src / TAG)
    assert record is not None
    began = time.perf_counter()
    process = start(src, dst, world_size, stages[1])
    while not staging_of(dst).exists() and process.poll() is None:
        time.sleep(0.001)
    start_s = time.perf_counter() - began
    assert process.wait(120) == 0
    work_s = time.perf_counter() - began - start_s
    check_whole(dst, record.content_root)
    shutil.rmtree(dst)
    outcomes = {"absent": 0, "complete": 0, "resumed": 0, "finished_before_the_kill": 0}
    resumed_ranks: list[int] = []
    moments: list[float] = []
    for number in range(kills):
        process = start(src, dst, world_size, stages[1])
        early = number % 4 == 0
        if not early:
            while not staging_of(dst).exists() and process.poll() is None:
                time.sleep(0.0005)
        moment = chance.uniform(0, start_s if early else work_s * 1.1)
        moments.append(round(moment, 4))
        time.sleep(moment)
        process.kill()
        if process.wait(60) == 0:
            outcomes["finished_before_the_kill"] += 1
        if dst.exists():
            check_whole(dst, record.content_root)
            outcomes["complete"] += 1
            shutil.rmtree(dst)
        else:
            outcomes["absent"] += 1
            if chance.random() < 0.5 or number == kills - 1:
                process = start(src, dst, world_size, stages[1], subprocess.PIPE)
                told, _ = process.communicate(timeout=120)
                assert process.returncode == 0
                resumed_ranks.append(json.loads(told)["resumed_ranks"])
                outcomes["resumed"] += 1
                check_whole(dst, record.content_root)
                shutil.rmtree(dst)
        assert fingerprint(src) == before, "the source was touched"
    assert sorted(os.listdir(directory)) in (["src"], [staging_of(dst).name, "src"])
    return {
        "kills": kills,
        "seed": seed,
        "stages": list(stages),
        "world_sizes": [4, world_size],
        "start_s": round(start_s, 3),
        "work_s": round(work_s, 3),
        "outcomes": outcomes,
        "ranks_taken_over": resumed_ranks,
        "moments_s": moments,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, nargs=2, default=(3, 3), help="ZeRO stage of the source, and the new one")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    stages = (chosen.stages[0], chosen.stages[1])
    print(f"seed {chosen.seed}", file=sys.stderr)
    with tempfile.TemporaryDirectory() as directory:
        result = campaign(Path(directory), kills=chosen.kills, seed=chosen.seed, stages=stages)
    name = "crash_reshard" if stages == (3, 3) else "crash_reshard_stage{}_to_stage{}".format(*stages)
    write_result(chosen.out, name, result)


if __name__ == "__main__":
    main()
