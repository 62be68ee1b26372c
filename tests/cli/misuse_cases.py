"""Every way of misusing a verb or a function that is known, as a table: what is given, and what the error has to name.

``{ckpt}`` is a checkpoint of 4 ranks with the tags global_step2 and global_step4, ``{empty}`` an empty directory,
``{file}`` a file, ``{stray}`` a directory with two tags and no ``latest``, ``{universal}`` a Universal checkpoint,
``{events}`` an event log, ``{new}`` nothing yet.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from places import ROOT

SOURCES = (
    (["{new}"], "{new}"),
    (["{empty}"], "{empty}"),
    (["{file}"], "{file}"),
    (["{stray}"], "{stray}"),
    (["{universal}"], "{universal}"),
    (["s3:/bucket/run"], "s3://bucket/run"),
)
"""What is no checkpoint, for every verb that takes one."""

TAGGED = ((["{ckpt}", "--tag", "global_step3"], "global_step3"), (["{ckpt}", "--tag", "../x"], "../x"))

READERS = {
    "inspect": [],
    "verify": [],
    "plan": ["-n", "2"],
    "reshard": ["{new}/dst", "-n", "2"],
    "export": ["{new}/dst"],
    "convert": ["{new}/dst", "--to", "fsdp2"],
}
"""The verbs that read one checkpoint, and what else they need."""

OTHERS: dict[str, list[tuple[list[str], str]]] = {
    "inspect": [
        (["{ckpt}", "--tensor", "no.such.tensor"], "no.such.tensor"),
        (["{ckpt}", "--al-ranks"], "--all-ranks"),
        (["{ckpt}", "--all-ranks", "true"], "(true)"),
        (["{ckpt}", "--allow-global", "a.B"], "before: zeroelastic --allow-global"),
        ([], "SRC"),
    ],
    "verify": [],
    "diff": [
        (["{ckpt}", "{new}"], "{new}"),
        (["{empty}", "{ckpt}"], "{empty}"),
        (["{ckpt}", "{ckpt}", "--params", "nothing*"], "nothing*"),
    ],
    "plan": [
        (["{ckpt}", "-n", "0"], "0"),
        (["{ckpt}"], "--world-size"),
        (["{ckpt}", "-n", "two"], "'two'"),
        (["{ckpt}", "--to", "3"], "No such option: --to (Possible options: --world-size)"),
        (["{ckpt}", "-n", "65537"], "from 1 to 65536, not 65537"),
    ],
    "reshard": [
        (["{ckpt}", "{empty}", "-n", "2"], "{empty}"),
        (["{ckpt}", "{ckpt}/new", "-n", "2"], "lies inside the source"),
        (["{ckpt}", "{ckpt}/global_step4/new", "-n", "2"], "lies inside the source"),
        (["{ckpt}", "{new}/dst", "-n", "2"], "{new}: no such directory"),
        (["{ckpt}", "{new}/dst", "--to", "3"], "No such option: --to (Possible options: --world-size)"),
        (["{ckpt}", "{new}/dst", "-n", "0"], "a world size of 0"),
        (["{ckpt}", "{new}/dst", "-n", "-3"], "a world size of -3"),
        (["{ckpt}", "{empty}", "-n", "2", "--dry-run"], "refusing to overwrite"),
        (["{ckpt}", "{ckpt}", "-n", "2"], "{ckpt}"),
        (["{ckpt}", "s3://bucket/x", "-n", "2"], "s3://bucket/x: is a URL; targets are written to this machine"),
        (["{ckpt}", "{new}/dst", "-n", "2", "--tp", "3"], "--tp"),
        (["{ckpt}", "{new}/dst", "-n", "2", "--max-memory", "1KiB"], "--max-memory"),
        (["{ckpt}", "{new}/dst", "-n", "2", "--max-memory", "much"], "much"),
        (["{ckpt}", "{new}/dst", "-n", "2", "--stage", "7"], "7"),
        (["{ckpt}", "{new}/dst", "-n", "2", "--stage", "2", "--sub-group-size", "5"], "--sub-group-size"),
        (["{ckpt}", "{new}/dst", "-n", "2", "--sub-group-size", "0"], "sub_group_size"),
        (["{ckpt}", "{new}/dst", "-n", "2", "--round-robin-gradients"], "no effect at ZeRO stage 3"),
        (["{ckpt}", "{new}/dst", "-n", "2", "--stage", "2", "--format", "elastic"], "elastic"),
        (["{ckpt}", "{new}/dst", "-n", "2", "--format", "other"], "other"),
    ],
    "export": [
        (["{ckpt}", "{empty}"], "{empty}"),
        (["{ckpt}", "{ckpt}/global_step4/new"], "lies inside the source"),
        (["{ckpt}", "gs://bucket/x"], "gs://bucket/x"),
        (["{ckpt}", "{new}/dst", "--max-shard-size", "much"], "much"),
        (["{ckpt}", "{new}/dst", "--max-shard-size", "0"], "--max-shard-size"),
        (["{ckpt}", "{new}/dst", "--max-memory", "1KiB"], "--max-memory"),
        (["{ckpt}", "{new}/dst", "--dtype", "int4"], "int4"),
        (["{ckpt}", "{new}/dst", "--tied", "twice"], "twice"),
    ],
    "convert": [
        (["{ckpt}", "{empty}", "--to", "fsdp2"], "{empty}"),
        (["{ckpt}", "{new}/dst"], "Give one of --to fsdp2"),
        (["{ckpt}", "{new}/dst", "--to", "other"], "other"),
        (["{ckpt}", "s3://bucket/x", "--to", "fsdp2"], "s3://bucket/x"),
        (["{ckpt}", "{new}/dst", "--to", "universal"], "ds_to_universal --input_folder"),
        (["{ckpt}", "{new}/dst", "--to", "fsdp2", "--format", "rigid"], "--format goes with --from"),
        (["{ckpt}", "{new}/dst", "--to", "fsdp2", "--ds-config", "x"], "--ds-config goes with"),
        (["{ckpt}", "{new}/dst", "--from", "universal", "-n", "2"], "{ckpt}"),
        (["{ckpt}", "{new}/dst", "--from", "universal", "-n", "2", "--tag", "global_step2"], "no Universal checkpoint"),
        (["{ckpt}", "{new}/dst", "--from", "universal", "-n", "2", "--tag", "../x"], "is not the name of a tag"),
        (["{ckpt}", "{new}/dst", "--from", "fsdp2", "-n", "2", "--layout", "torch"], "--layout goes with"),
        (["{ckpt}", "{new}/dst", "--from", "fsdp2", "-n", "2", "--tag", "t"], "has no tags"),
        (["{ckpt}", "{new}/dst", "--from", "fsdp2"], "--world-size"),
        (["{universal}", "{new}/dst", "--from", "universal"], "--world-size"),
        (["{ckpt}", "{new}/dst", "--to", "fsdp2", "-n", "2"], "--world-size"),
        (["{ckpt}", "{new}/dst", "--to", "fsdp2", "--from", "universal"], "--from"),
        (["{ckpt}", "{new}/dst", "--to", "fsdp2", "--max-memory", "1KiB"], "--max-memory"),
    ],
    "ls": [
        (["{new}"], "{new}"),
        (["{empty}"], "{empty}"),
        (["{file}"], "{file}"),
        (["{ckpt}/global_step2"], "global_step2"),
    ],
    "latest": [
        (["{new}"], "{new}"),
        (["{empty}"], "{empty}"),
        (["{ckpt}", "--set", "global_step3"], "global_step3"),
        (["{ckpt}", "--set", "global_step2", "--fix"], "--fix"),
        (["{ckpt}", "--dry-run"], "--dry-run"),
        (["{ckpt}/global_step2"], "global_step2"),
    ],
    "prune": [
        (["{new}", "--keep", "1"], "{new}"),
        (["{empty}", "--keep", "1"], "{empty}"),
        (["{ckpt}"], "--keep"),
        (["{ckpt}", "--keep", "0"], "--keep"),
        (["{ckpt}", "--keep", "1", "--min-age", "soon"], "soon"),
        (["{ckpt}", "--keep", "1"], "--yes"),
        (["memory://bucket/run", "--keep", "1"], "memory://bucket/run"),
        (["{ckpt}/global_step2", "--keep", "1"], "global_step2"),
        (["{ckpt}/latest", "--keep", "1"], "is a file"),
    ],
    "doctor": [(["{new}"], "unexpected")],
}  # fmt: skip


@dataclass(frozen=True)
class Misuse:
    """A command line that asks for something impossible, and what its error has to name."""

    verb: str
    arguments: tuple[str, ...]
    names: str

    def __str__(self) -> str:
        return " ".join((self.verb, *self.arguments))


def cases() -> Iterator[Misuse]:
    """All command lines of the tables."""
    for verb, more in READERS.items():
        for source, names in SOURCES:
            yield Misuse(verb, (*source, *more), names)
        for (source, *tag), names in TAGGED:
            yield Misuse(verb, (source, *more, *tag), names)
    for verb, table in OTHERS.items():
        for arguments, names in table:
            yield Misuse(verb, tuple(arguments), names)
    for verb in OTHERS:
        yield Misuse(verb, ("--no-such-option",), "--no-such-option")
    yield Misuse("verfy", (), "verfy")
    yield Misuse("plann", (".",), "Did you mean 'plan'?")


_VERBS = """
    add ask begin build call change check choose convert copy correct create cut delete divide enter export fix
    free give install keep leave list load lower make move name open pass point put raise read reinstall remove rename
    repair replace reshard restart restore resume run save set shrink start switch take train try turn update
    upgrade use verify wait write
