"""Elements of HTML and SVG as a tree. ``render`` escapes every text and attribute: names in files are hostile input.

    render(element("p", "a < b", class_="note"))   # <p class="note">a &lt; b</p>

What is rendered is HTML that is well-formed XML, too, so that a strict parser can check it.
"""

from __future__ import annotations

import html
from dataclasses import dataclass

from zeroelastic.cli.output.show import printable

_VOID = frozenset({"meta", "wbr"})
_RAW = frozenset({"style", "script"})
"""Elements whose text HTML takes as it is, without entities."""


@dataclass(frozen=True, slots=True)
class Element:
    """An element; ``attributes`` are names as they are written, and values before they are escaped."""

    tag: str
    attributes: tuple[tuple[str, str], ...]
    children: tuple[Element | str, ...]


Node = Element | str


def element(tag: str, *children: Node | None, **attributes: str | int | float | bool | None) -> Element:
    """An element. An underscore in an attribute's name is a hyphen, and one at its end nothing (``class_``).

    Children and attributes that are None are left out, and so are attributes that are False; True is an empty value.
    """
    given = ((name, value) for name, value in attributes.items() if value is not None and value is not False)
    written = tuple((_name(name), _value(value)) for name, value in given)
    return Element(tag, written, tuple(child for child in children if child is not None))


def render(node: Node) -> str:
    """The text of an element and everything in it."""
    parts: list[str] = []
    _render(node, parts)
    return "".join(parts)


def raw_text(text: str) -> str:
    """The text of a style sheet or a script as an XML parser takes it unchanged, too."""
    return f"/*<![CDATA[*/\n{text}/*]]>*/"


def _render(node: Node, parts: list[str]) -> None:
    if isinstance(node, str):
        parts.append(_escape(node))
        return
    parts.append(f"<{node.tag}")
    parts += [f' {name}="{_escape(value)}"' for name, value in node.attributes]
    if node.tag in _VOID:
        parts.append(" />")
        return
    parts.append(">")
    for child in node.children:
        if node.tag in _RAW:
            parts.append(_raw(child))
        else:
            _render(child, parts)
    parts.append(f"</{node.tag}>")


def _escape(text: str) -> str:
    return html.escape(printable(text))


def _raw(child: Node) -> str:
    """Text that is written as it is. Nothing from a file gets here but JSON without any of the signs of HTML."""
    assert isinstance(child, str) and "</" not in child and "<!--" not in child
    return child


def _name(name: str) -> str:
    return name.rstrip("_").replace("_", "-")


def _value(value: str | int | float | bool | None) -> str:
    if value is True:
        return ""
    if isinstance(value, float):
        return f"{value:.3f}".rstrip("0").rstrip(".")
    return str(value)
