"""The exception tree: everything zeroelastic raises on purpose derives from ZeroElasticError.

Leaves also inherit the builtin they refine, so ``except ValueError`` written for DeepSpeed keeps working.
Messages say where, what was found, what was expected and what to do. What to do about a damaged file is the same for
hundreds of findings, so the class has it (``remedy``), and ``with_remedy`` adds it once, where the error is reported.
``require_torch`` raises the one for a missing PyTorch, the extra "train" of the distribution, which the offline verbs
do not need.
"""

from __future__ import annotations

import reprlib
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec

_SHORT = reprlib.Repr()
_SHORT.maxlevel = 3
_SHORT.maxother = _SHORT.maxstring = 120
_MAX_TEXT = 240

INSTALL_TRAIN = "pip install 'zeroelastic[train]'"


def shown(value: object) -> str:
    """A value from a file for an error message: its ``repr``, shortened where it is long, nested or recursive."""
    return brief(_SHORT.repr(value))


def printable(name: str) -> str:
    """The name of a file or tag for an error message: unchanged if it is readable, else as ``shown``."""
    return brief(name) if name.isprintable() and name == name.strip() != "" else shown(name)


def brief(text: str) -> str:
    """A name from a file for an error message: unchanged, or only its two ends if it is long."""
    return text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT // 2]}...{text[-_MAX_TEXT // 2 :]}"


def some(names: Iterable[str], limit: int = 6, *, count: int | None = None, separator: str = ", ") -> str:
    """The first ``limit`` names, and the number of the others; ``count`` is the number of all if ``names`` are fewer.

    Example::

        some(["a", "b", "c"], 2)    # "a, b and 1 more"
    """
    names = tuple(names)
    more = (len(names) if count is None else count) - limit
    return separator.join(names[:limit]) + (f" and {more} more" if more > 0 else "")


