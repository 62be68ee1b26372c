"""Whether an error says what to do: by the words with which a remedy begins."""

from __future__ import annotations

import re

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


def says_what_to_do(message: str) -> bool:
    """Whether a message has a clause that begins with an imperative, or lists what is possible.

    Example::

        says_what_to_do("/ckpt: exists. Give another --out, or remove it.")    # True
        says_what_to_do("/ckpt: is damaged.")    # False
    """
    return bool(_IMPERATIVE.search(message) or _LISTED.search(message))
