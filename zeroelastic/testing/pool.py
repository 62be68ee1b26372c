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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, TypeVar

from zeroelastic.testing.preload import DEEPSPEED_MODULES, preload
from zeroelastic.testing.rank import RankJob, prepare_deepspeed
from zeroelastic.testing.run import (
    Cancelled,
    RankError,
    child_environment,
    rank_environment,
    rank_jobs,
    results_of,
    supervise,
)

T = TypeVar("T")

# Those of install() and of a load take half of the rest.
PRELOADED = (
    *DEEPSPEED_MODULES,
    "zeroelastic.deepspeed.install.seams",
    "zeroelastic.deepspeed.install.wrappers",
    "zeroelastic.executors.staged",
    "zeroelastic.testing.state",
)
# Variables with these prefixes are read when modules are imported, so a forked rank cannot change them any more,
_READ_AT_IMPORT = ("CUDA_", "DS_", "LD_", "MKL_", "OMP_", "OPENBLAS_", "PYTHON", "PYTORCH_", "TORCH", "TRITON_")
# but libraries set these themselves on import, and read them later.
_READ_LATER = ("CUDA_MODULE_LOADING", "PYTORCH_NVML_BASED_CUDA_CHECK", "TORCHINDUCTOR_CACHE_DIR")
# Time limits for importing and for ending a run, in seconds.
_START_LIMIT = 300.0
_END_LIMIT = 60.0


class RankPool:
    """Runs functions on ranks as ``run_ranks`` does, without its start-up time. One run at a time.

        with RankPool(4) as pool:
            for world_size in (1, 2, 3, 4):
                pool.run(train_step, world_size)

    Ranks run on the CPU (CUDA does not survive a fork). They have the caller's environment, working directory and
    sys.path at the moment a run starts. The pool stays usable after a failed run. ``preload`` names modules that are
    imported once, before any rank is forked.
    """

    def __init__(self, max_ranks: int, *, preload: Sequence[str] = ()) -> None:
        if max_ranks < 1:
            raise ValueError(f"max_ranks is {max_ranks}; a pool needs at least one rank.")
        self.max_ranks = max_ranks
        self.preload = tuple(preload)
        self._server: SpawnProcess | None = None
        self._connection: Connection | None = None
        self._environment: dict[str, str] = {}
        self._owner = os.getpid()

    def __enter__(self) -> RankPool:
        self._start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def run(
        self,
        fn: Callable[..., T],
        world_size: int,
        *args: Any,
        timeout: float = 120.0,
        env: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> list[T]:
        """Results, by rank, of ``fn(*args, **kwargs)`` on ``world_size`` ranks; otherwise as in ``run_ranks``.

        ``timeout`` counts from the start of the ranks and does not include the pool's own first imports. Raises
        ValueError when world_size exceeds the pool's size, and where the environment, or ``env``, has another value of
        a variable that is read at import (DS_ACCELERATOR, OMP_NUM_THREADS, ...) than when the pool started.
        """
        if world_size > self.max_ranks:
            raise ValueError(f"world_size is {world_size}; this pool was made for at most {self.max_ranks} ranks.")
        with rank_jobs(fn, args, kwargs, world_size, timeout=timeout, backend=None, env=env) as jobs:
            if self._server is None or not self._server.is_alive():
                self._start()
            if changed := dict(_read_at_import(jobs[0].environment).items() ^ self._environment.items()):
                raise ValueError(
                    f"{', '.join(sorted(changed))} changed since the pool started. Libraries read such variables when "
                    "they are imported: use run_ranks, which starts ranks from scratch."
                )
            return results_of(jobs, self._request(jobs))

    def close(self) -> None:
        """End the pool's process, and the ranks of a run. A later run starts another one."""
        atexit.unregister(self.close)
        if self._connection is not None:
            with suppress(OSError):
                self._connection.send(None)
            self._connection.close()
        if self._server is not None and self._owner == os.getpid():  # not in a forked child, which has this object
            self._server.join(_END_LIMIT)
            self._server.kill()
            self._server.join()
        self._server = self._connection = None

    def _start(self) -> None:
        self.close()
        self._owner = os.getpid()
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        environment = rank_environment("gloo")
        self._environment = _read_at_import(environment)
        self._server = context.Process(target=_serve, args=(theirs, self.preload), name="rank-pool")
        with child_environment(environment):
            self._server.start()
        theirs.close()
        # Registered after multiprocessing's own hook, so it runs before that, which would wait for the process forever.
        atexit.register(self.close)

    def _request(self, jobs: list[RankJob]) -> RankError | None:
        assert self._connection is not None and self._server is not None
        try:
            self._connection.send(jobs)
            wait([self._connection, self._server.sentinel], jobs[0].timeout + _START_LIMIT + _END_LIMIT)
            if not self._connection.poll():
                raise EOFError
            error: RankError | None = self._connection.recv()
            return error
        except (EOFError, OSError):
            self.close()
            raise RuntimeError("the pool's process gave no answer; the next run starts another.") from None
        except BaseException:
            self.close()
            raise


def _read_at_import(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_READ_AT_IMPORT) and name not in _READ_LATER
    }


def _serve(requests: Connection, modules: tuple[str, ...]) -> None:
    """The pool's process: imports modules, then serves one request at a time until the connection is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    preload((*PRELOADED, *modules))
    prepare_deepspeed()
    # Frozen objects are neither collected nor copied in the ranks.
    gc.collect()
    gc.freeze()
    with suppress(EOFError, Cancelled):
        # A fork copies one thread only: if an import has started more, ranks are spawned.
        alone = len(os.listdir("/proc/self/task")) == 1
        context = multiprocessing.get_context("fork" if alone else "spawn")
        while (jobs := requests.recv()) is not None:
            requests.send(supervise(context, jobs, owner=requests))
