"""The process of one rank, spawned or forked, from its first instruction to its end.

A rank reports "started", then "done" or what it raised, and then waits to be released or ended. It never closes
its sockets before that, so that a failing rank does not make its peers fail too: the first traceback is the cause.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import importlib.util
import os
import pickle
import signal
import socket
import sys
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

RankStore = Literal["file", "tcp"]

# A real-time signal, because user code and launchers use SIGUSR1, SIGUSR2 and SIGTERM.
STACKS_SIGNAL: int = signal.SIGRTMIN + 7
VERBOSE_VARIABLE = "ZEROELASTIC_TEST_VERBOSE"

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class RankJob:
    """The description of one rank process.

    ``directory`` is private to the run and shared by its ranks. It holds the pickled call, the rendezvous file, and for
    each rank its result, output and stacks. ``timeout`` is in seconds. ``store``: that of the process group,
    a file, which no rank takes with it when it dies, or one of rank 0 on the loopback interface, as quick as a job's.
    """

    rank: int
    world_size: int
    directory: str
    backend: str
    timeout: float
    environment: dict[str, str]
    sys_path: tuple[str, ...]
    working_directory: str
    store: RankStore = "file"

    def file(self, kind: str) -> Path:
        """The path of this rank's file of one kind: result, output or stacks."""
        return Path(self.directory) / f"rank{self.rank}.{kind}"


@dataclass(frozen=True, slots=True)
class Raised:
    """An exception that ended a rank's function; ``moment_ns`` is its time by ``time.monotonic_ns``."""

    moment_ns: int
    headline: str
    traceback: str


def rank_main(job: RankJob, parent_pid: int, supervisor: Connection) -> None:
    """Run the job's pickled call in an initialised process group; the entry point of a rank process."""
    # A new session: all processes that the rank starts can be found and ended with it.
    os.setsid()
    _die_with_parent(parent_pid)
    if os.environ.get(VERBOSE_VARIABLE) != "1":
        _redirect_output(job.file("output"))
    stacks = open(job.file("stacks"), "w")  # noqa: SIM115 - faulthandler writes to it until the process ends
    faulthandler.register(STACKS_SIGNAL, file=stacks, all_threads=True)
    faulthandler.enable(file=stacks)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    supervisor.send("started")
    try:
        sys.path[:] = job.sys_path
        os.chdir(job.working_directory)
        _init_process_group(job)
        function, args, kwargs = pickle.loads((Path(job.directory) / "call").read_bytes())
        result = function(*args, **kwargs)
        _write_result(job, result)
    except BaseException as error:
        raised = Raised(
            moment_ns=time.monotonic_ns(),
            headline="".join(traceback.format_exception_only(type(error), error)).strip(),
            traceback="".join(traceback.format_exception(type(error), error, _trim(error.__traceback__))),
        )
        supervisor.send(raised)
        _wait_for_release(supervisor)
        os._exit(1)
    supervisor.send("done")
    _wait_for_release(supervisor)
    import torch

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
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    for stream, number in (("stdout", 1), ("stderr", 2)):
        setattr(sys, stream, os.fdopen(number, "w", buffering=1, closefd=False, errors="backslashreplace"))


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
        init_method=f"file://{job.directory}/rendezvous" if job.store == "file" else None,
        store=_tcp_store(job) if job.store == "tcp" else None,
        rank=job.rank,
        world_size=job.world_size,
        # Longer than the run may take, so that a hang is reported with its stacks and not as a broken collective.
        timeout=timedelta(seconds=job.timeout + 60),
        device_id=device if job.backend == "nccl" else None,
    )


def _tcp_store(job: RankJob) -> TCPStore:
    from torch._C._distributed_c10d import TCPStore

    path = Path(job.directory) / "port"
    if job.rank == 0:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port, descriptor = server.getsockname()[1], server.detach()
        store = TCPStore("127.0.0.1", port, job.world_size, True, wait_for_workers=False, master_listen_fd=descriptor)
        path.with_suffix(".tmp").write_text(str(port))
        path.with_suffix(".tmp").rename(path)
        return store
    while not path.exists():
        time.sleep(0.002)
    return TCPStore("127.0.0.1", int(path.read_text()), job.world_size, False, wait_for_workers=False)


def prepare_deepspeed() -> None:
    """Import deepspeed, if it is installed, without the shared-memory op that it compiles on first use.

    The op is for inference, and is only used where LOCAL_SIZE is set; compiling it takes half a minute.
    """
    if importlib.util.find_spec("deepspeed") is None:
        return
    backend = importlib.import_module("deepspeed.comm.torch")
    setattr(backend, "build_shm_op", lambda: None)  # noqa: B010 - mypy allows no assignment to a module


def _write_result(job: RankJob, result: Any) -> None:
    try:
        payload = pickle.dumps(result)
    except Exception as error:
        raise TypeError(f"the result, a {type(result).__qualname__}, cannot be pickled: {error}") from error
    job.file("result").write_bytes(payload)


def _trim(frames: TracebackType | None) -> TracebackType | None:
    """The traceback without this module's own first frame."""
    return frames.tb_next if frames is not None and frames.tb_next is not None else frames


def _wait_for_release(supervisor: Connection) -> None:
    try:
        supervisor.recv()
    except EOFError:
        os._exit(1)
