"""The code blocks of the documentation, and how to run their commands."""

from __future__ import annotations

import re
from pathlib import Path

from places import ROOT


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
