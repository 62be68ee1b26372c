"""One process of a job: takes commands over a socket, runs them on a real engine, and can be made to stop or die.

A fault is armed for the next command: at the n-th file that it opens, makes, renames or removes below the directory of
the run, this process kills itself, gets SIGTERM, or stops until it is released. What is counted are Python's audit
events, so nothing of the package is replaced.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from training import VOCABULARY, Job, build_engine, gathered

BATCH = 6  # divisible by 1, 2 and 3
LENGTH = 6000
EXTRA = {"G": "", "D": "more"}
"""What the networks have in addition that jobs train: two engines of one process have different ones."""
_EVENTS = frozenset({"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.link", "os.listdir", "os.scandir"})
_CODE = (".py", ".pyc", ".so")


@dataclass
class Fault:
    """What happens at the ``at``-th event: "kill", "sigterm" or "hold", in the main thread or in another one."""

    kind: str
    at: int
    gate: str
    background: bool = False


class Counter:
    """Counts the events of a process, once it is armed."""

    def __init__(self, below: str) -> None:
        self.below, self.fault, self.seen = below, None, 0
        self.fault: Fault | None
        sys.addaudithook(self._on_event)

    def arm(self, fault: Fault | None) -> None:
        self.fault, self.seen = fault, 0

    def disarm(self) -> None:
        """A fault is for one command; one for the thread behind a save outlives it."""
        if self.fault is not None and not self.fault.background:
            self.fault = None

    def _on_event(self, event: str, args: tuple[Any, ...]) -> None:
        fault = self.fault
        if fault is None or event not in _EVENTS or not args or not self._counts(args[0]):
            return
        if threading.current_thread().name != ("zeroelastic-save" if fault.background else "MainThread"):
            return
        self.seen += 1
        if self.seen != fault.at:
            return
        self.fault = None
        if fault.kind == "hold":
            hold(fault.gate)
        else:
            os.kill(os.getpid(), signal.SIGKILL if fault.kind == "kill" else signal.SIGTERM)

    def _counts(self, path: object) -> bool:
        if isinstance(path, bytes):
            path = os.fsdecode(path)
        if not isinstance(path, str) or path.endswith(_CODE):
            return False
        # A file that is opened beneath an open directory has no more than its name here.
        return path.startswith(self.below) or not path.startswith("/")


def hold(gate: str) -> None:
    """Say that this process has stopped, and go on when the gate is taken away."""
    os.close(os.open(f"{gate}.held.{os.getpid()}", os.O_CREAT | os.O_WRONLY))
    while os.path.exists(gate):
        time.sleep(0.002)


def short_hash(found: Mapping[str, Any]) -> str:
    """Values by name as one text."""
    return hashlib.sha256(repr(sorted(found.items())).encode()).hexdigest()[:16]


@dataclass
class Trained:
    """An engine, and its position in the data."""

    engine: Any
    data: Any


def use_node(path: Path) -> None:
    """Let this process be on a node whose memory is a directory."""
    from zeroelastic.elastic.memory import checkpoints
    from zeroelastic.elastic.memory.place import JobPlace

    def create(self: JobPlace) -> None:
        for directory in (self.path.parent, self.path):  # no other user may enter either
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    place = JobPlace(path=path, node=path.name)
    JobPlace.of_this_job = staticmethod(lambda *args, **kwargs: place)  # type: ignore[method-assign, assignment]
    JobPlace.create = create  # type: ignore[method-assign]
    checkpoints.start_reaper = lambda *args: None  # type: ignore[assignment]


class Rank:
    """The state of one process: its engines by network, and the commands by name."""

    def __init__(self, below: str) -> None:
        self.trained: dict[str, Trained] = {}
        self.net = "G"
        self.counter = Counter(below)

    @property
    def engine(self) -> Any:
        return self.trained[self.net].engine

    @property
    def data(self) -> Any:
        return self.trained[self.net].data

    def build(self, *, nodes: Sequence[str], **how: Any) -> dict[str, Any]:
        from zeroelastic.elastic import ElasticDistributedSampler

        use_node(Path(nodes[dist.get_rank()]))
        self.trained[self.net] = Trained(self._built(**how), ElasticDistributedSampler(range(LENGTH), BATCH, seed=4))
        return self.state()

    def _built(self, *, seed: int, options: dict[str, Any], batch: int = BATCH, **how: Any) -> Any:
        options = {"verify": "full", "save_timeout_s": 40.0, **options}
        return build_engine(Job(extra=EXTRA[self.net], perturb=seed / 1000, batch=batch, options=options, **how))

    def state(self) -> dict[str, Any]:
        """What is compared after every action: the training state as two hashes, and where this process is.

        The second one is of what DeepSpeed's own accessors gather: master weights and optimizer state.
        """
        from zeroelastic.testing import fingerprint, gather_state

        found = fingerprint(gather_state(self.engine))
        del found["engine/global_steps"]  # compared on its own: client state may say another one
        up = self.engine.module.up.bias  # accessors have no value of what is frozen meanwhile (``freeze``)
        trained = up.requires_grad
        up.requires_grad_(True)
        try:
            seen = gathered(self.engine)
        finally:
            up.requires_grad_(trained)
        return {
            "state": f"{short_hash(found)}-{short_hash(seen)}",
            "step": int(self.engine.global_steps),
            "position": self.data.global_step * BATCH,
            "cwd": os.getcwd(),
        }

    def arm(self, *, kind: str, at: int, gate: str, background: bool = False) -> None:
        self.counter.arm(Fault(kind, at, gate, background))

    def train(self, *, steps: int, salt: int) -> None:
        for _ in range(steps):
            engine = self.engine
            generator = torch.Generator().manual_seed(1000003 * salt + engine.global_steps)
            tokens = torch.randint(0, VOCABULARY, (BATCH, 5), generator=generator)
            self._step(tokens.chunk(dist.get_world_size())[dist.get_rank()])

    def _step(self, mine: torch.Tensor) -> None:
        engine = self.engine
        before = engine.global_steps
        for part in mine.chunk(engine.gradient_accumulation_steps()):
            engine.backward(engine(part, part.roll(1, 1)))
            engine.step()
        assert engine.global_steps == before + 1

    def save(self, *, directory: str, tag: str | None, background: bool, client_state: dict[str, Any] | None) -> None:
        from zeroelastic.deepspeed.save.background import saving_in_background

        with saving_in_background(self.engine, background):
            if client_state is None:
                self.engine.save_checkpoint(directory, tag=tag)
            else:
                self.engine.save_checkpoint(directory, tag=tag, client_state=dict(client_state))

    def wait(self) -> None:
        import zeroelastic

        zeroelastic.wait_for_save(self.engine)

    def is_done(self) -> bool:
        from zeroelastic.deepspeed.save.background import pending_of

        pending = pending_of(self.engine)
        return pending is None or pending.is_done()

    def load(self, *, directory: str, tag: str | None, verify: str) -> tuple[bool, Any]:
        self.engine._config._param_dict["zeroelastic"]["verify"] = verify
        path, client_state = self.engine.load_checkpoint(directory, tag=tag)
        return path is not None, client_state

    def resume(self, *, directory: str, required: bool, strict: bool) -> dict[str, Any]:
        from zeroelastic.deepspeed.engine_state import last_save_of
        from zeroelastic.elastic import resume

        self.engine._config._param_dict["zeroelastic"]["verify"] = "full"
        resumed = resume(self.engine, directory, data=self.data, required=required, strict=strict)
        return {
            "tag": resumed.tag,
            "client_state": dict(resumed.client_state),
            "passed": tuple(resumed.passed_over),
            "tier": resumed.tier,
            "unsaved": last_save_of(self.engine).unsaved_steps > 0,
        }

    def chdir(self, *, to: str) -> None:
        os.chdir(to)

    def freeze(self, *, trained: bool) -> None:
        self.engine.module.up.bias.requires_grad_(trained)

    def reinstall(self) -> None:
        import zeroelastic

        zeroelastic.uninstall()
        assert not zeroelastic.is_installed()
        zeroelastic.install()

    def loop(
        self,
        *,
        directory: str,
        script: Sequence[tuple[Any, ...]],
        every_steps: int | None,
        background: bool,
        workers: int,
        salt: int,
        journal: str,
        gate: str,
    ) -> bool:
        """A training loop under ``preemption``; the script says what happens. Returns whether it was stopped.

        train, load a tag; save, or save slowly in the background: until "release"; a signal to a rank or to its process
        group; the death of a rank or of all, when memory has the last step or at once ("vanish"). Rank 0 writes the
        journal.
        """
        from zeroelastic.deepspeed.engine_state import state_of
        from zeroelastic.elastic import every, preemption

        saving = every(steps=every_steps, background=background) if every_steps else None
        release = partial(Path(gate).unlink, missing_ok=True)
        batches = self._batches(workers, salt)
        with preemption(self.engine, directory, data=self.data, saving=saving, grace=120) as stop:
            self._stopped = stop
            for what, *args in script:
                if what in ("load", "save", "slow", "signal", "group"):
                    release()  # each waits for the save before it
                if what == "load":
                    path, _ = self.engine.load_checkpoint(directory, tag=args[0])
                    assert path is not None
                    self._note(journal, "loaded", tag=args[0])
                elif what in ("save", "slow"):
                    if what == "slow":
                        Path(gate).touch()
                        self.counter.arm(Fault("hold", 1, gate, background=True))
                    tag = stop.save(*args, background=what == "slow")
                    self._note(journal, "saved", tag=tag, background=what == "slow")
                elif what == "release":
                    release()
                    while not self.is_done():
                        time.sleep(0.002)
                    dist.barrier()
                    self._note(journal, "released")
                elif what in ("signal", "group", "die", "vanish"):
                    if what == "die" and (memory := state_of(self.engine).memory) is not None:
                        memory.wait()
                    if not args or dist.get_rank() == args[0] % dist.get_world_size():
                        number = signal.SIGKILL if what in ("die", "vanish") else signal.SIGTERM
                        os.kill(os.getpid(), number) if what != "group" else os.killpg(os.getpgid(0), number)
                    if what == "group" and workers:
                        time.sleep(0.2)  # torch looks at its workers when one has ended
                else:
                    self._step(next(batches))
                    # What a periodic save saves now, and what the one after the signal does.
                    self._note(journal, "step", ahead=BATCH)
                    saved = len(stop.saves)
                    ended = stop()
                    for tag in stop.saves[saved:]:
                        self._note(journal, "saved", tag=tag, background=background and not ended)
                    if ended:
                        break
            release()
        return stop.stopped

    def _batches(self, workers: int, salt: int) -> Iterator[torch.Tensor]:
        """This rank's part of each global batch from the sampler's position on, made by workers where there are any."""
        from torch.utils.data import DataLoader

        size = BATCH // dist.get_world_size()
        while True:
            for numbers in DataLoader(range(LENGTH), batch_size=size, sampler=self.data, num_workers=workers):  # type: ignore[arg-type]
                yield (numbers.unsqueeze(1) * torch.arange(1, 6) + salt) % VOCABULARY

    def _note(self, journal: str, what: str, *, ahead: int = 0, **more: Any) -> None:
        """Write a line: what has happened, and the state; the position is ``ahead`` samples later."""
        state = self.state()
        if dist.get_rank() == 0:
            line = {"did": what, **more, **state, "position": state["position"] + ahead}
            with open(journal, "a") as file:
                file.write(json.dumps(line) + "\n")

    def leave(self, *, signal_again: bool) -> None:
        """The end of a preempted job: ``stop.exit()``; torchrun may send one more signal before it is over."""
        if signal_again:
            os.kill(os.getpid(), signal.SIGTERM)
        self._stopped.exit()

    def destroy(self) -> None:
        for one in self.trained.values():
            one.engine.destroy()

    def tool(self, *, args: list[str]) -> tuple[int, str]:
        """A verb of the command line."""
        from typer.testing import CliRunner

        from zeroelastic.cli import app

        result = CliRunner().invoke(app.app, args, catch_exceptions=True)
        text = result.output
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            from zeroelastic.errors import ZeroElasticError

            text += f"{type(result.exception).__name__}: {result.exception}"
            if not isinstance(result.exception, ZeroElasticError):
                text += "".join(traceback.format_tb(result.exception.__traceback__))
        return result.exit_code, text


def serve(connection: Connection, below: str) -> None:
    """Take commands until the other side is gone or a command ends the process."""
    rank = Rank(below)
    while True:
        try:
            rank.net, name, kwargs = connection.recv()
        except (EOFError, OSError):
            os._exit(0)
        command: Callable[..., Any] = getattr(rank, name)
        try:
            answer: tuple[Any, ...] = ("ok", command(**kwargs))
        except Exception as error:
            names = [kind.__name__ for kind in type(error).__mro__]
            answer = ("error", names, str(error), traceback.format_exc())
        if name != "arm":
            rank.counter.disarm()
        connection.send(answer)
        if name == "loop" and answer[0] == "error":
            os._exit(1)  # as a job does: others may wait for this rank
