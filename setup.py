"""Build entry point: the native engines from csrc/; the metadata is in pyproject.toml.

The engines are plain shared libraries that ctypes loads: they include neither Python's nor torch's headers. Both are
optional. ZEROELASTIC_BUILD_NATIVE (needs a C++17 compiler) and ZEROELASTIC_BUILD_CUDA (needs nvcc on the PATH) say
"1": fail when it cannot be built; "0": do not try; unset: build what can be built. What happened is left in a log
beside the library. CXX, CXXFLAGS and LDFLAGS are heeded.
"""

from __future__ import annotations

import glob
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
CPP_FLAGS = ["-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-pthread"]
CUDA_FLAGS = [
    "-std=c++17",
    "-O3",
    "-Xcompiler=-fPIC,-fvisibility=hidden,-pthread",
    "-gencode=arch=compute_80,code=sm_80",
    "-gencode=arch=compute_90,code=[sm_90,compute_90]",
]


class NotBuilt(Exception):
    """An engine that was left out; the text says why."""


def sources(*patterns: str) -> list[str]:
    return sorted(path for pattern in patterns for path in glob.glob(pattern, root_dir=ROOT))


class BuildEngines(build_ext):
    """Compiles each engine with one command, puts it in place in one step, and never half."""

    def build_extension(self, ext: Extension) -> None:
        name = ext.name.rpartition("._")[2]
        wanted = os.environ.get(f"ZEROELASTIC_BUILD_{name.upper()}", "")
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        log = target.with_suffix(".log")
        try:
            if wanted == "0":
                raise NotBuilt(f"ZEROELASTIC_BUILD_{name.upper()}=0 was set when the package was built")
            command = self.cpp_command(ext) if name == "native" else self.cuda_command(ext)
            made = target.with_suffix(f".{os.getpid()}.tmp")
            try:
                text = compile_library([*command, "-o", str(made)])
                os.replace(made, target)
            finally:
                made.unlink(missing_ok=True)
            log.write_text(f"built: {shlex.join(command)}\n{text}", encoding="utf-8")
        except NotBuilt as reason:
            target.unlink(missing_ok=True)
            log.write_text(f"{reason}\n", encoding="utf-8")
            if wanted == "1":
                raise SystemExit(f"zeroelastic: the {name} engine was not built: {reason}") from None
            if wanted != "0" and (name == "native" or shutil.which("nvcc")):
                self.warn(f"zeroelastic goes without its {name} engine: {str(reason).splitlines()[0]}")

    def cpp_command(self, ext: Extension) -> list[str]:
        compiler = find_cpp_compiler()
        flags = [*CPP_FLAGS, *shlex.split(os.environ.get("CXXFLAGS", ""))]
        return [*compiler, *flags, "-shared", *ext.sources, *shlex.split(os.environ.get("LDFLAGS", ""))]

    def cuda_command(self, ext: Extension) -> list[str]:
        nvcc = shutil.which("nvcc")
        if nvcc is None:
            raise NotBuilt("there was no nvcc on the PATH when the package was built")
        return [nvcc, *CUDA_FLAGS, "-shared", *ext.sources]

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")).with_suffix(".so"))

    def copy_extensions_to_source(self) -> None:
        # Never into the file itself: a running process may have it in use.
        package = ROOT / "zeroelastic"
        for ext in self.extensions:
            built = Path(self.build_lib, self.get_ext_filename(ext.name))
            for made in (built, built.with_suffix(".log")):
                target = package / made.name
                if made.exists():
                    copy = target.with_suffix(f".{os.getpid()}.tmp")
                    shutil.copy2(made, copy)
                    os.replace(copy, target)
                else:
                    target.unlink(missing_ok=True)


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


def compile_library(command: list[str]) -> str:
    """Run the compiler; returns what it said. Raises NotBuilt with the first error and the rest below."""
    sys.stderr.write(f"{shlex.join(command)}\n")
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        raise NotBuilt(f"{command[0]} cannot be run: {error.strerror}") from None
    said = done.stdout + done.stderr
    if done.returncode:
        errors = [line for line in said.splitlines() if "error" in line]
        first = f": {errors[0]}" if errors else ""
        raise NotBuilt(f"{command[0]} failed with exit code {done.returncode}{first}\n{shlex.join(command)}\n{said}")
    sys.stderr.write(said)
    return said


def engine(name: str, *patterns: str, without: str = "") -> Extension:
    headers = sources("csrc/*.h", "csrc/cuda/*.h", "csrc/cuda/*.cuh")
    files = [path for path in sources(*patterns) if path != without]
    return Extension(f"zeroelastic._{name}", files, depends=headers, optional=True)


# The CUDA library reads files by the code of the native one, of which it has a copy; its C interface is its own.
setup(
    ext_modules=[
        engine("native", "csrc/*.cpp"),
        engine("cuda", "csrc/*.cpp", "csrc/cuda/*.cu", "csrc/cuda/*.cpp", without="csrc/api.cpp"),
    ],
    cmdclass={"build_ext": BuildEngines},
)
