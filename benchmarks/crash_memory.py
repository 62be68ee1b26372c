"""SIGKILL at random moments of a job that keeps checkpoints in memory: it goes on from one of its steps, bit for bit.

    python benchmarks/crash_memory.py --kills 200 --out benchmarks/results

Two jobs run side by side, one with a copy at ZeRO stage 3 and one with two at stage 2, each on three or four torchrun
agents of this machine, which are its nodes. A kill takes one worker, or a node: the agent, its worker and, by
its own reaper, its memory. Most kills are aimed at a phase of a checkpoint in memory on the rank that is killed: the
copy, the exchange, the swap of one checkpoint for the next. After each the job starts again by itself, and a lost node
is replaced in most rounds. Then

- the state that it resumed, as DeepSpeed's buffers have it, is that of one step of one moment, by a hash that the job
  wrote down before the checkpoint of that step: never another state, never a mix of two steps,
- it resumed from memory, unless it started without a node that lives, which was late at the rendezvous,
- it lost one step at most where it resumed from memory, and never fell back further than the last save on the disk,
- at the end of the job nothing is left in shared memory.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import platform
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import psutil
from report import REPOSITORY, append_line, words_of_lines, write_result

sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests"), str(REPOSITORY / "examples" / "elastic")]

PHASES = ("copy", "exchange", "swap")
AIMED = 0.8
"""The part of the kills that is meant for a phase; the others come at any time."""
WITHIN_S = 0.02
SAVE_STEPS = 25
LIMIT_S = 120.0
OPTIONS = {"copies": {"every": 1, "copies": 1}, "two-copies": {"every": 1, "copies": 2}}
STAGES = {"copies": 3, "two-copies": 2}


def work(directory: Path, kind: str) -> None:
    """The worker: resume, then train for ever, with the hash of each step's state written down before it is kept."""
    import deepspeed
    import torch.distributed as dist
    from training import Job, build_engine, train_step

    from zeroelastic.elastic import every, preemption, resume
    from zeroelastic.elastic.memory.checkpoints import MemoryCheckpoints
    from zeroelastic.elastic.memory.save import MemoryDirectory, MemorySave
    from zeroelastic.testing import fingerprint, gather_state

    deepspeed.init_distributed()
    rank, phases = dist.get_rank(), directory / f"phases-{os.environ['TORCHELASTIC_RESTART_COUNT']}"

    def noted(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            append_line(phases, name, os.getpid())
            return original(*args, **kwargs)

        return call

    MemoryCheckpoints._copy = noted("copy", MemoryCheckpoints._copy)  # type: ignore[method-assign]
    MemorySave._copy = noted("exchange", MemorySave._copy)  # type: ignore[method-assign]
    MemoryDirectory._publish = noted("swap", MemoryDirectory._publish)  # type: ignore[method-assign]

    def state() -> str:
        return hashlib.sha256(repr(sorted(fingerprint(gather_state(engine)).items())).encode()).hexdigest()

    engine = build_engine(Job(stage=STAGES[kind], options={"memory": OPTIONS[kind]}))
    start = resume(engine, directory / "ckpt", strict=False)
    found = state()
    if rank == 0:
        for reason in start.passed_over:
            append_line(directory / "passed_over", engine.global_steps, start.tier, reason)
        append_line(directory / "resumes", start.tier, engine.global_steps, found, dist.get_world_size())
    with preemption(engine, directory / "ckpt", saving=every(steps=SAVE_STEPS)) as stop:
        while not stop():
            train_step(engine, engine.global_steps)
            found = state()
            if rank == 0:
                append_line(directory / "steps", engine.global_steps, found)
            if engine.global_steps == 1:
                stop.save()
    stop.exit()


class Campaign:
    """The rounds of one job, and what must hold after each."""

    def __init__(self, directory: Path, kind: str, chance: random.Random) -> None:
        from cluster import Cluster, Way
        from network import Loopback

        self.directory, self.chance, self.kind = directory, chance, kind
        self.counts: Counter[str] = Counter()
        self.seen_resumes = 0
        launch = ("-m", "zeroelastic.run")
        way = Way(kind, launch, script=Path(__file__).resolve())
        arguments = ["--work", str(directory), "--kind", kind]
        self.cluster = Cluster(directory, arguments, nodes="1:4", network=Loopback(), way=way)
        for _ in range(3):
            self.cluster.add()
        self.size = int(self._resumed("the first start")[-1])

    def round(self) -> bool:
        """Wait for steps, kill, wait for the next start, check; then replace a node that is gone.

        False where nothing was killed, because the job has just started once more by itself.
        """
        begun = len(words_of_lines(self.directory / "steps"))
        self._wait(lambda: len(words_of_lines(self.directory / "steps")) >= begun + 2, "two steps")
        self._check_unasked()
        phase = self.chance.choice(PHASES) if self.chance.random() < AIMED else None
        whole = self.chance.random() < 0.5
        node_of = {worker: node for node in self.cluster.nodes for worker in _workers(node.agent.pid)}
        family = {node: node.family() for node in self.cluster.nodes}
        victim = self._victim(phase)
        time.sleep(self.chance.uniform(0, WITHIN_S if phase else 0.5))
        if self._check_unasked():
            return False
        node = node_of.get(victim)
        if whole and node is not None:
            self.cluster.nodes.remove(node)
            for process in family[node]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.suspend()
        try:
            os.kill(victim, signal.SIGKILL)
        except ProcessLookupError:
            if not whole or node is None:
                return False
        # Of a job that ran on one node, because others were late, nothing is in another's memory.
        alone = whole and node is not None and self.size == 1
        if whole and node is not None:
            node.kill()
        reached = self._last_step()
        self.counts.update([f"killed during the {phase}" if phase else "killed at any time"])
        self.counts.update(["a node killed" if whole and node is not None else "a worker killed"])
        self._check(reached, alone=alone)
        if len(self.cluster.nodes) < 3 or (len(self.cluster.nodes) < 4 and self.chance.random() < 0.3):
            reached = self._last_step()
            self.cluster.add()
            self._check(reached, kill=False, newcomers=1)
        return True

    def close(self) -> None:
        """End the job by force."""
        self.cluster.close()

    def _victim(self, phase: str | None) -> int:
        """A worker's process id: of one that comes to the phase now, or of any."""
        path = max(self.directory.glob("phases-*"), key=lambda path: path.stat().st_mtime_ns)
        before = len(words_of_lines(path))
        found: list[list[str]] = []

        def came() -> bool:
            found[:] = [words for words in words_of_lines(path)[before:] if phase in (None, words[0])]
            return bool(found)

        self._wait(came, f"the {phase} of a checkpoint")
        return int(self.chance.choice(found)[1])

    def _resumed(self, what: str) -> list[str]:
        self._wait(lambda: len(words_of_lines(self.directory / "resumes")) > self.seen_resumes, what)
        self.seen_resumes = len(words_of_lines(self.directory / "resumes"))
        return words_of_lines(self.directory / "resumes")[-1]

    def _last_step(self) -> int:
        """The last step of the present start."""
        steps = words_of_lines(self.directory / "steps")
        return int(steps[-1][0]) if steps else 0

    def _check_unasked(self) -> bool:
        """Check a start that came without a kill, if there was one: a node was late at the rendezvous."""
        if len(words_of_lines(self.directory / "resumes")) == self.seen_resumes:
            return False
        self.counts["started once more for a late node"] += 1
        self._check(0, kill=False)
        return True

    def _check(self, reached: int, *, kill: bool = True, newcomers: int = 0, alone: bool = False) -> None:
        tier, step, found, size = self._resumed("the next start")
        self.size = int(size)
        kept = dict(words_of_lines(self.directory / "steps"))  # the last hash of each step
        assert found in [state for number, state in words_of_lines(self.directory / "steps") if number == step], (
            f"the state of step {step}, from {tier}, is none that the job had at that step"
        )
        assert kept[step] == found, f"the state of step {step}, from {tier}, is one that the job had left"
        lost = max(self._reached_before(step), reached) - int(step)
        self.counts[f"resumed from {tier}"] += 1
        self.counts[f"resumed on {size} ranks"] += 1
        if kill:
            lonely = ", of a job on the killed node alone" if alone else ""
            self.counts[f"{lost if lost < 3 else '3 or more'} steps lost, from {tier}{lonely}"] += 1
        assert tier != "memory" or lost <= 1 or alone, f"{lost} steps were lost at a resume of step {step} from memory"
        late = len(self.cluster.nodes) - newcomers - int(size)  # one rank on each node; newcomers have nothing to miss
        assert tier == "memory" or late > 0, f"step {step} was resumed from {tier}, and no node was late"
        assert lost <= SAVE_STEPS + 1, f"{lost} steps were lost at a resume of step {step} from {tier}"

    def _reached_before(self, step: str) -> int:
        """The last step that was written down before the newest start began, if that one has not trained yet."""
        steps = [int(number) for number, _ in words_of_lines(self.directory / "steps")]
        descents = [at for at in range(1, len(steps)) if steps[at] <= steps[at - 1]]
        if descents and steps[descents[-1]] == int(step) + 1 and descents[-1] >= len(steps) - 3:
            return steps[descents[-1] - 1]
        return int(step)

    def _wait(self, done: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not done():
            assert time.monotonic() < deadline, f"not within {LIMIT_S:.0f} s: {what}; see {self.directory}"
            time.sleep(0.002)


def _workers(agent: int) -> set[int]:
    """The workers of an agent."""
    found: set[int] = set()
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process(agent).children():
            if "zeroelastic.run" in process.cmdline():
                found.add(process.pid)
    return found


def left_in(memory: Path) -> list[str]:
    """The files that are still in shared memory a while after the end of all jobs."""
    deadline = time.monotonic() + 10.0
    while left := [str(path) for path in memory.rglob("*") if path.is_file()]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.1)
    return left


def campaign(directory: Path, kind: str, *, kills: int, seed: int, failed: Event) -> dict[str, Any]:
    """Run it; raises at the first thing that is wrong, and ends early where another one has ``failed``."""
    began = time.perf_counter()
    run = Campaign(directory, kind, random.Random(seed))
    try:
        number = 0
        while number < kills and not failed.is_set():
            if run.round():
                number += 1
                if number % 10 == 0:
                    print(f"{kind}: {number} kills, {time.perf_counter() - began:.0f} s", file=sys.stderr)
    except BaseException as error:
        print(f"{kind}: {type(error).__name__}: {error}", file=sys.stderr)
        failed.set()
        raise
    finally:
        run.close()
    return {
        "kind": kind,
        "stage": STAGES[kind],
        "kills": kills,
        "seed": seed,
        "minutes": round((time.perf_counter() - began) / 60, 1),
        "steps_trained": len(words_of_lines(directory / "steps")),
        "outcomes": dict(sorted(run.counts.items())),
        "passed_over": [" ".join(words) for words in words_of_lines(directory / "passed_over")],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="over both jobs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--kind", choices=OPTIONS, help="only the job of this kind")
    chosen, _ = parser.parse_known_args()
    if chosen.work is not None:
        work(chosen.work, chosen.kind)
        return
    kinds = [chosen.kind] if chosen.kind else list(OPTIONS)
    shared = "/dev/shm" if shutil.disk_usage("/dev/shm").free > 1 << 30 else None
    with tempfile.TemporaryDirectory() as scratch, tempfile.TemporaryDirectory(dir=shared) as memory:
        os.environ["ZEROELASTIC_MEMORY_DIR"] = memory
        places, failed = [Path(scratch) / kind for kind in kinds], Event()
        for place in places:
            place.mkdir()
        with ThreadPoolExecutor(len(kinds)) as threads:
            futures = [
                threads.submit(
                    campaign, place, kind, kills=chosen.kills // len(kinds), seed=chosen.seed + number, failed=failed
                )
                for number, (place, kind) in enumerate(zip(places, kinds, strict=True))
            ]
            try:
                runs = [future.result() for future in futures]
            except BaseException:
                shutil.copytree(scratch, f"/tmp/crash-memory-{os.getpid()}")
                raise
        left = left_in(Path(memory))
    total: Counter[str] = Counter()
    for run in runs:
        total.update(run["outcomes"])
    result = {
        "kills": sum(run["kills"] for run in runs),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}",
        "files_left_in_memory": len(left),
        **({"left": left[:20]} if left else {}),
        "outcomes": dict(sorted(total.items())),
        "jobs": runs,
    }
    write_result(chosen.out, "crash_memory", result)
    sys.exit(1 if left else 0)


if __name__ == "__main__":
    main()
