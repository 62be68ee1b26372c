"""Objects in a store: put whole, removed, and listed with all that is below a directory.

A put object is there completely or not at all, and a reader sees it at once: S3, Google Cloud Storage and Azure promise
both. No store has a rename.

A large object is uploaded in parts: ``send`` transfers, ``complete`` makes the object. On S3 this is a multipart
upload, which is aborted when it fails; one whose process is killed stays, unseen and paid for, until it is aborted: see
``open_uploads``. Other stores have no such two steps that fsspec knows: there ``complete`` transfers, and what a killed
process leaves the store itself forgets.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import copy_context
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

from zeroelastic.core.digest import ByteArray
from zeroelastic.errors import UnreadableError
from zeroelastic.io.paths import RemotePath, missing_directory, reason
from zeroelastic.io.remote import call, remote_size, with_retries

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_PARTS = 10_000
"""The most parts that S3 takes for an object."""

THREADS = 4
"""Parts of an object that are under way at a time. Each is held in memory once more while it is."""

_MIB = 1 << 20
_MODIFIED = ("LastModified", "last_modified", "mtime", "updated", "created")
_VERSION = ("ETag", "etag", "generation", "md5Hash")
_AT_ONCE = 1000
_CLOCKS_S = 60.0
"""How far apart the clocks of the servers of a store may be."""


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object below a directory: its name from there, bytes, the time of its last change, and what tells versions.

    ``modified_at`` is in seconds since 1970, 0 where the store does not say.
    """

    name: str
    nbytes: int
    modified_at: float
    version: str


def put_object(path: RemotePath, data: bytes, *, create: bool = False) -> None:
    """Write a small object whole; with ``create`` only where there is none, on stores that can (S3: If-None-Match).

    Raises FileExistsError with ``create``, OSError naming the object otherwise.
    """

    def put() -> None:
        try:
            call(path.system, "pipe_file", path.path, data, **({"mode": "create"} if create else {}))
        except FileExistsError:
            raise
        except TypeError:  # a file system that cannot create alone
            if path.system.exists(path.path):
                raise FileExistsError(str(path)) from None
            call(path.system, "pipe_file", path.path, data)
        except Exception as error:
            if create and _is_precondition(error):
                raise FileExistsError(str(path)) from None
            raise

    _write(path, put)
    forget_listing(path)


def remove_objects(paths: Iterable[RemotePath]) -> None:
    """Remove objects; one that is not there is no error. Raises OSError naming the first that cannot be removed."""
    found = list(paths)
    for at in range(0, len(found), _AT_ONCE):
        some = found[at : at + _AT_ONCE]

        def remove(some: list[RemotePath] = some) -> None:
            system = some[0].system
            if hasattr(system, "_call_s3"):  # ``rm`` takes "[" in a name for a pattern, ``bulk_delete`` hides failures
                _remove_from_s3(system, [path.path for path in some])
                return
            for path in some:
                with suppress(FileNotFoundError):
                    call(system, "rm_file", path.path)

        _write(some[0], remove)
        for path in some:
            forget_listing(path)


def _remove_from_s3(system: Any, paths: list[str]) -> None:
    keys = [{"Key": system.split_path(path)[1]} for path in paths]
    bucket = system.split_path(paths[0])[0]
    answer = call(system, "call_s3", "delete_objects", Bucket=bucket, Delete={"Objects": keys, "Quiet": True})
    failed = [entry for entry in answer.get("Errors", ()) if entry.get("Code") != "NoSuchKey"]
    if failed:
        kind = PermissionError if failed[0].get("Code") == "AccessDenied" else OSError
        raise kind(errno.EACCES if kind is PermissionError else errno.EIO, f"{failed[0]['Key']}: {failed[0]['Code']}")


def objects_below(directory: RemotePath) -> list[StoredObject]:
    """Every object below a directory, sorted by name. Raises MissingFileError for none, UnreadableError."""

    def find() -> dict[str, dict[str, Any]]:
        directory.system.invalidate_cache()
        found: dict[str, dict[str, Any]] = call(directory.system, "find", directory.path, detail=True)
        return found

    try:
        found = with_retries(find, directory)
    except FileNotFoundError:
        raise missing_directory(directory) from None
    except Exception as error:  # file systems raise errors of many kinds
        raise UnreadableError(f"{directory}: cannot be listed: {reason(error)}.") from None
    begin = f"{directory.path.strip('/')}/"
    objects: list[StoredObject] = []
    for entry in found.values():
        path = str(entry["name"]).strip("/")
        if entry["type"] == "directory" or not path.startswith(begin):
            continue
        objects.append(StoredObject(path[len(begin) :], int(entry.get("size") or 0), _modified(entry), _version(entry)))
    if not objects:
        raise missing_directory(directory)
    return sorted(objects, key=lambda one: one.name)


def modified_at(path: RemotePath) -> float:
    """When an object was written, in seconds since 1970; 0 where there is none, or the store does not say.

    Raises UnreadableError.
    """

    def ask() -> dict[str, Any]:
        forget_listing(path)
        found: dict[str, Any] = call(path.system, "info", path.path)
        return found

    try:
        return _modified(with_retries(ask, path))
    except FileNotFoundError:
        return 0.0
    except Exception as error:  # file systems raise errors of many kinds
        raise UnreadableError(f"{path}: cannot be looked at: {reason(error)}.") from None


