"""``kill -9`` at random moments of a training job that saves: ``latest`` always names a whole checkpoint.

    python benchmarks/crash_training.py --kills 200 --seed 0 --out benchmarks/results
    python benchmarks/crash_training.py --stage 2 --kills 60 --out benchmarks/results

Each round starts a job of four ranks, which resumes from ``latest`` and then trains one step and saves, over and over:
every step under a tag of its own, and every other step under the tag "last" too, which is there already. At a random
moment one rank, or all of them, gets SIGKILL; one round in eight while the job still starts and loads. Then

- ``latest`` names a tag whose every byte verifies against its commit record,
- so does every tag that a save had returned for before, in this round or an earlier one, and "last" is not older,
- a job of another size loads ``latest``, and its whole state is what the job of four ranks had at that step, by hashes
  that it wrote down before the save.

Ranks are forked from a process that has imported everything, so that a round takes seconds.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from report import REPOSITORY, append_line, words_of_lines, write_result

sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests")]

import torch.distributed as dist  # noqa: E402
from training import Job, build_engine, train_step  # noqa: E402

from zeroelastic.checkpoint.commit_record import read_record  # noqa: E402
from zeroelastic.runs.tag_directory import is_unfinished  # noqa: E402
from zeroelastic.testing import RankError, RankPool, fingerprint, gather_state  # noqa: E402
from zeroelastic.verbs.verify.verify import verify_checkpoint  # noqa: E402

RANKS = 4
KEPT = 4
AIMED = 0.7
"""The part of the kills that is meant for a save; the others come at any time."""
SAVE_S = 0.2
"""Up to this time after its beginning: about the duration of a save here."""


def state_hash(engine: Any) -> str:
    """One hash of everything that is trained, gathered from all ranks without any of the code that saves."""
    return hashlib.sha256(repr(sorted(fingerprint(gather_state(engine)).items())).encode()).hexdigest()


def save_for_ever(directory: str, notes: str, stage: int) -> None:
    """The job: train a step, write down its state, save it. Ends by a kill, or by the error that one gives it."""
    root, log = Path(directory), Path(notes)
    rank = dist.get_rank()
    append_line(log / "pids", os.getpid())
    engine = build_engine(Job(stage=stage))
    if (root / "latest").exists():
        engine.load_checkpoint(directory)
    try:
        while True:
            step = engine.global_steps
            train_step(engine, step)
            state = state_hash(engine)
            tags = [f"global_step{step + 1}", *(["last"] if step % 2 else [])]
            for tag in tags:
                if rank == 0:
                    append_line(log / "states", step + 1, state)
                    append_line(log / "moments", "save", tag)
                engine.save_checkpoint(directory, tag=tag)
                if rank == 0:
                    append_line(log / "moments", "done", tag, step + 1)
    except Exception as error:
        append_line(log / "errors", json.dumps([type(error).__name__, str(error).replace(directory, ".")]))
        raise


def load_latest(directory: str, stage: int) -> tuple[int, str]:
    """The step and the state of what ``latest`` names, at whatever size this job has."""
    engine = build_engine(Job(stage=stage).other())
    path, _ = engine.load_checkpoint(directory)
    assert path is not None and engine.zeroelastic_report.root_matches
    return engine.global_steps, state_hash(engine)


class Campaign:
    """The rounds, and what must hold after each of them."""

    def __init__(self, directory: Path, pool: RankPool, chance: random.Random, stage: int) -> None:
        self.root, self.log = directory / "run", directory / "notes"
        self.root.mkdir()
        self.log.mkdir()
        self.pool, self.chance, self.stage = pool, chance, stage
        self.committed: dict[str, int] = {}
        self.counts: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.moments: list[float] = []
        self.ended_by = ""

    def round(self, number: int) -> None:
        """Start the job, kill, check."""
        for name in ("pids", "moments", "errors"):
            (self.log / name).unlink(missing_ok=True)
        early, whole = number % 8 == 7, self.chance.random() < 0.5
        victim, moment = self.chance.randrange(RANKS), self.chance.uniform(0, 1.0)
        within = self.chance.uniform(0, SAVE_S) if self.chance.random() < AIMED else None
        job = threading.Thread(target=self._run_job)
        job.start()
        self._wait_for("pids" if early else "moments", RANKS if early else 1, job)
        time.sleep(moment)
        if within is not None and not early:
            self._wait_for_a_save(job)
            time.sleep(within)
        self.moments.append(round(moment + (within or 0), 4))
        before = words_of_lines(self.log / "moments")
        where = "starting" if early and not before else "saving" if before and before[-1][0] == "save" else "training"
        pids = [int(pid) for (pid,) in words_of_lines(self.log / "pids")]
        for pid in pids if whole else [pids[victim % len(pids)]]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        job.join()
        self.counts.update([f"killed while {where}", "all ranks killed" if whole else "one rank killed"])
        self.errors.update(json.loads(" ".join(line))[0] for line in words_of_lines(self.log / "errors"))
        self._check(number)

    def _run_job(self) -> None:
        try:
            self.pool.run(save_for_ever, RANKS, str(self.root), str(self.log), self.stage, timeout=300)
        except RankError as error:
            self.ended_by = str(error)

    def _wait_for(self, name: str, count: int, job: threading.Thread) -> None:
        deadline = time.monotonic() + 120
        while len(words_of_lines(self.log / name)) < count:
            assert job.is_alive() and time.monotonic() < deadline, self.ended_by
            time.sleep(0.002)

    def _wait_for_a_save(self, job: threading.Thread) -> None:
        """Return when the next save begins."""
        begun, deadline = len(words_of_lines(self.log / "moments")), time.monotonic() + 60
        while not any(kind == "save" for kind, *_ in words_of_lines(self.log / "moments")[begun:]):
            assert job.is_alive() and time.monotonic() < deadline, self.ended_by
            time.sleep(0.001)

    def _check(self, number: int) -> None:
        for kind, *words in words_of_lines(self.log / "moments"):
            if kind == "done":
                self.committed[words[0]] = int(words[1])
        if not (self.root / "latest").exists():
            assert not self.committed, "`latest` is lost"
            self.counts["no save yet"] += 1
            return
        latest = (self.root / "latest").read_text()
        for tag in {latest, *self.committed}:
            report = verify_checkpoint(self.root / tag)
            assert report.valid, (tag, report.problems)
            record = read_record(self.root / tag)
            assert record is not None and record.global_steps >= self.committed.get(tag, 0), tag
        written = words_of_lines(self.log / "states")
        states = {int(step): state for step, state in written}
        assert len({(step, state) for step, state in written}) == len(states), "training differs"
        size = (2, 3)[number % 2]
        step, state = self.pool.run(load_latest, size, str(self.root), self.stage, timeout=300)[0]
        assert states[step] == state, f"step {step} is not what was saved"
        assert step >= max(self.committed.values(), default=0), "an older checkpoint than the last that was saved"
        self.counts[f"resumed on {size} ranks"] += 1
        self.counts["hidden directories left"] += sum(is_unfinished(name) for name in os.listdir(self.root))
        if self.committed and step > max(self.committed.values()):
            self.counts["the killed save was complete"] += 1
        self.committed[latest] = step
        steps = sorted((s, tag) for tag, s in self.committed.items() if tag not in ("last", latest))
        for _, tag in steps[:-KEPT]:
            shutil.rmtree(self.root / tag)
            del self.committed[tag]


def campaign(directory: Path, pool: RankPool, *, kills: int, seed: int, stage: int = 3) -> dict[str, object]:
    """Run it; raises at the first thing that is wrong."""
    run = Campaign(directory, pool, random.Random(seed), stage)
    began = time.perf_counter()
    for number in range(kills):
        run.round(number)
        if number % 10 == 9:
            print(f"seed {seed}: {number + 1} rounds, {time.perf_counter() - began:.0f} s", file=sys.stderr)
    return {
        "kills": kills,
        "seed": seed,
        "minutes": round((time.perf_counter() - began) / 60, 1),
        "outcomes": dict(sorted(run.counts.items())),
        "errors_of_surviving_ranks": dict(run.errors),
        "steps_trained": max((int(step) for step, _ in words_of_lines(run.log / "states")), default=0),
        "moments_s": run.moments,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, choices=(1, 2, 3), default=3, help="the ZeRO stage of all jobs")
    parser.add_argument("--kills", type=int, default=200, help="over all jobs")
    parser.add_argument("--jobs", type=int, default=2, help="jobs that are killed side by side, each with its own seed")
    parser.add_argument("--seed", type=int, default=0, help="of the first job")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    seeds = range(chosen.seed, chosen.seed + chosen.jobs)
    print(f"seeds {list(seeds)}", file=sys.stderr)

    def run(seed: int) -> dict[str, object]:
        with tempfile.TemporaryDirectory() as directory, RankPool() as pool:
            return campaign(Path(directory), pool, kills=chosen.kills // chosen.jobs, seed=seed, stage=chosen.stage)

    with ThreadPoolExecutor(chosen.jobs) as threads:
        runs = list(threads.map(run, seeds))
    total: Counter[str] = Counter()
    for made in runs:
        total.update(made["outcomes"])  # type: ignore[arg-type]
    result = {
        "kills": sum(int(str(made["kills"])) for made in runs),
        "stage": chosen.stage,
        "ranks": RANKS,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}",
        "outcomes": dict(sorted(total.items())),
        "jobs": runs,
    }
    name = "crash_training" if chosen.stage == 3 else f"crash_training_stage{chosen.stage}"
    write_result(chosen.out, name, result)


if __name__ == "__main__":
    main()
