"""``--html``: the view of a verb as one HTML file that needs no other file, network or script.

The file's name is checked before the work, and the page written after it; never half a file. Names in files are hostile
input: Jinja2 escapes every value, after unprintable characters have become visible, and the page may load nothing.
"""

from __future__ import annotations

import base64
import hashlib
import time
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeroelastic._version import __version__
from zeroelastic.cli.tables import View
from zeroelastic.cli.terminal import printable
from zeroelastic.errors import UsageError

if TYPE_CHECKING:
    from jinja2 import Environment

_EXISTS = "{}: already exists; refusing to overwrite it without --force. Give another name."
_MOST_ROWS = 1000


def check_page(path: Path | None, *, force: bool = False) -> None:
    """Raise UsageError, with what to do, where no page can be written to ``path``; ``force`` replaces a file."""
    if path is None:
        return
    if path.suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"{path}: a report is written as .html or .htm. Give a name that ends so.")
    if path.exists() and not (force and path.is_file()):
        raise UsageError(_EXISTS.format(path))
    if not path.absolute().parent.is_dir():
        raise UsageError(f"{path}: there is no directory {path.absolute().parent}. Make it first.")


def write_page(path: Path, verb: str, view: View, *, force: bool = False) -> None:
    """Write a view as a page. Raises UsageError where the file exists, without ``force``; OSError."""
    from zeroelastic.io.atomic import write_atomically

    try:
        write_atomically(path, page(verb, view).encode(), replace=force)
    except FileExistsError:
        raise UsageError(_EXISTS.format(path)) from None


def page(verb: str, view: View) -> str:
    """Return the HTML of a view."""
    return (
        _environment()
        .get_template("page.html")
        .render(
            verb=verb,
            view=view,
            most=_MOST_ROWS,
            version=__version__,
            written=time.strftime("%Y-%m-%d %H:%M:%S %z"),
        )
    )


@cache
def _environment() -> Environment:
    """Return the template with autoescaping; its style sheet is allowed by its hash."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    made = Environment(
        loader=PackageLoader("zeroelastic.cli", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_visible,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    assert made.loader is not None
    style = made.loader.get_source(made, "style.css")[0]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    made.globals.update(style=Markup(style), style_digest=f"sha256-{digest}")
    return made


def _visible(value: Any) -> Any:
    return printable(value) if type(value) is str else value
