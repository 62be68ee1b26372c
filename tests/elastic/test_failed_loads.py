"""A load or resume that fails anywhere leaves the engine as it was, or says that it has not.

One job of two ranks tries each way in again and again, and each time another function of the package fails when it is
first entered: one of those that are entered after the first change of the engine, or before it. Afterwards the state is
compared with what the call has returned, or with what its error has said.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lifecycle.rank import use_node
from saved_files import logged
from training import Job, build_engine, look, train_step

import zeroelastic
from zeroelastic.deepspeed.engine_state import state_of
from zeroelastic.elastic import ElasticDistributedSampler, preemption, resume
from zeroelastic.elastic.position import generators_of
from zeroelastic.errors import CheckpointError, SaveError
from zeroelastic.testing import RankPool, compare_states

PACKAGE = str(Path(zeroelastic.__file__).parent)
COLLECTIVES = "all_reduce", "all_gather", "all_gather_object", "broadcast", "broadcast_object_list", "barrier"
CPU = torch.device("cpu")
BEFORE, AFTER = 4, 12
_RAISED = -1
LENGTH, BATCH = 2000, 120
JOB = Job(groups=1, frozen=False)
IN_MEMORY = replace(JOB, options={"verify": True, "memory": {"every": 1}})
FALLBACK = replace(JOB, options={"verify": True, "fallback": True})

Boundary = tuple[str, str, int]
"""File, function and first line of a function of the package."""


@dataclass
class Run:
    """One rank's engine and position, and the state at each step that was saved."""

    engine: Any
    directory: Path
    shared: Path
    data: ElasticDistributedSampler = field(
        default_factory=lambda: ElasticDistributedSampler(range(LENGTH), BATCH, seed=4)
    )
    states: dict[int, dict[str, Any]] = field(default_factory=dict)
    source: Any = None
    leaving: Any = None
    store: Any = None
    calls: int = 0

    def look(self) -> dict[str, Any]:
        return {**look(self.engine)[0], "position": str(self.data.state_dict()), "generators": generators()}

    @property
    def node(self) -> Path:
        return self.shared / f"node{dist.get_rank()}"

    @property
    def kept(self) -> Path:
        """A copy of what the node has in memory."""
        return self.shared / f"kept{dist.get_rank()}"


def generators() -> str:
    return str([tensor.sum().item() for tensor in leaves(generators_of(CPU))])


