"""``zeroelastic doctor``: what is installed here, what works, what does not, and how to fix it."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

import zeroelastic
from zeroelastic.cli.app import FAILED, JsonOption
from zeroelastic.cli.terminal import print_report, print_styled

if TYPE_CHECKING:
    from packaging.requirements import Requirement

    from zeroelastic.cli.machine import Doctor

_DISTRIBUTION = "zeroelastic"
_SHOWN = ("torch", "deepspeed", "numpy")


def doctor(
    build_cuda: Annotated[
        bool, typer.Option("--build-cuda", help="First compile the CUDA engine, which needs nvcc on the PATH.")
    ] = False,
    fix: Annotated[
        bool, typer.Option("--fix", help="First remove the locks of DeepSpeed's op builds that killed processes left.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Also name every method of DeepSpeed that is relied on.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show what is installed here, what works, what does not, and what to do about it.

    Looks at versions, the native and CUDA engines, DeepSpeed's methods, ZEROELASTIC, and locks that killed builds left.
    Exit code 0: usable; 1: something here does not work; 2: wrong usage.

    \b
    Examples:
        zeroelastic doctor
        zeroelastic doctor --verbose
        zeroelastic doctor --fix
        zeroelastic doctor --json
    """
    if build_cuda:
        from zeroelastic.cli.machine import build_cuda_engine

        build_cuda_engine()
    if fix:
        from zeroelastic.deepspeed.install.op_builds import remove_left_locks

        for lock in remove_left_locks():
            typer.echo(f"removed {lock.path}, {lock.age_s:.0f} s old", err=True)
    report = diagnose()
    if as_json:
        print_report(report)
    else:
        _show(report, verbose)
    if not report.ok:
        raise typer.Exit(FAILED)


def diagnose() -> Doctor:
    """Check everything, with progress on stderr where that is a terminal."""
    from rich.console import Console

    from zeroelastic.cli import machine
    from zeroelastic.deepspeed.install.op_builds import find_locks

    def ask(function: Callable[..., object], *arguments: str) -> machine.Probe:
        return stack.enter_context(machine.Probe(f"{function.__module__}:{function.__qualname__}", *arguments))

    versions, problems = _versions()
    log = Console(stderr=True)
    with ExitStack() as stack:
        status = log.status("importing DeepSpeed") if log.is_terminal else None
        stack.enter_context(status or nullcontext())
        asked_deepspeed = ask(machine.check_deepspeed)
        asked_engines = {name: ask(machine.describe_engine, name) for name in machine.ENGINES}
        asked_executor = ask(machine.choose_auto)
        engines: dict[str, machine.Engine] = {
            name: machine.engine_answer(probe, name) for name, probe in asked_engines.items()
        }
        try:
            executor = asked_executor.answer(str, limit_s=machine.ENGINE_LIMIT_S)
        except machine.ProbeFailed:
            executor = None  # choosing loads the native engine, whose own probe reports what is wrong
        deepspeed = machine.deepspeed_answer(asked_deepspeed)
    activation, locks = machine.describe_activation(), find_locks()
    for name, engine in engines.items():
        if engine.state == "broken":
            problems.append(f"the {name} engine: {engine.reason.rstrip('.')}. {engine.remedy}")
    if deepspeed.state == "broken":
        problems.append(f"DeepSpeed: {deepspeed.reason} {deepspeed.remedy}".rstrip())
    if activation.state == "broken":
        problems.append(activation.reason)
    problems += [lock.problem for lock in locks if lock.state == "left"]
    return machine.Doctor(
        ok=not problems,
        problems=problems,
        versions=versions,
        package=str(Path(zeroelastic.__file__).parent),
        python=sys.executable,
        platform=platform.platform(),
        num_cores=len(os.sched_getaffinity(0)),
        engines=engines,
        executor=executor,
        deepspeed=deepspeed,
        activation=activation,
        build_locks=[machine.BuildLock(path=lock.path, age_s=lock.age_s, state=lock.state) for lock in locks],
    )


