"""The pages of docs as the site has them: ``stage(directory)`` writes them where the site generator finds them.

The pages of docs are plain Markdown that a code host shows as it is. Here they become pages of a site that needs no
network and no repository beside it:

* a file of the repository that a page links to becomes a page of its own, so that no link leaves the site;
* a drawing becomes a part of its page, so that it follows the page's light and dark colours;
* the first use of a word of the glossary on each page is a link to it;
* an option of a command line, such as `--html`, gets a class, by which it stays on one line;
* every page gets a description for search engines and link previews: the beginning of its first paragraph.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from drawings import inline

REPOSITORY = Path(__file__).resolve().parents[2]
DOCS = REPOSITORY / "docs"

PLACES = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "benchmarks/README.md": "benchmarks.md",
}
"""Pages that are not below docs -> where the site has them."""

LANGUAGES = {".py": "python", ".cpp": "cpp", ".h": "cpp", ".cu": "cpp", ".cuh": "cpp", ".json": "json", ".yaml": "yaml"}
PICTURES = (".png", ".svg")
"""Files that are copied as they are."""

LARGEST = 200_000
"""A file with more characters is cut off: raw results have megabytes."""

_FENCE = re.compile(r"^(`{3,}|~{3,}).*?^\1$", flags=re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(!?\[(?:[^\[\]]|\[[^\]]*\])*\])\((?!\w+:)([^)\s]+)\)")
_UNLINKED = re.compile(
    r"^#.*$|^\|.*$|^:::.*$|^    .*$|`[^`\n]*`|\[(?:[^\[\]]|\[[^\]]*\])*\]\([^)]*\)|<[^>]*>", flags=re.MULTILINE
)
_OPTION = re.compile(r"(?<!`)`--?[^`\s]+`(?!`)")
_DESCRIPTION = 200


class MissingTargetError(Exception):
    """A link to a file that the repository does not have."""


def stage(directory: Path) -> None:
    """Write the pages and their files into a directory. Raises MissingTargetError.

    A file that is there and has not changed is not written, so that a server which follows the directory builds only
    what changed. What is there and belongs to no page is removed.
    """
    made = directory.with_name(f"{directory.name}.new")
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir(parents=True)
    _write(made)
    for path in sorted(directory.rglob("*")) if directory.exists() else ():
        if path.is_file() and not (made / path.relative_to(directory)).is_file():
            path.unlink()
    for path in sorted(made.rglob("*")):
        target = directory / path.relative_to(made)
        if path.is_file() and not (target.is_file() and target.read_bytes() == path.read_bytes()):
            target.parent.mkdir(parents=True, exist_ok=True)
            path.replace(target)
    shutil.rmtree(made)


def _write(directory: Path) -> None:
    """Write all pages and files into an empty directory."""
    words, drawings = glossary(), inline()
    shutil.copytree(DOCS / "assets", directory / "assets")
    shutil.copytree(DOCS / "schemas", directory / "schemas")
    (directory / "schemas/index.md").write_text(list_of_schemas())
    todo = [*sorted(DOCS.rglob("*.md")), *(REPOSITORY / name for name in PLACES)]
    done: set[Path] = set()
    while todo:
        source = todo.pop()
        if source in done:
            continue
        done.add(source)
        target = directory / place(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        if is_page(source):
            text = source.read_text()
            text = outside_code(text, lambda part, source=source: with_links(part, source, todo))
            text = outside_code(text, lambda part: re.sub(r"<!--.*?-->\n?", "", part, flags=re.DOTALL))
            if target.relative_to(directory) != Path("glossary.md") and "source" not in target.parts:
                text = with_glossary(text, words, os.path.relpath(directory / "glossary.md", target.parent))
            text = outside_code(text, lambda part: with_drawings(part, drawings))
            head = front_matter(text, listed="source" not in target.parts)
            target.write_text(head + outside_code(text, lambda part: _OPTION.sub(r"\g<0>{ .option }", part)))
        elif source.suffix in PICTURES:
            shutil.copy(source, target)
        else:
            target.write_text(as_page(source))


def is_page(source: Path) -> bool:
    """Whether a file is Markdown, which the site shows as a page."""
    return source.suffix == ".md" and source.is_file()


def place(source: Path) -> Path:
    """Where the site has a file of the repository, from the root of the site."""
    if source.is_relative_to(DOCS):
        return source.relative_to(DOCS)
    name = str(source.relative_to(REPOSITORY))
    if name in PLACES:
        return Path(PLACES[name])
    return Path("source") / (name if source.suffix in (".md", *PICTURES) else f"{name}.md")


def outside_code(text: str, change: Callable[[str], str]) -> str:
    """A page with everything but its code blocks changed."""
    parts, end = [], 0
    for fence in _FENCE.finditer(text):
        parts += [change(text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, change(text[end:])])


def with_links(text: str, source: Path, todo: list[Path]) -> str:
    """Links as they are on the site; files that it has to have, because a page links to them, are added to ``todo``."""

    def moved(match: re.Match[str]) -> str:
        path, mark, anchor = match[2].partition("#")
        if not path:
            return match[0]
        target = (source.parent / path).resolve()
        if not target.exists():
            raise MissingTargetError(f"{source.relative_to(REPOSITORY)}: {match[2]} does not exist")
        if target == DOCS / "schemas":
            target = target / "index.md"
        if target.is_relative_to(DOCS / "assets") or target.is_relative_to(DOCS / "schemas"):
            found = target.relative_to(DOCS)
        else:
            todo.append(target)
            found = place(target)
        return f"{match[1]}({os.path.relpath(found, place(source).parent)}{mark}{anchor})"

    return _LINK.sub(moved, text)


def with_drawings(text: str, drawings: dict[str, str]) -> str:
    """A page with its drawings in it; a picture that is no drawing stays a link."""

    def drawn(match: re.Match[str]) -> str:
        svg = drawings.get(Path(match[2]).name)
        return match[0] if svg is None or not match[1].startswith("!") else re.sub(r"\n+", "\n", svg).strip()

    return _LINK.sub(drawn, text)


def glossary() -> dict[str, str]:
    """Word of the glossary -> its anchor; several words may have one, as "sub-group / sub-groups"."""
    found = {}
    for heading in re.findall(r"^## (.+)$", (DOCS / "glossary.md").read_text(), flags=re.MULTILINE):
        anchor = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        found.update({word: anchor for word in re.split(r", | / ", heading.lower())})
    return found


def with_glossary(text: str, words: dict[str, str], page: str) -> str:
    """A page whose first use of each word in running text is a link to the glossary."""
    for word, anchor in words.items():
        blank = _FENCE.sub(lambda match: " " * len(match[0]), text)
        blank = _UNLINKED.sub(lambda match: " " * len(match[0]), blank)
        if re.search(rf"\[[^\]]*\]\([^)]*glossary\.md#{re.escape(anchor)}\)", text):
            continue
        first = re.search(rf"(?<![\w-]){re.escape(word)}s?(?![\w-])", blank, flags=re.IGNORECASE)
        if first is not None:
            at, end = first.span()
            text = f"{text[:at]}[{text[at:end]}]({page}#{anchor}){text[end:]}"
    return text


def front_matter(text: str, *, listed: bool) -> str:
    """The head of a page for the generator; a page that is not listed stays out of the search."""
    head = f"---\ndescription: {json.dumps(description(text))}\n"
    return head + ("" if listed else "search:\n  exclude: true\n") + "---\n\n"


def description(text: str) -> str:
    """The beginning of the first paragraph, as plain text."""
    text = re.sub(r"<svg.*?</svg>", "", _FENCE.sub("", text), flags=re.DOTALL)
    paragraphs = [part.strip() for part in re.split(r"\n{2,}", text)]
    first = next((part for part in paragraphs if part and part[0] not in "#|!<>-*"), "")
    plain = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", first)
    plain = " ".join(re.sub(r"[*`]", "", plain).replace('"', "'").split())  # the theme does not escape quotes
    if len(plain) <= _DESCRIPTION:
        return plain
    return plain[:_DESCRIPTION].rpartition(" ")[0] + " ..."


def list_of_schemas() -> str:
    """The page with which the folder of the JSON Schemas begins."""
    text = "# JSON Schemas\n\nOf the document that each verb prints with `--json`, and of the options of a run.\n\n"
    text += "".join(f"* [{path.name}]({path.name})\n" for path in sorted((DOCS / "schemas").glob("*.json")))
    return front_matter(text, listed=True) + text


def as_page(source: Path) -> str:
    """A file that is no Markdown, or a directory, as a page."""
    name = source.relative_to(REPOSITORY)
    head = (
        f"---\ndescription: {json.dumps(f'{name} of the repository.')}\nsearch:\n  exclude: true\n---\n\n# {name}\n\n"
    )
    if source.is_dir():
        names = sorted(path.name + "/" * path.is_dir() for path in source.iterdir() if path.name[0] not in "._")
        return head + "This folder of the repository has\n\n" + "".join(f"* `{path}`\n" for path in names)
    text = source.read_text()
    rest = "" if len(text) <= LARGEST else f"\nThe file has {len(text):,} characters; here are the first.\n"
    return f"{head}{rest}\n~~~~{LANGUAGES.get(source.suffix, 'text')}\n{text[:LARGEST].rstrip()}\n~~~~\n"
