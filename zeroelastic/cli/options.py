"""The arguments and options that several verbs have."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer


def complete_tag(context: typer.Context, incomplete: str) -> list[str]:
    """The tags of the directory that the command line names; none for a URL, or where nothing can be listed."""
    given = context.params.get("src") or context.params.get("directory")
    left = (word for word in context.args if not word.startswith("-"))  # not assigned yet: the line ends in --tag
    root = Path(given or next(left, ".")).expanduser()
    try:
        return sorted(name for name in os.listdir(root) if name.startswith(incomplete) and _is_tag(root / name))
    except OSError:
        return []


def _is_tag(folder: Path) -> bool:
    """Return whether ranks have files in a folder, or a Universal checkpoint its parameters. Opens no file."""
    from zeroelastic.checkpoint.tag_files import is_rank_file

    try:
        return any(name == "zero" or is_rank_file(name) for name in os.listdir(folder))
    except OSError:
        return False


RunArgument = Annotated[
    str, typer.Argument(metavar="DIR", help="The directory that holds the tags, or the checkpoint-N folders.")
]

DstArgument = Annotated[Path, typer.Argument(metavar="DST", help="The directory to make; it must not exist.")]

TagOption = Annotated[
    str | None,
    typer.Option(
        "--tag",
        metavar="TAG",
        autocompletion=complete_tag,
        help="The tag, if SRC is the directory above; default: the one that latest names, or the only one.",
    ),
]

HtmlOption = Annotated[
    Path | None,
    typer.Option("--html", metavar="FILE", help="Also write a self-contained .html report."),
]

ForceOption = Annotated[bool, typer.Option("--force", help="Replace the file of --html.")]

QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress on stderr.")]

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]


TpOption = Annotated[
    int | None,
    typer.Option("--tp", metavar="T", min=1, help="Tensor parallel size (AutoTP); default: the source's."),
]

EpOption = Annotated[
    int | None, typer.Option("--ep", metavar="E", min=1, help="Expert parallel size; default: the source's.")
]

LikeOption = Annotated[
    str | None,
    typer.Option(
        metavar="TAG", help="With --tp: a checkpoint of a run of that size, which says how it cuts the weights."
    ),
]
