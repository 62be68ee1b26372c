"""The extra "train" of the distribution, which the offline verbs do not need, and the error without it."""

from __future__ import annotations

import sys
from importlib.util import find_spec

from zeroelastic.errors import MissingPackageError

INSTALL_TRAIN = "pip install 'zeroelastic[train]'"


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
