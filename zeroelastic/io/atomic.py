"""Files and directories that appear whole or not at all, and are on the device when they do.

    write_atomically   a small file: sibling temporary file, fsync, rename
    exchange           two directories swap their names
    rename_new         a directory gets a name that nothing has
    sync_path          fsync of a file; ``sync_directory`` of the names in a directory
    reserve_space      a full disk is noticed before anything is written; ``write_fully`` writes at an offset
    start_writeback    the device begins to write the page cache
    name_in_errors     errors of the system name the file; ``errors_of_the_system`` makes them of torch's
    shortened          a name that leaves room for a suffix
    put_object         an object of a store, whole; ``put_file``, ``remove_objects``, ``sizes_below``

All calls to libc that Python has no function for are here. A put object is there completely or not at all, and a reader
sees it at once: S3, Google Cloud Storage and Azure promise both. No store has a rename.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import secrets
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from zeroelastic.errors import UnreadableError
from zeroelastic.io.remote import RemotePath
from zeroelastic.io.retries import call, reason, with_retries

_AT_FDCWD = -100  # linux/fcntl.h
_RENAME_NOREPLACE, _RENAME_EXCHANGE = 1, 2  # linux/fs.h
_SYNC_FILE_RANGE_WRITE = 2  # linux/fs.h
_NO_RENAMEAT2 = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
_NO_FALLOCATE = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINTR, errno.EINVAL, errno.EPERM)

_DIGITS = 16  # of a digest in a shortened name
_SHORT_OF_SPACE = 1 << 20

_libc = ctypes.CDLL(None, use_errno=True)
_fallocate = _libc.fallocate64 if hasattr(_libc, "fallocate64") else _libc.fallocate  # musl has one name for both


def shortened(name: str, longest: int = 200) -> str:
    """The name of a file in at most ``longest`` bytes: a longer one is cut and ends in a digest of the whole.

    A name has 255 bytes at most on the file systems of Linux; one that is made of another has to leave room.
    """
    data = os.fsencode(name)
    if len(data) <= longest:
        return name
    head = data[: longest - _DIGITS].decode(errors="ignore").encode()
    return head.ljust(longest - _DIGITS, b"~").decode() + hashlib.sha256(data).hexdigest()[:_DIGITS]


@contextmanager
def name_in_errors(path: Path) -> Iterator[None]:
    """Errors of the system inside the block name the file, unless they name one already."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, os.fspath(path)) from None


@contextmanager
def errors_of_the_system(directory: Path) -> Iterator[None]:
    """Within this context torch writes to a directory: where the system takes too few bytes, that is an OSError.

    torch's own writer raises a RuntimeError, which does not say why.
    """
    try:
        yield
    except RuntimeError as error:
        if "unexpected pos" not in str(error):
            raise
        code = errno.EIO
        try:
            with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
                write_fully(file.fileno(), bytes(_SHORT_OF_SPACE), 0)
        except OSError as found:  # no space, or a quota
            code = found.errno or code
        raise OSError(code, os.strerror(code)) from error


def write_atomically(path: Path, data: bytes, *, sync: bool = True, replace: bool = True) -> None:
    """Put a small file in place so that readers see the old content or the new, with ``sync`` also after a power cut.

    Raises OSError naming the file, and without ``replace`` FileExistsError where there is one.
    """
    temporary = path.with_name(f".{shortened(path.name)}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    with name_in_errors(path):
        try:
            with open(temporary, "wb") as file:
                file.write(data)
                file.flush()
                if sync:
                    os.fsync(file.fileno())
            if replace:
                os.replace(temporary, path)
            elif not rename_new(temporary, path):
                os.link(temporary, path)
                temporary.unlink()
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    if sync:
        sync_directory(path.parent)


def sync_path(path: Path, flags: int = 0) -> None:
    """fsync a file. Raises OSError naming it."""
    with name_in_errors(path):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def sync_directory(path: Path) -> None:
    """fsync a directory, so that names created or renamed in it survive a power cut. Raises OSError naming it."""
    sync_path(path, os.O_DIRECTORY)


def exchange(one: Path, other: Path) -> bool:
    """Swap two directories at once (Linux 3.15); False where the file system cannot. Raises OSError."""
    return _renameat2(one, other, _RENAME_EXCHANGE)


def rename_new(src: Path, dst: Path) -> bool:
    """Rename where nothing has the new name; False where the file system cannot. Raises FileExistsError, OSError."""
    return _renameat2(src, dst, _RENAME_NOREPLACE)


def _renameat2(src: Path, dst: Path, flags: int) -> bool:
    if not hasattr(_libc, "renameat2"):
        return False
    if _libc.renameat2(_AT_FDCWD, os.fsencode(src), _AT_FDCWD, os.fsencode(dst), flags) == 0:
        return True
    code = ctypes.get_errno()
    if code in _NO_RENAMEAT2:
        return False
    raise OSError(code, os.strerror(code), os.fspath(dst))


def reserve_space(fd: int, nbytes: int) -> None:
    """Let the file system set space aside, where it can: it writes faster, and a full disk is noticed early.

    A request that cannot fit is not made: a file system may use up its free space before it refuses, so that no other
    process can write. Not ``os.posix_fallocate``, which writes to every block where space cannot be set aside.
    Raises OSError.
    """
    if not _fallocates(fd, min(nbytes, 1)):
        return
    system, held = os.fstatvfs(fd), os.fstat(fd).st_blocks * 512
    if system.f_blocks and nbytes > held + system.f_bfree * system.f_frsize:  # some say nothing of their size
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    _fallocates(fd, nbytes)


def _fallocates(fd: int, nbytes: int) -> bool:
    """Set space aside; False where the file system cannot."""
    if _fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(nbytes)) == 0:
        return True
    code = ctypes.get_errno()
    if code not in _NO_FALLOCATE:
        raise OSError(code, os.strerror(code))
    return False


