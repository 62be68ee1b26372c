"""This machine, for ``zeroelastic doctor``: engines, DeepSpeed, ZEROELASTIC=1, the CUDA build.

Engines and DeepSpeed are asked in separate processes, which may crash. The models are parts of the verb's report.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import site
import subprocess
import sys
from contextlib import suppress
from importlib import import_module, metadata, util
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal, TypeVar

from pydantic import BaseModel, Field, TypeAdapter

import zeroelastic
from zeroelastic.activation import FILE, VARIABLE, is_waiting
from zeroelastic.errors import ConfigError, signal_name
from zeroelastic.executors.build_info import REMEDIES
from zeroelastic.executors.library_build import NotBuilt, build_library, cuda_command, cuda_sources
from zeroelastic.verbs.report import Part, Report

if TYPE_CHECKING:
    from zeroelastic.deepspeed.install.seams import Seam

Answer = TypeVar("Answer")

_SITE_FOLDERS = ("site-packages", "dist-packages")

# The child gets the module path of its parent: "" or a script's folder in front could make it import other modules.
_CHILD = """\
import sys
sys.path[:] = sys.argv[1].split("\\n")
from zeroelastic.cli.machine import _reply
_reply(*sys.argv[2:])
"""

ENGINES: tuple[Literal["native", "cuda"], ...] = ("native", "cuda")
ENGINE_LIMIT_S = 120.0
DEEPSPEED_LIMIT_S = 300.0


class ProbeFailed(Exception):
    """The process gave no answer; the text is the reason."""


class Probe:
    """Starts ``"module:function"`` with string arguments in the background. Use it as a context manager.

    The function returns a string or a pydantic model. ZEROELASTIC does not reach it: what the hook would do
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
        try:
            code = self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise ProbeFailed(f"it did not end within {limit_s:.0f} s") from None
        text = _contents(self._answer)
        if code < 0:
            raise ProbeFailed(f"the process was killed by {signal_name(-code)}")
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
        text, code = value.model_dump_json() if isinstance(value, BaseModel) else json.dumps(value), 0
    except Exception as error:
        text, code = describe_error(error), 1
    with open(int(fd), "wb") as answer:
        answer.write(text.encode(errors="replace"))
    os._exit(code)


def _contents(fd: int) -> bytes:
    return os.pread(fd, os.fstat(fd).st_size, 0)


class Engine(Part):
    """An engine in C++ or CUDA. ``log`` is the log of its build, if there is one.

    ``reason`` and ``remedy`` are empty when it is "usable". ``targets`` are the machines that ``compiler`` built it
    for; ``instruction_set`` and ``threads`` are those that a call would use (native only).
    """

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
    from zeroelastic.executors.dispatch import describe_build
    from zeroelastic.executors.native_executor import instruction_set
    from zeroelastic.executors.tables import default_threads

    info = describe_build(name)
    path, log = str(info.path), None if info.log is None else str(info.log)
    if not info.usable:
        state: Literal["not built", "broken"] = "broken" if info.path.exists() else "not built"
        return Engine(state=state, path=path, log=log, reason=info.reason, remedy=info.remedy)
    compiler, _, targets = info.compiler.partition(", ")
    found = Engine(state="usable", path=path, log=log, compiler=compiler, targets=targets)
    if name != "native":
        return found
    changes: dict[str, object] = {"instruction_set": instruction_set()}
    try:
        changes["threads"] = default_threads()
    except ConfigError as error:
        remedy = "Unset it, or set it to the number of threads that one read may use."
        changes |= {"state": "broken", "reason": str(error), "remedy": remedy}
    return found.model_copy(update=changes)


def engine_answer(probe: Probe, name: Literal["native", "cuda"]) -> Engine:
    """The answer of a Probe of ``describe_engine``; without one, an Engine that is broken or not built."""
    try:
        return probe.answer(Engine, limit_s=ENGINE_LIMIT_S)
    except ProbeFailed as failure:
        path = Path(zeroelastic.__file__).parent / f"_{name}.so"
        return Engine(
            state="broken" if path.exists() else "not built",
            path=str(path),
            reason=f"looking at {path} failed: {failure}",
            remedy=f"If the file is damaged or was made for another machine, delete it. {REMEDIES[name]}",
        )


