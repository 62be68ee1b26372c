"""This machine, for ``zeroelastic doctor``: ZEROELASTIC=1, the speed of a disk, the build of the CUDA engine."""

from __future__ import annotations

import csv
import errno
import os
import shutil
import site
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

import zeroelastic
from zeroelastic.byte_sizes import format_size
from zeroelastic.cli.command import unwinding_signals
from zeroelastic.errors import ConfigError
from zeroelastic.executors.library_build import NotBuilt, build_library, cuda_command, cuda_sources
from zeroelastic.verbs.plan.bandwidth import cached_share, scratch_file

_FILE = "zeroelastic.pth"
_VARIABLE = "ZEROELASTIC"
_SITE_FOLDERS = ("site-packages", "dist-packages")
_CHUNK_BYTES = 8 << 20
_STILL_CACHED = 0.1  # with a larger share still in memory after the drop, a read does not measure the device


@dataclass(frozen=True, slots=True)
class Activation:
    """``files`` are the .pth files that a Python like this one reads; "on" means that this one has."""

    state: Literal["on", "off", "broken"]
    value: str | None
    files: tuple[str, ...]
    reason: str = ""


def describe_activation() -> Activation:
    """Look at the environment and at the folders in which Python looks for .pth files."""
    value = os.environ.get(_VARIABLE)
    folders = {*site.getsitepackages(), *(entry for entry in sys.path if Path(entry).name in _SITE_FOLDERS)}
    if site.ENABLE_USER_SITE:
        folders.add(site.getusersitepackages())
    files = tuple(sorted(str(path) for folder in folders if (path := Path(folder) / _FILE).is_file()))
    if value in (None, "", "0"):
        return Activation("off", value, files)
    reason = ""
    if value != "1":
        reason = f"{_VARIABLE} is {value!r}; it can be 1 (on) or 0 (off). A job that imports DeepSpeed stops."
    elif not files:
        reason = (
            f"{_VARIABLE}=1 has no effect: no {_FILE} in {', '.join(sorted(folders))}. Install zeroelastic with pip, "
            "or start jobs by `python -m zeroelastic.run`."
        )
    elif not _has_begun():
        reason = f"{_VARIABLE}=1 has no effect in this Python, which has not read {files[0]}: leave out -S."
    return Activation("broken" if reason else "on", value, files, reason)


def _has_begun() -> bool:
    hook = sys.modules.get("_zeroelastic_hook")
    return hook is not None and bool(hook.is_waiting())


@dataclass(frozen=True, slots=True)
class DiskSpeed:
    """Bytes per second, one thread: written and made durable, read from the page cache, read from the device.

    A figure is None when it was not measured: all of them with a ``problem``, ``read_cold`` with a ``note`` that says
    why.
    """

    directory: str
    nbytes: int
    write: float | None
    read_warm: float | None
    read_cold: float | None
    note: str
    problem: str


def measure_disk(directory: Path, *, nbytes: int, progress: Callable[[str], None]) -> DiskSpeed:
    """Write, flush and read back ``nbytes`` in a temporary file of ``directory``.

    The file is removed also on Ctrl-C, SIGTERM and SIGHUP, and on SIGKILL where the file system supports files without
    a name. An OSError becomes the result's ``problem``.
    """
    shown = str(directory.resolve())
    try:
        with unwinding_signals(), scratch_file(directory) as fd:
            free = shutil.disk_usage(directory).free
            if free < nbytes:
                raise OSError(errno.ENOSPC, f"{format_size(free)} are free, {format_size(nbytes)} are needed")
            progress(f"writing {format_size(nbytes)} in {shown}")
            write = _write(fd, nbytes)
            progress(f"reading {format_size(nbytes)} from memory")
            warm = _read(fd, nbytes)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            cached = cached_share(fd, nbytes)
            if cached > _STILL_CACHED:
                note = f"not measured: {cached:.0%} of the file stay in memory, as on a RAM disk"
                return DiskSpeed(shown, nbytes, write, warm, None, note, "")
            progress(f"reading {format_size(nbytes)} from the device")
            return DiskSpeed(shown, nbytes, write, warm, _read(fd, nbytes), "", "")
    except OSError as error:
        return DiskSpeed(shown, nbytes, None, None, None, "", _explain(shown, error))


