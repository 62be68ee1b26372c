"""``--html``: the document of a verb as one HTML file that needs nothing beside it, not even a network.

    checkpoints  what the templates of ``inspect``, ``verify``, ``plan`` and ``diff`` need beside the document
    figures      figures and tables as data

The templates are in ``cli/templates``: one for each verb, ``page.html`` around it, ``blocks.html`` for facts, lists
and tables, ``figures.html`` for drawings. Read the template of a verb first.

The file's name is checked before the work, and the page written after it; never half a file. The page may load nothing
from anywhere and run nothing but its own script. Names in files are hostile input: Jinja2 escapes every value, after
unprintable characters have become visible.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeroelastic._version import __version__
from zeroelastic.byte_sizes import format_size
from zeroelastic.cli.terminal import check_new_file, printable, write_new_file
from zeroelastic.errors import counted

if TYPE_CHECKING:
    from jinja2 import Environment

MOST_DATA = 2 << 20
"""The most bytes of data in a page."""

_LENGTHS = tuple(1 << power for power in range(14, 3, -1))


def check_report(path: Path | None, *, force: bool = False) -> None:
    """Raise UsageError, with what to do, where no report can be written to ``path``; ``force`` replaces a file."""
    if path is not None:
        check_new_file(path, "a report is written", (".html", ".htm"), force=force)


def write_report(
    path: Path | None, verb: str, document: Callable[[], Mapping[str, object]], *, force: bool = False
) -> None:
    """Write the report on the document of a verb, if there is a ``path``. Raises UsageError where it exists."""
    if path is not None:
        write_new_file(path, report(verb, document()).encode(), force=force)


def report(verb: str, document: Mapping[str, object]) -> str:
    """The HTML of the report on the document that ``zeroelastic VERB --json`` prints.

    The view ``VERB_view`` gives the template ``VERB.html`` what it shows beside the document: the ``title``, the
    ``sentence`` that answers the question of the verb, its ``tone``, figures and tables.
    """
    from zeroelastic.cli.documents import DOCUMENTS
    from zeroelastic.cli.pages import checkpoints

    model = DOCUMENTS[verb].model_validate_json(json.dumps(document))
    view = getattr(checkpoints, f"{verb}_view")
    templates = environment()
    style, script = (_raw(templates, name) for name in ("style.css", "script.js"))
    data, cut = embedded(document)
    return templates.get_template(f"{verb}.html").render(
        view(model),
        report=model,
        verb=verb,
        style=style,
        script=script,
        data=_markup(data),
        cut=cut,
        version=__version__,
        written=time.strftime("%Y-%m-%d %H:%M:%S %z"),
    )


def embedded(document: Mapping[str, Any]) -> tuple[str, dict[str, int]]:
    """The document as JSON that can stand in a page, and the lengths of the lists that were cut, by their keys.

    All lists are cut to one length, the largest of 16,384, 8,192 ... 16 with which it is small enough.
    """
    text = _json(document)
    kept: Any = document
    cut: dict[str, int] = {}
    longest = _longest(document) if len(text) > MOST_DATA else 0
    for length in _LENGTHS:
        if len(text) <= MOST_DATA:
            break
        if length < longest:
            kept = _shortened(kept, length, "", cut)
            text = _json(kept)
    return text, cut


def _json(document: object) -> str:
    """Compact JSON without any sign that HTML or XML knows."""
    text = json.dumps(document, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _longest(value: Any) -> int:
    """The length of the longest list."""
    if isinstance(value, dict):
        return max(map(_longest, value.values()), default=0)
    if isinstance(value, list):
        return max(len(value), max(map(_longest, value), default=0))
    return 0


def _shortened(value: Any, length: int, key: str, cut: dict[str, int]) -> Any:
    """The value with no list longer than ``length``; notes in ``cut`` how long each was at first."""
    if isinstance(value, dict):
        return {name: _shortened(item, length, f"{key}.{name}" if key else name, cut) for name, item in value.items()}
    if isinstance(value, list):
        if len(value) > length:
            cut[key] = max(cut.get(key, 0), len(value))
        return [_shortened(item, length, f"{key}[]", cut) for item in value[:length]]
    return value


@cache
def environment() -> Environment:
    """The templates, with autoescaping, and their filters."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    made = Environment(
        loader=PackageLoader("zeroelastic.cli", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_written,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.globals["counted"] = counted
    made.filters.update(
        breakable=_breakable,
        number=lambda value: None if value is None else f"{value:,}",
        size=lambda value: None if value is None else format_size(value),
        percent=lambda value: f"{_written(float(value))}%",
        sha256=lambda text: f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}",
    )
    return made


def _written(value: Any) -> Any:
    """A value as a template writes it: None as nothing, numbers short, unprintable characters visible."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.3f}".rstrip("0").rstrip(".")
    return printable(value) if type(value) is str else value


def _markup(text: str) -> Any:
    """Text that is written as it is. Nothing from a file gets here but JSON without any of the signs of HTML."""
    from markupsafe import Markup

    assert "</" not in text and "<!--" not in text
    return Markup(text)


def _raw(templates: Environment, name: str) -> Any:
    """A style sheet or a script as an XML parser takes it unchanged, too."""
    assert templates.loader is not None
    return _markup(f"/*<![CDATA[*/\n{templates.loader.get_source(templates, name)[0]}/*]]>*/")


def _breakable(value: object) -> Any:
    """Text in which a line may end after a slash, an underscore, or a point before a letter."""
    from markupsafe import Markup

    parts = re.split(r"(?<=[/_])|(?<=\.)(?=[A-Za-z])", printable(str(value)))
    return Markup("<wbr />").join(parts)
