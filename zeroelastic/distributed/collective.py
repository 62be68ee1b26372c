"""Collectives that turn an error on one rank into the same error on every rank."""

from __future__ import annotations

import hashlib
import math
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

from zeroelastic import errors
from zeroelastic.errors import LayoutMismatchError, RemoteRankError, ZeroElasticError, some

T = TypeVar("T")
U = TypeVar("U")

Description = tuple[str, str, tuple[str, ...], str | None]
"""An error as it is sent to other ranks: its type's name, its message, the problems that it lists, its remedy."""

_AGREED = "_zeroelastic_agreed"

_NUMBER_BYTES, _HASH_BYTES = 8, 32
"""A hash of SHA-256, and the numbers of a collective that it is sent as."""

_limit_s = math.inf

_group: ContextVar[dist.ProcessGroup | None] = ContextVar("zeroelastic_group", default=None)


def limit() -> float:
    """How many seconds a rank waits for another one at most, whatever it waits with."""
    return _limit_s


def set_limit(seconds: float) -> None:
    """Set what ``limit`` returns."""
    global _limit_s
    _limit_s = seconds


@contextmanager
def collectives_over(group: dist.ProcessGroup) -> Iterator[None]:
    """Within this context, this thread's collectives use ``group``, of all ranks, in place of the default group.

    The collectives of a background thread must not come between the collectives of training.
    """
    token = _group.set(group)
    try:
        yield
    finally:
        _group.reset(token)


def current_group() -> dist.ProcessGroup | None:
    """The process group that this thread's collectives use; None for the default group."""
    return _group.get()


def all_gather(value: T) -> list[T]:
    """The value of every rank, by rank. Collective.

    Pickled, and not padded: a long value of one rank costs what it is long. What a rank receives grows with the number
    of ranks: values that are alike on nearly all of them belong in ``all_gather_mostly_equal``.
    """
    if dist.get_world_size() == 1:
        return [value]
    rank, group = dist.get_rank(), _group.get()
    data = pickle.dumps(value)
    lengths = torch.zeros(dist.get_world_size(), dtype=torch.int64, device=collective_device(group))
    lengths[rank] = len(data)
    dist.all_reduce(lengths, group=group)
    ends = lengths.cumsum(0).tolist()
    begins = [0, *ends[:-1]]
    together = torch.zeros(ends[-1], dtype=torch.uint8, device="cpu")
    together[begins[rank] : ends[rank]] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    together = together.to(lengths.device)
    dist.all_reduce(together, group=group)  # no two ranks have bytes at one place
    everything = together.cpu().numpy()
    return [pickle.loads(everything[begin:end].data) for begin, end in zip(begins, ends, strict=True)]


def all_gather_mostly_equal(value: T) -> list[T]:
    """``all_gather`` of values that are nearly always equal: a reduction of 64 bytes finds out, and no more is sent.

    Values are alike that have the same ``repr``. Collective.
    """
    code = hashlib.sha256(repr(value).encode("utf-8", "surrogatepass")).digest()
    places = range(0, _HASH_BYTES, _NUMBER_BYTES)
    numbers = [int.from_bytes(code[at : at + _NUMBER_BYTES], "little", signed=True) for at in places]
    inverted = [~number for number in numbers]  # the largest one belongs to the smallest number
    if maximum([*numbers, *inverted]) == [*numbers, *inverted]:
        return [value] * dist.get_world_size()
    return all_gather(value)


def maximum(values: Sequence[int]) -> list[int]:
    """The largest of each number, of less than 64 bits, over all ranks, which give equally many. Collective."""
    if dist.get_world_size() == 1:
        return list(values)
    group = _group.get()
    numbers = torch.tensor(values, dtype=torch.int64, device=collective_device(group))
    dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=group)
    largest: list[int] = numbers.tolist()
    return largest


def maximum_and_total(values: Sequence[int], summed: int) -> tuple[list[int], int]:
    """``maximum`` of some numbers, and the sum of another over all ranks, both under way at a time. Collective."""
    if dist.get_world_size() == 1:
        return list(values), summed
    group = _group.get()
    device = collective_device(group)
    numbers, number = (torch.tensor(some, dtype=torch.int64, device=device) for some in (values, [summed]))
    works = [
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=group, async_op=True),
        dist.all_reduce(number, group=group, async_op=True),
    ]
    for work in works:
        work.wait()
    return numbers.tolist(), int(number)


def any_rank(flag: bool) -> bool:
    """Whether the flag is set on any rank. Collective."""
    return bool(maximum([int(flag)])[0])


