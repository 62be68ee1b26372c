"""Requests that are made again: which failures of a file system may pass, and how often one is repeated.

A request without an answer after five minutes has failed. What failed for a passing reason is asked for again, a
bounded number of times, with random pauses: what fsspec and the store's own client repeat comes first; this repeats
what they gave up, and counts on nothing of them. ``Retries`` in force are those of the innermost ``retrying`` of this
context, or the default ones.
"""

from __future__ import annotations

import errno
import logging
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")

TIME_LIMIT_S = 300.0
"""How long a request may go without an answer."""

_TRANSIENT_STATUS = frozenset((408, 429, 500, 502, 503, 504))
_TRANSIENT_ERRNO = frozenset(
    (errno.ECONNRESET, errno.ECONNREFUSED, errno.ECONNABORTED, errno.EPIPE, errno.ETIMEDOUT, errno.EBUSY, errno.EAGAIN)
)
_TRANSIENT_NAMES = frozenset(
    (
        "ChecksumError", "ClientConnectionError", "ClientOSError", "ClientPayloadError", "ConnectionClosedError",
        "ConnectTimeoutError", "ConnectionTimeoutError", "EndpointConnectionError", "FlexibleChecksumError",
        "HTTPClientError", "IncompleteRead", "IncompleteReadError", "ReadTimeoutError", "ResponseParserError",
        "ResponseStreamingError", "ServerDisconnectedError",
    )
)  # fmt: skip
"""Names of errors of aiohttp, botocore, gcsfs and http.client that stand for a broken or refused connection, or for an
answer that was damaged on its way."""

_DAMAGED_ON_THE_WAY = frozenset(
    ("BadDigest", "IncompleteBody", "XAmzContentChecksumMismatch", "XAmzContentSHA256Mismatch")
)
"""Codes with which S3 refuses a request whose body is not what its checksum or length says; its HTTP status is 400."""


class NoAnswerError(TimeoutError):
    """A request had no answer within the time limit; it is not made again."""


@dataclass(frozen=True, slots=True)
class Retries:
    """``number`` of further attempts after the first; before attempt i a pause of up to ``first_pause_s * 2**i``.

    ``timeout_s`` is how long a request may go without an answer; None for the default. A pause is between a half and
    the whole of its bound, which is ``longest_pause_s`` at most.
    """

    number: int = 4
    first_pause_s: float = 0.5
    longest_pause_s: float = 20.0
    timeout_s: float | None = None

    def pause(self, attempt: int) -> None:
        """Wait before attempt ``attempt + 1``; the first is number 0."""
        bound = min(self.longest_pause_s, self.first_pause_s * 2**attempt)
        time.sleep(bound * random.uniform(0.5, 1.0))


_current: ContextVar[Retries] = ContextVar("zeroelastic_retries", default=Retries())  # noqa: B039  it is frozen


def current() -> Retries:
    """The retries in force."""
    return _current.get()


@contextmanager
def retrying(retries: Retries) -> Iterator[None]:
    """Within this context, requests of this thread are repeated as ``retries`` says."""
    token = _current.set(retries)
    try:
        yield
    finally:
        _current.reset(token)


def with_retries(request: Callable[[], T], what: object) -> T:
    """The result of a request, made again while it fails for a passing reason. Raises its last error."""
    retries = current()
    attempt = 0
    while True:
        try:
            return request()
        except Exception as error:  # file systems raise errors of many kinds
            if attempt >= retries.number or not is_transient(error):
                raise
            note_retry(what, error, attempt)
        retries.pause(attempt)
        attempt += 1


def note_retry(what: object, error: object, attempt: int) -> None:
    """Log that a request is made again."""
    text = reason(error) if isinstance(error, BaseException) else str(error)
    logger.debug("%s: attempt %d failed and is repeated: %s", what, attempt + 1, text)


def is_transient(error: BaseException) -> bool:
    """Whether an error of a file system may pass: a broken connection, a transfer that damaged what it carried, a
    server that is busy or failing.

    The HTTP status decides, where the error or what caused it has one; else the kind of the error.
    """
    if isinstance(error, (NoAnswerError, FileNotFoundError, FileExistsError, PermissionError, NotADirectoryError)):
        cause = error.__cause__
        return not isinstance(error, NoAnswerError) and cause is not None and _is_broken_connection(cause)
    seen: BaseException | None = error
    while seen is not None:
        status = http_status(seen)
        if status is not None:
            return status in _TRANSIENT_STATUS or _code(seen) in _DAMAGED_ON_THE_WAY
        if _is_broken_connection(seen):
            return True
        seen = seen.__cause__
    return False


def _code(error: BaseException) -> object:
    """The code of S3's answer in an error of botocore, None in others."""
    response = getattr(error, "response", None)
    return response.get("Error", {}).get("Code") if isinstance(response, dict) else None


def _is_broken_connection(error: BaseException) -> bool:
    if isinstance(error, (ConnectionError, TimeoutError)):
        return True
    if isinstance(error, OSError) and error.errno in _TRANSIENT_ERRNO:
        return True
    return any(kind.__name__ in _TRANSIENT_NAMES for kind in type(error).__mro__)


def call(system: Any, operation: str, *arguments: Any, **options: Any) -> Any:
    """Call a file system. Raises NoAnswerError after the time limit where the call can be stopped."""
    if not system.async_impl:
        return getattr(system, operation)(*arguments, **options)
    from fsspec.asyn import sync
    from fsspec.exceptions import FSTimeoutError

    limit = current().timeout_s or TIME_LIMIT_S
    try:
        return sync(system.loop, getattr(system, f"_{operation}"), *arguments, timeout=limit, **options)
    except FSTimeoutError:
        raise NoAnswerError(f"no answer in {limit:.0f} s") from None


def reason(error: BaseException) -> str:
    """Say in one line without a full stop why a file system failed."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(text.split()).rstrip(".") or type(error).__name__


def http_status(error: BaseException | None) -> int | None:
    """The HTTP status in an error of aiohttp (``status``), gcsfs (``code``), adlfs (``status_code``) or botocore."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        return status if isinstance(status, int) else None
    found = (getattr(error, name, None) for name in ("status", "status_code", "code"))
    return next((status for status in found if isinstance(status, int)), None)