def write_fully(fd: int, data: bytes | bytearray | memoryview, offset: int) -> None:
    """Write all of ``data`` at ``offset``, however many calls it takes. Raises OSError with the place."""
    view = memoryview(data).cast("B")
    while len(view):
        try:
            put = os.pwrite(fd, view, offset)
            if put == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise OSError(error.errno, f"{error.strerror}, writing at byte {offset}") from None
        view, offset = view[put:], offset + put


def write_at(path: Path, data: bytes, offset: int) -> None:
    """Write bytes into a file that is there. Raises OSError naming it."""
    with name_in_errors(path), open(path, "r+b", buffering=0) as file:
        write_fully(file.fileno(), data, offset)


def start_writeback(path: Path) -> None:
    """Let the device begin to write the page cache of a file, without waiting for it."""
    if hasattr(_libc, "sync_file_range"):
        with open(path, "rb", buffering=0) as file:
            _libc.sync_file_range(file.fileno(), ctypes.c_int64(0), ctypes.c_int64(0), _SYNC_FILE_RANGE_WRITE)


_AT_ONCE = 1000


def put_object(path: RemotePath, data: bytes) -> None:
    """Write a small object whole. Raises OSError naming it."""
    if path.protocol == "file":  # fsspec writes it in place, where a reader or a crash finds a part of it
        os.makedirs(os.path.dirname(path.path), exist_ok=True)
        write_atomically(Path(path.path), data)
        return
    _write(path, lambda: call(path.system, "pipe_file", path.path, data))
    forget_listing(path)


def put_file(source: Path, path: RemotePath) -> None:
    """Write an object with the content of a file; it may take as long as it does. Raises OSError naming it."""
    _write(path, lambda: path.system.put_file(os.fspath(source), path.path))
    if path.protocol == "file":
        sync_path(Path(path.path))
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


def sizes_below(directory: RemotePath) -> dict[str, int]:
    """The bytes of every object below a directory, by its name from there. Raises UnreadableError."""

    def find() -> dict[str, dict[str, Any]]:
        directory.system.invalidate_cache()
        found: dict[str, dict[str, Any]] = call(directory.system, "find", directory.path, detail=True)
        return found

    try:
        found = with_retries(find, directory)
    except FileNotFoundError:
        return {}
    except Exception as error:  # file systems raise errors of many kinds
        raise UnreadableError(f"{directory}: cannot be listed: {reason(error)}.") from None
    begin = f"{directory.path.strip('/')}/"
    paths = {str(entry["name"]).strip("/"): entry for entry in found.values() if entry["type"] != "directory"}
    return {
        path.removeprefix(begin): int(entry.get("size") or 0)
        for path, entry in sorted(paths.items())
        if path.startswith(begin)
    }


def forget_listing(path: RemotePath) -> None:
    """Let the next listing of a path's directory ask the store."""
    path.system.invalidate_cache(path.path)
    path.system.invalidate_cache(path.parent.path)


def _write(path: RemotePath, request: Callable[[], object]) -> None:
    """Make a request that writes or removes. Raises OSError naming the object."""
    try:
        with_retries(request, path)
    except Exception as error:  # file systems raise errors of many kinds
        number = error.errno if isinstance(error, OSError) else None
        raise OSError(number or errno.EIO, f"{_kind(error)}{reason(error)}", str(path)) from error


def _kind(error: BaseException) -> str:
    """Explain an error whose words may not say it."""
    name = type(error).__name__
    if name in ("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError"):
        return "no credentials (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or a role of this machine): "
    if isinstance(error, PermissionError):
        return "access is denied: "
    if isinstance(error, FileNotFoundError):
        return "there is no such bucket: "
    return ""
