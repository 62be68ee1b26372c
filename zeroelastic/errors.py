"""The exception tree: everything zeroelastic raises on purpose derives from ZeroElasticError.

Leaves also inherit the builtin they refine, so ``except ValueError`` written for DeepSpeed keeps working.
Messages say where, what was found, what was expected and what to do.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable

_SHORT = reprlib.Repr()
_SHORT.maxlevel = 3
_SHORT.maxother = _SHORT.maxstring = 120
_MOST_SHOWN = 240


def shown(value: object) -> str:
    """Something of a file as an error message has it: its ``repr``, cut where it is long, nested or holds itself."""
    return brief(_SHORT.repr(value))


def printable(name: str) -> str:
    """A name of a file or tag as an error message has it: as it is where it can be read, else as ``shown``."""
    return brief(name) if name.isprintable() and name == name.strip() != "" else shown(name)


def brief(text: str) -> str:
    """A name from a file as an error message has it: as it is, or its two ends where it is long."""
    return text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN // 2]}...{text[-_MOST_SHOWN // 2 :]}"


class ZeroElasticError(Exception):
    """Base of every error raised on purpose by zeroelastic."""


class CheckpointError(ZeroElasticError, ValueError):
    """A checkpoint that cannot be what its writer left: damaged, incomplete, mixed, or not ours to read."""


class MissingFileError(CheckpointError, FileNotFoundError):
    """A file that the checkpoint needs is not there."""


class UnreadableError(ZeroElasticError, OSError):
    """A file that cannot be read here and now: no permission, an I/O error, a server that is away. It may be whole.

    It is not a CheckpointError, which is a verdict on the checkpoint.
    """


class SavedAgainError(UnreadableError):
    """A checkpoint that was saved again while it was read: what was read is not of one save, and nobody's fault."""


class OldFormatError(CheckpointError):
    """A file in torch.save's format from before 1.6, which is no zip archive: its payload cannot be addressed."""


class DigestMismatchError(CheckpointError):
    """State that differs from what the commit record says was saved."""


class UnsafePickleError(CheckpointError):
    """A pickle that names something outside the allow-list; nothing of it was run."""


class SaveError(ZeroElasticError, OSError):
    """A checkpoint that could not be written whole; its tag is not committed, and ``latest`` is as it was."""


class AbsentRankError(SaveError, TimeoutError):
    """A rank that has ended, or did not arrive in time where a save needs all of them."""


class LayoutMismatchError(ZeroElasticError, ValueError):
    """The checkpoint and the model disagree; every disagreement is listed in ``problems``."""

    def __init__(self, summary: str, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__(summary + "".join(f"\n  - {problem}" for problem in self.problems))


class ConfigError(ZeroElasticError, ValueError):
    """A mistake in the "zeroelastic" block of the DeepSpeed configuration."""


class StrictError(ZeroElasticError, ValueError):
    """A resume that would change the run (such as its global batch) under ``"strict": true``."""


class UsageError(ZeroElasticError, ValueError):
    """Something that cannot be done as it was asked for: a path that is no checkpoint, a target that exists."""


class UnsupportedError(ZeroElasticError, NotImplementedError):
    """A configuration that zeroelastic refuses by name because it cannot do it right."""


class IncompatibleDeepSpeedError(ZeroElasticError, RuntimeError):
    """The installed DeepSpeed is too old, or one of the seams that install() needs has changed."""


class RemoteRankError(ZeroElasticError, RuntimeError):
    """Another rank failed with an error that is not ours; its message is quoted."""
