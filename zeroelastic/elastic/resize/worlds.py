"""A training loop over worlds: when nodes come or leave, the job goes on at another size in the same processes.

``worlds`` builds an engine for each world. Between two of them the state goes from memory to memory, by ``resize``, and
each rank gets only what it does not have; the content root is compared. Where a node is lost without notice, the
survivors build the next world too, and resume from the memory of the nodes or from the disk.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from zeroelastic.elastic.events import Events
from zeroelastic.elastic.notice import SIGNALS, Notice
from zeroelastic.elastic.position import Position
from zeroelastic.elastic.preemption import Every
from zeroelastic.elastic.resize.job import Job, build_engine, resume_newest
from zeroelastic.elastic.resize.membership import Membership
from zeroelastic.elastic.resize.world import World, WorldArguments


def worlds(
    build: Callable[[], Any],
    directory: str | os.PathLike[str],
    *,
    data: Position | None = None,
    saving: Every | None = None,
    grace: float = 30.0,
    client_state: Callable[[], Mapping[str, Any]] | None = None,
    log: str | os.PathLike[str] | None = None,
    status: bool = False,
    strict: bool = True,
    fresh: bool = False,
    required: bool = False,
    sizes: Callable[[int], bool] | None = None,
) -> Iterator[World]:
    """The job at one size after another, each with an engine that ``build`` makes for it::

        for world in worlds(build, "ckpt", data=sampler, saving=every(seconds=600)):
            with world as engine:
                for batch in batches(sampler, engine):
                    engine.backward(engine(batch))
                    engine.step()
                    if world.ends():
                        break

    ``build()`` is called in each world, when ``torch.distributed`` is there: it makes the model and returns what
    ``deepspeed.initialize`` returns first, or that and a position in the data which fits this world. It must build the
    same model and optimizer groups each time; the run's values replace theirs. ``sizes(n)`` says whether
    the job can have ``n`` ranks. ``preemption`` and ``resume`` have the other arguments too; ``log`` is the path of
    an event log.

    Under torchrun with ``--rdzv-backend=zeroelastic-in-place``, worlds change in the same processes: a node that comes
    is taken in between two steps, one that is asked to leave (SIGTERM) hands its state to the others. When all nodes
    are asked to leave, the job saves and stops, as with ``preemption``. Elsewhere there is one world, which begins with
    ``resume``. The loop ends when the training loop of a world ends by itself, when the job stops, and in a process
    that leaves.

    Raises what ``build`` and ``resume`` raise, StrictError for another global batch in the next world where ``strict``,
    DigestMismatchError where the state has changed on its way, and MembershipError where the job goes on without this
    process.
    """
    arguments = WorldArguments(
        build, directory, data, saving, client_state, log, status, strict, fresh, required, sizes
    )
    from zeroelastic.deepspeed.install.seams import install

    install()
    membership = Membership.of_this_process()
    with _SignalScope(
        Notice(grace if membership is None else min(grace, membership.settings.notice), SIGNALS)
    ) as notice:
        if membership is None:
            yield _only_world(arguments, notice)
            return
        try:
            yield from Job(arguments, membership, notice).worlds()
        finally:
            membership.leave()


class _SignalScope:
    """Notes signals from the first world to the end of the last one, and ignores them while a process leaves."""

    def __init__(self, notice: Notice) -> None:
        self._notice = notice

    def __enter__(self) -> Notice:
        self._notice.begin()
        return self._notice

    def __exit__(self, *_: object) -> None:
        self._notice.end(ignoring=self._notice.at is not None)


def _only_world(arguments: WorldArguments, notice: Notice) -> World:
    """The one world of a job whose size does not change."""
    engine, data = build_engine(arguments)
    log = Events(engine, arguments.log, status=arguments.status)
    start = resume_newest(arguments, engine, data, log)
    return World(arguments, engine, data, start, log, notice, None, None)
