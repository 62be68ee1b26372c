"""`make docs`: the site builds without a warning, every link works, and everything is there without a network."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

import pytest
from environments import made_once
from places import ROOT

pytest.importorskip("zensical", reason="the generator of the site needs Python 3.11")

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


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built from a copy of the working tree; a warning fails."""
    return made_once(tmp_path_factory, "site", build_from_copy) / "site"


def build_from_copy(copy: Path) -> None:
    tracked = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=True,
    ).stdout.splitlines()  # fmt: skip
    for name in tracked:
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
    done = build(copy)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def build(copy: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, copy / "docs/tools/build_site.py", "build"]
    return subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="session")
def pages(site: Path) -> dict[str, Page]:
    """Every page by its path from the root of the site, those of the repository's files included."""
    found = {str(path.relative_to(site)): read_page(path) for path in sorted(site.rglob("*.html"))}
    assert len(found) > 100
    return found


def test_every_page_of_the_docs_is_on_the_site_and_in_its_navigation(pages: dict[str, Page]) -> None:
    expected = {str(path.relative_to(ROOT / "docs").with_suffix(".html")) for path in (ROOT / "docs").rglob("*.md")}
    assert expected <= set(pages)
    navigation = set(re.findall(r'"([\w/.-]+)\.md"', (ROOT / "zensical.toml").read_text()))
    assert {f"{name}.html" for name in navigation} >= expected


def test_every_link_leads_to_a_file_and_to_a_place_in_it(pages: dict[str, Page], site: Path) -> None:
    broken, inside = [], 0
    for name, page in pages.items():
        if name == "404.html":  # its links are those of a server's root
            continue
        for link in {*page.links, *page.loaded}:
            if re.match(r"[a-z]+:", link) or not link:
                continue
            path, _, anchor = link.partition("#")
            target = (page.path.parent / path.partition("?")[0]).resolve() if path else page.path
            inside += 1
            if not target.is_file() or not target.is_relative_to(site):
                broken.append(f"{name}: {link}")
            elif anchor and anchor not in pages[str(target.relative_to(site))].ids:
                broken.append(f"{name}: {link} (no such place)")
    assert not broken, broken[:20]
    assert inside > 5000


def test_nothing_is_loaded_from_other_servers(pages: dict[str, Page], site: Path) -> None:
    for name, page in pages.items():
        assert not [link for link in page.loaded if re.match(r"(https?:)?//", link)], name
        assert "mermaid" not in page.classes, f"{name}: the script that draws these is fetched from another server"
    styles = "".join(path.read_text() for path in site.rglob("*.css"))
    assert not re.findall(r"url\(['\"]?(?:https?:)?//[^)]*\)|@import", styles)


def test_every_page_has_a_title_a_description_and_headings_in_order(pages: dict[str, Page]) -> None:
    titles: dict[str, str] = {}
    for name, page in pages.items():
        if name == "404.html":
            continue
        assert page.language == "en", name
        assert page.title.strip(), name
        assert titles.setdefault(page.title, name) == name, f"{name} and {titles[page.title]} have one title"
        assert 20 <= len(page.description) <= 210, f"{name}: {page.description!r}"
        levels = [level for level, _ in page.headings]
        assert levels.count(1) == 1 and levels[0] == 1, f"{name}: {page.headings[:3]}"
        jumps = [(a, b) for a, b in zip(page.headings, page.headings[1:], strict=False) if b[0] > a[0] + 1]
        assert not jumps, f"{name}: {jumps}"
        assert len(page.ids) == len(set(page.ids)), f"{name}: {[i for i in page.ids if page.ids.count(i) > 1][:5]}"


def test_every_picture_has_a_text(pages: dict[str, Page]) -> None:
    drawn = 0
    for name, page in pages.items():
        assert not page.pictures_without_text, name
        for drawing in page.drawings:
            named = drawing.get("aria-labelledby", "").split()
            assert drawing.get("role") == "img" and named and set(named) <= set(page.ids), name
            drawn += 1
    assert drawn >= 7


def test_the_api_has_types_and_every_public_function(site: Path) -> None:
    html = (site / "reference/library.html").read_text()
    import zeroelastic

    functions = [name for name in zeroelastic.__all__ if name[0].islower() and not name.startswith("_")]
    headings = set(re.findall(r'<h3 id="[\w.]*?(\w+)"', html))
    assert set(functions) <= headings, set(functions) - headings
    assert "world_size" in html and "ResumeReport" in html and "::</p>" not in html


def test_a_broken_link_fails_the_build(tmp_path: Path) -> None:
    """With the settings of the site but its navigation; one page, so that it is quick."""
    shutil.copytree(ROOT / "docs/tools", tmp_path / "docs/tools")
    settings = re.sub(r"^nav = \[.*?^\]$", "", (ROOT / "zensical.toml").read_text(), flags=re.DOTALL | re.MULTILINE)
    (tmp_path / "zensical.toml").write_text(settings)
    page = tmp_path / "build/pages/index.md"
    page.parent.mkdir(parents=True)
    for text, status in (("[there](#one)", 0), ("[lost](#two)", 1), ("[lost](two.md)", 1)):
        page.write_text(f"# Page\n\n## One\n\n{text}\n")
        program = "import build_site; raise SystemExit(build_site.generator('build', '--strict', '--clean'))"
        environment = {**os.environ, "PYTHONPATH": f"{tmp_path / 'docs/tools'}{os.pathsep}{ROOT}"}
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == status, f"{text}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