def choose_auto() -> str:
    """The engine that "auto" stands for. Run by a Probe, because it loads the library."""
    from zeroelastic.executors.dispatch import choose_executor

    return choose_executor("auto")


class Method(Part):
    """A method of DeepSpeed that zeroelastic relies on; ``problem`` is empty when it is as expected."""

    name: str
    use: Literal["wrapped", "called"]
    expected: list[str]
    found: list[str] | None
    problem: str


class DeepSpeed(Part):
    """The installed DeepSpeed; "usable" means that ``zeroelastic.install()`` succeeded."""

    state: Literal["usable", "not installed", "broken"]
    version: str | None
    seams: list[Method] = Field(default_factory=list)
    reason: str = ""
    remedy: str = ""


def check_deepspeed() -> DeepSpeed:
    """Import DeepSpeed, check every seam and install. Run by a Probe: the import takes seconds and prints."""
    from zeroelastic.deepspeed.install.seams import MINIMUM_DEEPSPEED, SEAMS, USED
    from zeroelastic.extras import INSTALL_TRAIN

    version = installed_version("deepspeed")
    if version is None and util.find_spec("deepspeed") is None:
        return DeepSpeed(
            state="not installed",
            version=None,
            reason="it is needed to train and resume, not to look at checkpoints",
            remedy=f"To train, install it: {INSTALL_TRAIN}.",
        )
    try:
        import_module("deepspeed")
    except Exception as error:
        return _not_importable(version, describe_error(error))
    seams = [*(_check(seam, "wrapped") for seam in SEAMS), *(_check(seam, "called") for seam in USED)]
    state: Literal["usable", "broken"] = "broken"
    reason = remedy = ""
    try:
        zeroelastic.install()
        state = "usable"
    except zeroelastic.IncompatibleDeepSpeedError as error:
        reason = str(error)
    except Exception as error:
        reason = f"zeroelastic.install() failed: {describe_error(error)}."
        remedy = f"Use another DeepSpeed (>={MINIMUM_DEEPSPEED}) or upgrade zeroelastic."
    return DeepSpeed(state=state, version=version, seams=seams, reason=reason, remedy=remedy)


def deepspeed_answer(probe: Probe) -> DeepSpeed:
    """The answer of a Probe of ``check_deepspeed``; without one, DeepSpeed cannot be imported."""
    try:
        return probe.answer(DeepSpeed, limit_s=DEEPSPEED_LIMIT_S)
    except ProbeFailed as failure:
        return _not_importable(installed_version("deepspeed"), str(failure))


def installed_version(name: str) -> str | None:
    """The version of an installed distribution; None where it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _not_importable(version: str | None, reason: str) -> DeepSpeed:
    remedy = "To see the whole error: python -c 'import deepspeed'."
    return DeepSpeed(state="broken", version=version, reason=f"importing deepspeed failed: {reason}.", remedy=remedy)


def _check(seam: Seam, use: Literal["wrapped", "called"]) -> Method:
    from zeroelastic.deepspeed.install.seams import check_seam

    try:
        checked = check_seam(seam)
    except Exception as error:
        module = seam.class_path.rpartition(".")[0]
        found, problem = None, f"{module} cannot be imported: {describe_error(error)}"
    else:
        found, problem = None if checked.found is None else list(checked.found), checked.problem
    return Method(name=seam.name, use=use, expected=list(seam.parameters), found=found, problem=problem)


class Activation(Part):
    """``files`` are the .pth files that a Python like this one reads; "on" means that this one has."""

    state: Literal["on", "off", "broken"]
    value: str | None
    files: list[str]
    reason: str = ""


def describe_activation() -> Activation:
    """Look at the environment and at the folders in which Python looks for .pth files."""
    value = os.environ.get(VARIABLE)
    folders = {*site.getsitepackages(), *(entry for entry in sys.path if Path(entry).name in _SITE_FOLDERS)}
    if site.ENABLE_USER_SITE:
        folders.add(site.getusersitepackages())
    files = sorted(str(path) for folder in folders if (path := Path(folder) / FILE).is_file())
    reason = ""
    if value in (None, "", "0"):
        return Activation(state="off", value=value, files=files)
    if value != "1":
        reason = f"{VARIABLE} is {value!r}; it can be 1 (on) or 0 (off). A job that imports DeepSpeed stops."
    elif not files:
        reason = (
            f"{VARIABLE}=1 has no effect: no {FILE} in {', '.join(sorted(folders))}. Install zeroelastic with pip, "
            "or start jobs by `python -m zeroelastic.run`."
        )
    elif not is_waiting():
        reason = f"{VARIABLE}=1 has no effect in this Python, which has not read {files[0]}: leave out -S."
    return Activation(state="broken" if reason else "on", value=value, files=files, reason=reason)


class BuildLock(Part):
    """The lock of a build of one of DeepSpeed's ops: ``deepspeed.install.op_builds`` says what its states mean."""

    path: str
    age_s: float
    state: Literal["held", "left", "unknown"]


