"""The code blocks of the documentation, and how to run their commands."""

from __future__ import annotations

import json
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from places import ROOT

# What a process says that torch ends when the script is done: a gloo thread that still holds a tensor asks for the
# interpreter when there is none any more. Rare, and the same without zeroelastic; such a command is run once more.
ABORT_AT_EXIT = "terminate called without an active exception"


@dataclass(frozen=True)
class Block:
    language: str
    text: str


def blocks(document: str) -> list[Block]:
    found = re.findall(r"^```(\w+)\n(.*?)^```$", (ROOT / document).read_text(), flags=re.DOTALL | re.MULTILINE)
    return [Block(language, text) for language, text in found]


def pages() -> list[str]:
    """Every page below docs, by its path from the root of the repository."""
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))


def links(document: str) -> list[str]:
    """The targets of the links and pictures of a page within the repository, as they are written."""
    text = re.sub(r"^```.*?^```$", "", (ROOT / document).read_text(), flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"\]\((?!\w+:)([^)\s]+)\)", text)


def anchors(path: Path) -> set[str]:
    """What a link may have behind its #: the headings of a page as code hosts and the site number them."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+?)\s*$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def verb_section(verb: str) -> str:
    """What the page of the command line says of a verb."""
    return (ROOT / "docs/reference/cli.md").read_text().split(f"\n## {verb}\n")[1].split("\n## ")[0]


def documented_keys(verb: str) -> set[str]:
    """The keys whose meaning stands in the schema of the document that a verb prints with --json."""
    meanings: dict[str, dict[str, str]] = json.loads((ROOT / "docs/tools/keys.json").read_text())
    assert all(meanings[verb].values())
    return set(meanings[verb])


def zero_block(document: str) -> dict[str, object]:
    """``zero_optimization`` in the only JSON block of a page."""
    (text,) = [block.text for block in blocks(document) if block.language == "json"]
    zero: dict[str, object] = json.loads(text)["zero_optimization"]
    return zero


def run(arguments: list[str], directory: Path, *, python: str) -> str:
    """What ``python`` with these arguments prints, and with the same for the ranks that it starts."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    environment["PYTHON_EXEC"] = python
    command = [python, *arguments]
    for _ in range(2):
        result = subprocess.run(
            command, cwd=directory, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        if result.returncode == 0 or ABORT_AT_EXIT not in result.stderr:
            break
    assert result.returncode == 0, f"{command}\n{result.stdout[-2000:]}\n{result.stderr[-4000:]}"
    return result.stdout
