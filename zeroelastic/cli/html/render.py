"""A page as text: one file with its style, its script and its data, which may load nothing from anywhere."""

from __future__ import annotations

import base64
import hashlib
import re
import time
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from zeroelastic._version import __version__
from zeroelastic.cli.html.embed import embedded
from zeroelastic.cli.html.markup import Element, Node, element, raw_text, render
from zeroelastic.cli.html.page import SIGNS, WORDS, Cell, Fact, Figure, Item, Page, Section, Table, Tone

_ON_PAPER = 40  # rows of a table; the style sheet hides the others


def render_page(page: Page, document: Mapping[str, Any]) -> str:
    """The HTML of a page, with the document that it was made from."""
    style, script = (raw_text(_resource(name)) for name in ("style.css", "script.js"))
    data, cut = embedded(document)
    title = f"{page.verb}: {page.title}"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=_policy(style, script)),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("meta", name="referrer", content="no-referrer"),
        element("title", title),
        element("style", style),
    )
    body = element(
        "body",
        element(
            "header",
            element("p", "zeroelastic ", element("strong", page.verb), class_="verb"),
            element("h1", *_breakable(page.title)),
        ),
        element(
            "main",
            _banner(page.tone, page.sentence),
            _facts(page.facts) if page.facts else None,
            *map(_section, page.sections),
            _data_section(page, cut),
        ),
        element(
            "footer",
            element("p", f"Written by zeroelastic {__version__}, {time.strftime('%Y-%m-%d %H:%M:%S %z')}."),
        ),
        element("script", data, type="application/json", id="document"),
        element("script", script),
    )
    return f"<!DOCTYPE html>\n{render(element('html', head, body, lang='en'))}\n"


def _resource(name: str) -> str:
    return (files("zeroelastic.cli.html") / name).read_text(encoding="utf-8")


def _policy(style: str, script: str) -> str:
    """What the page may do: nothing but run its own script in its own style."""
    style_hash, script_hash = (
        base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (style, script)
    )
    return (
        f"default-src 'none'; style-src 'sha256-{style_hash}'; script-src 'sha256-{script_hash}'; "
        "base-uri 'none'; form-action 'none'"
    )


def _sign(tone: Tone) -> Element:
    return element("span", SIGNS[tone], class_=f"tone {tone}", role="img", aria_label=WORDS[tone])


def _banner(tone: Tone, sentence: str) -> Element:
    return element("p", _sign(tone), element("span", *_breakable(sentence)), class_=f"banner {tone}", id="summary")


def _facts(facts: tuple[Fact, ...]) -> Element:
    pairs = (element("div", element("dt", fact.label), element("dd", *_breakable(fact.value))) for fact in facts)
    return element("dl", *pairs, class_="facts")


def _section(section: Section) -> Element:
    return element("section", element("h2", section.heading), *map(_block, section.blocks))


def _block(block: Figure | Table | tuple[Item, ...] | str) -> Element:
    if isinstance(block, str):
        return element("p", block)
    if isinstance(block, Figure):
        return _figure(block)
    if isinstance(block, Table):
        return _table(block)
    return element("ul", *map(_item, block), class_="items")


def _figure(figure: Figure) -> Element:
    return element(
        "figure",
        element("figcaption", figure.name),
        figure.drawing,
        figure.legend,
        *(element("p", note, class_="small") for note in figure.notes),
    )


def _item(item: Item) -> Element:
    details = element("ul", *(element("li", line) for line in item.details)) if item.details else None
    return element("li", _sign(item.tone), element("div", *_breakable(item.text), details))


def _table(table: Table) -> Element:
    heads = (
        element("th", column.title, class_="right" if column.right else None, scope="col") for column in table.columns
    )
    classes = ["right" if column.right else "" for column in table.columns]
    body = (
        element("tr", *(_cell(cell, style) for cell, style in zip(row, classes, strict=True))) for row in table.rows
    )
    shown = len(table.rows)
    notes: list[Node] = []
    if shown < table.total:
        notes.append(element("p", f"The {shown:,} {table.order} of {table.total:,}.", class_="small"))
    if shown > _ON_PAPER:
        notes.append(element("p", f"On paper, the first {_ON_PAPER} of {shown:,} rows.", class_="small only-on-paper"))
    return element(
        "div",
        element("p", table.caption, class_="caption"),
        element(
            "div",
            element(
                "table",
                element("thead", element("tr", *heads)),
                element("tbody", *body),
                aria_label=table.caption,
            ),
            class_="scroll",
            tabindex=0,
            role="region",
            aria_label=f"{table.caption}: table",
        ),
        *notes,
        class_="table",
    )


def _cell(cell: Cell, style: str) -> Element:
    classes = " ".join(part for part in (style, "name" if cell.name else "", cell.tone or "") if part)
    sign = None if cell.tone is None else _sign(cell.tone)
    texts = _breakable(cell.text) if cell.name or cell.tone is not None else [cell.text]
    return element("td", sign, *texts, class_=classes or None)


def _breakable(name: str) -> list[Node]:
    """A name, or text with names, in which a line may end after a slash, an underscore, or a point before a letter."""
    parts = re.split(r"(?<=[/_])|(?<=\.)(?=[A-Za-z])", name)
    return [node for part in parts for node in (part, element("wbr"))][:-1]


def _data_section(page: Page, cut: Mapping[str, int]) -> Element:
    """How to get the data out of the page, and what is not in it."""
    text = f"This page holds the document that zeroelastic {page.verb} --json prints"
    if cut:
        lists = ", ".join(f"{key} ({length:,})" for key, length in cut.items())
        text += f", but of its longest lists only the beginning: {lists}"
    return element(
        "section",
        element("h2", "Data"),
        element("p", f"{text}."),
        element("button", "Save as JSON", type="button", id="save", hidden=True, data_name=f"{page.verb}.json"),
        class_="data",
    )
