"""``zeroelastic doctor``: the installed versions, which parts do not work, and how to fix them.

Engines are loaded and DeepSpeed is imported in processes of their own: a crash there becomes a line of the report.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib import import_module, metadata, util
from pathlib import Path
from typing import Annotated, Literal

import typer
from pydantic import Field

import zeroelastic
from zeroelastic.cli.app import FAILED, JsonOption
from zeroelastic.cli.terminal import print_report
from zeroelastic.cli.view import Severity, Table, View, facts, print_view, row, sentences
from zeroelastic.compiled_ops import compiled_ops, left_locks
from zeroelastic.errors import ConfigError, signal_name
from zeroelastic.executors.build_info import REMEDIES, EngineLibrary
from zeroelastic.executors.library_build import NotBuilt, build_library, cuda_command, cuda_sources
from zeroelastic.io.large_pages import large_pages_pay
from zeroelastic.verbs.interface import Part, Report

_PACKAGE = Path(zeroelastic.__file__).resolve().parent
_REMEDIES = dict[str, str](REMEDIES, deepspeed="To see the whole error: python -c 'import deepspeed'.")  # type: ignore[arg-type]
_LIMIT_S = 300.0
_CHILD = "import sys; sys.path[:] = eval(sys.argv[1]); from zeroelastic.cli import doctor; doctor._answer(sys.argv[2])"


class Component(Part):
    """An engine or DeepSpeed: whether it works, and how it was built, or why it does not and what to do.

    ``seams`` are the methods of DeepSpeed that are relied on, each with what is wrong, or "".
    """

    state: Literal["usable", "missing", "broken"]
    about: str
    seams: dict[str, str] = Field(default={})


class Doctor(Report):
    """The report of ``doctor``. Any of ``problems`` makes the exit code 1; each says what to do."""

    problems: list[str]
    versions: dict[str, str | None]
    places: dict[str, str]
    new_memory: str
    components: dict[str, Component]
    ops: list[str]
    stale_locks: list[str]


def doctor(
    build_cuda: Annotated[
        bool, typer.Option("--build-cuda", help="First compile the CUDA engine, which needs nvcc on the PATH.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show the versions and engines on this machine, and how to fix what doesn't work.

    Looks at versions, the native and CUDA engines, DeepSpeed's methods, its compiled ops and locks of killed builds.
    Exit code 0: usable; 1: something here does not work; 2: wrong usage.

    \b
    Examples:
        zeroelastic doctor
        zeroelastic doctor --json
    """
    if build_cuda:
        build_cuda_engine()
    report = diagnose()
    print_report(report) if as_json else print_view(_view(report))
    if not report.ok:
        raise typer.Exit(FAILED)


def _view(found: Doctor) -> View:
    severities: dict[str, Severity] = {"usable": "good", "missing": "note", "broken": "bad"}
    packages = [(name, version or "not installed") for name, version in found.versions.items()]
    parts = [row(name, it.state, it.about, severity=severities[it.state]) for name, it in found.components.items()]
    tables = (
        facts("", [*packages, *found.places.items(), ("new memory", found.new_memory), ("compiled ops", found.ops)]),
        Table("Components", tuple(parts)),
        sentences("To fix", found.problems, "bad"),
    )
    return View("zeroelastic", tables, "Usable." if found.ok else "Not usable as it is.", "good" if found.ok else "bad")


def build_cuda_engine() -> None:
    """Compile the CUDA engine into the package, in about a minute. Raises ConfigError with the library as it was."""
    csrc = _PACKAGE / "csrc" if (_PACKAGE / "csrc").is_dir() else _PACKAGE.parent / "csrc"  # in a wheel, in a checkout
    try:
        command = cuda_command([path.relative_to(csrc.parent) for path in cuda_sources(csrc)])
        build_library(command, _PACKAGE / "_cuda.so", directory=csrc.parent)
    except (NotBuilt, OSError) as error:
        raise ConfigError(
            f"the CUDA engine was not built: {error}. It needs nvcc on the PATH (module load cuda) and a package that "
            f"can be written to ({_PACKAGE}). Without it, torch moves what is in GPU memory."
        ) from None


