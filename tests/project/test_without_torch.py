"""Without torch: what works does, and what needs it says how to install it. The wheel's test shows both for real."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from places import GOLDEN
from programs import run_command

import zeroelastic
from zeroelastic import MissingPackageError

HOW = "which is not installed. Install it: pip install 'zeroelastic[train]'."


@pytest.fixture
def no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zeroelastic.errors.find_spec", lambda name: None)


@pytest.fixture
def ckpt(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / "elastic2", tmp_path / "ckpt"))


def test_a_verb_that_needs_torch_names_the_extra(no_torch: None, ckpt: Path) -> None:
    done = run_command("convert", "ckpt", "fsdp", "--to", "fsdp2", cwd=ckpt.parent)
    assert done.returncode == 1 and f"error: convert --to fsdp2 needs PyTorch, {HOW}" in done.stderr
    assert list(ckpt.parent.iterdir()) == [ckpt], "nothing was written"


def test_a_tensor_of_the_library_becomes_an_array_but_no_torch_tensor(no_torch: None, ckpt: Path) -> None:
    with zeroelastic.open(ckpt) as opened:
        tensor = opened[next(iter(opened))]
        assert tensor.numpy().shape == tensor.shape
        with pytest.raises(MissingPackageError, match=r"^torch\(\) needs PyTorch, .*zeroelastic\[train\]"):
            tensor.torch()


def test_a_module_that_is_run_as_a_program_says_so_in_one_line() -> None:
    script = "import runpy, zeroelastic.errors as errors\nerrors.find_spec = lambda name: None\n"
    script += "runpy.run_module('zeroelastic.run', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (1, f"error: zeroelastic.run needs PyTorch, {HOW}\n")


@pytest.mark.parametrize(
    "code",
    [
        "import zeroelastic.elastic",
        "zeroelastic.resume",
        "import zeroelastic.run",
        "from zeroelastic import resume",
    ],
)
def test_what_needs_torch_names_the_extra_when_it_is_imported(code: str) -> None:
    what = "zeroelastic.run" if code.endswith(".run") else "zeroelastic.elastic"
    script = f"import sys, zeroelastic, zeroelastic.errors as errors\nerrors.find_spec = lambda name: None\n{code}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and done.stderr.endswith(f"MissingPackageError: {what} needs PyTorch, {HOW}\n")
