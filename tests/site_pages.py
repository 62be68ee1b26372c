"""The built site as tests look at it: its pages, and what is in each of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

EMPTY = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "wbr"}


@dataclass
class Page:
    """What the checks need to know of one page."""

    path: Path
    language: str = ""
    title: str = ""
    description: str = ""
    headings: list[tuple[int, str]] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    links: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    """Scripts, styles and pictures that a browser fetches by itself."""
    pictures_without_text: list[str] = field(default_factory=list)
    drawings: list[dict[str, str]] = field(default_factory=list)
    classes: set[str] = field(default_factory=set)


class _Reader(HTMLParser):
    def __init__(self, page: Page) -> None:
        super().__init__()
        self.page = page
        self.open: list[tuple[str, dict[str, str]]] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attributes}
        page = self.page
        if tag not in EMPTY:
            self.open.append((tag, found))
        if "id" in found:
            page.ids.append(found["id"])
        page.classes |= set(found.get("class", "").split())
        if tag == "html":
            page.language = found.get("lang", "")
        elif tag == "a" and found.get("href"):
            page.links.append(found["href"])
        elif tag == "link" and found.get("rel") not in ("canonical", "next", "prev"):
            page.loaded.append(found.get("href", ""))
        elif tag in ("script", "iframe", "source") and found.get("src"):
            page.loaded.append(found["src"])
        elif tag == "img":
            page.loaded.append(found.get("src", ""))
            if not found.get("alt", "").strip():
                page.pictures_without_text.append(found.get("src", ""))
        elif tag == "meta" and found.get("name") == "description":
            page.description = found.get("content", "")
        elif tag in ("h1", "h2", "h3", "h4", "h5", "h6"):
            page.headings.append((int(tag[1]), ""))
        elif tag == "svg" and "zd" in found.get("class", "").split():
            page.drawings.append(found)

    def handle_endtag(self, tag: str) -> None:
        while self.open and self.open.pop()[0] != tag:
            pass

    def handle_data(self, data: str) -> None:
        tags = [tag for tag, _ in self.open]
        if tags[-1:] == ["title"] and "svg" not in tags:
            self.page.title += data
        if self.page.headings and any(tag[0] == "h" and tag[1:].isdigit() for tag in tags):
            level, text = self.page.headings[-1]
            self.page.headings[-1] = (level, text + data)


def read_page(path: Path) -> Page:
    """One page of the built site."""
    page = Page(path)
    reader = _Reader(page)
    reader.feed(path.read_text())
    reader.close()
    return page
