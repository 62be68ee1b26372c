"""A small SVG: boxes, text, lines and bands in colours that follow a light or a dark page.

A drawing has a title and a description for those who do not see it. The file has colours of its own for both modes of
the system, for code hosts; the site takes the same classes from docs/assets/drawings.css (``STYLE``), so that a
drawing follows the page's own switch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape

LIGHT = {
    "ink": "#1f2328",
    "quiet": "#57606a",
    "line": "#8c959f",
    "paper": "#ffffff",
    "fill0": "#cfe3fb",
    "fill1": "#cdeccf",
    "fill2": "#fbdcc4",
    "fill3": "#e6d7f7",
    "free": "#eaeef2",
    "mark": "#b3261e",
}
DARK = {
    "ink": "#e6edf3",
    "quiet": "#a8b3bf",
    "line": "#768390",
    "paper": "#1e2129",
    "fill0": "#1f4a7d",
    "fill1": "#1f5a2b",
    "fill2": "#79421a",
    "fill3": "#553282",
    "free": "#353b45",
    "mark": "#ff9d94",
}
FILLS = 4
"""``fill0`` to ``fill3`` are the colours of parameters and of ranks."""

FONT = "font-family:system-ui,-apple-system,'Segoe UI',Roboto,sans-serif"


def rules() -> str:
    """What the classes of a drawing look like; the colours are custom properties."""
    fills = "".join(f".zd-fill{i}{{fill:var(--zd-fill{i})}}" for i in range(FILLS))
    return (
        f"{fills}.zd-free{{fill:var(--zd-free)}}.zd-paper{{fill:var(--zd-paper)}}"
        ".zd-box{stroke:var(--zd-line);stroke-width:1}"
        ".zd-band{fill-opacity:.55;stroke:var(--zd-line);stroke-width:.7}"
        ".zd-line{stroke:var(--zd-line);stroke-width:1.5;fill:none}"
        ".zd-cut{stroke:var(--zd-mark);stroke-width:1.5;stroke-dasharray:4 3}"
        f".zd-text{{fill:var(--zd-ink);{FONT};font-size:13px}}"
        f".zd-quiet{{fill:var(--zd-quiet);{FONT};font-size:12px}}"
        f".zd-bold{{fill:var(--zd-ink);{FONT};font-size:13px;font-weight:600}}"
        ".zd-arrow{fill:var(--zd-line)}"
    )


def _colours(colours: dict[str, str]) -> str:
    return "".join(f"--zd-{name}:{value};" for name, value in colours.items())


def site_style() -> str:
    """The style sheet of the site: the rules, and the colours of its two schemes."""
    return (
        "/* Made by docs/tools/drawings.py. */\n"
        f":root{{{_colours(LIGHT)}}}\n"
        f'[data-md-color-scheme="slate"]{{{_colours(DARK)}}}\n'
        "svg.zd{max-width:100%;height:auto}\n" + rules().replace("}.", "}\n.") + "\n"
    )


@dataclass
class Drawing:
    """What is drawn, in the order in which it is added; all numbers are pixels."""

    name: str
    title: str
    description: str
    width: int
    height: int
    parts: list[str] = field(default_factory=list)

    def box(self, x: float, y: float, width: float, height: float, *, kind: str = "free", label: str = "") -> None:
        """A rectangle, with a label in its middle if it has one."""
        self.parts.append(
            f'<rect class="zd-{kind} zd-box" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3"/>'
        )
        if label:
            self.text(x + width / 2, y + height / 2 + 4.5, label, anchor="middle")

    def text(self, x: float, y: float, words: str, *, kind: str = "text", anchor: str = "start") -> None:
        """One line of text; ``y`` is its base line."""
        self.parts.append(f'<text class="zd-{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(words)}</text>')

    def line(self, x1: float, y1: float, x2: float, y2: float, *, kind: str = "line", arrow: bool = False) -> None:
        """A straight line, with an arrow at its end if asked for."""
        end = f' marker-end="url(#{self.name}-arrow)"' if arrow else ""
        self.parts.append(f'<line class="zd-{kind}" x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}"{end}/>')

    def band(self, top: tuple[float, float, float], bottom: tuple[float, float, float], *, kind: str) -> None:
        """What moves: from the range ``(x, y, width)`` above to the one below."""
        (x, y, width), (u, v, breadth) = top, bottom
        points = f"{x:g},{y:g} {x + width:g},{y:g} {u + breadth:g},{v:g} {u:g},{v:g}"
        self.parts.append(f'<polygon class="zd-{kind} zd-band" points="{points}"/>')

    def svg(self) -> str:
        """The file, readable by itself."""
        style = f"svg{{{_colours(LIGHT)}}}@media (prefers-color-scheme:dark){{svg{{{_colours(DARK)}}}}}{rules()}"
        return f"{self._head()}<style>{style}</style>\n{self._body()}"

    def inline(self) -> str:
        """The same for a page that has ``site_style()``."""
        return f"{self._head()}{self._body()}"

    def _head(self) -> str:
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="zd" role="img" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" height="{self.height}" aria-labelledby="{self.name}-title {self.name}-desc">\n'
            f'<title id="{self.name}-title">{escape(self.title)}</title>\n'
            f'<desc id="{self.name}-desc">{escape(self.description)}</desc>\n'
        )

    def _body(self) -> str:
        arrow = (
            f'<defs><marker id="{self.name}-arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" '
            'markerHeight="8" orient="auto"><path class="zd-arrow" d="M0,0 L8,4 L0,8 z"/></marker></defs>'
        )
        return "\n".join([arrow, *self.parts, "</svg>"]) + "\n"
