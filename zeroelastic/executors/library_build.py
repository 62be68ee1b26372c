"""How the engines are compiled from csrc: the commands, and a library that is put in place in one step, never half.

setup.py loads this file by its path, in environments that have nothing but setuptools, and ``zeroelastic doctor
--build-cuda`` imports it from the installed package. So it imports nothing but the standard library.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

CPP_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-pthread")
"""No -march: the code chooses its instruction set when it runs (csrc/cpu.h), so that one library fits every x86-64."""

CUDA_FLAGS = (
    "-std=c++17",
    "-O3",
    "-Xcompiler=-fPIC,-fvisibility=hidden,-pthread",
    "-gencode=arch=compute_80,code=sm_80",
    "-gencode=arch=compute_90,code=[sm_90,compute_90]",
)


class NotBuilt(Exception):
    """An engine that was left out; the text says why."""


def native_sources(csrc: Path) -> list[Path]:
    """The C++ files of the native engine."""
    return sorted(csrc.glob("*.cpp"))


def cuda_sources(csrc: Path) -> list[Path]:
    """The files of the CUDA engine: the native one, whose code reads files, with an own interface."""
    native = [path for path in native_sources(csrc) if path.name != "api.cpp"]
    return sorted([*native, *csrc.glob("cuda/*.cu"), *csrc.glob("cuda/*.cpp")])


def cpp_command(sources: Sequence[Path]) -> list[str]:
    """The command of the native engine, without its output; heeds $CXX, $CXXFLAGS and $LDFLAGS. Raises NotBuilt."""
    flags = [*CPP_FLAGS, *shlex.split(os.environ.get("CXXFLAGS", ""))]
    return [*find_cpp_compiler(), *flags, "-shared", *map(str, sources), *shlex.split(os.environ.get("LDFLAGS", ""))]


def cuda_command(sources: Sequence[Path]) -> list[str]:
    """The command of the CUDA engine, without its output. Raises NotBuilt where there is no nvcc."""
    return [find_nvcc(), *CUDA_FLAGS, "-shared", *map(str, sources)]


def find_cpp_compiler() -> list[str]:
    """The command of a C++ compiler that is there: $CXX, the one Python was built with, or a usual name."""
    asked = os.environ.get("CXX")
    if asked:
        return shlex.split(asked)
    for name in (sysconfig.get_config_var("CXX") or "", "c++", "g++", "clang++"):
        words = shlex.split(name)
        if words and shutil.which(words[0]):
            return words
    raise NotBuilt("there was no C++ compiler on the PATH when the package was built")


def find_nvcc() -> str:
    """nvcc, from the PATH. Raises NotBuilt where it is not there."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        raise NotBuilt("there was no nvcc on the PATH when the package was built")
    return nvcc


def build_library(command: Sequence[str], target: Path, *, directory: Path) -> None:
    """Run a compiler in ``directory``; its library becomes ``target``, and its output the log next to it.

    A process that has the former library loaded keeps it. Raises NotBuilt; ``target`` is then as it was.
    """
    made = target.with_suffix(f".{os.getpid()}.tmp")
    try:
        text = _compile([*command, "-o", str(made)], directory)
        os.replace(made, target)
    finally:
        made.unlink(missing_ok=True)
    write_log(target, f"built: {shlex.join(command)}\n{text}")


def write_log(target: Path, text: str) -> None:
    """Write the log of a build next to the library: ``zeroelastic doctor`` shows the first line."""
    target.with_suffix(".log").write_text(text, encoding="utf-8")


def _compile(command: Sequence[str], directory: Path) -> str:
    """Run the compiler; returns what it said. Raises NotBuilt with the first error and the rest below."""
    sys.stderr.write(f"{shlex.join(command)}\n")
    try:
        done = subprocess.run(command, cwd=directory, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        raise NotBuilt(f"{command[0]} cannot be run: {error.strerror}") from None
    said = done.stdout + done.stderr
    if done.returncode:
        errors = [line for line in said.splitlines() if "error" in line]
        first = f": {errors[0]}" if errors else ""
        raise NotBuilt(f"{command[0]} failed with exit code {done.returncode}{first}\n{shlex.join(command)}\n{said}")
    sys.stderr.write(said)
    return said
