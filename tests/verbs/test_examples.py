"""The examples in the docstrings of the library, and the code of its page, run on a sample checkpoint."""

from __future__ import annotations

import inspect
import re
import shutil
import textwrap
from pathlib import Path

import pytest
from places import ROOT

import zeroelastic
from zeroelastic.verbs.tensor import TensorHandle
from zeroelastic.verbs.view import CheckpointView

DOCUMENTED = [
    *(getattr(zeroelastic, verb) for verb in ("convert", "diff", "export", "inspect", "latest", "open", "plan")),
    *(getattr(zeroelastic, verb) for verb in ("prune", "reshard", "verify")),
    TensorHandle,
    CheckpointView.optimizer,
]


def example(of: object) -> str:
    """The code after ``Example::`` in a docstring."""
    _, _, after = inspect.getdoc(of).partition("Example::\n\n")
    return textwrap.dedent(re.split(r"\n(?=\S)", after)[0])


@pytest.fixture
def here(samples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(samples / "elastic", tmp_path / "ckpt")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("of", DOCUMENTED, ids=lambda of: of.__qualname__)
def test_the_example_of_a_docstring_runs(here: Path, of: object) -> None:
    code = example(of)
    assert code.startswith("import zeroelastic\n"), "an example can be pasted as it is"
    exec(compile(code, of.__qualname__, "exec"), {})


def test_the_code_of_the_documentation_runs_in_order(here: Path) -> None:
    blocks = re.findall(
        r"^```python\n(.*?)^```$", (ROOT / "docs/reference/library.md").read_text(), flags=re.DOTALL | re.M
    )
    namespace: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "docs/reference/library.md", "exec"), namespace)
    assert len(blocks) >= 3
