"""The wheel of `make dist`: its tag, its contents, and that it works without torch in an empty environment."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
import zipfile
from email import message_from_string
from email.message import Message
from pathlib import Path

import pytest
from environments import Environment
from packaging.requirements import Requirement
from places import GOLDEN, ROOT
from programs import copy_sources

from zeroelastic import __version__, activation
from zeroelastic.cli.app import VERBS

NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}
"""Symbol versions that every system of the tag manylinux_2_28 has, by the policy of manylinux."""

SYSTEM_LIBRARIES = {"libc.so.6", "libm.so.6", "libpthread.so.0", "libstdc++.so.6", "libgcc_s.so.1"}


@pytest.fixture(scope="module")
def wheel() -> Path:
    found = sorted((ROOT / "dist").glob(f"*_{os.uname().machine}.whl"))
    if not found and not os.environ.get("CI"):
        pytest.skip("there is no wheel in dist; `make dist` builds it")
    (only,) = found
    return only


def names(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return [name for name in archive.namelist() if not name.endswith("/")]


def read(wheel: Path, ending: str) -> str:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(ending))
        return archive.read(name).decode()


def man_pages() -> list[str]:
    return ["zeroelastic", *(f"zeroelastic-{verb}" for verb in VERBS)]


def metadata(wheel: Path, name: str) -> Message:
    return message_from_string(read(wheel, f".dist-info/{name}"))


def unpack(wheel: Path, name: str, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(name, folder))


def test_it_is_for_every_python_of_most_linux_systems(wheel: Path) -> None:
    tag = f"py3-none-manylinux_2_28_{os.uname().machine}"
    assert wheel.name == f"zeroelastic-{__version__}-{tag}.whl"
    found = metadata(wheel, "WHEEL")
    assert found.get_all("Tag") == [tag] and found["Root-Is-Purelib"] == "false"


def test_the_library_needs_nothing_that_is_newer_than_the_tag(wheel: Path, tmp_path: Path) -> None:
    library = unpack(wheel, "zeroelastic/_native.so", tmp_path)
    shown = subprocess.run(["objdump", "-p", library], capture_output=True, text=True, timeout=60, check=True).stdout
    assert set(re.findall(r"NEEDED +(\S+)", shown)) <= SYSTEM_LIBRARIES
    needed = re.findall(r"0x[0-9a-f]+ 0x[0-9a-f]+ \d+ ([A-Z]+)_([\d.]+)$", shown, flags=re.MULTILINE)
    assert "GLIBC" in dict(needed)
    too_new = [f"{name}_{text}" for name, text in needed if tuple(map(int, text.split("."))) > NEWEST[name]]
    assert not too_new


def test_the_library_runs_on_every_processor_of_its_kind(wheel: Path) -> None:
    """Instruction sets are chosen when it runs; flags that name a processor would use them everywhere."""
    command = read(wheel, "zeroelastic/_native.log").splitlines()[0]
    assert command.startswith("built: ") and not re.search(r" -(march|mtune|mcpu|mavx)", command)


PAGE_FILES = [f"cli/templates/{path.name}" for path in (ROOT / "zeroelastic/cli/templates").iterdir()]


def test_it_has_this_package_and_the_sources_of_the_cuda_engine(wheel: Path, tmp_path: Path) -> None:
    found = set(names(wheel))
    modules = [path for path in (ROOT / "zeroelastic").rglob("*.py") if "__pycache__" not in path.parts]
    sources = [path for path in (ROOT / "csrc").rglob("*") if path.suffix in (".cpp", ".cu", ".cuh", ".h")]
    expected = {str(path.relative_to(ROOT)): path for path in modules}
    for path in sources:
        if not {"tests", "build"} & set(path.relative_to(ROOT).parts):
            expected[f"zeroelastic/{path.relative_to(ROOT)}"] = path
    assert expected.keys() <= found, "files are missing; `make dist` builds the wheel anew"
    with zipfile.ZipFile(wheel) as archive:
        changed = [name for name, path in expected.items() if archive.read(name) != path.read_bytes()]
    assert not changed, "dist has an older wheel; `make dist` builds it anew"
    pages = {f"zeroelastic-{__version__}.data/data/share/man/man1/{page}.1" for page in man_pages()}
    assert pages <= found
    others = {name for name in found - expected.keys() - pages if ".dist-info/" not in name}
    assert others == {
        f"zeroelastic/{name}" for name in ("_native.so", "_native.log", "_cuda.log", "py.typed", *PAGE_FILES)
    } | {activation.FILE}


def test_it_requires_neither_torch_nor_deepspeed_without_an_extra(wheel: Path) -> None:
    requirements = [Requirement(text) for text in metadata(wheel, "METADATA").get_all("Requires-Dist")]

    def required(extra: str) -> set[str]:
        return {one.name for one in requirements if one.marker is None or one.marker.evaluate({"extra": extra})}

    assert required("") == {"numpy", "fsspec", "pydantic", "packaging", "rich", "typer", "jinja2"}
    assert required("train") - required("") == {"torch", "deepspeed"}


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Environment, float]:
    """The environment, with a checkpoint of two ranks that DeepSpeed saved; and the seconds from pip to `inspect`."""
    there = Environment(tmp_path_factory.mktemp("installed"))
    shutil.copytree(GOLDEN / "elastic2", there.work / "ckpt")
    begin = time.monotonic()
    there.output("pip", "install", "-q", "-c", ROOT / "constraints.txt", wheel)
    shown = there.output("zeroelastic", "inspect", "ckpt")
    seconds = time.monotonic() - begin
    assert "2 ranks" in shown
    return there, seconds


@pytest.mark.slow
def test_the_offline_verbs_work_in_an_empty_environment(
    installed: tuple[Environment, float], capsys: pytest.CaptureFixture[str]
) -> None:
    there, seconds = installed
    with capsys.disabled():
        print(
            f"\n{seconds:.1f} s from `pip install` of the wheel to the output of `zeroelastic inspect`", file=sys.stderr
        )
    assert not {"torch", "deepspeed"} & {line.split("==")[0] for line in there.output("pip", "freeze").splitlines()}
    assert there.output("pip", "check")
    assert all((there.folder / f"share/man/man1/{page}.1").is_file() for page in man_pages())
    assert "native     usable" in there.output("zeroelastic", "doctor")
    for verb in (
        "verify ckpt",
        "plan ckpt --world-size 3",
        "reshard ckpt ckpt-3 --world-size 3",
        "reshard ckpt-3 ckpt-2 --world-size 2 --stage 2",
        "verify ckpt-2",
        "diff ckpt ckpt-2",
        "export ckpt weights",
        "latest ckpt",
        "prune ckpt --keep 1",
    ):
        there.output("zeroelastic", *verb.split())


def test_the_activation_lies_where_python_reads_it_and_goes_with_the_package(
    wheel: Path, installed: tuple[Environment, float]
) -> None:
    """The file is in the wheel's root, which pip unpacks into site-packages, and in RECORD."""
    there, _ = installed
    assert re.search(r"^zeroelastic\.pth,sha256=\S+,\d+\r?$", read(wheel, ".dist-info/RECORD"), flags=re.MULTILINE)
    assert (there.site / activation.FILE).read_text() == activation.LINE
    asked = "import sys; print('zeroelastic.activation' in sys.modules, 'numpy' in sys.modules)"
    assert there.output("python", "-c", asked, ZEROELASTIC="1") == "True False\n"
    assert there.output("python", "-c", asked) == "False False\n"


