"""Agreement between ranks: an error on one becomes the same error on all, and facts that must be equal are compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist

from zeroelastic import errors
from zeroelastic.errors import LayoutMismatchError, RemoteRankError, ZeroElasticError

T = TypeVar("T")

Description = tuple[str, str, tuple[str, ...]]
"""An error that travels: its type's name, its message, and the problems that it lists."""

_AGREED = "_zeroelastic_agreed"

_group: ContextVar[dist.ProcessGroup | None] = ContextVar("zeroelastic_group", default=None)


@contextmanager
def agreeing_over(group: dist.ProcessGroup) -> Iterator[None]:
    """While it lasts, this thread's agreements go over ``group``, of all ranks, in place of the default group.

    What a thread agrees on while training goes on must not come between the collectives of training.
    """
    token = _group.set(group)
    try:
        yield
    finally:
        _group.reset(token)


def gather(value: T) -> list[T]:
    """The value of every rank, by rank. Collective."""
    world_size = dist.get_world_size()
    if world_size == 1:
        return [value]
    values: list[T | None] = [None] * world_size
    dist.all_gather_object(values, value, group=_group.get())
    return values  # type: ignore[return-value]


def broadcast(value: T) -> T:
    """Rank 0's value. Collective."""
    if dist.get_world_size() == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0, group=_group.get())
    return values[0]


def together(action: Callable[[], T]) -> tuple[T, list[T]]:
    """Run ``action`` on every rank; if it fails on any, every rank raises, otherwise all get all results. Collective.

    Returns this rank's result and the results by rank; they are pickled, so keep them small. Errors of ours are raised
    with the same type and message everywhere (the lowest failing rank's, others' appended when they differ). Any other
    exception keeps its type where it happened and is a RemoteRankError elsewhere.
    """
    result, failure = _attempt(action)
    outcomes = gather((result, _describe(failure)))
    if any(told is not None for _, told in outcomes):
        _raise(failure, [told for _, told in outcomes])
    return result, [value for value, _ in outcomes]  # type: ignore[return-value, misc]


def settle(action: Callable[[], T]) -> T:
    """Like ``together``, for a result that need not travel: unless it fails, one number is reduced. Collective."""
    result, failure = _attempt(action)
    if _any(failure is not None):
        _raise(failure, gather(_describe(failure)))
    return result  # type: ignore[return-value]


def collective_device(group: dist.ProcessGroup | None = None) -> torch.device:
    """Where tensors have to be for collectives of a process group, the default one if none is given."""
    on_host = dist.get_backend(group) == "gloo"
    return torch.device("cpu") if on_host else torch.device("cuda", torch.cuda.current_device())


def is_agreed(error: Exception) -> bool:
    """Whether an error comes from an agreement, so that every rank raises one at the same place."""
    return getattr(error, _AGREED, False)


def _attempt(action: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """The result or the exception, which the caller raises on every rank."""
    try:
        return action(), None
    except Exception as error:
        return None, error


def _any(flag: bool) -> bool:
    """Whether the flag is set on any rank. Collective."""
    if dist.get_world_size() == 1:
        return flag
    group = _group.get()
    votes = torch.tensor([int(flag)], dtype=torch.int32, device=collective_device(group))
    dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=group)
    return bool(votes.item())


def _raise(failure: Exception | None, told: list[Description | None]) -> NoReturn:
    """Raise this rank's foreign exception, or the error that all ranks agree on."""
    if failure is None or isinstance(failure, ZeroElasticError):
        failure = _combined({rank: description for rank, description in enumerate(told) if description is not None})
    setattr(failure, _AGREED, True)
    raise failure


def _describe(error: Exception | None) -> Description | None:
    if error is None:
        return None
    return type(error).__name__, str(error), getattr(error, "problems", ())


def _combined(failures: dict[int, Description]) -> ZeroElasticError:
    first = min(failures)
    name, message, problems = failures[first]
    others = {told[1]: rank for rank, told in sorted(failures.items(), reverse=True) if told[1] != message}
    for other, rank in sorted(others.items(), key=lambda item: item[1]):
        message += f"\n(rank {rank}: {other})"
    kind = getattr(errors, name, None)
    if not (isinstance(kind, type) and issubclass(kind, ZeroElasticError)):
        return RemoteRankError(f"rank {first} failed with {name}: {message}")
    if issubclass(kind, LayoutMismatchError):
        error = LayoutMismatchError(message, ())
        error.problems = problems
        return error
    made = kind(message)
    assert isinstance(made, ZeroElasticError)
    return made
