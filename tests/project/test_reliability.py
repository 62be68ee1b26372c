"""docs/reliability.md names tests, targets and raw results that exist."""

from __future__ import annotations

import re

from places import ROOT

PAGE = ROOT / "docs" / "reliability.md"


def test_the_page_names_tests_targets_and_results_that_exist() -> None:
    page = PAGE.read_text()
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", page)
    assert len(named) >= 50
    modules = {path.name: path for path in (ROOT / "tests").rglob("test_*.py")}
    for file, name in set(named):
        assert re.search(rf"^def {name}\(", modules[file].read_text(), re.MULTILINE), f"{file}::{name}"
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"`make ([\w-]+)`", page)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    for result in re.findall(r"\(\.\./(benchmarks/results/[^)]*)\)", page):
        assert (ROOT / result).exists(), result