def test_an_editable_install_has_the_activation_and_takes_it_with_it(tmp_path: Path) -> None:
    source = copy_sources(tmp_path / "source")
    there = Environment(tmp_path, "--without-pip", ZEROELASTIC_BUILD_NATIVE="0")
    pip = [sys.executable, "-m", "pip", "-q", "--python", str(there.folder / "bin/python")]
    options = ["--no-deps", "--no-build-isolation", "--ignore-installed"]
    (there.site / "packages.pth").write_text(sysconfig.get_path("purelib") + "\n")  # for setuptools, numpy
    before = sorted(path.name for path in there.site.iterdir())
    subprocess.run([*pip, "install", *options, "-e", source], env=there.env, timeout=300, check=True)
    assert (there.site / activation.FILE).read_text() == activation.LINE
    asked = "import sys; h = sys.modules['zeroelastic.activation']; print(h._finder in sys.meta_path, h.__file__)"
    expected = f"True {source}/zeroelastic/activation.py\n"
    assert there.output("python", "-c", asked, ZEROELASTIC="1") == expected
    subprocess.run([*pip, "uninstall", "-y", "zeroelastic"], env=there.env, timeout=120, check=True)
    assert sorted(path.name for path in there.site.iterdir()) == before


@pytest.mark.slow
def test_what_needs_torch_names_the_extra(installed: tuple[Environment, float]) -> None:
    there, _ = installed
    done = there.run("zeroelastic", "convert", "ckpt", "fsdp", "--to", "fsdp2")
    assert done.returncode == 1 and "pip install 'zeroelastic[train]'" in done.stderr
    code = "import zeroelastic; print(len(zeroelastic.open('ckpt')) > 0); {}"
    for use in ("zeroelastic.install()", "zeroelastic.resume", "import zeroelastic.run", "import zeroelastic.elastic"):
        done = there.run("python", "-c", code.format(use))
        assert done.stdout == "True\n" and "pip install 'zeroelastic[train]'" in done.stderr.splitlines()[-1]
