"""Large objects, uploaded in parts: nothing of an object is seen before all of it is there.

``send`` transfers, ``complete`` makes the object. On S3 this is a multipart upload, which is aborted when it fails; one
whose process is killed stays, unseen and paid for, until it is aborted: see ``open_uploads``. Other stores have no such
two steps that fsspec knows: there ``complete`` transfers, and what a killed process leaves the store itself forgets.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any

from zeroelastic.core.digest import ByteArray
from zeroelastic.errors import UnreadableError
from zeroelastic.io.failures import reason
from zeroelastic.io.objects import forget_listing, remove_objects, written_wrong
from zeroelastic.io.paths import RemotePath
from zeroelastic.io.remote import call, remote_size
from zeroelastic.io.retry import with_retries

logger = logging.getLogger(__name__)

MAX_PARTS = 10_000
"""The most parts that S3 takes for an object."""

THREADS = 4
"""Parts of an object that are under way at a time. Each is held in memory once more while it is."""

_MIB = 1 << 20


def part_size(nbytes: int, wanted: int) -> int:
    """The size of the parts of an object of ``nbytes``: ``wanted``, or more MiB so that there are at most MAX_PARTS."""
    least = -(-nbytes // MAX_PARTS)
    return max(wanted, -(-least // _MIB) * _MIB)


class Upload(ABC):
    """One object on its way; ``data``, shape ``(nbytes,)``, must not change until it is completed.

    Methods raise OSError naming the object. One thread at a time.
    """

    def __init__(self, path: RemotePath, data: ByteArray, part_bytes: int) -> None:
        self.path, self._data = path, data
        self._part_bytes = part_size(len(data), part_bytes)
        self.completed = False

    @property
    def nbytes(self) -> int:
        """The size of the object."""
        return len(self._data)

    @abstractmethod
    def send(self) -> None:
        """Transfer as much as can be without the object being seen."""

    @abstractmethod
    def complete(self) -> None:
        """Make the object, in place of one that there was."""

    @abstractmethod
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

    def _attempt(self, request: Callable[[], Any]) -> Any:
        try:
            return with_retries(request, self.path)
        except Exception as error:  # each file system has errors of its own
            raise written_wrong(self.path, error) from error


class MultipartUpload(Upload):
    """An upload to S3, by s3fs' client."""

    def __init__(self, path: RemotePath, data: ByteArray, part_bytes: int) -> None:
        super().__init__(path, data, part_bytes)
        self._upload_id: str | None = None
        self._tags: list[str] = []

    def send(self) -> None:
        self._upload_id = str(self._attempt(lambda: self._call("create_multipart_upload"))["UploadId"])
        pool = ThreadPoolExecutor(THREADS)
        try:
            futures = [pool.submit(copy_context().run, self._send_part, i) for i in range(self._num_parts)]
            self._tags = [future.result() for future in futures]
        finally:
            pool.shutdown(cancel_futures=True)

    def _send_part(self, number: int) -> str:
        body = self._part(number)
        of = {"UploadId": self._upload_id, "PartNumber": number + 1}
        return str(self._attempt(lambda: self._call("upload_part", Body=body, **of))["ETag"])

    def complete(self) -> None:
        parts = [{"PartNumber": number + 1, "ETag": tag} for number, tag in enumerate(self._tags)]

        def ask() -> None:
            try:
                self._call("complete_multipart_upload", UploadId=self._upload_id, MultipartUpload={"Parts": parts})
            except Exception as error:
                # The answer to an earlier attempt may have been lost.
                if "NoSuchUpload" not in f"{error!r} {error.__cause__!r}" or remote_size(self.path) != self.nbytes:
                    raise

        self._attempt(ask)
        self.completed, self._upload_id = True, None
        forget_listing(self.path)

    def abort(self) -> None:
        if self._upload_id is None:
            return
        try:
            abort_upload(OpenUpload(self.path, self._upload_id, 0.0))
        except OSError as error:
            logger.warning("%s: its upload cannot be aborted: %s", self.path, error.strerror)
        self._upload_id = None

    def _call(self, method: str, **options: Any) -> Any:
        bucket, key, _ = self.path.system.split_path(self.path.path)
        return call(self.path.system, "call_s3", method, Bucket=bucket, Key=key, **options)


class StreamUpload(Upload):
    """An upload to a store of which fsspec knows one step only."""

    def send(self) -> None:
        pass

    def complete(self) -> None:
        def write() -> None:
            file = self.path.system.open(self.path.path, "wb", block_size=self._part_bytes)
            try:
                for number in range(self._num_parts):
                    file.write(self._part(number))
                file.close()
            except BaseException:
                discard = getattr(file, "discard", None)
                if discard is not None:
                    discard()
                raise

        self._attempt(write)
        self.completed = True
        forget_listing(self.path)

    def abort(self) -> None:
        pass


def new_upload(path: RemotePath, data: ByteArray, part_bytes: int) -> Upload:
    """The upload of an object, not begun."""
    kind = MultipartUpload if _is_s3(path) else StreamUpload
    return kind(path, data, part_bytes)


@dataclass(frozen=True, slots=True)
class OpenUpload:
    """A multipart upload that is neither completed nor aborted; ``began_at`` is in seconds since 1970."""

    path: RemotePath
    upload_id: str
    began_at: float


def open_uploads(directory: RemotePath) -> list[OpenUpload]:
    """The uploads of objects below a directory that are on their way, or were left; none where the store lists none.

    One request for each thousand. Raises UnreadableError.
    """
    if not _is_s3(directory):
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
        except Exception as error:  # each file system has errors of its own
            raise UnreadableError(f"{directory}: its unfinished uploads cannot be listed: {reason(error)}.") from None
        for entry in answer.get("Uploads", ()):
            path = RemotePath(directory.protocol, f"{bucket}/{entry['Key']}", directory.options)
            found.append(OpenUpload(path, entry["UploadId"], entry["Initiated"].timestamp()))
        if not answer.get("IsTruncated"):
            return found
        options = {"KeyMarker": answer["NextKeyMarker"], "UploadIdMarker": answer["NextUploadIdMarker"]}


def abort_upload(upload: OpenUpload) -> None:
    """Abort an upload; one that is gone is no error. Raises OSError naming the object."""
    bucket, key, _ = upload.path.system.split_path(upload.path.path)

    def ask() -> None:
        try:
            call(
                upload.path.system, "call_s3", "abort_multipart_upload",
                Bucket=bucket, Key=key, UploadId=upload.upload_id,
            )  # fmt: skip
        except Exception as error:
            if not isinstance(error, FileNotFoundError) and "NoSuchUpload" not in f"{error!r} {error.__cause__!r}":
                raise

    try:
        with_retries(ask, upload.path)
    except Exception as error:  # each file system has errors of its own
        raise written_wrong(upload.path, error) from error


def _is_s3(path: RemotePath) -> bool:
    return hasattr(path.system, "_call_s3")