def diagnose() -> Doctor:
    """Look at everything; the import of DeepSpeed takes seconds."""
    components = {name: _ask(name) for name in _REMEDIES}
    locks = left_locks()
    problems = [f"{name}: {found.about}" for name, found in components.items() if found.state == "broken"]
    problems += locks.values()
    installed = {found.name: found.version for found in reversed([*metadata.distributions()])}
    versions: dict[str, str | None] = {"zeroelastic": zeroelastic.__version__, "python": platform.python_version()}
    return Doctor(
        ok=not problems,
        problems=problems,
        versions=versions | {name: installed.get(name) for name in ("torch", "deepspeed", "numpy")},
        places={"package": str(_PACKAGE), "interpreter": sys.executable, "platform": platform.platform()},
        new_memory="pages of 2 MiB" if large_pages_pay() else "pages of 4 KiB, which come faster here than of 2 MiB",
        components=components,
        ops=compiled_ops(),
        stale_locks=[*map(str, locks)],
    )


def _ask(name: str) -> Component:
    """Look at a component in a new process, whose output other than its last line is noise of what it imports."""
    path = [entry or os.getcwd() for entry in sys.path]
    command = [sys.executable, "-c", _CHILD, repr(path), name]
    env = {key: value for key, value in os.environ.items() if key != "ZEROELASTIC"}
    try:
        done = subprocess.run(command, env=env, capture_output=True, errors="replace", timeout=_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return Component(state="broken", about=f"looking at it did not end within {_LIMIT_S:.0f} s")
    if done.returncode == 0 and (answer := done.stdout.rpartition("\n")[2]).startswith("{"):
        return Component.model_validate_json(answer)
    how = f"was killed by {signal_name(-done.returncode)}" if done.returncode < 0 else f"exited with {done.returncode}"
    last = next((line for line in reversed((done.stdout + done.stderr).splitlines()) if line.strip()), "nothing")
    about = f"the process that loads it {how}; it said last: {last}. {_REMEDIES[name]}"
    return Component(state="broken", about=about)


def _answer(name: str) -> None:
    """Print what a component is as the last line, and exit without the clean-up of what was imported."""
    found = check_deepspeed() if name == "deepspeed" else describe_engine("cuda" if name == "cuda" else "native")
    sys.stdout.write(f"\n{found.model_dump_json()}")
    sys.stdout.flush()
    os._exit(0)


def describe_engine(name: EngineLibrary) -> Component:
    """Load the library of an engine and describe it."""
    from zeroelastic.executors.dispatch import describe_build
    from zeroelastic.executors.tables import default_threads

    info = describe_build(name)
    if info.usable:
        return Component(state="usable", about=f"{info.compiler}; {default_threads()} threads")
    about = f"{info.reason.rstrip('.')}. {info.remedy}" + (f" Log of the build: {info.log}" if info.log else "")
    return Component(state="broken" if info.path.exists() else "missing", about=about)


def check_deepspeed() -> Component:
    """Import DeepSpeed, compare the methods that are relied on, and install zeroelastic."""
    if util.find_spec("deepspeed") is None:
        return Component(state="missing", about="training needs it: pip install 'zeroelastic[train]'")
    import_module("deepspeed")
    from zeroelastic.deepspeed.seams import SEAMS, USED, check_seam

    seams = {seam.name: check_seam(seam) for seam in (*SEAMS, *USED)}
    try:
        zeroelastic.install()
    except zeroelastic.IncompatibleDeepSpeedError as error:
        return Component(state="broken", about=str(error), seams=seams)
    return Component(state="usable", about="zeroelastic.install() works; its methods are as expected", seams=seams)
