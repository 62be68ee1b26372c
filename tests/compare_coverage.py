"""Compares two results of `make coverage`, in total and for each file: ``python tests/compare_coverage.py OLD NEW``.

Each is a file of ``coverage json``. Prints covered and all lines and branches of both, the total first, then the files
that cover less in the new result, then the others that differ. With ``--moves FILE`` (JSON, old path: new path) a file
that was renamed is compared with itself. Exits 1 if the total share is lower in the new result.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Covered:
    """Lines and branches that ran, and those that there are."""

    ran: int
    all: int

    @property
    def share(self) -> float:
        return self.ran / self.all if self.all else 1.0

    def __str__(self) -> str:
        return f"{self.ran:6d} of {self.all:6d} {100 * self.share:6.2f} %"


def read_summary(summary: dict[str, Any]) -> Covered:
    return Covered(
        summary["covered_lines"] + summary.get("covered_branches", 0),
        summary["num_statements"] + summary.get("num_branches", 0),
    )


def read_result(path: Path) -> tuple[Covered, dict[str, Covered]]:
    """The total, and each file by its path from ``zeroelastic`` on."""
    document = json.loads(path.read_text())
    files = {name: read_summary(entry["summary"]) for name, entry in document["files"].items()}
    return read_summary(document["totals"]), {
        name[max(name.rfind("zeroelastic/"), 0) :]: c for name, c in files.items()
    }


def compare(old: Path, new: Path, moves: dict[str, str]) -> tuple[bool, list[str]]:
    """Whether the total share did not fall, and the lines of the comparison."""
    (old_total, before), (new_total, after) = read_result(old), read_result(new)
    before = {moves.get(name, name): covered for name, covered in before.items()}
    nothing = Covered(0, 0)
    pairs = [
        (name, before.get(name, nothing), after.get(name, nothing)) for name in sorted(before.keys() | after.keys())
    ]
    changed = [pair for pair in pairs if pair[1] != pair[2]]
    changed.sort(key=lambda pair: pair[2].share - pair[1].share)
    lines = [f"{left}   {right}   {name}" for name, left, right in [("total", old_total, new_total), *changed]]
    return new_total.share >= old_total.share, lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--moves", type=Path, help="JSON: the old path of a file -> its new path")
    options = parser.parse_args()
    moves = json.loads(options.moves.read_text()) if options.moves else {}
    good, lines = compare(options.old, options.new, moves)
    print("\n".join(lines))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
