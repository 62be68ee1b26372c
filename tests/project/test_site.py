"""`make docs`: the site builds without a warning, every link works, and everything is there without a network."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from environments import made_once
from places import ROOT

pytest.importorskip("zensical", reason="the generator of the site needs Python 3.11")


class Page(HTMLParser):
    """A page of the built site: its elements with their attributes, and its title."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path, self.title, self._in_title = path, "", False
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.feed(path.read_text())
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attributes}))
        self._in_title = tag == "title" and not self.title  # drawings have titles, too

    def handle_endtag(self, tag: str) -> None:
        self._in_title = False

    def handle_data(self, data: str) -> None:
        if self._in_title:
            self.title += data

    def all(self, attribute: str, *tags: str) -> list[str]:
        """The values of an attribute, of every element or of those with these tags."""
        return [found[attribute] for tag, found in self.elements if attribute in found and (not tags or tag in tags)]

    @property
    def loaded(self) -> list[str]:
        """Scripts, styles and pictures that a browser fetches by itself."""
        links = [found for tag, found in self.elements if tag == "link"]
        styles = [found.get("href", "") for found in links if found.get("rel") not in ("canonical", "next", "prev")]
        return [*styles, *self.all("src", "script", "iframe", "source", "img")]


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
    found = {str(path.relative_to(site)): Page(path) for path in sorted(site.rglob("*.html"))}
    assert len(found) > 100
    return found


def test_every_page_of_the_docs_is_on_the_site_and_in_its_navigation(pages: dict[str, Page]) -> None:
    expected = {str(path.relative_to(ROOT / "docs").with_suffix(".html")) for path in (ROOT / "docs").rglob("*.md")}
    assert expected <= set(pages)
    navigation = set(re.findall(r'"([\w/.-]+)\.md"', (ROOT / "zensical.toml").read_text()))
    assert {f"{name}.html" for name in navigation} >= expected


def test_every_link_leads_to_a_file_and_to_a_place_in_it(pages: dict[str, Page], site: Path) -> None:
    broken, inside = [], 0
    ids = {name: {*page.all("id")} for name, page in pages.items()}
    for name, page in pages.items():
        if name == "404.html":  # its links are those of a server's root
            continue
        for link in {*page.all("href", "a"), *page.loaded}:
            if re.match(r"[a-z]+:", link) or not link:
                continue
            path, _, anchor = link.partition("#")
            target = (page.path.parent / path.partition("?")[0]).resolve() if path else page.path
            inside += 1
            if not target.is_file() or not target.is_relative_to(site):
                broken.append(f"{name}: {link}")
            elif anchor and anchor not in ids[str(target.relative_to(site))]:
                broken.append(f"{name}: {link} (no such place)")
    assert not broken, broken[:20]
    assert inside > 5000


def test_nothing_is_loaded_from_other_servers(pages: dict[str, Page], site: Path) -> None:
    for name, page in pages.items():
        assert not [link for link in page.loaded if re.match(r"(https?:)?//", link)], name
        classes = " ".join(page.all("class")).split()
        assert "mermaid" not in classes, f"{name}: the script that draws these is fetched from another server"
    styles = "".join(path.read_text() for path in site.rglob("*.css"))
    assert not re.findall(r"url\(['\"]?(?:https?:)?//[^)]*\)|@import", styles)


def test_the_search_works_where_the_site_is_opened_as_files(pages: dict[str, Page], site: Path) -> None:
    """There the index is a script, and a frame takes the place of the worker before the theme's script starts one."""
    assert (site / "search.js").read_text().startswith("var __index = {")
    for name, page in pages.items():
        scripts = [Path(link).name for link in page.all("src", "script")]
        assert scripts[0] == "iframe-worker.js", f"{name}: {scripts}"


def test_every_page_has_a_title_a_description_and_headings_in_order(pages: dict[str, Page]) -> None:
    titles: dict[str, str] = {}
    for name, page in pages.items():
        if name == "404.html":
            continue
        assert page.all("lang", "html") == ["en"], name
        assert page.title.strip(), name
        assert titles.setdefault(page.title, name) == name, f"{name} and {titles[page.title]} have one title"
        descriptions = [found["content"] for tag, found in page.elements if found.get("name") == "description"]
        assert [20 <= len(text) <= 210 for text in descriptions] == [True], f"{name}: {descriptions}"
        levels = [int(tag[1]) for tag, _ in page.elements if re.fullmatch("h[1-6]", tag)]
        assert levels.count(1) == 1 and levels[0] == 1, f"{name}: {levels}"
        assert all(after <= before + 1 for before, after in pairwise(levels)), f"{name}: {levels}"
        ids = page.all("id")
        assert len(ids) == len(set(ids)), f"{name}: {[i for i in ids if ids.count(i) > 1][:5]}"


def test_every_picture_has_a_text(pages: dict[str, Page]) -> None:
    drawn = 0
    for name, page in pages.items():
        assert all(found.get("alt", "").strip() for tag, found in page.elements if tag == "img"), name
        for tag, drawing in page.elements:
            if tag != "svg" or "zd" not in drawing.get("class", "").split():
                continue
            named = drawing.get("aria-labelledby", "").split()
            assert drawing.get("role") == "img" and named and set(named) <= set(page.all("id")), name
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
