"""The process of one rank: what is imported before it is forked, its first instructions, its end.

A rank reports how its function ended, and then waits until it may leave or is killed: a failing rank that closes its
sockets would make its peers fail too. Its output, traceback and stacks are in one file.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

VERBOSE_VARIABLE = "ZEROELASTIC_TEST_VERBOSE"

# The imports of the first deepspeed.initialize take two thirds of a rank's start.
DEEPSPEED_MODULES = (
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "torch.utils.cpp_extension",
    "torch.utils.serialization.config",
    "torch._subclasses.schema_check_mode",
    "torch.profiler._cupti_monitor",
    "numpy.ma",
    "deepspeed",
    "deepspeed.comm.mori",
    "deepspeed.ops.op_builder.all_ops",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.runtime.zero.stage3",
    "deepspeed.runtime.zero.muon.muon_optimizer",
)

_OUTPUT_LINES = 80
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class RankJob:
    """The description of one rank process.

    ``call`` is a function with its arguments, pickled. ``directory``, of the run, holds the rendezvous file and the
    output of each rank. ``grace`` is the time in seconds that others have to fail after the first. With a
    ``world_size`` of 0 the process has no process group.
    """

    rank: int
    world_size: int
    directory: str
    backend: str
    timeout: float
    environment: dict[str, str]
    sys_path: tuple[str, ...]
    working_directory: str
    call: bytes = b""
    grace: float = 0.5

    @property
    def output(self) -> Path:
        """The file of what the rank prints."""
        return Path(self.directory) / f"rank{self.rank}.output"

    def failure(self, headline: str, *, died: bool = False) -> RankFailure:
        """A failure of the rank at this moment."""
        text = self.output.read_text(errors="backslashreplace") if self.output.exists() else ""
        details = "\n".join(text.splitlines()[-_OUTPUT_LINES:])
        return RankFailure(self.rank, headline, details, died, time.monotonic_ns())


@dataclass(frozen=True, slots=True)
class RankFailure:
    """The failure of one rank: one line, and the last lines that the rank printed, its traceback or stacks among them.

    ``died``: the process ended by itself. ``moment_ns`` is the time by ``time.monotonic_ns``.
    """

    rank: int
    headline: str
    details: str
    died: bool
    moment_ns: int


def rank_main(job: RankJob, deadline: float, parent_pid: int, supervisor: Connection) -> None:
    """Run the job's call and send its pickled result, or the failure; at the ``deadline`` all stacks are printed."""
    end: bytes | RankFailure
    try:
        become_rank(job, parent_pid)
        faulthandler.dump_traceback_later(max(deadline - time.monotonic(), 0.001))
        function, args, kwargs = pickle.loads(job.call)
        end = pickle.dumps(function(*args, **kwargs))
    except BaseException as error:
        traceback.print_exc()
        end = job.failure("".join(traceback.format_exception_only(type(error), error)).strip())
    supervisor.send(end)
    supervisor.recv()
    torch = importlib.import_module("torch")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def become_rank(job: RankJob, parent_pid: int) -> None:
    """Give this process the job's environment and process group. It ends with its parent, however that ends."""
    # A new session: all processes that the rank starts can be found and ended with it.
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)
    os.environ.clear()
    os.environ.update(job.environment)
    if os.environ.get(VERBOSE_VARIABLE) != "1":
        _redirect_output(job.output)
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.path[:] = job.sys_path
    os.chdir(job.working_directory)
    if job.world_size:
        _init_process_group(job)


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

    prepare_deepspeed()
    device = None
    if job.backend == "nccl":
        device = torch.device("cuda", job.rank)
        torch.cuda.set_device(device)
    torch.distributed.init_process_group(
        job.backend,
        init_method=f"file://{job.directory}/rendezvous",
        rank=job.rank,
        world_size=job.world_size,
        # Longer than the run may take, so that a hang is reported with its stacks and not as a broken collective.
        timeout=timedelta(seconds=job.timeout + 60),
        device_id=device,
    )


def preload(names: Iterable[str]) -> None:
    """Import modules, and get the CPU information once, for all processes that are forked from this one.

    DeepSpeed gets it twice for each op, in a process that takes a second. The garbage collector, a quarter of the time
    of these imports, is off meanwhile; frozen objects are neither collected nor copied in the forked processes.
    """
    gc.disable()
    for name in names:
        # A module that cannot be imported fails again in the rank that needs it, and that traceback is reported.
        with suppress(Exception):
            importlib.import_module(name)
    with suppress(Exception):  # without it, ranks get it themselves
        cpuinfo = importlib.import_module("cpuinfo")
        known = cpuinfo.get_cpu_info()
        setattr(cpuinfo, "get_cpu_info", lambda: dict(known))  # noqa: B010 - mypy allows no assignment to a module
    gc.enable()
    gc.collect()
    gc.freeze()


def prepare_deepspeed() -> None:
    """Import deepspeed, if it is installed, without the op for inference that it compiles on first use."""
    with suppress(ModuleNotFoundError):
        backend = importlib.import_module("deepspeed.comm.torch")
        setattr(backend, "build_shm_op", lambda: None)  # noqa: B010 - mypy allows no assignment to a module