def forget_listing(path: RemotePath) -> None:
    """Let the next listing of a path's directory ask the store."""
    path.system.invalidate_cache(path.path)
    path.system.invalidate_cache(path.parent.path)


def _write(path: RemotePath, request: Callable[[], T]) -> T:
    """The result of a request that writes or removes. Raises OSError naming the object, FileExistsError as it comes."""
    try:
        return with_retries(request, path)
    except FileExistsError:
        raise
    except Exception as error:  # file systems raise errors of many kinds
        raise not_written_error(path, error) from error


def not_written_error(path: RemotePath, error: Exception) -> OSError:
    """What a store raised for a request that writes or removes, as an OSError that names the object."""
    number = error.errno if isinstance(error, OSError) else None
    return OSError(number or errno.EIO, f"{_kind(error)}{reason(error)}", str(path))


def _kind(error: BaseException) -> str:
    """What an error means, where its words may not say so."""
    name = type(error).__name__
    if name in ("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError"):
        return "no credentials (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or a role of this machine): "
    if isinstance(error, PermissionError):
        return "access is denied: "
    if isinstance(error, FileNotFoundError):
        return "there is no such bucket: "
    return ""


def _is_precondition(error: BaseException) -> bool:
    response = getattr(error, "response", None) or getattr(error.__cause__, "response", None)
    code = response.get("Error", {}).get("Code") if isinstance(response, dict) else None
    return code in ("PreconditionFailed", "ConditionalRequestConflict")


def _modified(entry: dict[str, Any]) -> float:
    value = next((entry[key] for key in _MODIFIED if entry.get(key) is not None), None)
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value.replace("Z", "+00:00"))
        except ValueError:
            return 0.0
    if isinstance(value, datetime):
        return value.timestamp()
    return float(value) if isinstance(value, (int, float)) else 0.0


def _version(entry: dict[str, Any]) -> str:
    return "/".join(str(entry[key]) for key in _VERSION if entry.get(key) is not None)


