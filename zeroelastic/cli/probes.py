"""Questions about the engines and DeepSpeed, each answered in a separate process, which may crash."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass, is_dataclass, replace
from importlib import import_module, util
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal, TypeVar

import zeroelastic

if TYPE_CHECKING:
    from zeroelastic.deepspeed.install.seams import Seam

Answer = TypeVar("Answer")

# The child gets the module path of its parent: "" or a script's folder in front could make it import other modules.
_CHILD = """\
import sys
sys.path[:] = sys.argv[1].split("\\n")
from zeroelastic.cli.probes import _reply
_reply(*sys.argv[2:])
"""

ENGINES: tuple[Literal["native", "cuda"], ...] = ("native", "cuda")
ENGINE_LIMIT_S = 120.0
DEEPSPEED_LIMIT_S = 300.0


class ProbeFailed(Exception):
    """The process gave no answer; the text is the reason."""


class Probe:
    """Starts ``"module:function"`` with string arguments in the background. Use it as a context manager.

    The function returns a string or a dataclass of plain values. ZEROELASTIC does not reach it: what the hook would do
    is asked for by name.
    """

    def __init__(self, question: str, *arguments: str) -> None:
        self._answer = os.memfd_create("answer")
        self._noise = os.memfd_create("noise")
        path = "\n".join(entry or os.getcwd() for entry in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-c", _CHILD, path, str(self._answer), question, *arguments],
            stdin=subprocess.DEVNULL,
            env={name: value for name, value in os.environ.items() if name != "ZEROELASTIC"},
            stdout=self._noise,
            stderr=self._noise,
            pass_fds=[self._answer],
            start_new_session=True,
        )

    def answer(self, kind: type[Answer], *, limit_s: float) -> Answer:
        """Wait for the answer, an object of type ``kind``. Raises ProbeFailed when there is none."""
        from pydantic import TypeAdapter

        try:
            code = self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise ProbeFailed(f"it did not end within {limit_s:.0f} s") from None
        text = _contents(self._answer)
        if code < 0:
            raise ProbeFailed(f"the process was killed by {_signal_name(-code)}")
        if not text:
            printed = _contents(self._noise).decode(errors="replace").split("\n")
            last = next((line.strip() for line in reversed(printed) if line.strip()), "nothing")
            raise ProbeFailed(f"the process ended with exit code {code}; its last line of output: {last}")
        if code:
            raise ProbeFailed(text.decode())
        return TypeAdapter(kind).validate_json(text)

    def __enter__(self) -> Probe:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._answer)
        os.close(self._noise)


def describe_error(error: BaseException) -> str:
    """An exception in one line, like the last line of a traceback."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _reply(fd: str, question: str, *arguments: str) -> None:
    """The child's side: call the function and write its answer; exit without the imported modules' clean-up."""
    module, _, function = question.partition(":")
    try:
        value = getattr(import_module(module), function)(*arguments)
        text, code = json.dumps(asdict(value) if is_dataclass(value) else value), 0  # type: ignore[arg-type]
    except Exception as error:
        text, code = describe_error(error), 1
    with open(int(fd), "wb") as answer:
        answer.write(text.encode(errors="replace"))
    os._exit(code)


def _contents(fd: int) -> bytes:
    return os.pread(fd, os.fstat(fd).st_size, 0)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


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
        return probe.answer(Engine, limit_s=ENGINE_LIMIT_S)
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


@dataclass(frozen=True, slots=True)
class CheckedSeam:
    """A method of DeepSpeed that zeroelastic relies on; ``problem`` is empty when it is as expected.

    The plain values of ``zeroelastic.deepspeed.install.seams.CheckedSeam``.
    """

    name: str
    use: Literal["wrapped", "called"]
    expected: tuple[str, ...]
    found: tuple[str, ...] | None
    problem: str


@dataclass(frozen=True, slots=True)
class DeepSpeed:
    """The installed DeepSpeed; "usable" means that ``zeroelastic.install()`` succeeded."""

    state: Literal["usable", "not installed", "broken"]
    version: str | None
    seams: tuple[CheckedSeam, ...] = ()
    reason: str = ""
    remedy: str = ""


def check_deepspeed() -> DeepSpeed:
    """Import DeepSpeed, check every seam and install. Run by a Probe: the import takes seconds and prints."""
    import zeroelastic
    from zeroelastic.deepspeed.install.seams import MINIMUM_DEEPSPEED, SEAMS, USED
    from zeroelastic.extras import INSTALL_TRAIN

    version = installed_version("deepspeed")
    if version is None and util.find_spec("deepspeed") is None:
        reason = "it is needed to train and resume, not to look at checkpoints"
        remedy = f"To train, install it: {INSTALL_TRAIN}."
        return DeepSpeed("not installed", None, (), reason, remedy)
    try:
        import_module("deepspeed")
    except Exception as error:
        return _not_importable(version, describe_error(error))
    seams = (*(_check(seam, "wrapped") for seam in SEAMS), *(_check(seam, "called") for seam in USED))
    try:
        zeroelastic.install()
    except zeroelastic.IncompatibleDeepSpeedError as error:
        return DeepSpeed("broken", version, seams, str(error))
    except Exception as error:
        remedy = f"Use another DeepSpeed (>={MINIMUM_DEEPSPEED}) or upgrade zeroelastic."
        return DeepSpeed("broken", version, seams, f"zeroelastic.install() failed: {describe_error(error)}.", remedy)
    return DeepSpeed("usable", version, seams)


def deepspeed_answer(probe: Probe) -> DeepSpeed:
    """The answer of a Probe of ``check_deepspeed``; without one, DeepSpeed cannot be imported."""
    try:
        return probe.answer(DeepSpeed, limit_s=DEEPSPEED_LIMIT_S)
    except ProbeFailed as failure:
        return _not_importable(installed_version("deepspeed"), str(failure))


def installed_version(name: str) -> str | None:
    """The version of an installed distribution; None where it is not installed."""
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _not_importable(version: str | None, reason: str) -> DeepSpeed:
    remedy = "To see the whole error: python -c 'import deepspeed'."
    return DeepSpeed("broken", version, (), f"importing deepspeed failed: {reason}.", remedy)


def _check(seam: Seam, use: Literal["wrapped", "called"]) -> CheckedSeam:
    from zeroelastic.deepspeed.install.seams import check_seam

    try:
        checked = check_seam(seam)
    except Exception as error:
        module = seam.class_path.rpartition(".")[0]
        return CheckedSeam(
            seam.name, use, seam.parameters, None, f"{module} cannot be imported: {describe_error(error)}"
        )
    return CheckedSeam(seam.name, use, seam.parameters, checked.found, checked.problem)
