"""``ZEROELASTIC=1`` installs zeroelastic where a process imports DeepSpeed; and functions that run after an import.

Where the environment variable is set, ``zeroelastic.pth`` calls ``activate`` at the start of every Python process, most
of which never import DeepSpeed: this module, and the package, import little. zeroelastic is installed when the code of
``deepspeed/__init__.py`` has run, and only then. The finder stays in ``sys.meta_path`` for good: programs ask whether
DeepSpeed exists long before they import it, or never do. docs/reference/options.md describes the variables.
"""

from __future__ import annotations

import os
import sys
from _thread import get_ident
from importlib import import_module

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

    Callback = Callable[[ModuleType], object]

VARIABLE = "ZEROELASTIC"
TIMEOUT = "ZEROELASTIC_COLLECTIVE_TIMEOUT"
"""Seconds for which ranks wait for a lost rank: ``--timeout`` of ``zeroelastic.run``, but torch's default if unset."""

FILE = "zeroelastic.pth"
LINE = (
    'import os; os.environ.get("ZEROELASTIC", "").strip("0") and '
    '__import__("zeroelastic.activation").activation.activate()\n'
)
"""The content of ``FILE``, which a build puts beside the package, and which Python runs at its start (setup.py)."""

_callbacks: dict[str, list[Callback]] = {}
_looking: set[tuple[int, str]] = set()
"""Threads that look for a module in the finders of others, which may ask for it again."""
_active = False


def activate() -> None:
    """Install zeroelastic in this process when it imports DeepSpeed, if the environment says so. Raises nothing.

    A value other than 1, 0 or none is an error of the import of DeepSpeed, so that a mistyped one stops a job, and no
    other program.
    """
    if os.environ.get(VARIABLE, "") not in ("", "0"):
        when_imported("deepspeed", _start)


def is_active() -> bool:
    """Whether the environment variable has installed zeroelastic in this process."""
    return _active


def start(timeout_s: float | None) -> None:
    """Install zeroelastic, and let collectives fail after ``timeout_s`` seconds, if any. Raises as ``install`` does."""
    import_module("zeroelastic").install()
    if timeout_s:
        import_module("zeroelastic.elastic.leaving").set_collective_timeout(timeout_s)


def _start(deepspeed: ModuleType) -> None:
    """Install zeroelastic. Raises RuntimeError: a job that was asked to use zeroelastic must not go on without it."""
    global _active
    value = os.environ.get(VARIABLE, "")
    if value in ("", "0"):  # the process has changed its environment since
        return
    try:
        if value != "1":
            raise ValueError(f"it can be 1 (on) or 0 (off), not {value!r}.")
        start(_timeout())
    except Exception as error:
        reason = str(error) if value != "1" else f"{type(error).__name__}: {error}"
        message = f"{VARIABLE}={value}: zeroelastic could not be installed into DeepSpeed: {reason}"
        message += f" To run DeepSpeed without zeroelastic, unset {VARIABLE}."
        # Also for programs that take a failed import of DeepSpeed for a missing one.
        sys.stderr.write(f"[zeroelastic] {message}\n")
        raise RuntimeError(message) from error
    _active = True


def _timeout() -> float | None:
    """The timeout of collectives in seconds; None to leave torch's. Raises ConfigError."""
    text = os.environ.get(TIMEOUT, "")
    try:
        seconds = float(text or "0")
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        from zeroelastic.errors import ConfigError  # what importing it costs, a process that is right does not pay

        raise ConfigError(f"{TIMEOUT} is {text!r}; it is a number of seconds, or 0 for torch's default. Change it.")
    return seconds or None


def when_imported(name: str, callback: Callback) -> None:
    """Call ``callback`` with the module whenever the code of module ``name`` has run from now on, a reload included.

    An error of the callback is an error of that import. Nothing happens at once where the module is imported already.
    """
    callbacks = _callbacks.setdefault(name, [])
    if callback not in callbacks:
        callbacks.append(callback)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def forget(name: str, callback: Callback) -> None:
    """Undo ``when_imported``."""
    if callback in _callbacks.get(name, ()):
        _callbacks[name].remove(callback)


class _Finder:
    """Finds the modules of ``_callbacks`` by the other finders, and gives them a loader that runs the callbacks."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        asked = (get_ident(), name)
        if not _callbacks.get(name) or asked in _looking:
            return None
        _looking.add(asked)
        try:
            for finder in list(sys.meta_path):
                find_spec = getattr(finder, "find_spec", None)
                spec: ModuleSpec | None = None
                if finder is not self and find_spec is not None:
                    spec = find_spec(name, path, target)
                if spec is not None:
                    if spec.loader is not None:
                        spec.loader = _Loader(spec.loader, name)  # type: ignore[assignment]
                    return spec
        finally:
            _looking.discard(asked)
        return None


class _Loader:
    """Another module's loader, which the module gets back before its code runs; then come the callbacks."""

    def __init__(self, loader: Any, name: str) -> None:
        self._loader, self._name = loader, name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self.__dict__["_loader"], attribute)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._loader.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        for callback in list(_callbacks.get(self._name, ())):
            callback(module)


_finder = _Finder()
