"""Lines and files of each package, of each folder of tests, of benchmarks and of the C++ code: ``make sizes``."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHON, CPP = ("*.py",), ("*.cpp", "*.h", "*.cu", "*.cuh")
TREES = {"zeroelastic": PYTHON, "tests": PYTHON, "benchmarks": PYTHON, "csrc": CPP}


def sources(tree: str) -> Iterator[Path]:
    """The files of code below a folder, without what a build has made."""
    for pattern in TREES[tree]:
        for path in (ROOT / tree).rglob(pattern):
            if "build" not in path.relative_to(ROOT).parts:
                yield path


def package_of(path: Path, tree: str) -> str:
    """The folder right below the tree that has a file; the tree itself for files that are in none."""
    inside = path.relative_to(ROOT / tree).parts
    return f"{tree}/{inside[0]}" if len(inside) > 1 else tree


def main() -> None:
    """A line for each package, largest first, and one for each tree."""
    for tree in TREES:
        lines: Counter[str] = Counter()
        files: Counter[str] = Counter()
        for path in sources(tree):
            lines[package_of(path, tree)] += len(path.read_text().splitlines())
            files[package_of(path, tree)] += 1
        for package, count in lines.most_common() if len(lines) > 1 else ():
            sys.stdout.write(f"{count:7,}  {files[package]:4}  {package}\n")
        sys.stdout.write(f"{lines.total():7,}  {files.total():4}  {tree}, in all\n\n")


if __name__ == "__main__":
    main()
