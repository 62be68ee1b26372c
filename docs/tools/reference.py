"""The parts of the pages that are made from the code: ``python docs/tools/reference.py`` (`make reference`).

A page has each part between two comments; tests/project/test_pages.py compares::

    <!-- generated: options -->
    ...
    <!-- end -->

In the tables of the keys that verbs print with --json, what a key means is written by hand, and its type is that of the
JSON Schema.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typer.main import get_command

from zeroelastic.cli.app import VERBS, app
from zeroelastic.cli.documents import DOCUMENTS
from zeroelastic.deepspeed.options import options_table

REPOSITORY = Path(__file__).resolve().parents[2]
CLI = "docs/reference/cli"


def parts() -> dict[str, dict[str, str]]:
    """Page, by its path from the root of the repository -> name of a part -> its text."""
    group = get_command(app)
    found = {f"{CLI}/{verb}.md": {"options": "\n".join(_options(verb, group.commands[verb]))} for verb in VERBS}
    found[f"{CLI}/index.md"] = {"verbs": "\n".join(_verbs(group)), "options": "\n".join(_options("", group))}
    found["docs/reference/options.md"] = {"options": options_table().strip()}
    return found


def written(text: str, made: dict[str, str]) -> str:
    """A page with these parts in place of its own. Raises ValueError where the page does not have a part once."""
    for name, part in made.items():
        pattern = rf"(<!-- generated: {name} -->\n).*?(<!-- end -->)"
        text, count = re.subn(pattern, lambda match, part=part: f"{match[1]}{part}\n{match[2]}", text, flags=re.DOTALL)
        if count != 1:
            raise ValueError(f"{count} places for the part {name!r}")
    return text


def with_types(text: str, verb: str) -> str:
    """The page of a verb with the type of each key in the table of its document. Raises ValueError for a wrong key."""
    schema = DOCUMENTS[verb].model_json_schema(by_alias=True)
    begin = text.index(f"\n## {verb} --json\n")
    head = re.sub(
        r"\| key \|(?: type \|)? value \|\n\|(?:---\|)+\n", "| key | type | value |\n|---|---|---|\n", text[begin:]
    )

    def row(match: re.Match[str]) -> str:
        cells = re.split(r"(?<!\\) \| ?", match[2].removesuffix("|"))
        meaning = cells[-1].strip()
        return f"| `{match[1]}` | {type_of(match[1], schema)} | {meaning} |".replace("|  |", "| |")

    return text[:begin] + re.sub(r"^\| `([^`]+)` \| (.*)$", row, head, flags=re.MULTILINE)


def type_of(key: str, schema: dict[str, Any]) -> str:
    """What a key of a document is, such as "list of text, or null"; ``key`` is dotted, ``[]`` stands for the items."""
    node: dict[str, Any] = schema
    for name in key.split("."):
        choices = [
            choice for choice in _choices(node, schema) if name.removesuffix("[]") in choice.get("properties", {})
        ]
        if not choices and name.isupper():  # NAME, KEY: of many, which all have one type
            members = [member for choice in _choices(node, schema) for member in _members(choice)]
            if not members:
                raise ValueError(f"{key}: the schema has nothing below {name}")
            node = members[0]
        elif choices:
            node = choices[0]["properties"][name.removesuffix("[]")]
        else:
            raise ValueError(f"{key}: the schema has no {name}")
        if name.endswith("[]"):
            (node,) = [choice["items"] for choice in _choices(node, schema) if "items" in choice]
    return _type(node, schema)


_TYPES = {
    "string": "text",
    "integer": "integer",
    "number": "number",
    "boolean": "bool",
    "null": "null",
    "object": "object",
}


def _choices(node: dict[str, Any], schema: dict[str, Any]) -> list[dict[str, Any]]:
    """The alternatives of a part of a schema, with references followed."""
    if "$ref" in node:
        return _choices(schema["$defs"][node["$ref"].rpartition("/")[2]], schema)
    return [found for part in node["anyOf"] for found in _choices(part, schema)] if "anyOf" in node else [node]


def _members(node: dict[str, Any]) -> list[dict[str, Any]]:
    """What an object may have under any name: all that it has, or what a mapping has."""
    rest = node.get("additionalProperties")
    return [*node.get("properties", {}).values(), *([rest] if isinstance(rest, dict) else [])]


def _type(node: dict[str, Any], schema: dict[str, Any]) -> str:
    names = []
    for choice in _choices(node, schema):
        if choice.get("type") == "array":
            items = _type(choice.get("items", {}), schema)
            names.append(f"list of {items}" if items else "list")
        else:
            names.append(_TYPES.get(choice.get("type", ""), "any"))
    names = list(dict.fromkeys(names))
    last = ["or null"] if "null" in names else []
    return ", ".join([" or ".join(name for name in names if name != "null"), *last])


def _options(verb: str, command: Any) -> Iterator[str]:
    """How a command is called, and a table of its arguments and options."""
    path = f"zeroelastic {verb}".strip()
    settings = {"help_option_names": ["--help", "-h"]}
    context = command.context_class(command, info_name=path, **settings)
    usage = " ".join(command.collect_usage_pieces(context)).replace("{", "").replace("}", "")
    yield from ("```text", f"{path} {usage}", "```", "", "| argument or option | meaning |", "|---|---|")
    for parameter in command.get_params(context):
        names, text = parameter.get_help_record(context) or ("", "")
        if names:
            yield f"| `{_cell(re.sub(r' <(str|path)>$', '', names))}` | {_cell(_prose(text))} |"


def _verbs(group: Any) -> Iterator[str]:
    """A table of all verbs, each linked to its page."""
    yield from ("| verb | what it does |", "|---|---|")
    for verb in VERBS:
        first = re.split(r"\n{2,}", group.commands[verb].help.strip())[0]
        yield f"| [`{verb}`]({verb}.md) | {_cell(_prose(first))} |"


def _prose(text: str) -> str:
    """A text of the help as Markdown: option names and placeholders as code."""
    text = " ".join(text.split()).replace("<", "&lt;").replace("*", r"\*").replace("_", r"\_")
    return re.sub(r"(?<![\w-])(--?[a-z][\w-]*)", r"`\1`", text)


def _cell(text: str) -> str:
    return text.replace("|", r"\|")


def main() -> None:
    """Write all parts and types into their pages."""
    for page, made in parts().items():
        path = REPOSITORY / page
        path.write_text(complete(page, path.read_text(), made))


def complete(page: str, text: str, made: dict[str, str]) -> str:
    """A page with all that is made from the code."""
    text = written(text, made)
    return with_types(text, Path(page).stem) if Path(page).stem in VERBS else text


if __name__ == "__main__":
    main()
