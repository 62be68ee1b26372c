"""docs/architecture.md names files, functions and packages that exist, in the order that the imports obey."""

from __future__ import annotations

import ast
import re
import sys
from functools import cache
from pathlib import Path

import pytest
from places import ROOT

sys.path.insert(0, str(ROOT / "docs/tools"))
from drawings import WALKS

PAGE = ROOT / "docs" / "architecture.md"
TEXT = PAGE.read_text()
LINKS = re.findall(r"\[`([^`]+)`\]\(([^)]+)\)", TEXT)
"""Each link whose text is code: (the name, the path relative to the page)."""


@cache
def defined(path: Path) -> frozenset[str]:
    """The names at the top level of a Python file, and the methods of its classes as ``Class.method``."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        match node:
            case ast.ClassDef():
                found.add(node.name)
                found |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                found.add(node.name)
            case ast.Assign():
                found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
            case ast.AnnAssign(target=ast.Name(id=name)):
                found.add(name)
    return frozenset(found)


def problem(name: str, link: str) -> str:
    """What is wrong with a link to code; empty when the file is there and is, or defines, what the text names."""
    path = (PAGE.parent / link).resolve()
    if not path.exists():
        return f"{link} does not exist"
    place = path.parent if path.name in ("__init__.py", "zeroelastic.h") else path
    if str(place).endswith(f"/{name.rstrip('/')}"):
        return ""
    if path.suffix == ".cpp":
        return "" if re.search(rf"\b{name}\(", path.read_text()) else f"{link} does not define {name}"
    if path.suffix != ".py":
        return f"{link} is not {name}"
    inside = name.rpartition("/")[2].removeprefix(f"{path.stem}.")
    return "" if inside in defined(path) else f"{link} does not define {inside}"


@pytest.mark.parametrize(("name", "link"), sorted(set(LINKS)))
def test_every_name_on_the_page_is_defined_where_it_links_to(name: str, link: str) -> None:
    assert not problem(name, link)


def test_the_drawing_shows_only_stops_of_the_page() -> None:
    boxes = {stop for stops in WALKS.values() for stop in stops}
    assert len(boxes) >= 20 and "assets/walk.svg" in TEXT
    assert boxes <= {part for name, _ in LINKS for part in re.split(r"[./]", name)}
