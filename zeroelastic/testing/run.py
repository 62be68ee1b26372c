"""Functions run on ranks: new processes, a rendezvous by file, a time limit, the first traceback."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from zeroelastic.testing.rank import RankJob, RankStore
from zeroelastic.testing.supervisor import Outcome, RankFailure, supervise

T = TypeVar("T")

# When set by a launcher, these contradict the file rendezvous or the rank numbers.
_LAUNCHER_VARIABLES = (
    "MASTER_ADDR",
    "MASTER_PORT",
    "LOCAL_SIZE",
    "GROUP_RANK",
    "ROLE_RANK",
    "TORCHELASTIC_RUN_ID",
)


class RankError(RuntimeError):
    """A rank failed. ``failures`` are all failures in order; ``rank`` and ``traceback`` belong to the first."""

    def __init__(self, message: str, failures: tuple[RankFailure, ...]) -> None:
        super().__init__(message, failures)
        self.failures = failures
        self.rank = failures[0].rank
        self.traceback = failures[0].details

    def __str__(self) -> str:
        return str(self.args[0])


class RankTimeoutError(RankError, TimeoutError):
    """Ranks did not finish in time; ``failures`` has the ranks that hung, with their Python stacks."""


def run_ranks(
    fn: Callable[..., T],
    world_size: int,
    *args: Any,
    timeout: float = 120.0,
    backend: str | None = None,
    env: Mapping[str, str] | None = None,
    **kwargs: Any,
) -> list[T]:
    """Results, by rank, of ``fn(*args, **kwargs)`` run in ``world_size`` new processes, one process group.

    torch.distributed is initialised before fn runs, through a file in a private directory: no port is opened, and
    ``deepspeed.initialize`` and ``deepspeed.init_distributed`` adopt the process group. RANK, LOCAL_RANK, WORLD_SIZE,
    LOCAL_WORLD_SIZE, DS_ACCELERATOR and OMP_NUM_THREADS=1 are set; ``env`` adds to them or overrides them. ``backend``
    None or "gloo" runs on the CPU, on every machine; "nccl" gives each rank its own GPU. fn, its arguments and its
    result are pickled, so fn must be defined at the top level of a module; tensors may be among them. The output of the
    ranks is shown when one fails; with ZEROELASTIC_TEST_VERBOSE=1 it is shown at once. ``timeout`` is in seconds and
    includes the start of the processes.

        def total(x: int) -> int:
            t = torch.tensor(x + dist.get_rank())
            dist.all_reduce(t)
            return int(t)

        assert run_ranks(total, 3, 10) == [33, 33, 33]

    Raises RankError with the first rank's traceback when one fails, RankTimeoutError with the stacks of the
    ranks that hang, TypeError when something cannot be pickled, ValueError when the machine lacks the GPUs.
    """
    with run_directory(fn, args, kwargs) as directory:
        jobs = rank_jobs(world_size, directory, timeout=timeout, backend=backend, env=env)
        outcome = supervise(multiprocessing.get_context("spawn"), jobs)
        return collect_results(outcome, directory)


def gpus_available() -> int:
    """The number of GPUs that ranks of a NCCL run can use: 0 without CUDA, NCCL or a device::

    pytest.mark.skipif(gpus_available() < 2, reason="needs 2 GPUs")
    """
    import torch

    if not (torch.cuda.is_available() and torch.distributed.is_nccl_available()):
        return 0
    return torch.cuda.device_count()


@contextmanager
def run_directory(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[str]:
    """A private temporary directory with the pickled call; raises TypeError when it cannot be pickled."""
    _check_picklable(fn, args, kwargs)
    with tempfile.TemporaryDirectory(prefix="zeroelastic-ranks-") as directory:
        (Path(directory) / "call").write_bytes(pickle.dumps((fn, args, kwargs)))
        yield directory


def _check_picklable(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    named = [("the function", fn), *((f"argument {i}", arg) for i, arg in enumerate(args))]
    named += [(f"argument {name}=", value) for name, value in kwargs.items()]
    for what, value in named:
        try:
            pickle.dumps(value)
        except Exception as error:
            raise TypeError(
                f"{what} {value!r} cannot be sent to another process: {error}. Ranks are processes of "
                "their own: define functions and classes at the top level of a module (no lambda, no "
                "nested function) and pass values that pickle."
            ) from error


def rank_jobs(
    world_size: int,
    directory: str,
    *,
    timeout: float,
    backend: str | None,
    env: Mapping[str, str] | None,
    store: RankStore = "file",
) -> list[RankJob]:
    """The jobs of one run, by rank; raises ValueError when world size, backend or GPUs do not fit."""
    if world_size < 1:
        raise ValueError(f"world_size is {world_size}; a run needs at least one rank.")
    backend = backend or "gloo"
    if backend not in ("gloo", "nccl"):
        raise ValueError(f"backend is {backend!r}; known are 'gloo' (CPU) and 'nccl' (one GPU a rank).")
    if backend == "nccl" and gpus_available() < world_size:
        raise ValueError(f"backend 'nccl' needs a GPU per rank: {world_size} ranks, {gpus_available()} GPUs available.")
    return [
        RankJob(
            rank=rank,
            world_size=world_size,
            directory=directory,
            backend=backend,
            timeout=timeout,
            environment=_rank_environment(rank, world_size, backend, env or {}),
            sys_path=tuple(sys.path),
            working_directory=os.getcwd(),
            store=store,
        )
        for rank in range(world_size)
    ]


def _rank_environment(rank: int, world_size: int, backend: str, env: Mapping[str, str]) -> dict[str, str]:
    """The whole environment of one rank."""
    environment = {name: value for name, value in os.environ.items() if name not in _LAUNCHER_VARIABLES}
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    environment.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        CROSS_RANK="0",
        CROSS_SIZE="1",
        DS_ACCELERATOR="cuda" if backend == "nccl" else "cpu",
        OMP_NUM_THREADS="1",
    )
    environment.update(env)
    return environment


def collect_results(outcome: Outcome, directory: str) -> list[Any]:
    """The ranks' results, by rank; raises RankError or RankTimeoutError when the outcome has failures."""
    if outcome.failures:
        error = RankTimeoutError if outcome.timed_out else RankError
        raise error(_message(outcome), outcome.failures)
    return [pickle.loads((Path(directory) / f"rank{rank}.result").read_bytes()) for rank in range(outcome.world_size)]


def _message(outcome: Outcome) -> str:
    first, *later = outcome.failures
    shown = list(outcome.failures) if outcome.timed_out else [first]
    if outcome.timed_out:
        ranks = ", ".join(str(failure.rank) for failure in outcome.failures)
        lines = [f"of {outcome.world_size} ranks these did not finish: {ranks}"]
    else:
        lines = [f"rank {first.rank} of {outcome.world_size} failed first: {first.headline}"]
    for failure in shown:
        lines += [
            "",
            f"rank {failure.rank}: {failure.headline}" if outcome.timed_out else f"rank {failure.rank}:",
        ]
        lines += [failure.details.rstrip()] if failure.details else []
        if failure.output:
            lines += [f"last output of rank {failure.rank}:", failure.output]
    if later and not outcome.timed_out:
        lines += ["", "the others:", *(f"rank {failure.rank}: {failure.headline}" for failure in later)]
    return "\n".join(lines)
