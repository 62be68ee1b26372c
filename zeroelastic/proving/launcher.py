"""A run of a proof under torchrun on this machine, within a time limit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from zeroelastic.errors import UsageError
from zeroelastic.proving.records import Failure, RunSpec, write_run

_PROCESSES_PER_CORE = 8
_END_SECONDS = 40.0
_BEAT_SECONDS = 10.0
_TAIL_LINES = 15

PACKAGE_PARENT = Path(__file__).parents[2]


def command(run: RunSpec, script: Sequence[str]) -> list[str]:
    """The command line of a run: torchrun, with ``zeroelastic.proving.rank`` in front of the script."""
    return [
        sys.executable,
        *("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(run.world_size)),
        *("-m", "zeroelastic.proving.rank", str(Path(run.folder) / "run.json"), *script),
    ]


def launch(
    run: RunSpec,
    script: Sequence[str],
    *,
    time_limit_s: float,
    env: dict[str, str],
    waiting: Callable[[float], None] = lambda seconds: None,
) -> int | None:
    """Run a script on ``run.world_size`` ranks and wait; returns torchrun's status, None after the time limit.

    ``waiting`` is called every 10 s with the seconds since the start.
    """
    write_run(Path(run.folder) / "run.json", run)
    with run.log_path.open("wb") as log:
        started = subprocess.Popen(
            command(run, script), stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=env
        )
        began = time.monotonic()
        try:
            while (seconds := time.monotonic() - began) < time_limit_s:
                with suppress(subprocess.TimeoutExpired):
                    return started.wait(timeout=min(_BEAT_SECONDS, time_limit_s - seconds))
                waiting(time.monotonic() - began)
            return None
        finally:
            _stop(started)


def _stop(started: subprocess.Popen[bytes]) -> None:
    """Terminate torchrun, which ends its ranks; kill it after a while, and its ranks die with it."""
    if started.poll() is None:
        started.terminate()
        with suppress(subprocess.TimeoutExpired):
            started.wait(timeout=_END_SECONDS)
    if started.poll() is None:
        started.kill()
        started.wait()


def environment(num_processes: int, state_nbytes: int) -> tuple[dict[str, str], str]:
    """The environment of the runs, and their device: "cuda" or "cpu".

    They use GPUs where there is one for each process, and the CPU where the user set DS_ACCELERATOR=cpu. Raises
    UsageError where the processes, or on the CPU the state of one run, do not fit.
    """
    env = dict(os.environ)
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(PACKAGE_PARENT), env.get("PYTHONPATH"))))
    num_gpus = 0 if env.get("DS_ACCELERATOR") == "cpu" else _num_gpus()
    if num_gpus >= num_processes:
        return env, "cuda"
    if num_gpus:
        raise UsageError(
            f"{num_processes} processes need {num_processes} GPUs; this machine has {num_gpus}. Choose smaller sizes "
            "(--world-size, --from-world-size), or set DS_ACCELERATOR=cpu to prove it on the CPU."
        )
    cores = len(os.sched_getaffinity(0))
    if num_processes > cores * _PROCESSES_PER_CORE:
        raise UsageError(
            f"{num_processes} processes are too many for the {cores} cores of this machine. Choose smaller sizes "
            "(--world-size, --from-world-size)."
        )
    free = _free_memory_nbytes()
    if state_nbytes > free:
        raise UsageError(
            f"the checkpoint's {state_nbytes:,} bytes of state do not fit into the {free:,} bytes of free "
            "memory of this machine. Run the proof on a machine with more memory, or with GPUs."
        )
    env["DS_ACCELERATOR"] = "cpu"
    return env, "cpu"


def _free_memory_nbytes() -> int:
    with open("/proc/meminfo") as lines:
        return 1024 * int(next(line for line in lines if line.startswith("MemAvailable")).split()[1])


def _num_gpus() -> int:
    """The number of GPUs, counted in another process so that this one does not initialise CUDA."""
    code = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    return int(done.stdout) if done.returncode == 0 else 0


def failure_of(run: RunSpec) -> str:
    """Why a run failed: the error of its first rank that failed with one, or the end of its log."""
    failures = [Failure(**json.loads(path.read_text())) for path in Path(run.folder).glob("failure-*.json")]
    if failures:
        first = min(failures, key=lambda failure: failure.rank)
        return f"rank {first.rank}: {first.error}"
    if not run.log_path.exists():
        return "there is no log"
    return "\n".join(run.log_path.read_text(errors="replace").splitlines()[-_TAIL_LINES:])
