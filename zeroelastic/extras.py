"""The extra "train" of the distribution, which the offline verbs do not need, and the error without it."""

from __future__ import annotations

import sys
from importlib.util import find_spec

from zeroelastic.errors import MissingPackageError

INSTALL_TRAIN = "pip install 'zeroelastic[train]'"


def torch_is_there() -> bool:
    """Whether PyTorch can be imported; does not import it."""
    return find_spec("torch") is not None


def torch_missing(what: str) -> MissingPackageError:
    """The error of ``what`` where PyTorch is not installed; it says how to install it."""
    return MissingPackageError(f"{what} needs PyTorch, which is not installed. Install it: {INSTALL_TRAIN}.")


def require_torch(what: str, module: str = "") -> None:
    """Raise MissingPackageError where PyTorch is not installed; imports nothing. Example::

    require_torch("convert --to fsdp2")

    A ``module`` that is run as a program, ``__main__``, ends with the sentence alone.
    """
    if not torch_is_there():
        if module == "__main__":
            sys.exit(f"error: {torch_missing(what)}")
        raise torch_missing(what)