def broadcast(value: T) -> T:
    """The value of rank 0. Pickled. Collective."""
    if dist.get_world_size() == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0, group=_group.get())
    return values[0]


def broadcast_or_raise(action: Callable[[], T]) -> T:
    """Return the result of ``action`` on rank 0, which alone runs it; if it fails, every rank raises. Collective."""
    result, failure = _attempt(action) if dist.get_rank() == 0 else (None, None)
    result, failed = broadcast((result, _describe(failure)))
    if failed is not None:
        _raise(failure, [failed])
    return result  # type: ignore[return-value]


def all_gather_or_raise(action: Callable[[], T]) -> tuple[T, list[T]]:
    """Run ``action`` on every rank; if it fails on any, every rank raises, otherwise all get all results. Collective.

    Returns this rank's result and the results by rank; they are pickled, so keep them small. Errors of ours are raised
    with the same type and message everywhere (the lowest failing rank's, others' appended when they differ). Any other
    exception keeps its type where it happened and is a RemoteRankError elsewhere.
    """
    return all_gather_of_or_raise(action, lambda result: result)


def all_gather_of_or_raise(action: Callable[[], T], part: Callable[[T], U]) -> tuple[T, list[U]]:
    """Do ``all_gather_or_raise`` with a ``part`` of each rank's result. Collective."""
    sent: U | None = None

    def act() -> T:
        nonlocal sent
        result = action()
        sent = part(result)
        return result

    result, failure = _attempt(act)
    outcomes = all_gather_mostly_equal((sent, _describe(failure)))
    if any(failed is not None for _, failed in outcomes):
        _raise(failure, [failed for _, failed in outcomes])
    return result, [value for value, _ in outcomes]  # type: ignore[return-value, misc]


def all_or_raise(action: Callable[[], T]) -> T:
    """Run ``action`` on every rank; if it fails on any, every rank raises as in ``all_gather_or_raise``. Collective.

    Results stay where they are: unless an action fails, one number is reduced.
    """
    result, failure = _attempt(action)
    if any_rank(failure is not None):
        _raise(failure, all_gather(_describe(failure)))
    return result  # type: ignore[return-value]


def end_group(group: dist.ProcessGroup | None) -> None:
    """Destroy a process group that this rank has made, with its threads and files, unless it has gone. No collective.

    The caller has dropped its references: the last one ends the group.
    """
    if group is not None and dist.is_initialized() and group in _world.pg_map:
        dist.destroy_process_group(group)


def collective_device(group: dist.ProcessGroup | None = None) -> torch.device:
    """The device of tensors in collectives of a process group; the default group if none is given."""
    on_host = dist.get_backend(group) == "gloo"
    return torch.device("cpu") if on_host else torch.device("cuda", torch.cuda.current_device())


def is_raised_on_all_ranks(error: Exception) -> bool:
    """Whether every rank raises an error at this place: one of ours, or one that a collective here has compared."""
    return isinstance(error, ZeroElasticError) or getattr(error, _AGREED, False)


def _attempt(action: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """The result or the exception, which the caller raises on every rank."""
    try:
        return action(), None
    except Exception as error:
        return None, error


def _raise(failure: Exception | None, failures: list[Description | None]) -> NoReturn:
    """Raise this rank's foreign exception, or the error that all ranks agree on."""
    if failure is None or isinstance(failure, ZeroElasticError):
        failure = _combined({rank: description for rank, description in enumerate(failures) if description is not None})
    setattr(failure, _AGREED, True)
    raise failure


def _describe(error: Exception | None) -> Description | None:
    if error is None:
        return None
    return type(error).__name__, str(error), getattr(error, "problems", ()), getattr(error, "remedy", None)


def _combined(failures: dict[int, Description]) -> ZeroElasticError:
    first = min(failures)
    name, message, problems, remedy = failures[first]
    others = {failed[1]: rank for rank, failed in sorted(failures.items(), reverse=True) if failed[1] != message}
    listed = [f"\n(rank {rank}: {other})" for other, rank in sorted(others.items(), key=lambda item: item[1])]
    message += some(listed, separator="")
    kind = getattr(errors, name, None)
    if not (isinstance(kind, type) and issubclass(kind, ZeroElasticError)):
        return RemoteRankError(f"rank {first} failed with {name}: {message}")
    if issubclass(kind, LayoutMismatchError):
        error = LayoutMismatchError(message, (), remedy=remedy)
        error.problems = problems
        return error
    made = kind(message, remedy=remedy)
    assert isinstance(made, ZeroElasticError)
    return made
