"""Resume DeepSpeed ZeRO-3 checkpoints at any world size, bit for bit.

Importing this package changes nothing and imports neither torch nor deepspeed::

    import zeroelastic
    zeroelastic.install()      # before or after deepspeed.initialize; zeroelastic.uninstall() reverts
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zeroelastic._version import __version__
from zeroelastic.errors import (
    AbsentRankError,
    CheckpointError,
    ConfigError,
    DigestMismatchError,
    IncompatibleDeepSpeedError,
    LayoutMismatchError,
    MissingFileError,
    OldFormatError,
    RemoteRankError,
    SaveError,
    StrictError,
    UnreadableError,
    UnsafePickleError,
    UnsupportedError,
    UsageError,
    ZeroElasticError,
)
from zeroelastic.report import ResumeReport

if TYPE_CHECKING:
    from zeroelastic.elastic.resume import resume as resume

__all__ = [
    "AbsentRankError",
    "CheckpointError",
    "ConfigError",
    "DigestMismatchError",
    "IncompatibleDeepSpeedError",
    "LayoutMismatchError",
    "MissingFileError",
    "OldFormatError",
    "RemoteRankError",
    "ResumeReport",
    "SaveError",
    "StrictError",
    "UnreadableError",
    "UnsafePickleError",
    "UnsupportedError",
    "UsageError",
    "ZeroElasticError",
    "__version__",
    "install",
    "is_installed",
    "resume",
    "uninstall",
    "wait_for_save",
]


def __getattr__(name: str) -> object:
    """``resume`` is that of ``zeroelastic.elastic``, which imports torch, and only when it is asked for."""
    if name == "resume":
        from zeroelastic.elastic import resume

        return resume
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def install() -> None:
    """Teach the installed DeepSpeed to save elastic ZeRO-3 checkpoints and to load them at any world size.

    Idempotent and reversible (``uninstall``). Imports deepspeed. Raises IncompatibleDeepSpeedError, before anything is
    changed, when DeepSpeed is missing, too old, or one of the methods to be wrapped has changed.
    """
    from zeroelastic.stage3.seams import install as wrap_deepspeed

    wrap_deepspeed()


def uninstall() -> None:
    """Put every DeepSpeed method back as it was; does nothing when nothing is installed.

    Waits for a save in the background. Raises SaveError, when all is put back, if that could not be finished.
    """
    from zeroelastic.stage3.seams import uninstall as unwrap_deepspeed

    unwrap_deepspeed()


def is_installed() -> bool:
    """Whether DeepSpeed's methods are wrapped at the moment."""
    import sys

    seams = sys.modules.get("zeroelastic.stage3.seams")
    return bool(seams is not None and seams.is_installed())


def wait_for_save(engine: Any) -> None:
    """Return when the engine's save in the background is committed; at once where there is none. Collective.

    What a decoupled checkpoint engine has not committed is committed too. Raises SaveError on every rank when the save
    failed: its tag is not committed then, and ``latest`` is as it was::

        engine.save_checkpoint("ckpt")   # with "background_save": true
        train_on()
        zeroelastic.wait_for_save(engine)
    """
    from zeroelastic.stage3.pending import flush

    flush(engine, before="wait_for_save()")
