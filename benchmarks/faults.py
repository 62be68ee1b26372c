"""Puts faults into the code, one at a time, and says which test finds each.

    python benchmarks/faults.py --out benchmarks/results/faults.json
    python benchmarks/faults.py --draw 20 --seed 3

The faults are in ``faults_in_code.json``: the fixes of the changelog taken back, and edits that ``--draw`` chose at
random in the code of load, save, plan and the checks of headers. Each is tried in a copy of the tracked files: first
with the tests that name the module or its directory, then with all of ``make test``, then with all of ``make
test-all``. A fault that nothing finds, and a fault whose text is no longer in the code, makes the exit code 1.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parent.parent
FAULTS = Path(__file__).with_name("faults_in_code.json")
DRAWN_FROM = (
    "zeroelastic/deepspeed/load/*.py",
    "zeroelastic/deepspeed/save/*.py",
    "zeroelastic/core/*plan.py",
    "zeroelastic/checkpoint/checker.py",
    "zeroelastic/checkpoint/contradictions.py",
)
SECONDS = 2400
"""The limit of one run of tests."""

TIERS = {"make test": "not extended and not sweep", "make test-all": "not sweep"}
Tier = Literal["make test", "make test-all"]


@dataclass(frozen=True)
class Fault:
    """A text of the package and the one that takes its place; the two are whole lines, or parts of lines."""

    name: str
    old: str
    new: str
    tests: list[str] = field(default_factory=list)
    """Tests to try first."""

    def places(self) -> list[Path]:
        """The module of each place that has the text."""
        return [
            path for path in sorted(ROOT.glob("zeroelastic/**/*.py")) for _ in range(path.read_text().count(self.old))
        ]

    def file(self) -> Path:
        """The one module that has the text, from the root of the repository. Raises ValueError."""
        if len(places := self.places()) != 1:
            raise ValueError(f"{self.name}: the text is {len(places)} times in the code: {self.old}")
        return places[0].relative_to(ROOT)


@dataclass(frozen=True)
class Outcome:
    """Which test found a fault first, and in which of the two sets; both are empty if none did."""

    name: str
    file: str
    line: int
    old: str
    new: str
    found_by: str
    tier: str
    seconds: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file for the outcomes; those that it has are not tried again")
    parser.add_argument("--only", help="a regular expression: faults whose name has it")
    parser.add_argument("--near", action="store_true", help="leave it at the tests to try first")
    parser.add_argument("--jobs", type=int, default=2, help="workers of pytest (2)")
    parser.add_argument("--draw", type=int, metavar="N", help="print N edits chosen at random, and try nothing")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    if arguments.draw:
        print(json.dumps([asdict(fault) for fault in draw(arguments.draw, arguments.seed)], indent=1))
        return 0
    faults = [Fault(**one) for one in json.loads(FAULTS.read_text())]
    faults = [fault for fault in faults if re.search(arguments.only or "", fault.name)]
    gone = [fault for fault in faults if len(fault.places()) != 1]
    for fault in gone:
        print(f"{fault.name}: its text is {len(fault.places())} times in the code")
    done = json.loads(arguments.out.read_text())["faults"] if arguments.out and arguments.out.exists() else []
    outcomes = [Outcome(**one) for one in done if one["name"] not in {f.name for f in faults} or one["found_by"]]
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory, "copy")
        copy_files(copy)
        for fault in faults:
            if fault in gone or fault.name in {outcome.name for outcome in outcomes}:
                continue
            outcomes.append(outcome := try_fault(fault, copy, arguments))
            print(
                f"{outcome.name}: {outcome.found_by or 'NOT FOUND'} ({outcome.tier}, {outcome.seconds} s)", flush=True
            )
            if arguments.out:
                arguments.out.write_text(json.dumps({"faults": [asdict(one) for one in outcomes]}, indent=1) + "\n")
    for tier in TIERS:
        print(f"found by {tier}: {sum(outcome.tier == tier for outcome in outcomes)} of {len(outcomes)}")
    return int(bool(gone) or not all(outcome.found_by for outcome in outcomes))


def copy_files(copy: Path) -> None:
    """Copy the tracked files and the compiled engines."""
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\n")
    built = [str(path.relative_to(ROOT)) for path in ROOT.glob("zeroelastic/**/*.so")]
    for name in filter(None, [*names, *built]):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)


def try_fault(fault: Fault, copy: Path, arguments: argparse.Namespace) -> Outcome:
    """Run the tests with the fault in the copy, until one fails."""
    file = fault.file()
    right = (copy / file).read_text()
    began = time.monotonic()
    line = right[: right.index(fault.old)].count("\n") + 1
    found, tier = "", ""
    try:
        (copy / file).write_text(right.replace(fault.old, fault.new))
        near = fault.tests or [str(path.relative_to(ROOT)) for path in nearest_tests(file)]
        for tier, tests in product(TIERS, [near] if arguments.near else [near, ["tests"]]):
            if found := first_failure(copy, tests, TIERS[tier], arguments.jobs):
                break
    finally:
        (copy / file).write_text(right)
    seconds = round(time.monotonic() - began, 1)
    return Outcome(fault.name, str(file), line, fault.old, fault.new, found, tier if found else "", seconds)


def nearest_tests(file: Path) -> list[Path]:
    """The directories and files of tests that are named as a module's packages are, or as the module."""
    parts = file.with_suffix("").parts[1:]
    packages = [ROOT / "tests" / Path(*parts[:depth]) for depth in range(len(parts) - 1, 0, -1)]
    return [*ROOT.glob(f"tests/**/test_{parts[-1]}*.py"), *(path for path in packages if path.is_dir())]