"""
_IMPERATIVE = re.compile(rf"(?:^|[.;:(,] |\bor )(?:{'|'.join(_VERBS.split())})\b", re.IGNORECASE | re.MULTILINE)
_LISTED = re.compile(
    r"such as|at least|must be|has to be|Did you mean|(?:is|are) not one of|Known options|[Tt]here are|these have|"
    r"that work|Try '|"
    r"goes with|needs --|without --force|has two slashes|--dry-run shows|Missing (?:option|argument)|"
    r"zeroelastic convert --from"
)


def errors_made(kinds: Collection[str]) -> Iterator[tuple[str, ast.Call]]:
    """Every call in the package that makes an error of these classes, and its place."""
    for path in sorted((ROOT / "zeroelastic").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in kinds and node.args:
                yield f"{path.name}:{node.lineno}", node


def literal_text(node: ast.AST) -> str:
    """The text of an expression that is in the code."""
    constants = [n for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    return "".join(str(n.value) for n in sorted(constants, key=lambda n: (n.lineno, n.col_offset)))


def says_what_to_do(message: str) -> bool:
    """Whether a message has a clause that begins with an imperative, or lists what is possible.

    Example::

        says_what_to_do("/ckpt: exists. Give another --out, or remove it.")    # True
        says_what_to_do("/ckpt: is damaged.")    # False
    """
    return bool(_IMPERATIVE.search(message) or _LISTED.search(message))
