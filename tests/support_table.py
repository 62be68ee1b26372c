"""docs/support.md from the tests: a row of the table is a mark on the tests that show it.

    @pytest.mark.support("Precision", "fp16, dynamic loss scale", "exact", "the scale and skipped steps too")

A pytest plugin. `pytest --collect-only --support-table docs/support.md tests` (`make support`) writes the page, and
tests/project/test_support.py compares. So that a row cannot be claimed and not shown, a marked test carries no skip
or xfail mark, and where the variable CI is set, a marked test that is skipped has failed. So has a skipped test
marked `core`, which every DeepSpeed version must pass.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from places import OLDER_DEEPSPEEDS, ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PAGE = ROOT / "docs" / "support.md"

SECTIONS = (
    "Parameters",
    "Optimizers",
    "Precision",
    "Offload",
    "Parallelism and communication",
    "Checkpoint engines and storage",
    "Using it",
    "Frameworks",
)
VERDICTS = ("exact", "refused")
MARKS_THAT_SKIP = ("skip", "skipif", "xfail")
MUST_RUN = ("support", "core")


class SupportTableError(ValueError):
    """The marks contradict each other or are not what the table takes; all of it, one line each."""


@dataclass(frozen=True)
class Shown:
    """One mark on one test: its file, its name, its case, and whether it needs a GPU."""

    section: str
    feature: str
    verdict: str
    note: str
    path: str
    function: str
    case: str
    gpu: bool


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    section: str
    feature: str
    verdict: str
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Versions:
    """What the package needs at least, and the DeepSpeed versions that CI runs."""

    python: str
    torch: str
    deepspeed: str
    tested: tuple[str, ...]


def read_marks(items: Iterable[pytest.Item]) -> tuple[Shown, ...]:
    """Every support mark of the items; raises SupportTableError with all marks that are not as they must be."""
    found, problems = [], []
    for item in items:
        marks = list(item.iter_markers("support"))
        if not marks:
            continue
        problems += [
            f"{item.nodeid} carries {mark.name}" for mark in item.iter_markers() if mark.name in MARKS_THAT_SKIP
        ]
        for mark in marks:
            try:
                values = _arguments(*mark.args, **mark.kwargs)
            except TypeError as error:
                problems.append(f"{item.nodeid}: {error}")
                continue
            problems += [f"{item.nodeid}: {problem}" for problem in _problems(*values)]
            gpu = item.get_closest_marker("gpu") is not None
            found.append(Shown(*values, *_name(item), gpu))
    if problems:
        raise SupportTableError("support marks:\n  " + "\n  ".join(problems))
    return tuple(found)


def _arguments(section: str, feature: str, verdict: str, note: str = "") -> tuple[str, str, str, str]:
    return section, feature, verdict, note


def _problems(section: object, feature: object, verdict: object, note: object) -> list[str]:
    """What is wrong with one mark."""
    problems = []
    if section not in SECTIONS:
        problems.append(f"section {section!r} is none of {', '.join(map(repr, SECTIONS))}")
    if verdict not in VERDICTS:
        problems.append(f"verdict {verdict!r} is none of {', '.join(map(repr, VERDICTS))}")
    for name, value in (("feature", feature), ("note", note)):
        if not isinstance(value, str) or re.search(r"[|\n]", value) or value != value.strip():
            problems.append(f"{name} {value!r} is not the text of one cell (one line, no '|', nothing blank around it)")
    if not feature:
        problems.append("the feature has no name")
    return problems


def _name(item: pytest.Item) -> tuple[str, str, str]:
    path, _, rest = item.nodeid.partition("::")
    function, _, case = rest.partition("[")
    return path, function, case.removesuffix("]")


def make_rows(marks: Iterable[Shown]) -> tuple[Row, ...]:
    """The rows in the order of the page; raises SupportTableError where marks contradict each other.

    A feature stands in one section with one verdict, and at least one test shows it without a GPU.
    """
    by_feature: dict[str, list[Shown]] = {}
    for mark in marks:
        by_feature.setdefault(_spelling(mark.feature), []).append(mark)
    problems, rows = [], []
    for shown in by_feature.values():
        first = shown[0]
        for field in ("section", "feature", "verdict"):
            values = {getattr(mark, field): f"{mark.path}::{mark.function}" for mark in reversed(shown)}
            if len(values) > 1:
                said = ", ".join(f"{value!r} ({test})" for value, test in sorted(values.items()))
                problems.append(f"{first.feature}: more than one {field}: {said}")
        if all(mark.gpu for mark in shown):
            problems.append(f"{first.feature}: shown by nothing but {first.path}::{first.function}, which needs a GPU")
        notes = dict.fromkeys(mark.note for mark in sorted(shown, key=_place) if mark.note)
        rows.append(Row(first.section, first.feature, first.verdict, tuple(notes)))
    if problems:
        raise SupportTableError("support marks:\n  " + "\n  ".join(sorted(problems)))
    return tuple(sorted(rows, key=_order))


def _spelling(feature: str) -> str:
    """A feature without what is only typography, so that two spellings of one feature are noticed."""
    return re.sub(r"[^a-z0-9<>=.]+", " ", feature.lower()).strip()


def _order(row: Row) -> tuple[int, int, str]:
    return SECTIONS.index(row.section), VERDICTS.index(row.verdict), _spelling(row.feature)


def _place(mark: Shown) -> tuple[str, str, str]:
    return mark.path, mark.function, mark.case


def read_versions() -> Versions:
    """From pyproject.toml, constraints.txt and places.py."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = project["optional-dependencies"]["train"]
    floors = {name: floor for name, _, floor in (requirement.partition(">=") for requirement in requirements)}
    pinned = re.search(r"^deepspeed==(\S+)$", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE)
    assert pinned is not None
    python = project["requires-python"].removeprefix(">=")
    return Versions(python, floors["torch"], floors["deepspeed"], (*OLDER_DEEPSPEEDS, pinned[1]))