class Doctor(Report):
    """Everything that was found out. Any of ``problems`` makes the exit code 1; each says what to do."""

    problems: list[str]
    versions: dict[str, str | None]
    package: str
    python: str
    platform: str
    num_cores: int
    engines: dict[str, Engine]
    executor: str | None
    deepspeed: DeepSpeed
    activation: Activation
    build_locks: list[BuildLock]


def build_cuda_engine() -> Path:
    """Compile the CUDA engine into the package; returns the library's path. Takes about a minute.

    A process that has the former library loaded keeps it. Raises ConfigError, with the library as it was, where there
    is no nvcc, where it fails, and where the package cannot be written to.
    """
    package = Path(zeroelastic.__file__).resolve().parent
    target = package / "_cuda.so"
    csrc = _find_csrc(package)
    if shutil.which("nvcc") is None:
        raise ConfigError(
            "the CUDA engine is compiled by nvcc, which is not on the PATH. Install the CUDA toolkit, load its module "
            "(module load cuda), or put its folder on the PATH (export PATH=/usr/local/cuda/bin:$PATH), and run "
            "zeroelastic doctor --build-cuda again. Without it, torch moves what lies in GPU memory."
        )
    if not os.access(package, os.W_OK):
        raise ConfigError(
            f"{package} cannot be written to, so that the CUDA engine cannot be put there. Ask its owner to run "
            "zeroelastic doctor --build-cuda, or install zeroelastic into a virtual environment of your own."
        )
    try:
        command = cuda_command([path.relative_to(csrc.parent) for path in cuda_sources(csrc)])
        build_library(command, target, directory=csrc.parent)
    except NotBuilt as reason:
        first, _, rest = str(reason).partition("\n")
        sys.stderr.write(rest)
        raise ConfigError(
            f"the CUDA engine was not built: {first}. What nvcc printed is above; repair what it names and run this "
            "again."
        ) from None
    _record(target)
    return target


def _find_csrc(package: Path) -> Path:
    """The sources of the engines: within an installed package, beside one that is used from its source tree."""
    for csrc in (package / "csrc", package.parent / "csrc"):
        if (csrc / "cuda").is_dir():
            return csrc
    raise ConfigError(
        f"{package / 'csrc'} is missing: the sources of the CUDA engine, which every wheel has. Reinstall zeroelastic."
    )


def _record(library: Path) -> None:
    """Add the library and its log to the list of the package's files, so that uninstalling removes them."""
    try:
        distribution = metadata.distribution("zeroelastic")
    except metadata.PackageNotFoundError:  # run from a source tree
        return
    listed = {Path(str(distribution.locate_file(file))).resolve() for file in distribution.files or ()}
    record = next((path for path in listed if path.name == "RECORD"), None)
    if record is None or not os.access(record, os.W_OK):
        return
    folder = record.parent.parent
    with record.open("a", newline="", encoding="utf-8") as lines:
        for made in (library, library.with_suffix(".log")):
            if made not in listed and made.is_relative_to(folder):
                csv.writer(lines, lineterminator="\n").writerow([made.relative_to(folder).as_posix(), "", ""])
