"""`zeroelastic doctor --build-cuda`: compiles the CUDA engine of the installed package where nvcc is."""

from __future__ import annotations

import csv
import os
import shutil
import sys
from importlib import metadata
from pathlib import Path

import zeroelastic
from zeroelastic.errors import ConfigError
from zeroelastic.executors.library_build import NotBuilt, build_library, cuda_command, cuda_sources


def build_cuda() -> Path:
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
        first, _, said = str(reason).partition("\n")
        sys.stderr.write(said)
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
