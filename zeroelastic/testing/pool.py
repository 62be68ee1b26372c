"""A pool that starts ranks in milliseconds, forked from a process that has imported torch and deepspeed.

Every run has new processes, so no global state of torch or deepspeed (process groups, parameter ids, caches by world
size) is passed from one run to the next, and nothing has to be reset.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import signal
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from types import TracebackType
from typing import Any, TypeVar

from zeroelastic.testing.preload import DEEPSPEED_MODULES, preload
from zeroelastic.testing.rank import RankJob, RankStore, prepare_deepspeed
from zeroelastic.testing.run import collect_results, rank_jobs, run_directory, run_ranks
from zeroelastic.testing.supervisor import Cancelled, Outcome, child_environment, supervise

T = TypeVar("T")

# Those of install() and of a load take half of the rest.
_PRELOADED = (
    *DEEPSPEED_MODULES,
    "zeroelastic.deepspeed.install.seams",
    "zeroelastic.deepspeed.install.wrappers",
    "zeroelastic.executors.staged",
    "zeroelastic.testing.state",
)
# Variables with these prefixes are read when modules are imported, so a forked rank cannot change them any more.
_READ_AT_IMPORT = (
    "CUDA_",
    "DS_",
    "LD_",
    "MKL_",
    "OMP_",
    "OPENBLAS_",
    "PYTHON",
    "PYTORCH_",
    "TORCH",
    "TRITON_",
)
# The exceptions: libraries set these themselves on import, and read them later.
_READ_LATER = ("CUDA_MODULE_LOADING", "PYTORCH_NVML_BASED_CUDA_CHECK", "TORCHINDUCTOR_CACHE_DIR")
# Time limits for importing and for ending a run, in seconds.
_START_LIMIT = 300.0
_END_LIMIT = 60.0


class RankPool:
    """Runs functions on ranks as ``run_ranks`` does, without its start-up time. One run at a time.

        with RankPool(4) as pool:
            for world_size in (1, 2, 3, 4):
                pool.run(train_step, world_size)

    Ranks have the caller's environment, working directory and sys.path at the moment a run starts. A run on "nccl"
    (CUDA does not survive a fork), and a run with other values of variables that are read at import (DS_ACCELERATOR,
    OMP_NUM_THREADS, ...), uses ``run_ranks``: slower, with the same result, and with a warning where ``env`` does not
    have the variable. The pool stays usable after a failed run. ``preload`` names modules that are imported once,
    before any rank is forked. ``store`` "tcp" gives the process group one as a job has it, for measurements: requests
    of a file's take 10 ms where they wait. It ends with rank 0.
    """

    def __init__(self, max_ranks: int, *, preload: Sequence[str] = (), store: RankStore = "file") -> None:
        if max_ranks < 1:
            raise ValueError(f"max_ranks is {max_ranks}; a pool needs at least one rank.")
        self.max_ranks = max_ranks
        self.preload = tuple(preload)
        self.store: RankStore = store
        self._server: SpawnProcess | None = None
        self._connection: Connection | None = None
        self._environment: dict[str, str] = {}
        self._owner = os.getpid()

    def __enter__(self) -> RankPool:
        self._start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def run(
        self,
        fn: Callable[..., T],
        world_size: int,
        *args: Any,
        timeout: float = 120.0,
        backend: str | None = None,
        env: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> list[T]:
        """Results, by rank, of ``fn(*args, **kwargs)`` on ``world_size`` ranks; otherwise as in ``run_ranks``.

        ``timeout`` counts from the start of the ranks and does not include the pool's own first imports. Raises
        ValueError when world_size exceeds the pool's size.
        """
        if world_size > self.max_ranks:
            raise ValueError(f"world_size is {world_size}; this pool was made for at most {self.max_ranks} ranks.")
        with run_directory(fn, args, kwargs) as directory:
            jobs = rank_jobs(world_size, directory, timeout=timeout, backend=backend, env=env, store=self.store)
            if self._server is None or not self._server.is_alive():
                self._start()
            changed = self._changed(jobs[0])
            if not changed and jobs[0].backend == "gloo":
                return collect_results(self._request(jobs), directory)
        if (unasked := changed - set(env or {})) and backend != "nccl":
            what = ", ".join(sorted(unasked))
            text = f"ranks start from scratch, which is slow: {what} changed since the pool started"
            warnings.warn(text, RuntimeWarning, stacklevel=2)
        return run_ranks(fn, world_size, *args, timeout=timeout, backend=backend, env=env, **kwargs)

    def close(self) -> None:
        """End the pool's process. A later run starts another one."""
        atexit.unregister(self.close)
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._server is not None:
            if self._owner == os.getpid():  # a forked child has this object, but not the process
                self._server.kill()
                self._server.join()
                self._server.close()
            self._server = None

    def _start(self) -> None:
        self.close()
        self._owner = os.getpid()
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        environment = rank_jobs(1, "", timeout=0.0, backend=None, env=None)[0].environment
        self._environment = _read_at_import(environment)
        self._server = context.Process(target=_serve, args=(theirs, self.preload), name="rank-pool")
        with child_environment(environment):
            self._server.start()
        theirs.close()
        # Registered after multiprocessing's own hook, so it runs before that, which would wait for the process forever.
        atexit.register(self.close)

    def _changed(self, job: RankJob) -> set[str]:
        """Variables that a forked rank cannot change any more: their values differ from those at the pool's imports."""
        return {name for name, _ in _read_at_import(job.environment).items() ^ self._environment.items()}

    def _request(self, jobs: list[RankJob]) -> Outcome:
        assert self._connection is not None and self._server is not None
        try:
            self._connection.send(jobs)
            wait([self._connection, self._server.sentinel], jobs[0].timeout + _START_LIMIT + _END_LIMIT)
            if not self._connection.poll():
                raise EOFError
            outcome: Outcome = self._connection.recv()
            return outcome
        except (EOFError, OSError):
            self._abandon()
            raise RuntimeError("the pool's process gave no answer; the next run starts another.") from None
        except BaseException:
            self._abandon()
            raise

    def _abandon(self) -> None:
        """Close the pool during a run, with time for its process to end the ranks."""
        assert self._connection is not None and self._server is not None
        self._connection.close()
        self._server.join(_END_LIMIT)
        self.close()


def _read_at_import(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_READ_AT_IMPORT) and name not in _READ_LATER
    }


def _serve(requests: Connection, modules: tuple[str, ...]) -> None:
    """The pool's process: imports modules, then serves one request at a time until the connection is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    preload((*_PRELOADED, *modules))
    prepare_deepspeed()
    # Frozen objects are neither collected nor copied in the ranks.
    gc.collect()
    gc.freeze()
    with suppress(EOFError, Cancelled):
        while True:
            jobs: list[RankJob] = requests.recv()
            # A fork copies one thread only; where an import has started more, ranks are spawned.
            alone = len(os.listdir("/proc/self/task")) == 1
            outcome = supervise(multiprocessing.get_context("fork" if alone else "spawn"), jobs, owner=requests)
            requests.send(outcome)