def leaves(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value.double()
    elif isinstance(value, dict):
        for item in value.values():
            yield from leaves(item)


class Entered:
    """The functions of the package in the order in which they are first entered; ``fails`` raises when it is.

    With each, how many collectives were called before: ranks that raise between the same two do not wait for others.
    """

    def __init__(self, engine: Any, fails: Boundary | None = None, error: Callable[[], Exception] | None = None):
        self.state, self.fails, self.error = state_of(engine), fails, error
        self.before: dict[Boundary, int] = {}
        self.after: dict[Boundary, int] = {}
        self.collectives = 0

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_name in COLLECTIVES and code.co_filename.endswith("distributed_c10d.py"):
            self.collectives += 1
        if event != "call" or not code.co_filename.startswith(PACKAGE):
            return
        boundary = (code.co_filename[len(PACKAGE) + 1 :], code.co_name, code.co_firstlineno)
        known = self.after if self.state.damage is not None else self.before
        if boundary == self.fails and boundary not in self.before and boundary not in self.after:
            known[boundary] = self.collectives
            assert self.error is not None
            raise self.error()
        known.setdefault(boundary, self.collectives)

    @contextmanager
    def watching(self) -> Iterator[None]:
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(None)


def boundaries_of(entered: Entered, turn: int) -> list[Boundary]:
    """Some that every rank has entered, most of them after the first change; another ``turn`` takes others.

    Each way in has a turn of its own: what one leaves out, another one takes.
    """
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, (entered.before, entered.after))
    chosen: list[Boundary] = []
    for part, most in ((0, BEFORE), (1, AFTER)):
        first = everybody[0][part]
        common = [one for one in first if can_fail(one) and all(own[part].get(one) == first[one] for own in everybody)]
        found = [one for one in common if part == 0 or not any(one in own[0] for own in everybody)]
        step = max(1, len(found) // most)
        chosen += found[turn % step :: step]
    return chosen


def can_fail(boundary: Boundary) -> bool:
    """Leaves out what carries errors from rank to rank, and what other threads and finalizers call."""
    file, function, _ = boundary
    return file not in ("distributed/collective.py", "deepspeed/engine_state.py", "errors.py") and function != "__del__"


ERRORS: tuple[Callable[[], Exception], ...] = (
    lambda: CheckpointError("injected: the checkpoint is damaged."),
    lambda: RuntimeError("injected"),
    lambda: OSError(5, "injected"),
)


def begun(job: Job, directory: Path, shared: Path, save: tuple[int, ...]) -> Run:
    """A run of three steps, which saves after some, and in memory after each where the options say so."""
    use_node(shared / f"node{dist.get_rank()}")
    run = Run(build_engine(job), directory, shared)
    with preemption(run.engine, directory, data=run.data) as stop:
        for step in range(3):
            train_step(run.engine, step)
            stop()
            if step + 1 in save:
                stop.save()
            run.states[step + 1] = run.look()
    return run


def train_before(job: Job, directory: Path, shared: Path) -> None:
    begun(job, directory, shared, ())


def load_tag(run: Run) -> int | None:
    return step_of(run.engine.load_checkpoint(str(run.directory), tag="global_step2"))


def load_newest(run: Run) -> int | None:
    return step_of(run.engine.load_checkpoint(str(run.directory)))


def step_of(loaded: tuple[Any, Any]) -> int | None:
    return None if loaded[0] is None else int(Path(loaded[0]).parent.name.removeprefix("global_step"))


def resumed(run: Run) -> int | None:
    start = resume(run.engine, run.directory, data=run.data)
    return None if start.tag is None else start.global_steps


@dataclass(frozen=True)
class Way:
    """A way in: what it loads from, and whether it restores position and generators."""

    call: Callable[[Run], int | None]
    job: Job = JOB
    save: tuple[int, ...] = ()
    positions: bool = True


WAYS = {
    "a tag": Way(load_tag, save=(1, 2), positions=False),
    "fallback": Way(load_newest, FALLBACK, save=(1, 2), positions=False),
    "resume from the directory": Way(resumed, save=(1, 2)),
    "resume from memory": Way(resumed, IN_MEMORY),
    "resume from memory or the directory": Way(resumed, IN_MEMORY, save=(1, 2)),
    "resume from the memory of other ranks": Way(resumed, IN_MEMORY),
}
OFTEN = "a tag", "resume from memory or the directory"


def marks_of(name: str, stage: int) -> list[pytest.MarkDecorator]:
    """`make test` has some ways at stage 3, `make test-all` all of them, and the first and the last at stage 2."""
    if stage == 3:
        return [pytest.mark.extended] * (name not in OFTEN)
    return [pytest.mark.extended if name in (OFTEN[0], OFTEN[-1]) else pytest.mark.sweep]


def put_back(run: Run) -> None:
    """The memory that failed loads removed. The engine is whole."""
    dist.barrier()
    if run.kept.exists():
        shutil.rmtree(run.node)
        shutil.copytree(run.kept, run.node)
    dist.barrier()
    run.engine.load_checkpoint(str(run.shared / "home"))


def differ_from_all(run: Run, number: int) -> dict[str, Any]:
    """Train to a state that no checkpoint has, and return it."""
    train_step(run.engine, 100 + number)
    run.data.load_state_dict({**run.data.state_dict(), "consumed": BATCH * (5 + number % 7)})
    torch.manual_seed(number)
    return run.look()


def refuses_to_begin(run: Run) -> list[str]:
    """Whether a damaged engine begins anew in an empty directory, or is saved to it."""
    problems = []
    for begin in (
        lambda: resume(run.engine, run.shared / "empty", data=run.data),
        lambda: run.engine.load_checkpoint(str(run.shared / "empty")),
        lambda: run.engine.save_checkpoint(str(run.shared / "empty")),
    ):
        try:
            problems.append(f"begins with damaged state: {begin()}")
        except (CheckpointError, SaveError) as error:
            if "do not train on it" not in str(error):
                problems.append(f"refuses to begin without a reason: {error}")
    return problems


def fail_everywhere(
    way: Way, stage: int, turn: int, directory: Path, shared: Path, *, earlier: bool
) -> tuple[int, int, list[str]]:
    """How many boundaries there were, how many failures damaged the engine, and what was not as it was said.

    ``earlier``: another job has left the checkpoints, of other ranks.
    """
    job = replace(way.job, stage=stage)
    if earlier:
        use_node(shared / f"node{dist.get_rank()}")
        run = Run(build_engine(job.other()), directory, shared)
    else:
        run = begun(job, directory, shared, way.save)
    run.engine.save_checkpoint(str(shared / "home"))
    if run.node.exists():
        shutil.copytree(run.node, run.kept)
    differ_from_all(run, 0)
    entered = Entered(run.engine)
    with entered.watching():
        reached = way.call(run)
    assert reached is not None
    problems = [] if earlier else differences(way, run, run.states[reached], "loaded")
    run.states[reached] = run.look()
    boundaries, damaged = boundaries_of(entered, turn), 0
    for number, boundary in enumerate(boundaries):
        put_back(run)
        before = differ_from_all(run, number)
        error = ERRORS[number % len(ERRORS)]
        step, said = fail_at(way, run, Entered(run.engine, boundary, error))
        if "do not train on it" in said:
            damaged += 1
            found = refuses_to_begin(run)
        elif step == _RAISED:
            found = differences(way, run, before, "raised")
        else:
            found = differences(way, run, before if step is None else run.states[step], f"returned step {step}")
        problems += [f"{boundary}, {error()!r}: {one}" for one in found]
    return len(boundaries), damaged, problems


def fail_at(way: Way, run: Run, entered: Entered) -> tuple[int | None, str]:
    """The step that the way in has returned, and what its error says; on Python 3.10, which has no notes, the log."""
    said = logged("deepspeed.engine_state")
    try:
        with entered.watching():
            return way.call(run), ""
    except Exception as error:
        return _RAISED, " ".join((str(error), *getattr(error, "__notes__", ()), *said))


def differences(way: Way, run: Run, expected: dict[str, Any], what: str) -> list[str]:
    found = run.look()
    if not way.positions:
        expected = {**expected, "position": found["position"], "generators": found["generators"]}
    return [f"{what}, and {line}" for line in compare_states(expected, found)[:3]]


@pytest.mark.parametrize(
    ("name", "stage"),
    [pytest.param(name, stage, marks=marks_of(name, stage)) for name in WAYS for stage in (3, 2)],
)
def test_a_load_that_fails_anywhere_leaves_the_engine_as_it_was_or_says_that_it_has_not(
    rank_pool: RankPool, tmp_path: Path, name: str, stage: int
) -> None:
    way, earlier = WAYS[name], name == "resume from the memory of other ranks"
    if earlier:
        rank_pool.run(train_before, 3, replace(way.job, stage=stage), tmp_path / "ckpt", tmp_path)
        shutil.rmtree(tmp_path / "node2")
    turn = [*WAYS].index(name)
    ranks = rank_pool.run(
        fail_everywhere, 2, way, stage, turn, tmp_path / "ckpt", tmp_path, earlier=earlier, timeout=120
    )
    for boundaries, damaged, problems in ranks:
        assert problems == []
        assert boundaries >= BEFORE + AFTER and boundaries > damaged > AFTER // 2, (boundaries, damaged)
