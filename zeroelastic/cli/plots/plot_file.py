"""A picture as a file: ``check_plot`` before the work, ``write_figure`` after it; never half a file."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

from zeroelastic.cli.output.new_file import check_new_file, write_new_file
from zeroelastic.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FORMATS = (".png", ".svg", ".pdf")
_NO_DATE = {".png": None, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}


def check_plot(path: Path, what: str, *, force: bool = False) -> None:
    """Raise UsageError, with what to do, where ``what`` cannot be drawn to ``path``; ``force`` replaces a file."""
    check_new_file(path, f"{what} is drawn", _FORMATS, force=force)
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UsageError("--plot needs matplotlib. Install it: pip install 'zeroelastic[plot]'.") from None


def write_figure(path: Path, figure: Figure, *, force: bool = False) -> None:
    """Write a figure as a file, in the format of its suffix. Raises UsageError when it exists, without ``force``.

    The file is rendered in memory first, and the same figure gives the same bytes.
    """
    import matplotlib

    drawing = io.BytesIO()
    suffix = path.suffix.lower()
    with matplotlib.rc_context({"svg.hashsalt": "zeroelastic"}):
        figure.savefig(drawing, format=suffix[1:], dpi=120, metadata=_NO_DATE[suffix])
    write_new_file(path, drawing.getvalue(), force=force)
