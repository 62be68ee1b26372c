"""Build entry point: the native engines from csrc/; the metadata is in pyproject.toml.

The engines are plain shared libraries that ctypes loads: they include neither Python's nor torch's headers, so that
one wheel serves every version of Python. Both are optional. The native engine needs a C++17 compiler and is built
where there is one: ZEROELASTIC_BUILD_NATIVE=0 skips it, and 1 makes a failed build fatal. The CUDA engine needs nvcc
and takes minutes: it is built only with ZEROELASTIC_BUILD_CUDA=1, or later by ``zeroelastic doctor --build-cuda``. A
log beside each library says what happened. CXX, CXXFLAGS and LDFLAGS are heeded.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import os
import shutil
import zipfile
from pathlib import Path
from types import ModuleType

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel

ROOT = Path(__file__).resolve().parent
CSRC = Path("csrc")


def load(name: str) -> ModuleType:
    """A module of zeroelastic without the package, whose requirements may not be installed yet."""
    spec = importlib.util.spec_from_file_location(Path(name).stem, ROOT / "zeroelastic" / name)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


library_build = load("executors/library_build.py")
activation = load("activation.py")


def relative(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


def engine_sources() -> list[str]:
    """Everything that an engine is compiled from, headers included."""
    patterns = ("*.cpp", "*.h", "cuda/*.cu", "cuda/*.cpp", "cuda/*.h", "cuda/*.cuh")
    return sorted(str(path.relative_to(ROOT)) for pattern in patterns for path in (ROOT / CSRC).glob(pattern))


class BuildEngines(build_ext):
    """Compiles each engine with one command."""

    def build_extension(self, ext: Extension) -> None:
        name = ext.name.rpartition("._")[2]
        variable = f"ZEROELASTIC_BUILD_{name.upper()}"
        wanted = os.environ.get(variable, "")
        target = Path(self.get_ext_fullpath(ext.name)).absolute()
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            if wanted == "0":
                raise library_build.NotBuilt(f"{variable}=0 was set when the package was built")
            if name == "cuda" and wanted != "1":
                raise library_build.NotBuilt(f"{variable}=1 was not set when the package was built")
            make_command = library_build.cpp_command if name == "native" else library_build.cuda_command
            library_build.build_library(make_command(ext.sources), target, directory=ROOT)
        except library_build.NotBuilt as reason:
            target.unlink(missing_ok=True)
            library_build.write_log(target, f"{reason}\n")
            if wanted == "1":
                raise SystemExit(f"zeroelastic: the {name} engine was not built: {reason}") from None
            if name == "native" and wanted != "0":
                self.warn(f"zeroelastic goes without its {name} engine: {str(reason).splitlines()[0]}")

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


class BuildPackage(build_py):
    """The package with the sources of the engines, for ``zeroelastic doctor --build-cuda``, and the file beside it."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for source, target in self._copied().items():
                self.mkpath(str(Path(target).parent))
                self.copy_file(source, target)
            self._activation.write_text(activation.LINE)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        added = [] if self.editable_mode else [*self._copied().values(), str(self._activation)]
        return [*super().get_outputs(include_bytecode), *added]

    def _copied(self) -> dict[str, str]:
        """The sources of the engines, and their places in the wheel: csrc/* goes into zeroelastic/csrc."""
        return {source: str(Path(self.build_lib, "zeroelastic", source)) for source in engine_sources()}

    @property
    def _activation(self) -> Path:
        return Path(self.build_lib, activation.FILE)


class EditableWheel(editable_wheel):
    """The wheel of ``pip install -e``, which has modules alone by itself, with the activation."""

    def run(self) -> None:
        super().run()
        (wheel,) = Path(self.dist_dir).glob("zeroelastic-*.editable-*.whl")
        add_to_wheel(wheel, activation.FILE, activation.LINE.encode())


def add_to_wheel(wheel: Path, name: str, content: bytes) -> None:
    """Add a file to a wheel and to its RECORD, by which it is removed with the package."""
    with zipfile.ZipFile(wheel) as archive:
        members = [(info, archive.read(info)) for info in archive.infolist()]
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, content)
        for info, data in members:
            line = f"{name},sha256={digest},{len(content)}\n" if info.filename.endswith(".dist-info/RECORD") else ""
            archive.writestr(info, data + line.encode())


class WheelOfEveryPython(bdist_wheel):
    """Tagged py3-none-PLATFORM: it has machine code, and no code that knows a version of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


def man_pages() -> list[tuple[str, list[str]]]:
    """The pages that `make man` has written, if it has, for ``man zeroelastic`` in the environment of the package."""
    pages = relative(sorted(ROOT.glob("man/*.1")))
    return [("share/man/man1", pages)] if pages else []


def engine(name: str, sources: list[Path]) -> Extension:
    return Extension(f"zeroelastic._{name}", relative(sources), depends=engine_sources(), optional=True)


setup(
    ext_modules=[
        engine("native", library_build.native_sources(ROOT / CSRC)),
        engine("cuda", library_build.cuda_sources(ROOT / CSRC)),
    ],
    cmdclass={
        "build_ext": BuildEngines,
        "build_py": BuildPackage,
        "bdist_wheel": WheelOfEveryPython,
        "editable_wheel": EditableWheel,
    },
    data_files=man_pages(),
)