def first_failure(copy: Path, tests: Sequence[str], marks: str, jobs: int) -> str:
    """The id of a test that fails, or what pytest says where it collects none; nothing if all pass."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", str(jobs), "--dist", "worksteal", "-m", marks, *tests]
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": ""}
    try:
        done = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return f"no end within {SECONDS} s: {' '.join(tests)}"
    if done.returncode in (0, 5):  # 5: there are no such tests
        return ""
    found = re.findall(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", done.stdout, flags=re.MULTILINE)
    return found[0] if found else f"pytest ended with {done.returncode}: {done.stdout.strip()[-200:]}"


def draw(count: int, seed: int) -> Iterator[Fault]:
    """Edits of one place each, at random among all places where one is possible; a module has two at most."""
    places = [
        (path, *edit)
        for pattern in DRAWN_FROM
        for path in sorted(ROOT.glob(pattern))
        for edit in edits(path.read_text())
    ]
    random.Random(seed).shuffle(places)
    chosen: list[Path] = []
    for path, line, old, new in places:
        fault = Fault(f"random {len(chosen) + 1}: {path.stem}, {line.strip()[:60]}", old, new)
        if len(chosen) < count and chosen.count(path) < 2 and len(fault.places()) == 1:
            chosen.append(path)
            yield fault


def edits(source: str) -> Iterator[tuple[str, str, str]]:
    """(line, old lines, new lines) for each condition negated, ``and`` for ``or``, number plus one, call left out."""
    lines = source.splitlines(keepends=True)

    def edit(node: ast.expr | ast.stmt, text: str) -> tuple[str, str, str]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        block = "".join(lines[node.lineno - 1 : node.end_lineno])
        last = sum(map(len, lines[node.lineno - 1 : node.end_lineno - 1])) + node.end_col_offset
        return lines[node.lineno - 1], block, block[: node.col_offset] + text + block[last:]

    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.If | ast.IfExp | ast.While):
            yield edit(node.test, f"not ({ast.unparse(node.test)})")
        elif isinstance(node, ast.BoolOp):
            other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            yield edit(node, f"({ast.unparse(ast.BoolOp(other, node.values))})")
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            yield edit(node, str(node.value + 1))
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield edit(node, "pass")


if __name__ == "__main__":
    sys.exit(main())
