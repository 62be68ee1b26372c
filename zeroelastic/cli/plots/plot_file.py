"""A picture as a new file: ``check_plot`` before the work, ``write_figure`` after it; never half a file."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

from zeroelastic.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FORMATS = (".png", ".svg")


def check_plot(path: Path, what: str) -> None:
    """Raise UsageError, with what to do, where ``what`` cannot be drawn to ``path``."""
    if path.suffix.lower() not in _FORMATS:
        raise UsageError(f"{path}: {what} is drawn as .png or .svg.")
    if path.exists():
        raise UsageError(f"{path}: exists; nothing is overwritten. Give another name.")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"{path}: there is no directory {path.absolute().parent}.")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UsageError("--plot needs matplotlib. Install it: pip install 'zeroelastic[plot]'.") from None


def write_figure(path: Path, figure: Figure) -> None:
    """Write a figure as a new file, in the format of its suffix. Raises UsageError when the file exists.

    The file is rendered in memory first, and the same figure gives the same bytes.
    """
    import matplotlib

    drawing = io.BytesIO()
    svg = path.suffix.lower() == ".svg"
    with matplotlib.rc_context({"svg.hashsalt": "zeroelastic"}):
        figure.savefig(drawing, format="svg" if svg else "png", dpi=120, metadata={"Date": None} if svg else None)
    try:
        with open(path, "xb") as file:
            file.write(drawing.getvalue())
    except FileExistsError:
        raise UsageError(f"{path}: exists; nothing is overwritten. Give another name.") from None
