"""The engines for `zeroelastic doctor`: whether each is built and loads, for which machines, and what "auto" takes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import zeroelastic
from zeroelastic.cli.machine.probe import Probe, ProbeFailed

ENGINES: tuple[Literal["native", "cuda"], ...] = ("native", "cuda")
LIMIT_S = 120.0


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine's library.

    "not built": by choice, or for lack of a compiler. "broken": the library exists and cannot be used. ``reason`` and
    ``remedy`` are empty when it is "usable". ``targets`` are the machines that ``compiler`` built it for;
    ``instruction_set`` and ``threads`` are those that a call would use (native only).
    """

    name: Literal["native", "cuda"]
    state: Literal["usable", "not built", "broken"]
    path: str
    log: str | None = None
    compiler: str = ""
    targets: str = ""
    instruction_set: str | None = None
    threads: int | None = None
    reason: str = ""
    remedy: str = ""


def describe_engine(name: Literal["native", "cuda"]) -> Engine:
    """Load an engine's library and describe it. Run by a Probe: loading a damaged one may kill the process."""
    from zeroelastic.errors import ConfigError
    from zeroelastic.executors.dispatch import describe_build
    from zeroelastic.executors.engine import default_threads
    from zeroelastic.executors.native_executor import instruction_set

    info = describe_build(name)
    log = None if info.log is None else str(info.log)
    if not info.usable:
        state: Literal["not built", "broken"] = "broken" if info.path.exists() else "not built"
        return Engine(name, state, str(info.path), log, reason=info.reason, remedy=info.remedy)
    compiler, _, targets = info.compiler.partition(", ")
    engine = Engine(name, "usable", str(info.path), log, compiler, targets)
    if name != "native":
        return engine
    try:
        return replace(engine, instruction_set=instruction_set(), threads=default_threads())
    except ConfigError as error:
        remedy = "Unset it, or set it to the number of threads that one read may use."
        return replace(engine, state="broken", instruction_set=instruction_set(), reason=str(error), remedy=remedy)


def engine_answer(probe: Probe, name: Literal["native", "cuda"]) -> Engine:
    """The answer of a Probe of ``describe_engine``; without one, an Engine that is broken or not built."""
    from zeroelastic.executors.build_info import REMEDIES

    try:
        return probe.answer(Engine, limit_s=LIMIT_S)
    except ProbeFailed as failure:
        path = Path(zeroelastic.__file__).parent / f"_{name}.so"
        return Engine(
            name,
            "broken" if path.exists() else "not built",
            str(path),
            reason=f"looking at {path} failed: {failure}",
            remedy=f"If the file is damaged or was made for another machine, delete it. {REMEDIES[name]}",
        )


def choose_auto() -> str:
    """The engine that "auto" stands for. Run by a Probe, because it loads the library."""
    from zeroelastic.executors.dispatch import choose_executor

    return choose_executor("auto")