HEAD = """\
# What is supported, and what is refused

Python >= {python}, torch >= {torch}, DeepSpeed >= {deepspeed}, Linux. The tables say for each feature what happens:

* **exact**: saved on N ranks and resumed on M, all of the state is the saved one, bit for bit, up and down.
* **refused**: an error that names what is not supported and what to do instead, the same on every rank, before a tensor
  or a file is touched. [Ways around](troubleshooting.md#what-is-refused-and-what-to-do-instead).

Anything in neither list is not tested. Each row is a mark on the tests that show it. All tests run on DeepSpeed
{newest}, the core of them on {others} too. [Compatibility](#compatibility) is at the end.
"""

TAIL = """
## Compatibility

* **Versions** have floors and no caps: a newer Python, torch or DeepSpeed is taken, and checked. A floor is raised in
  a minor release.
* **Checkpoints**: later releases read what a release has written. An older release that meets a newer format says to
  upgrade.
* **Without zeroelastic** a full checkpoint loads in DeepSpeed on the number of ranks that saved it, and
  `zero_to_fp32.py` reads it.
* **The interface** is: names that `import zeroelastic` gives, [options](reference/options.md),
  [verbs](reference/cli.md), and keys of `--json`. They change in a minor release, after one in which the old form
  still works and names its replacement. Other modules are internal.
* **When DeepSpeed changes** a method that zeroelastic relies on ([`SEAMS`,
  `USED`](../zeroelastic/deepspeed/seams.py)), `install()` raises `IncompatibleDeepSpeedError`, names it, and
  wraps nothing. A layout or file that does not fit is refused by name.
"""


def render(rows: Iterable[Row], versions: Versions) -> str:
    """The page with the rows."""
    *others, newest = versions.tested
    text = HEAD.format(
        python=versions.python,
        torch=versions.torch,
        deepspeed=versions.deepspeed,
        newest=newest,
        others=" and ".join(others),
    )
    rows = tuple(rows)
    for section in SECTIONS:
        lines = [_line(row) for row in rows if row.section == section]
        if lines:
            text += f"\n## {section}\n\n| feature | | note |\n|---|---|---|\n" + "\n".join(lines) + "\n"
    return text + TAIL


def _line(row: Row) -> str:
    return f"| {row.feature} | {row.verdict} | {'; '.join(row.notes)} |"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--support-table", metavar="FILE", help="write what the collected tests show")


COLLECTED = pytest.StashKey[tuple[pytest.Item, ...]]()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps what was collected, before -k and -m leave some of it out."""
    config.stash[COLLECTED] = tuple(items)


def pytest_collection_finish(session: pytest.Session) -> None:
    target = session.config.getoption("--support-table")
    if target and not session.testsfailed:  # what cannot be imported shows nothing
        try:
            rows = make_rows(read_marks(session.config.stash[COLLECTED]))
        except SupportTableError as error:
            raise pytest.UsageError(str(error)) from error
        Path(target).write_text(render(rows, read_versions()))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """In CI, a test that must run and is skipped, or excused by xfail, has failed."""
    report = yield
    named = [name for name in MUST_RUN if item.get_closest_marker(name)]
    if report.skipped and named and "CI" in os.environ and not _lacks_gpu(item):
        why: Any = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = (
            f"{item.nodeid} is marked {named[0]} and did not run, so nothing shows what it is to show: {why}"
        )
        report.__dict__.pop("wasxfail", None)
    return report


def _lacks_gpu(item: pytest.Item) -> bool:
    """A test of GPUs may be skipped: no row is shown by such tests alone."""
    return item.get_closest_marker("gpu") is not None