def _explain(directory: str, error: OSError) -> str:
    what = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{directory} is full: {what}. Free some space or give a smaller --disk-size."
    if error.errno == errno.EFBIG:
        return f"{directory}: {what}. Give a smaller --disk-size, or raise the limit (ulimit -f)."
    if error.errno == errno.EROFS:
        return f"{directory} is on a read-only file system. Give a directory that checkpoints can be written to."
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"{directory} cannot be written to: {what}. Give another directory, or change its permissions."
    return f"{directory}: the measurement failed: {what}."


def _write(fd: int, nbytes: int) -> float:
    # Random data, which a compressing file system cannot shrink.
    chunk = memoryview(os.urandom(min(_CHUNK_BYTES, nbytes)))
    start = time.perf_counter()
    written = 0
    while written < nbytes:
        written += os.pwrite(fd, chunk[: nbytes - written], written)
    os.fsync(fd)
    return nbytes / (time.perf_counter() - start)


def _read(fd: int, nbytes: int) -> float:
    buffer = bytearray(min(_CHUNK_BYTES, nbytes))
    start = time.perf_counter()
    done = 0
    while done < nbytes:
        got = os.preadv(fd, [buffer], done)
        if got == 0:
            raise OSError(errno.EIO, f"the file ends at byte {done} of {nbytes} written")
        done += got
    return nbytes / (time.perf_counter() - start)


def build_cuda_engine() -> Path:
    """Compile the CUDA engine into the package; returns the library's path. Takes about a minute.

    A process that has the former library loaded keeps it. Raises ConfigError, with the library as it was, where there
    is no nvcc, where it fails, and where the package cannot be written to.
    """
    package = Path(zeroelastic.__file__).resolve().parent
    target = package / "_cuda.so"
    csrc = _find_csrc(package)
    if shutil.which("nvcc") is None:
        raise ConfigError(
            "the CUDA engine is compiled by nvcc, which is not on the PATH. Install the CUDA toolkit, load its module "
            "(module load cuda), or put its folder on the PATH (export PATH=/usr/local/cuda/bin:$PATH), and run "
            "zeroelastic doctor --build-cuda again. Without it, torch moves what lies in GPU memory."
        )
    if not os.access(package, os.W_OK):
        raise ConfigError(
            f"{package} cannot be written to, so that the CUDA engine cannot be put there. Ask its owner to run "
            "zeroelastic doctor --build-cuda, or install zeroelastic into a virtual environment of your own."
        )
    try:
        command = cuda_command([path.relative_to(csrc.parent) for path in cuda_sources(csrc)])
        build_library(command, target, directory=csrc.parent)
    except NotBuilt as reason:
        first, _, rest = str(reason).partition("\n")
        sys.stderr.write(rest)
        raise ConfigError(
            f"the CUDA engine was not built: {first}. What nvcc printed is above; repair what it names and run this "
            "again."
        ) from None
    _record(target)
    return target


def _find_csrc(package: Path) -> Path:
    """The sources of the engines: within an installed package, beside one that is used from its source tree."""
    for csrc in (package / "csrc", package.parent / "csrc"):
        if (csrc / "cuda").is_dir():
            return csrc
    raise ConfigError(
        f"{package / 'csrc'} is missing: the sources of the CUDA engine, which every wheel has. Reinstall zeroelastic."
    )


def _record(library: Path) -> None:
    """Add the library and its log to the list of the package's files, so that uninstalling removes them."""
    try:
        distribution = metadata.distribution("zeroelastic")
    except metadata.PackageNotFoundError:  # run from a source tree
        return
    listed = {Path(str(distribution.locate_file(file))).resolve() for file in distribution.files or ()}
    record = next((path for path in listed if path.name == "RECORD"), None)
    if record is None or not os.access(record, os.W_OK):
        return
    folder = record.parent.parent
    with record.open("a", newline="", encoding="utf-8") as lines:
        for made in (library, library.with_suffix(".log")):
            if made not in listed and made.is_relative_to(folder):
                csv.writer(lines, lineterminator="\n").writerow([made.relative_to(folder).as_posix(), "", ""])