def _versions() -> tuple[dict[str, str | None], list[str]]:
    """The versions to show, and a sentence for each requirement that is not met. Imports none of the packages."""
    from importlib import metadata

    from packaging.requirements import Requirement

    from zeroelastic.cli.machine import installed_version

    versions: dict[str, str | None] = {
        "zeroelastic": zeroelastic.__version__,
        "python": platform.python_version(),
        **{name: installed_version(name) for name in _SHOWN},
    }
    try:
        declared = metadata.requires(_DISTRIBUTION) or []
    except metadata.PackageNotFoundError:  # run from a source tree
        declared = ["numpy"]
    unmet = []
    for requirement in map(Requirement, declared):
        found = installed_version(requirement.name)
        needed = _applies(requirement, extra="")
        # torch may be missing, but not too old; DeepSpeed has a check of its own.
        checked = needed or (requirement.name == "torch" and found and _applies(requirement, extra="train"))
        if not checked:
            continue
        wanted = f"{requirement.name}{requirement.specifier}"
        if found is None:
            unmet.append(f"{requirement.name} is not installed. Install it: pip install '{wanted}'.")
        elif not requirement.specifier.contains(found, prereleases=True):
            unmet.append(f"{requirement.name} {found} does not fit {wanted}. Upgrade it: pip install '{wanted}'.")
    return versions, unmet


def _applies(requirement: Requirement, *, extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


_Mark = Literal["ok", "note", "FAIL", ""]
_MARKS: dict[str, _Mark] = {"usable": "ok", "not built": "note", "not installed": "note", "broken": "FAIL"}
_COLOUR: dict[_Mark, str] = {"ok": "green", "note": "yellow", "FAIL": "bold red", "": ""}


def _show(found: Doctor, verbose: bool) -> None:
    """The diagnosis for people, on stdout."""

    def line(mark: _Mark, label: str, text: str) -> None:
        print_styled("  ", (f"{mark:<4}", _COLOUR[mark]), f"  {label:<11}  ", text)

    print_styled(("Versions", "bold"))
    places = {"zeroelastic": found.package, "python": found.python}
    for name, version in found.versions.items():
        unmet = any(problem.startswith(f"{name} ") for problem in found.problems)
        mark: _Mark = "FAIL" if unmet else "ok" if version else "note"
        line(mark, name, f"{version or 'not installed'}  {places.get(name, '')}".rstrip())
    line("", "platform", f"{found.platform}, {found.num_cores} cores")

    print_styled(("\nEngines", "bold"))
    for name, engine in found.engines.items():
        if engine.state == "usable":
            used = f"; uses {engine.instruction_set}, {engine.threads} threads" if engine.threads else ""
            line("ok", name, f"built by {engine.compiler} for {engine.targets}{used}")
            continue
        line(_MARKS[engine.state], name, f"{engine.state}: {engine.reason}")
        line("", "", engine.remedy)
        if engine.log:
            line("", "", f"The build's log: {engine.log}")
    line("ok" if found.executor else "FAIL", "auto", f"takes {found.executor or 'nothing: see above'}")

    print_styled(("\nDeepSpeed", "bold"))
    uses = [seam.use for seam in found.deepspeed.seams]
    methods = f"its methods are as expected ({uses.count('wrapped')} wrapped, {uses.count('called')} called)"
    summary = {"usable": f"zeroelastic.install() works; {methods}", "not installed": "not installed: ", "broken": ""}
    text = summary[found.deepspeed.state] + found.deepspeed.reason
    line(_MARKS[found.deepspeed.state], found.deepspeed.version or "", text)
    if found.deepspeed.remedy:
        line("", "", found.deepspeed.remedy)
    for seam in (seam for seam in found.deepspeed.seams if verbose or seam.problem):
        line("FAIL" if seam.problem else "ok", seam.use, f"{seam.name} {seam.problem}".rstrip())

    print_styled(("\nZEROELASTIC", "bold"))
    activation = found.activation
    where = ", ".join(activation.files) or "no zeroelastic.pth in this environment"
    states = {"on": "jobs of this environment use zeroelastic", "off": "1 installs zeroelastic in every job"}
    text = activation.reason or f"{states[activation.state]}; {where}"
    line("FAIL" if activation.state == "broken" else "ok", activation.state, text)

    if found.build_locks:
        marks: dict[str, _Mark] = {"held": "ok", "left": "FAIL", "unknown": "note"}
        print_styled(("\nBuild locks", "bold"))
        for lock in found.build_locks:
            line(marks[lock.state], lock.state, f"{lock.path}, {lock.age_s:.0f} s old")

    if not found.problems:
        print_styled(("\nUsable.", "green"))
        return
    print_styled((f"\n{len(found.problems)} to fix:", "bold red"))
    for problem in found.problems:
        print_styled(f"  - {problem}")
