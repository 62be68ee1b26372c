"""A pool that starts ranks in milliseconds, forked from a process that has imported torch and deepspeed.

Every run has fresh processes, so no global state of torch or deepspeed (process groups, parameter ids,
caches per world size) ever passes from one run to the next; there is nothing to reset.
"""

from __future__ import annotations

import atexit
import gc
import importlib
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

from zeroelastic.testing.rank import RankJob, prepare_deepspeed
from zeroelastic.testing.run import collect_results, rank_jobs, run_directory, run_ranks
from zeroelastic.testing.supervisor import Cancelled, Outcome, child_environment, supervise

T = TypeVar("T")

# With deepspeed, what deepspeed.initialize imports when it is first called: two thirds of a rank's start. With our own
# modules, what install() and a load import: half of what is left.
_PRELOADED = (
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "torch.utils.cpp_extension",
    "torch.utils.serialization.config",
    "deepspeed",
    "deepspeed.ops.op_builder.all_ops",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.runtime.zero.stage3",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "zeroelastic.stage3.seams",
    "zeroelastic.stage3.wrappers",
    "zeroelastic.testing.state",
)
# Variables with these beginnings are read while modules are imported: a forked rank is too late for another
# value.
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
# Of these, what libraries set themselves when a process imports them, and read when they need it.
_READ_LATER = ("PYTORCH_NVML_BASED_CUDA_CHECK", "TORCHINDUCTOR_CACHE_DIR")
# How long importing may take, and how long ending a run may take, in seconds.
_START_LIMIT = 300.0
_END_LIMIT = 60.0


class RankPool:
    """Runs functions on ranks like `run_ranks`, without its start-up time. One run at a time.

        with RankPool(4) as pool:
            for world_size in (1, 2, 3, 4):
                pool.run(train_step, world_size)

    Ranks see the caller's environment, working directory and sys.path as they are when a run starts. A run
    whose environment differs in what is read at import (DS_ACCELERATOR, OMP_NUM_THREADS, ...) and a run on
    "nccl" (CUDA does not survive a fork) take `run_ranks` instead: slower, same result, with a warning where
    the run did not ask for it. A failed run costs the pool nothing. `preload` names modules that are imported once,
    before any rank is forked.
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
        """Results, by rank, of `fn(*args, **kwargs)` on `world_size` ranks; all else as in `run_ranks`.

        `timeout` counts from the moment the ranks start, without the pool's own first imports. Raises
        ValueError when world_size exceeds the pool's size.
        """
        if world_size > self.max_ranks:
            raise ValueError(f"world_size is {world_size}; this pool was made for at most {self.max_ranks} ranks.")
        with run_directory(fn, args, kwargs) as directory:
            jobs = rank_jobs(world_size, directory, timeout=timeout, backend=backend, env=env)
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
        """Ends the pool's process; the next run would start another."""
        atexit.unregister(self.close)
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._server is not None:
            if self._owner == os.getpid():  # a child that was forked has the object, and not the pool
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
        # Registered after multiprocessing's own hook, so run before it, which would wait for the process
        # forever.
        atexit.register(self.close)

    def _changed(self, job: RankJob) -> set[str]:
        """Variables that are too late for a forked rank: another value than that with which the pool imported."""
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
        """Closes the pool in the middle of a run, with time for its process to end the ranks."""
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


def _serve(requests: Connection, preload: tuple[str, ...]) -> None:
    """The pool's process: imports, then runs one request after the other until the connection is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in (*_PRELOADED, *preload):
        # What cannot be imported here fails in the rank that needs it, where its traceback is reported.
        with suppress(Exception):
            importlib.import_module(name)
    prepare_deepspeed()
    with suppress(Exception):
        _remember_cpu_info()
    # What is frozen here is neither collected nor copied in the ranks.
    gc.collect()
    gc.freeze()
    with suppress(EOFError, Cancelled):
        while True:
            jobs: list[RankJob] = requests.recv()
            # A fork copies one thread only; where an import has started more, ranks start from scratch.
            alone = len(os.listdir("/proc/self/task")) == 1
            outcome = supervise(multiprocessing.get_context("fork" if alone else "spawn"), jobs, owner=requests)
            requests.send(outcome)


def _remember_cpu_info() -> None:
    """Asks for the kind of CPU once for all ranks: DeepSpeed asks twice for each op that a rank loads, each time by
    another process of a second or more.
    """
    cpuinfo = importlib.import_module("cpuinfo")
    known = cpuinfo.get_cpu_info()
    setattr(cpuinfo, "get_cpu_info", lambda: dict(known))  # noqa: B010 - for mypy a module is not to be changed
