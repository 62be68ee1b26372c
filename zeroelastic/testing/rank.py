"""The process of one rank, spawned or forked, from its first instruction to its end.

A rank reports how its function ended, and then waits until it may leave or is killed. It never closes its sockets
before that, so that a failing rank does not make its peers fail too: the first traceback is the cause.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import importlib.util
import os
import pickle
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

VERBOSE_VARIABLE = "ZEROELASTIC_TEST_VERBOSE"

_OUTPUT_LINES = 20
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class RankJob:
    """The description of one rank process.

    ``directory`` is private to the run and shared by its ranks. It holds the pickled call, the rendezvous file, and for
    each rank its result, output and stacks. ``timeout`` is in seconds.
    """

    rank: int
    world_size: int
    directory: str
    backend: str
    timeout: float
    environment: dict[str, str]
    sys_path: tuple[str, ...]
    working_directory: str

    def file(self, kind: str) -> Path:
        """The path of this rank's file of one kind: result, output or stacks."""
        return Path(self.directory) / f"rank{self.rank}.{kind}"

    def read(self, kind: str) -> str:
        """The text of the file of one kind; empty if there is none."""
        path = self.file(kind)
        return path.read_text(errors="backslashreplace") if path.exists() else ""

    def with_output(self, details: str) -> str:
        """A traceback or stacks, and the last lines that the rank printed."""
        output = self.read("output").splitlines()[-_OUTPUT_LINES:]
        return "\n".join([details.rstrip(), *([f"last output of rank {self.rank}:", *output] if output else [])])


@dataclass(frozen=True, slots=True)
class RankFailure:
    """The failure of one rank: one line, and the details: a traceback or stacks, and the last lines that it printed.

    ``moment_ns`` is its time by ``time.monotonic_ns``. ``died``: the process ended, or was killed, by itself.
    """

    rank: int
    headline: str
    details: str
    moment_ns: int
    died: bool = False


def rank_main(job: RankJob, deadline: float, parent_pid: int, supervisor: Connection) -> None:
    """Run the job's pickled call in an initialised process group; the entry point of a rank process.

    It sends its failure, or None. At the ``deadline``, by ``time.monotonic``, it writes the stacks of all threads.
    """
    # A new session: all processes that the rank starts can be found and ended with it.
    os.setsid()
    _die_with_parent(parent_pid)
    if os.environ.get(VERBOSE_VARIABLE) != "1":
        _redirect_output(job.file("output"))
    stacks = open(job.file("stacks"), "w")  # noqa: SIM115 - faulthandler writes to it until the process ends
    faulthandler.enable(file=stacks)
    faulthandler.dump_traceback_later(max(deadline - time.monotonic(), 0.001), file=stacks)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    failure = None
    try:
        sys.path[:] = job.sys_path
        os.chdir(job.working_directory)
        _init_process_group(job)
        function, args, kwargs = pickle.loads((Path(job.directory) / "call").read_bytes())
        _write_result(job, function(*args, **kwargs))
    except BaseException as error:
        headline = "".join(traceback.format_exception_only(type(error), error)).strip()
        frames = error.__traceback__ and error.__traceback__.tb_next  # without this function's own
        details = "".join(traceback.format_exception(type(error), error, frames))
        failure = RankFailure(job.rank, headline, job.with_output(details), time.monotonic_ns())
    supervisor.send(failure)
    supervisor.recv()
    torch = importlib.import_module("torch")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _die_with_parent(parent_pid: int) -> None:
    """Let the kernel kill this process when its parent ends, however that happens."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def _redirect_output(path: Path) -> None:
    """Send stdout and stderr to a file, including the output of native code."""
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream, number in (("stdout", 1), ("stderr", 2)):
        os.dup2(descriptor, number)
        setattr(sys, stream, os.fdopen(number, "w", buffering=1, closefd=False, errors="backslashreplace"))
    os.close(descriptor)


def _init_process_group(job: RankJob) -> None:
    """Initialise torch.distributed; deepspeed then adopts this group."""
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    prepare_deepspeed()
    device = None
    if os.environ["DS_ACCELERATOR"] == "cuda":
        device = torch.device("cuda", job.rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    torch.distributed.init_process_group(
        job.backend,
        init_method=f"file://{job.directory}/rendezvous",
        rank=job.rank,
        world_size=job.world_size,
        # Longer than the run may take, so that a hang is reported with its stacks and not as a broken collective.
        timeout=timedelta(seconds=job.timeout + 60),
        device_id=device if job.backend == "nccl" else None,
    )


def prepare_deepspeed() -> None:
    """Import deepspeed, if it is installed, without the shared-memory op that it compiles on first use.

    The op is for inference, and is only used where LOCAL_SIZE is set; compiling it takes half a minute.
    """
    if importlib.util.find_spec("deepspeed") is None:
        return
    backend = importlib.import_module("deepspeed.comm.torch")
    setattr(backend, "build_shm_op", lambda: None)  # noqa: B010 - mypy allows no assignment to a module


def _write_result(job: RankJob, result: object) -> None:
    try:
        payload = pickle.dumps(result)
    except Exception as error:
        raise TypeError(f"the result, a {type(result).__qualname__}, cannot be pickled: {error}") from error
    job.file("result").write_bytes(payload)