def part_size(nbytes: int, wanted: int) -> int:
    """The size of the parts of an object of ``nbytes``: ``wanted``, or more MiB so that there are at most MAX_PARTS."""
    least = -(-nbytes // MAX_PARTS)
    return max(wanted, -(-least // _MIB) * _MIB)


@contextmanager
def object_stream(path: RemotePath, part_bytes: int) -> Iterator[Callable[[bytes | bytearray], object]]:
    """Write an object piece by piece, to any store: it is there when the context ends, and not when that fails.

    Memory: some parts. Nothing is repeated. Raises what the file system raises.
    """
    file = path.system.open(path.path, "wb", block_size=part_bytes)
    try:
        yield file.write
        file.close()
    except BaseException:
        discard = getattr(file, "discard", None)
        if discard is not None:
            discard()
        raise
    forget_listing(path)


class Upload:
    """One object on its way; ``data``, shape ``(nbytes,)``, must not change until it is completed.

    To a store of which fsspec knows one step only, which ``complete`` takes. Methods raise OSError naming the object.
    One thread at a time.
    """

    def __init__(self, path: RemotePath, data: ByteArray, part_bytes: int) -> None:
        self.path, self._data = path, data
        self._part_bytes = part_size(len(data), part_bytes)
        self.completed = False

    @property
    def nbytes(self) -> int:
        """The size of the object."""
        return len(self._data)

    def send(self) -> None:
        """Transfer as much as can be without the object being seen."""

    def complete(self) -> None:
        """Make the object, in place of one that there was."""
        _write(self.path, self._complete)
        self.completed = True
        forget_listing(self.path)

    def _complete(self) -> None:
        with object_stream(self.path, self._part_bytes) as write:
            for number in range(self._num_parts):
                write(self._part(number))

    def abort(self) -> None:
        """Give up what is not completed; failures are logged."""

    def discard(self) -> None:
        """Give up what is not completed, and remove the object if it is; failures are logged."""
        self.abort()
        if self.completed:
            try:
                remove_objects([self.path])
            except OSError as error:
                logger.warning("%s: cannot be removed: %s", self.path, error.strerror)

    def _part(self, number: int) -> bytes:
        """The bytes of a part; the first is number 0."""
        return self._data[number * self._part_bytes : (number + 1) * self._part_bytes].tobytes()

    @property
    def _num_parts(self) -> int:
        return max(1, -(-self.nbytes // self._part_bytes))


class MultipartUpload(Upload):
    """An upload to S3, by s3fs' client."""

    def __init__(self, path: RemotePath, data: ByteArray, part_bytes: int) -> None:
        super().__init__(path, data, part_bytes)
        self._open: OpenUpload | None = None
        self._tags: list[str] = []

    def send(self) -> None:
        self._open = begin_upload(self.path)
        pool = ThreadPoolExecutor(THREADS)
        try:
            futures = [pool.submit(copy_context().run, self._send_part, i) for i in range(self._num_parts)]
            self._tags = [future.result() for future in futures]
        finally:
            pool.shutdown(cancel_futures=True)

    def _send_part(self, number: int) -> str:
        assert self._open is not None
        return send_part(self._open, number, self._part(number))

    def complete(self) -> None:
        assert self._open is not None
        complete_upload(self._open, self._tags, self.nbytes)
        self.completed, self._open = True, None

    def abort(self) -> None:
        if self._open is None:
            return
        try:
            abort_upload(self._open)
        except OSError as error:
            logger.warning("%s: its upload cannot be aborted: %s", self.path, error.strerror)
        self._open = None


def new_upload(path: RemotePath, data: ByteArray, part_bytes: int) -> Upload:
    """The upload of an object, not begun."""
    return (MultipartUpload if has_parts(path) else Upload)(path, data, part_bytes)


def has_parts(path: RemotePath) -> bool:
    """Whether the store takes parts of an object from several processes (``begin_upload``): S3."""
    return hasattr(path.system, "_call_s3")


@dataclass(frozen=True, slots=True)
class OpenUpload:
    """A multipart upload, neither completed nor aborted; ``began_at`` is the store's time in seconds since 1970."""

    path: RemotePath
    upload_id: str
    began_at: float


def begin_upload(path: RemotePath) -> OpenUpload:
    """Begin the upload of an object, to which every process that has the result can send parts. Raises OSError."""
    answer = _write(path, lambda: _call(path, "create_multipart_upload"))
    date = answer["ResponseMetadata"]["HTTPHeaders"].get("date")
    return OpenUpload(path, str(answer["UploadId"]), parsedate_to_datetime(date).timestamp() if date else 0.0)


def send_part(upload: OpenUpload, number: int, body: bytes | bytearray) -> str:
    """Send a part, the first of which is number 0: what ``complete_upload`` has to know of it. Raises OSError."""
    of = {"UploadId": upload.upload_id, "PartNumber": number + 1}
    return str(_write(upload.path, lambda: _call(upload.path, "upload_part", Body=body, **of))["ETag"])


def complete_upload(upload: OpenUpload, tags: Sequence[str], nbytes: int) -> None:
    """Make the object of all of its parts, in place of one that there was. Raises OSError naming it."""
    parts = [{"PartNumber": number + 1, "ETag": tag} for number, tag in enumerate(tags)]
    of = {"UploadId": upload.upload_id, "MultipartUpload": {"Parts": parts}}

    def ask() -> None:
        try:
            _call(upload.path, "complete_multipart_upload", **of)
        except Exception as error:
            # The answer to an earlier attempt may have been lost: then the object is newer than the upload. An older
            # one, such as that of an earlier save, has the same size: somebody has aborted the upload.
            if not _is_gone(error) or remote_size(upload.path) != nbytes:
                raise
            if modified_at(upload.path) < upload.began_at - _CLOCKS_S:
                raise

    _write(upload.path, ask)
    forget_listing(upload.path)


def _call(path: RemotePath, method: str, **options: Any) -> Any:
    bucket, key, _ = path.system.split_path(path.path)
    return call(path.system, "call_s3", method, Bucket=bucket, Key=key, **options)


def open_uploads(directory: RemotePath) -> list[OpenUpload]:
    """The uploads of objects below a directory that are on their way, or were left; none where the store lists none.

    One request for each thousand. Raises UnreadableError.
    """
    if not has_parts(directory):
        return []
    bucket, key, _ = directory.system.split_path(directory.path)
    prefix = f"{key.rstrip('/')}/" if key else ""
    found: list[OpenUpload] = []
    options: dict[str, str] = {}
    while True:

        def ask(options: dict[str, str] = options) -> Any:
            return call(directory.system, "call_s3", "list_multipart_uploads", Bucket=bucket, Prefix=prefix, **options)

        try:
            answer = with_retries(ask, directory)
        except FileNotFoundError:
            return []
        except Exception as error:  # file systems raise errors of many kinds
            raise UnreadableError(f"{directory}: its unfinished uploads cannot be listed: {reason(error)}.") from None
        for entry in answer.get("Uploads", ()):
            path = RemotePath(directory.protocol, f"{bucket}/{entry['Key']}", directory.options)
            found.append(OpenUpload(path, entry["UploadId"], entry["Initiated"].timestamp()))
        if not answer.get("IsTruncated"):
            return found
        options = {"KeyMarker": answer["NextKeyMarker"], "UploadIdMarker": answer["NextUploadIdMarker"]}


def abort_upload(upload: OpenUpload) -> None:
    """Abort an upload; one that is gone is no error. Raises OSError naming the object."""

    def ask() -> None:
        try:
            _call(upload.path, "abort_multipart_upload", UploadId=upload.upload_id)
        except Exception as error:
            if not isinstance(error, FileNotFoundError) and not _is_gone(error):
                raise

    _write(upload.path, ask)


def _is_gone(error: Exception) -> bool:
    return "NoSuchUpload" in f"{error!r} {error.__cause__!r}"
