"""The man pages, from the text of ``--help``: one for the program, and one for each verb (`make man`).

python docs/make_man.py DIRECTORY
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typer.main import get_command

from zeroelastic import __version__
from zeroelastic.cli.app import VERBS, app

PROGRAM = "zeroelastic"


def pages() -> dict[str, str]:
    """The text of each page, in troff's language, by the name of its file."""
    group = get_command(app)
    verbs = {verb: group.commands[verb] for verb in VERBS}
    found = {f"{PROGRAM}.1": "\n".join([*page(PROGRAM, group), *list_of_verbs(verbs)]) + "\n"}
    for verb, command in verbs.items():
        found[f"{PROGRAM}-{verb}.1"] = "\n".join([*page(f"{PROGRAM} {verb}", command), *see_also()]) + "\n"
    return found


def page(command_path: str, command: Any) -> Iterator[str]:
    """The lines of one page: name, synopsis, description, options and examples."""
    context = command.context_class(command, info_name=command_path)
    title = command_path.replace(" ", "-")
    first, *paragraphs = re.split(r"\n{2,}", command.help.strip())
    yield f'.TH {escape(title.upper())} 1 "" "{PROGRAM} {__version__}" "{PROGRAM} manual"'
    yield from (".ad l", ".nh")  # neither spaces nor hyphens are inserted
    yield from section("Name", f"{escape(title)} \\- {escape(one_line(first)).removesuffix('.')}")
    usage = " ".join(command.collect_usage_pieces(context)).replace("{", "").replace("}", "")
    yield from section("Synopsis", rf"\fB{escape(command_path)}\fR {escape(usage)}")
    examples = [text for text in paragraphs if "Examples:" in text.splitlines()[:2]]
    described = [text for text in paragraphs if text not in examples]
    if described:
        yield ".SH DESCRIPTION"
        for text in described:
            yield ".PP"
            yield from verbatim(text) if text.startswith("\b") else [escape(one_line(text))]
    yield ".SH OPTIONS"
    for parameter in command.get_params(context):
        names, text = parameter.get_help_record(context) or ("", "")
        if names:
            yield from (".TP", rf"\fB{escape(names)}\fR", escape(one_line(text)))
    for text in examples:
        yield ".SH EXAMPLES"
        yield from verbatim(text.partition("Examples:\n")[2])


def list_of_verbs(verbs: dict[str, Any]) -> Iterator[str]:
    """What only the page of the program has: each verb with the first sentence of its help."""
    yield ".SH VERBS"
    for verb, command in verbs.items():
        first = re.split(r"\n{2,}", command.help.strip())[0]
        yield from (".TP", rf"\fB{escape(verb)}\fR", escape(one_line(first)))
    names = ", ".join(rf"\fB{escape(f'{PROGRAM}-{verb}')}\fR(1)" for verb in verbs)
    yield from section("See also", names)


def see_also() -> Iterator[str]:
    yield from section("See also", rf"\fB{PROGRAM}\fR(1)")


def section(title: str, text: str) -> tuple[str, str]:
    return (f".SH {title.upper()}", text)


def verbatim(text: str) -> Iterator[str]:
    """Lines that stay as they are."""
    lines = [line.removeprefix("    ") for line in text.removeprefix("\b\n").splitlines()]
    yield from (".nf", *map(escape, lines), ".fi")


def one_line(text: str) -> str:
    return " ".join(text.split())


def escape(text: str) -> str:
    """Text for troff: a hyphen that can be copied, and no line that is a request by accident."""
    text = text.replace("\\", r"\e").replace("-", r"\-")
    return rf"\&{text}" if text.startswith((".", "'")) else text


def main() -> None:
    """Write the pages into a directory."""
    directory = Path(sys.argv[1])
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (directory / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
