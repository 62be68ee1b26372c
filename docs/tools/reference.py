"""The parts of the pages that are made from the code: ``python docs/tools/reference.py`` (`make reference`).

A page has each part between two comments; tests/project/test_pages.py compares::

    <!-- generated: options -->
    ...
    <!-- end -->

The JSON Schemas of docs/schemas are those of the models, with the meaning of each key from keys.json beside this file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from documents import schemas
from typer.main import get_command

from zeroelastic.cli.app import VERBS, app
from zeroelastic.deepspeed.options import options_table

REPOSITORY = Path(__file__).resolve().parents[2]
SCHEMAS = REPOSITORY / "docs/schemas"
KEYS: dict[str, dict[str, str]] = json.loads(Path(__file__).with_name("keys.json").read_text())
"""Verb -> key of the document that it prints with --json -> what it means. ``[]`` stands for the items of a list."""

COMMON = ("SRC", "DST", "DIR", "--tag", "--max-memory", "--html", "--force", "--quiet", "--json", "--help")
"""Arguments and options that mean the same in every verb that has them; the page explains them once."""


def parts() -> dict[str, dict[str, str]]:
    """Page, by its path from the root of the repository -> name of a part -> its text."""
    group = get_command(app)
    verbs = {verb: "\n".join(_verb(verb, group.commands[verb])) for verb in VERBS}
    program = list(_options("", group))
    verbs["program"] = "\n".join(_list(program))
    verbs["common"] = "\n".join(_list(one for one in _common(group) if one not in program))
    return {
        "docs/reference/cli.md": verbs,
        "docs/reference/options.md": {"options": options_table().strip()},
    }


def written(text: str, made: dict[str, str]) -> str:
    """A page with these parts in place of its own. Raises ValueError where the page does not have a part once."""
    for name, part in made.items():
        pattern = rf"(<!-- generated: {name} -->\n).*?(<!-- end -->)"
        text, count = re.subn(pattern, lambda match, part=part: f"{match[1]}{part}\n{match[2]}", text, flags=re.DOTALL)
        if count != 1:
            raise ValueError(f"{count} places for the part {name!r}")
    return text


def published_schemas() -> dict[str, str]:
    """File name -> JSON Schema with the meaning of each key. Raises ValueError for a key that the model lacks."""
    found = {name: json.loads(text) for name, text in schemas().items()}
    verify = KEYS["verify"]
    of_all = {key: verify[key] for key in ("ok", "path", "mode", "bytes_read", "seconds", "read_seconds")}
    keys = {**KEYS, "verify-all": {**of_all, "tags": "the documents of each checkpoint, newest first"}}
    for verb, meanings in keys.items():
        for key, meaning in meanings.items():
            _property(key, found[f"{verb}.json"])["description"] = meaning
    return {name: json.dumps(schema, indent=1, ensure_ascii=False) + "\n" for name, schema in found.items()}


def _property(key: str, schema: dict[str, Any]) -> dict[str, Any]:
    """The part of a schema that describes a key; ``key`` is dotted, NAME and KEY stand for any name."""
    node, found = schema, schema
    for name in key.split("."):
        choices = [one for one in _choices(node, schema) if name.removesuffix("[]") in one.get("properties", {})]
        if choices:
            found = choices[0]["properties"][name.removesuffix("[]")]
        elif name.isupper():
            members = [member for choice in _choices(node, schema) for member in _members(choice)]
            if not members:
                raise ValueError(f"{key}: the schema has nothing below {name}")
            found = members[0]
        else:
            raise ValueError(f"{key}: the schema has no {name}")
        node = found
        if name.endswith("[]"):
            (node,) = [choice["items"] for choice in _choices(found, schema) if "items" in choice]
    return found


def _choices(node: dict[str, Any], schema: dict[str, Any]) -> list[dict[str, Any]]:
    """The alternatives of a part of a schema, with references followed."""
    if "$ref" in node:
        return _choices(schema["$defs"][node["$ref"].rpartition("/")[2]], schema)
    return [found for part in node["anyOf"] for found in _choices(part, schema)] if "anyOf" in node else [node]


def _members(node: dict[str, Any]) -> list[dict[str, Any]]:
    """The properties that an object may have under any name."""
    rest = node.get("additionalProperties")
    return [*node.get("properties", {}).values(), *([rest] if isinstance(rest, dict) else [])]


def _verb(verb: str, command: Any) -> Iterator[str]:
    """The text of ``--help``: what the verb does, its examples, and a list of the options that it alone has."""
    paragraphs = re.split(r"\n{2,}", command.help.strip())
    examples = [text for text in paragraphs if "Examples:" in text.splitlines()[:2]]
    yield "\n\n".join(_prose(text) for text in paragraphs if text not in examples)
    for text in examples:
        lines = [line.strip() for line in text.partition("Examples:\n")[2].splitlines()]
        yield from ("", "```bash", *lines, "```")
    own = [(names, text) for names, text in _options(verb, command) if not _is_common(names)]
    if own:
        yield from ("", *_list(own))


def _options(verb: str, command: Any) -> Iterator[tuple[str, str]]:
    """The arguments and options of a command, each with its help."""
    settings = {"help_option_names": ["--help", "-h"]}
    context = command.context_class(command, info_name=f"zeroelastic {verb}".strip(), **settings)
    for parameter in command.get_params(context):
        names, text = parameter.get_help_record(context) or ("", "")
        if names:
            yield re.sub(r" <(str|path)>$", "", names), text


def _is_common(names: str) -> bool:
    return any(option in names.replace(",", " ").split() for option in COMMON)


def _common(group: Any) -> Iterable[tuple[str, str]]:
    """The options in ``COMMON``, as the first verb that has them explains them."""
    found: dict[str, str] = {}
    for verb in VERBS:
        for names, text in _options(verb, group.commands[verb]):
            if _is_common(names):
                found.setdefault(names, text)
    return found.items()


def _list(options: Iterable[tuple[str, str]]) -> Iterator[str]:
    yield from (f"* `{names}`: {_prose(text)}" for names, text in options)


def _prose(text: str) -> str:
    """A text of the help as Markdown: option names and placeholders as code."""
    text = " ".join(text.split()).replace("<", "&lt;").replace("*", r"\*").replace("_", r"\_")
    return re.sub(r"(?<![\w-])(--?[a-z][\w-]*)", r"`\1`", text)


def main() -> None:
    """Write all parts into their pages, and the schemas."""
    for page, made in parts().items():
        path = REPOSITORY / page
        path.write_text(written(path.read_text(), made))
    for name, text in published_schemas().items():
        (SCHEMAS / name).write_text(text)


if __name__ == "__main__":
    main()
