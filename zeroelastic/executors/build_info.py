"""Describes the engines built from csrc: with which compiler, or why not, without compiling anything.

The build (setup.py, or ``zeroelastic doctor --build-cuda``) leaves, next to the package's modules, a library for each
engine and a log of each attempt. A library is plain C: it is loaded with ctypes, knows nothing of torch or of the
Python version, and says which version of the C interface it speaks.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from zeroelastic.errors import ConfigError

EngineLibrary = Literal["native", "cuda"]

ABI_VERSION = 15
"""``ZE_ABI_VERSION`` of csrc/zeroelastic.h."""

_PACKAGE = Path(__file__).resolve().parent.parent
REMEDIES: dict[EngineLibrary, str] = {
    "native": "Install a C++17 compiler and reinstall from the sources with ZEROELASTIC_BUILD_NATIVE=1 "
    "pip install --force-reinstall --no-deps ., which fails loudly.",
    "cuda": "Where nvcc is on the PATH, zeroelastic doctor --build-cuda builds it.",
}
"""How to build an engine."""


@dataclass(frozen=True, slots=True)
class BuildInfo:
    """The state of one engine's library.

    ``compiler`` says what built it, and for which instruction sets, where it can be used; ``reason`` why it cannot,
    else it is empty. ``log`` is the build's own record, if there is one.
    """

    name: EngineLibrary
    path: Path
    log: Path | None
    compiler: str
    reason: str

    @property
    def usable(self) -> bool:
        """Whether the library is there and can be called."""
        return not self.reason

    @property
    def remedy(self) -> str:
        """How to build it, in one sentence."""
        return REMEDIES[self.name]


def describe_build(name: EngineLibrary) -> BuildInfo:
    """The state of an engine's library; loads it if it is there."""
    path = _PACKAGE / f"_{name}.so"
    log = _PACKAGE / f"_{name}.log"
    found = log if log.is_file() else None
    library, reason = _load(name)
    if library is None:
        return BuildInfo(name, path, found, "", reason)
    return BuildInfo(name, path, found, library.ze_build_info().decode(), "")


def is_usable(name: EngineLibrary) -> bool:
    """Whether an engine's library is there and can be called; loads it if it is there."""
    return _load(name)[0] is not None


def load_library(name: EngineLibrary) -> ctypes.CDLL:
    """An engine's library. Raises ConfigError that says why it is missing and how to build it."""
    library, _ = _load(name)
    if library is None:
        info = describe_build(name)
        raise ConfigError(f"the {name} engine cannot be used: {info.reason}. {info.remedy}")
    return library


@functools.cache
def _load(name: EngineLibrary) -> tuple[ctypes.CDLL | None, str]:
    path = _PACKAGE / f"_{name}.so"
    if not path.is_file():
        return None, _why_not_built(name)
    try:
        library = ctypes.CDLL(str(path))
        library.ze_abi_version.restype = ctypes.c_int32
        version = int(library.ze_abi_version())
        library.ze_build_info.restype = ctypes.c_char_p
    except (OSError, AttributeError) as error:
        return None, f"{path} cannot be loaded: {error}"
    if version != ABI_VERSION:
        return None, f"{path} is of interface version {version}, not {ABI_VERSION}: it is left from an older build"
    return library, ""


def _why_not_built(name: EngineLibrary) -> str:
    try:
        with (_PACKAGE / f"_{name}.log").open(encoding="utf-8", errors="replace") as log:
            return log.readline().strip() or "its build left an empty log"
    except OSError:
        return "it was not built"
