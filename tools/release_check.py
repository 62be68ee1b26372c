"""What has to hold before a tag is pushed (RELEASING.md): make release-check.

From a clean clone: the wheel and the source distribution are built; every Python that is at hand installs the wheel in
an empty environment and verifies a checkpoint with it; the quickstart runs from the wheel, with torch and DeepSpeed
beside it. Prints what was done; exits with 1 at the first thing that is wrong.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
TRAIN = ("torch", "numpy", "setuptools", "wheel", "packaging", "ninja", "psutil", "py-cpuinfo", "pydantic")
CPU = "https://download.pytorch.org/whl/cpu"


def fail(what: str) -> None:
    sys.exit(f"release-check: {what}")


def run(*command: str | Path, cwd: Path, **env: str) -> str:
    """The output of a command, which has to succeed."""
    done = subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        env={**{k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "MAKE"))}, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=3600,
    )
    if done.returncode:
        fail(f"{' '.join(map(str, command))} failed:\n{done.stdout[-4000:]}")
    return done.stdout


def check_version() -> str:
    """The version, which the changelog has with a date and no tag has yet."""
    version = re.search(r'__version__ = "(.+)"', (ROOT / "zeroelastic" / "_version.py").read_text())
    if version is None:
        fail("zeroelastic/_version.py has no version")
        raise AssertionError
    if not re.search(
        rf"^## \[{re.escape(version[1])}\] - \d{{4}}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text(), re.M
    ):
        fail(f"CHANGELOG.md has no section for {version[1]} with a date")
    if f"v{version[1]}" in run("git", "tag", "--list", cwd=ROOT).split() and not os.environ.get("GITHUB_REF_NAME"):
        fail(f"the tag v{version[1]} exists")
    if run("git", "status", "--porcelain", cwd=ROOT).strip():
        fail("there are changes that are not committed")
    return version[1]


def environment(python: str, folder: Path) -> Path:
    """An empty environment; the folder of its programs."""
    run(python, "-m", "venv", folder, cwd=folder.parent)
    return folder / "bin"


def quickstart(page: str) -> list[tuple[str, str]]:
    """The code of a page: (language, text) of each block."""
    return re.findall(r"^```(\w+)\n(.*?)^```$", page, re.M | re.S)


def run_quickstart(programs: Path, folder: Path, clone: Path) -> int:
    """Run the quickstart's blocks but for the installation; how many commands ran."""
    env = {"PATH": f"{programs}:{os.environ['PATH']}", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    count = 0
    for language, text in quickstart((clone / "docs" / "start" / "quickstart.md").read_text()):
        name = re.match(r"# (\S+\.py)\n", text)
        if language == "python" and name:
            (folder / name[1]).write_text(text)
        elif language == "python":
            run(programs / "python", "-c", text, cwd=folder, **env)
            count += 1
        elif language == "bash":
            for line in text.splitlines():
                if line and not line.startswith(("pip ", "#")):
                    run("bash", "-c", line, cwd=folder, **env)
                    count += 1
    return count


def main() -> None:
    began = time.monotonic()
    version = check_version()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        clone = folder / "clone"
        run("git", "clone", "--quiet", ROOT, clone, cwd=folder)
        run("make", "dist", cwd=clone)
        (wheel,) = (clone / "dist").glob(f"zeroelastic-{version}-*_{os.uname().machine}.whl")
        (source,) = (clone / "dist").glob(f"zeroelastic-{version}.tar.gz")
        print(f"built {wheel.name} and {source.name} in a clean clone")
        golden = sorted((clone / "tests" / "golden").glob("*/global_step*"))[0]
        tested = []
        for name in PYTHONS:
            python = shutil.which(f"python{name}")
            if python is None:
                continue
            programs = environment(python, folder / f"python{name}")
            run(programs / "pip", "install", "-q", wheel, cwd=folder)
            if version not in run(programs / "zeroelastic", "--version", cwd=folder):
                fail(f"zeroelastic --version on Python {name} does not say {version}")
            run(programs / "zeroelastic", "verify", golden, cwd=folder)
            tested.append(name)
        if not tested:
            fail(f"none of python{', python'.join(PYTHONS)} is on the path")
        print(f"the wheel verifies a checkpoint in empty environments of Python {', '.join(tested)}")
        programs, constraints = environment(sys.executable, folder / "train"), clone / "constraints.txt"
        pip = programs / "pip", "install", "-q", "-c", constraints
        run(*pip, "--extra-index-url", CPU, *TRAIN, cwd=folder)
        run(*pip, "--no-build-isolation", "deepspeed", cwd=folder, DS_BUILD_OPS="0")
        run(*pip, f"{wheel}[train]", cwd=folder)
        place = folder / "quickstart"
        place.mkdir()
        print(f"the quickstart runs from the wheel: {run_quickstart(programs, place, clone)} commands")
    print(f"release-check: {version} is ready, after {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