def counted(number: int, noun: str) -> str:
    """A number and its noun: "1 rank", "1,024 ranks", "2 batches"."""
    plural = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def signal_name(number: int) -> str:
    """The name of a signal, as ``SIGTERM``."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def without_pydantic(message: str) -> str:
    """Put a message of pydantic about a value into our words.

    Example::

        without_pydantic("Input should be a valid integer, unable to parse string as an integer")
        # "must be a valid integer"
    """
    message = message.removeprefix("Value error, ")
    if message.startswith("Input should"):
        return message.replace("Input should", "must", 1).partition(", unable")[0]
    return {"Field required": "is missing", "Extra inputs are not permitted": "is not known"}.get(message, message)


def buffer_kind(stage: int) -> str:
    """Name the flat buffer of a ZeRO stage, for messages."""
    return "sub-group" if stage == 3 else "optimizer group"


def rank_list(numbers: Sequence[int]) -> str:
    """Ranks, given in ascending order, as text: "rank 3", "ranks 1, 5", or "ranks 4 to 7" for consecutive ones."""
    if len(numbers) > 1 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"ranks {numbers[0]} to {numbers[-1]}"
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


class ZeroElasticError(Exception):
    """Base of every error raised on purpose by zeroelastic.

    ``remedy`` is what to do about an error of this class. An error whose message says it already is made with another
    one, such as ``CheckpointError(message, remedy="")``.
    """

    remedy: str = ""

    def __init__(self, message: str = "", *, remedy: str | None = None) -> None:
        super().__init__(message)
        if remedy is not None:
            self.remedy = remedy


def advice(error: ZeroElasticError) -> str:
    """The message of an error, and its remedy once.

    Example::

        advice(UnreadableError("/ckpt/latest: cannot be read: Permission denied."))
        # "/ckpt/latest: cannot be read: Permission denied. Restore the access, ..."
    """
    message = finding(error)
    if not error.remedy:
        return message
    return f"{message}{'' if message.endswith(('.', ')')) else '.'}{_before_remedy(message)}{error.remedy}"


def finding(error: ZeroElasticError) -> str:
    """The message of an error without its remedy, for a list of findings that have one remedy."""
    message = str(error)
    return message.removesuffix(f"{_before_remedy(message)}{error.remedy}") if error.remedy else message


def _before_remedy(message: str) -> str:
    return "\n" if "\n" in message else " "


@contextmanager
def with_remedy() -> Iterator[None]:
    """Within this context, which is also a decorator, an error of ours gets the remedy of the class into the message.

    Used where errors reach a person: by functions that are called from outside of the package.
    """
    try:
        yield
    except ZeroElasticError as error:
        if error.remedy:
            error.args = (advice(error),)
        raise


_OR_GO_BACK = (
    "or go back to the newest checkpoint that verifies: `zeroelastic latest DIR --fix`, or "
    '"fallback": true in a training job.'
)
COPY_OR_GO_BACK = f"Copy the checkpoint again from where it is sound, {_OR_GO_BACK}"


class CheckpointError(ZeroElasticError, ValueError):
    """A checkpoint that is damaged, incomplete, mixed from several saves, or of a kind that cannot be read."""

    remedy = f"{COPY_OR_GO_BACK} `zeroelastic verify` lists all damage."


class MissingFileError(CheckpointError, FileNotFoundError):
    """A file of the checkpoint does not exist."""

    remedy = f"Copy the missing files from where they are, {_OR_GO_BACK}"


def missing_file(path: object) -> MissingFileError:
    """The error about a checkpoint file that is not there."""
    return MissingFileError(f"{path}: no such file. The checkpoint is incomplete.")


def missing_directory(path: object) -> MissingFileError:
    """The error about a checkpoint directory that is not there."""
    return MissingFileError(f"{path}: no such checkpoint directory.", remedy="Give the directory of a checkpoint.")


class UnreadableError(ZeroElasticError, OSError):
    """A file that cannot be read here and now: no permission, an I/O error, an unreachable server. It may be whole.

    This is not a CheckpointError, which means that the checkpoint itself is wrong.
    """

    remedy = "Restore the access, then run it again: the checkpoint may be sound."


class SavedAgainError(UnreadableError):
    """A checkpoint that was saved again while it was read, so that the parts read are not of one save."""

    remedy = ""  # each message says it


class OldFormatError(CheckpointError):
    """A file in the format of torch.save before 1.6, which is not a zip archive: its payload cannot be addressed."""

    remedy = ""  # each message says it


class NewerFormatError(CheckpointError):
    """A file in a format of a later zeroelastic: it may be whole, but this version cannot check it."""

    remedy = ""  # each message says it


class DigestMismatchError(CheckpointError):
    """State that differs from the saved state by the digests in the commit record."""


class UnsafePickleError(CheckpointError):
    """A pickle that names something outside the allow-list; no part of it was executed."""

    remedy = "Load the file in another way only if you know who wrote it."


class SaveError(ZeroElasticError, OSError):
    """A checkpoint that could not be written completely; its tag is not committed, and ``latest`` is unchanged."""


class AbsentRankError(SaveError, TimeoutError):
    """A rank that has ended, or that did not arrive in time at a point of a save that needs all ranks."""


class LayoutMismatchError(ZeroElasticError, ValueError):
    """The checkpoint and the model disagree; every disagreement is listed in ``problems``."""

    def __init__(self, summary: str, problems: Iterable[str], *, remedy: str | None = None) -> None:
        self.problems = tuple(problems)
        super().__init__(summary + "".join(f"\n  - {problem}" for problem in self.problems), remedy=remedy)


class ConfigError(ZeroElasticError, ValueError):
    """A mistake in the "zeroelastic" block of the DeepSpeed configuration."""


class StrictError(ZeroElasticError, ValueError):
    """A resume that would change the run (such as its global batch) under ``"strict": true``."""


class UsageError(ZeroElasticError, ValueError):
    """A wrong request: a path that is not a checkpoint, a target that exists."""


class UnknownTensorError(UsageError, KeyError):
    """A name that no tensor of the checkpoint has."""

    def __str__(self) -> str:  # a KeyError shows the repr of its message
        return str(self.args[0])


class MissingPackageError(ZeroElasticError, ImportError):
    """A package that is not installed and that this function needs; the message says which extra has it."""


class UnsupportedError(ZeroElasticError, NotImplementedError):
    """A configuration that zeroelastic refuses by name because it cannot support it correctly."""


class UndescribedSlicesError(UnsupportedError):
    """A checkpoint of several tensor parallel ranks that does not say which slices of tensors each of them has."""


class IncompatibleDeepSpeedError(ZeroElasticError, RuntimeError):
    """The installed DeepSpeed is too old, or one of the methods that install() wraps has changed."""


class RemoteRankError(ZeroElasticError, RuntimeError):
    """Another rank failed with an error that is not one of these; its message is quoted."""


def torch_is_there() -> bool:
    """Whether PyTorch can be imported; does not import it."""
    return find_spec("torch") is not None


def require_torch(what: str, module: str = "") -> None:
    """Raise MissingPackageError where PyTorch is not installed; imports nothing. Example::

    require_torch("convert --to fsdp2")

    A ``module`` that is run as a program, ``__main__``, ends with the sentence alone.
    """
    if torch_is_there():
        return
    error = MissingPackageError(f"{what} needs PyTorch, which is not installed. Install it: {INSTALL_TRAIN}.")
    if module == "__main__":
        sys.exit(f"error: {error}")
    raise error
