"""The table of loggers in docs/guides/monitoring.md: every logger of the package, with the levels at which it logs."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from places import ROOT

import zeroelastic

PACKAGE = Path(zeroelastic.__file__).parent
PAGE = ROOT / "docs/guides/monitoring.md"
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
OF_CALLS = {
    "debug": {"DEBUG"},
    "info": {"INFO"},
    "warning": {"WARNING"},
    "error": {"ERROR"},
    "log": {"INFO", "WARNING"},
    "notice": {"INFO"},
    "log_report": {"INFO", "WARNING"},
    "load_and_correct": {"INFO", "WARNING"},
}
"""Methods of a logger, and functions that take one, with the levels at which they log."""


def used(source: str) -> set[str]:
    """The levels at which a module's own logger logs; empty for a module that has none."""
    if "getLogger(__name__)" not in source:
        return set()
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="logger" | "_notices"), attr=name)) if name in OF_CALLS:
                found |= OF_CALLS[name]
            case ast.Call(func=ast.Name(id="notice" | "log_report" | "load_and_correct" as name)):
                found |= OF_CALLS[name]
    assert found, "this module makes a logger and never logs"
    return found


def in_package() -> dict[str, set[str]]:
    paths = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}
    return {name: levels for name, path in paths.items() if (levels := used(path.read_text()))}


def on_page() -> dict[str, set[str]]:
    rows = re.findall(r"^\| `(zeroelastic\.[\w.]+)` \| ([A-Z, ]+) \| \S", PAGE.read_text(), flags=re.MULTILINE)
    return {name: set(levels.split(", ")) for name, levels in rows}


def test_every_logger_is_on_the_page_with_its_levels() -> None:
    assert on_page() == in_package() and len(on_page()) > 30


def test_the_levels_of_a_row_are_in_order() -> None:
    for name, levels in re.findall(
        r"^\| `(zeroelastic\.[\w.]+)` \| ([A-Z, ]+) \|", PAGE.read_text(), flags=re.MULTILINE
    ):
        assert levels.split(", ") == [level for level in LEVELS if level in levels.split(", ")], name


def test_all_loggers_have_the_name_of_their_module() -> None:
    """Besides those of other packages, and the package's own."""
    named = [name for path in PACKAGE.rglob("*.py") for name in re.findall(r"getLogger\(([^)]*)\)", path.read_text())]
    assert set(named) == {"__name__", '"zeroelastic"', '"DeepSpeed"', "record.name"}


def test_the_reader_of_modules_sees_what_they_log() -> None:
    head = "import logging\nlogger = logging.getLogger(__name__)\n"
    assert used(head + "logger.error('x')\nnotice(logger, 'y')") == {"ERROR", "INFO"}
    assert used("print('x')") == set()
    with pytest.raises(AssertionError, match="never logs"):
        used(head)
