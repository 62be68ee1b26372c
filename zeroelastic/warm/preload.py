"""What a warm process imports before it forks, and what must not be imported there.

A module is not imported ahead if doing so reads a variable of one rank (``RANK``), starts a thread or opens a GPU: its
state would be that of no rank, or would not survive the fork. That is tried in a process of its own first.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from zeroelastic.warm.messages import is_per_rank

ALWAYS = (
    "numpy", "setuptools", "networkx", "torch", "torch._dynamo", "torch._inductor.compile_fx",
    "torch.ao.quantization", "torch.utils.cpp_extension", "torch.utils.serialization.config", "deepspeed",
    "deepspeed.module_inject.auto_ep_layer", "deepspeed.ops.adam", "deepspeed.ops.op_builder.all_ops",
    "deepspeed.runtime.bf16_optimizer", "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.runtime.zero.muon.muon_optimizer", "deepspeed.runtime.zero.stage3",
    "deepspeed.runtime.zero.stage_1_and_2", "zeroelastic.deepspeed.install.frameworks",
    "zeroelastic.deepspeed.install.wrappers", "zeroelastic.elastic", "zeroelastic.executors.torch_executor",
    "zeroelastic.integrations",
)  # fmt: skip
"""What each worker of any job imports, as far as it is installed. Nearly all of the first ``deepspeed.initialize`` of a
process is the import of what torch's compiler needs (DeepSpeed 0.19.8, torch 2.13)."""

_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri")


class _Watched(os._Environ):  # type: ignore[type-arg]
    """``os.environ``, which notes the variables of a rank that are looked for."""

    asked: list[str] = []  # noqa: RUF012  one list, of one process

    def __getitem__(self, name: str) -> str:
        if isinstance(name, str) and is_per_rank(name):
            self.asked.append(name)
        value: str = super().__getitem__(name)
        return value


@contextmanager
def _watching() -> Iterator[list[str]]:
    kind, _Watched.asked = type(os.environ), []
    os.environ.__class__ = _Watched
    try:
        yield _Watched.asked
    finally:
        os.environ.__class__ = kind


def import_always(names: Sequence[str] = ALWAYS) -> str | None:
    """Import what every worker needs, as far as it is installed; the reason why nothing can be forked, or None."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # whether there is a GPU, without opening it
    with _watching() as asked:
        for name in names:
            with suppress(ImportError):
                importlib.import_module(name)
    return _problem(asked)


def import_if_harmless(name: str) -> str | None:
    """Import a module here if that does no harm; what would have been the harm, or None."""
    if name in sys.modules:
        return None
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        problem: str | None = "the import ended the process"
        try:
            os.dup2(os.open(os.devnull, os.O_RDWR), 1)
            problem = _try(name)
        finally:
            os.write(writing, json.dumps(problem).encode()[:4096])
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as file:
        data = file.read()
    os.waitpid(child, 0)
    try:
        problem = json.loads(data)
    except ValueError:
        problem = "the import killed the process"
    return problem or _try(name)


def _try(name: str) -> str | None:
    with _watching() as asked:
        try:
            importlib.import_module(name)
        except BaseException as error:
            return f"{type(error).__name__}: {error}"[:1000]
    return _problem(asked)


def _problem(asked: Sequence[str]) -> str | None:
    if asked:
        return f"importing looks for {asked[0]}, which differs between ranks"
    if threading.active_count() > 1:
        started = [thread.name for thread in threading.enumerate() if thread is not threading.current_thread()]
        return f"importing starts threads ({', '.join(started)}), which a fork loses"
    opened = [target for target in _open_files() if target.startswith(_DEVICES)]
    return f"importing opens {opened[0]}, which a fork cannot share" if opened else None


def _open_files() -> Iterator[str]:
    for file in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            yield os.readlink(f"/proc/self/fd/{file}")


def imports_of(script: Path) -> list[str]:
    """The modules that a script imports at its top level, also within ``try``, in order; none if it cannot be read."""
    try:
        tree = ast.parse(script.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return []
    return list(dict.fromkeys(_imports(tree.body)))


def _imports(body: Iterable[ast.stmt]) -> Iterator[str]:
    for statement in body:
        if isinstance(statement, ast.Import):
            yield from (alias.name for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
            yield statement.module
        elif isinstance(statement, ast.Try):
            yield from _imports(statement.body)


def source_of(target: str, *, is_module: bool) -> Path | None:
    """The file of a script, or of a module that is to be run; None where there is none."""
    if not is_module:
        return Path(target)
    try:
        spec = importlib.util.find_spec(target)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{target}.__main__")
    except (ImportError, ValueError):
        return None
    return Path(spec.origin) if spec is not None and spec.origin else None


class Sources:
    """The files of imported modules that may be edited between two starts: those that no package manager put there."""

    def __init__(self) -> None:
        self._installed = tuple({os.path.realpath(path) + os.sep for path in (sys.prefix, sys.base_prefix)})
        self._seen: set[str] = set()
        self._stamps: dict[str, tuple[int, int]] = {}

    def note(self) -> None:
        """Note the files of modules that were imported since the last call, as they are now."""
        for name, module in list(sys.modules.items()):
            if name in self._seen:
                continue
            self._seen.add(name)
            path: Any = getattr(module, "__file__", None)
            if isinstance(path, str) and not path.startswith(self._installed):
                path = os.path.realpath(path)
                if not path.startswith(self._installed):
                    self._stamps[path] = _stamp(path)

    def changed(self) -> str | None:
        """A file that is not any more as it was when it was noted, or None."""
        return next((path for path, stamp in self._stamps.items() if _stamp(path) != stamp), None)


def _stamp(path: str) -> tuple[int, int]:
    try:
        status = os.stat(path)
    except OSError:
        return -1, -1
    return status.st_size, status.st_mtime_ns
