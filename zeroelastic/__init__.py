"""Resume DeepSpeed ZeRO checkpoints at any world size, bit for bit.

Importing this package changes nothing and imports neither torch nor deepspeed::

    import zeroelastic
    zeroelastic.install()      # before or after deepspeed.initialize; zeroelastic.uninstall() reverts

Checkpoints are opened with ``zeroelastic.open``, and the verbs of the command line are functions of the same names::

    with zeroelastic.open("ckpt") as ck:
        ck["model.norm.weight"].numpy()
    zeroelastic.reshard("ckpt", "ckpt-3", world_size=3)

``zeroelastic.errors`` has every error that is raised on purpose; all derive from ``ZeroElasticError``.
"""

from __future__ import annotations

import importlib

from zeroelastic._version import __version__

TYPE_CHECKING = False  # typing takes longer than all else: every process of a job may import this (``activation``)
if TYPE_CHECKING:
    from typing import Any

    from zeroelastic.elastic.resume import resume as resume
    from zeroelastic.errors import (
        AbsentRankError,
        CheckpointError,
        ConfigError,
        DigestMismatchError,
        IncompatibleDeepSpeedError,
        LayoutMismatchError,
        MissingFileError,
        MissingPackageError,
        NewerFormatError,
        OldFormatError,
        RemoteRankError,
        SavedAgainError,
        SaveError,
        StrictError,
        UnknownTensorError,
        UnreadableError,
        UnsafePickleError,
        UnsupportedError,
        UsageError,
        ZeroElasticError,
    )
    from zeroelastic.observers import jsonl as jsonl
    from zeroelastic.observers import subscribe as subscribe
    from zeroelastic.report import ResumeReport as ResumeReport
    from zeroelastic.verbs.convert.convert import convert as convert
    from zeroelastic.verbs.convert.convert import export as export
    from zeroelastic.verbs.diff import diff as diff
    from zeroelastic.verbs.inspect.inspect import inspect as inspect
    from zeroelastic.verbs.plan import plan as plan
    from zeroelastic.verbs.prune import prune as prune
    from zeroelastic.verbs.reshard.reshard import reshard as reshard
    from zeroelastic.verbs.tags import latest as latest
    from zeroelastic.verbs.tags import ls as ls
    from zeroelastic.verbs.verify.verify import verify as verify
    from zeroelastic.verbs.verify.verify import verify_all as verify_all
    from zeroelastic.verbs.view import open as open

__all__ = [
    "AbsentRankError",
    "CheckpointError",
    "ConfigError",
    "DigestMismatchError",
    "IncompatibleDeepSpeedError",
    "LayoutMismatchError",
    "MissingFileError",
    "MissingPackageError",
    "NewerFormatError",
    "OldFormatError",
    "RemoteRankError",
    "ResumeReport",
    "SaveError",
    "SavedAgainError",
    "StrictError",
    "UnknownTensorError",
    "UnreadableError",
    "UnsafePickleError",
    "UnsupportedError",
    "UsageError",
    "ZeroElasticError",
    "__version__",
    "convert",
    "diff",
    "export",
    "inspect",
    "install",
    "is_installed",
    "jsonl",
    "last_report",
    "latest",
    "ls",
    "open",
    "plan",
    "prune",
    "reshard",
    "resume",
    "subscribe",
    "uninstall",
    "verify",
    "verify_all",
    "wait_for_save",
]

_IMPORTED_WHEN_USED = {
    **dict.fromkeys([name for name in __all__ if name.endswith("Error")], "zeroelastic.errors"),
    "ResumeReport": "zeroelastic.report",
    "resume": "zeroelastic.elastic.resume",
    "convert": "zeroelastic.verbs.convert.convert",
    "diff": "zeroelastic.verbs.diff",
    "export": "zeroelastic.verbs.convert.convert",
    "inspect": "zeroelastic.verbs.inspect.inspect",
    "jsonl": "zeroelastic.observers",
    "latest": "zeroelastic.verbs.tags",
    "ls": "zeroelastic.verbs.tags",
    "open": "zeroelastic.verbs.view",
    "plan": "zeroelastic.verbs.plan",
    "prune": "zeroelastic.verbs.prune",
    "reshard": "zeroelastic.verbs.reshard.reshard",
    "subscribe": "zeroelastic.observers",
    "verify": "zeroelastic.verbs.verify.verify",
    "verify_all": "zeroelastic.verbs.verify.verify",
}


def __getattr__(name: str) -> object:
    """Import it when it is used for the first time: numpy, or torch for ``resume``, comes with most of them."""
    if name not in _IMPORTED_WHEN_USED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found = getattr(importlib.import_module(_IMPORTED_WHEN_USED[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def install() -> None:
    """Teach the installed DeepSpeed to save checkpoints that resume at any world size, and to load them.

    Idempotent and reversible (``uninstall``). Imports deepspeed. Raises IncompatibleDeepSpeedError, before anything is
    changed, when DeepSpeed is missing, too old, or one of the methods to be wrapped has changed.
    """
    from zeroelastic.deepspeed.seams import install as wrap_deepspeed

    wrap_deepspeed()


def uninstall() -> None:
    """Put every DeepSpeed method back as it was; does nothing when nothing is installed.

    Waits for a save in the background. Raises SaveError, when all is put back, if that could not be finished.
    """
    from zeroelastic.deepspeed.seams import uninstall as unwrap_deepspeed

    unwrap_deepspeed()


def is_installed() -> bool:
    """Whether DeepSpeed's methods are wrapped at the moment."""
    import sys

    seams = sys.modules.get("zeroelastic.deepspeed.seams")
    return bool(seams is not None and seams.is_installed())


def wait_for_save(engine: Any) -> None:
    """Return when the engine's save in the background is committed; at once where there is none. Collective.

    Raises SaveError on every rank when the save
    failed: its tag is not committed then, and ``latest`` is as it was::

        engine.save_checkpoint("ckpt")   # with "async_save": true
        train_on()
        zeroelastic.wait_for_save(engine)
    """
    from zeroelastic.deepspeed.save.background import finish_pending

    finish_pending(engine, before="wait_for_save()")


def last_report(engine: Any) -> ResumeReport | None:
    """The report of the last ``load_checkpoint`` of a DeepSpeed engine; None when it has loaded nothing through us::

    engine.load_checkpoint("ckpt")
    report = zeroelastic.last_report(engine)
    print(report.saved_world_size, "->", report.world_size, report.root_matches)
    """
    return getattr(engine, "zeroelastic_report", None)
