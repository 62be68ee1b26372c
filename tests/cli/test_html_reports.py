"""``--html``: the tables of the terminal and a figure in one file that loads nothing; names from files stay text."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shutil
import subprocess
import threading
from html.parser import HTMLParser
from pathlib import Path

import pytest
from programs import run_command
from sample import write_sample
from saved_files import flip
from synthetic import optim_name, write_checkpoint

import zeroelastic
from zeroelastic.cli.view import Row, Table, View, page, what_moves, who_holds_what, write_page
from zeroelastic.core.layout import Param
from zeroelastic.errors import UsageError
from zeroelastic.io import atomic

VERBS = ("inspect", "verify", "plan", "diff")


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("reports")
    write_sample(root / "ckpt", world_size=4)
    return root


def arguments(verb: str, samples: Path) -> list[str]:
    ckpt = str(samples / "ckpt")
    return {
        "inspect": ["inspect", ckpt],
        "verify": ["verify", ckpt],
        "plan": ["plan", ckpt, "-n", "3"],
        "diff": ["diff", f"{ckpt}/global_step2", ckpt],
    }[verb]


class Parsed(HTMLParser):
    """The elements of a page, each with its attributes, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.cells: list[str] = []
        self._text: list[str] = []
        self._in_cell = False
        self.feed(text)
        self.text = " ".join(" ".join(self._text).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._in_cell = tag in ("td", "th")
        if self._in_cell:
            self.cells.append("")

    def handle_endtag(self, tag: str) -> None:
        self._in_cell = False

    def handle_data(self, data: str) -> None:
        self._text.append(data)
        if self._in_cell:
            self.cells[-1] += data


@pytest.mark.support("Using it", "`--html`: a page of four verbs for a browser", "exact", "one file that loads nothing")
@pytest.mark.parametrize("verb", VERBS)
def test_a_page_is_one_file_with_the_tables_of_the_terminal(verb: str, samples: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    done = run_command(*arguments(verb, samples), "--html", out, env={"COLUMNS": "400"})
    assert done.returncode == (1 if verb == "diff" else 0), done.stderr
    text = out.read_text()
    found = Parsed(text)
    for tag, attributes in found.elements:
        assert tag not in ("script", "link", "img", "iframe", "a"), tag
        assert not {"src", "href", "style", "action", "srcset"} & set(attributes), attributes
    assert not re.search(r"https?:|url\(|@import", text)
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    for cell in filter(None, found.cells):
        if "/s" not in cell:  # the rate of reading
            assert cell in done.stdout or verb == "diff" or "more; --json" in done.stdout, cell
    shown = {line.strip() for line in done.stdout.splitlines() if line.strip()}
    assert len([line for line in shown if line.split("  ")[0] in found.text]) > len(shown) * 0.8
    assert ("figure" in [tag for tag, _ in found.elements]) == (verb in ("inspect", "plan"))


def test_a_value_that_is_0_is_on_the_page_and_in_the_terminal(samples: Path, tmp_path: Path) -> None:
    done = run_command("inspect", samples / "ckpt", "--html", tmp_path / "a.html", env={"COLUMNS": "300"})
    assert "weight_decay 0.0," in done.stdout
    assert "weight_decay 0.0," in Parsed((tmp_path / "a.html").read_text()).text


def test_the_document_can_be_asked_for_beside_the_page(samples: Path, tmp_path: Path) -> None:
    done = run_command("verify", samples / "ckpt", "--html", tmp_path / "a.html", "--json")
    assert json.loads(done.stdout)["ok"] and (tmp_path / "a.html").exists()


@pytest.mark.parametrize("verb", VERBS)
def test_a_file_that_exists_is_replaced_only_by_force(verb: str, samples: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    out.write_text("older")
    refused = run_command(*arguments(verb, samples), "--html", out, "--json")
    assert refused.returncode == 2 and "refusing to overwrite it without --force" in refused.stderr
    assert out.read_text() == "older" and set(json.loads(refused.stdout)) == {"schema_version", "ok", "error"}
    done = run_command(*arguments(verb, samples), "--html", out, "--force")
    assert done.returncode in (0, 1) and f"Report: {out}\n" in done.stdout
    assert out.read_text().startswith("<!DOCTYPE html>")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("report.txt", "ends in .html or .htm"),
        ("none/report.html", "there is no directory"),
        ("folder.html", "exists"),
    ],
)
def test_a_name_that_cannot_be_is_refused_before_the_work(name: str, said: str, samples: Path, tmp_path: Path) -> None:
    (tmp_path / "folder.html").mkdir()
    done = run_command("verify", samples / "ckpt", "--html", tmp_path / name, "--force")
    assert done.returncode == 2 and said in done.stderr and done.stdout == ""


@pytest.mark.parametrize("can_rename", [True, False])
def test_of_all_that_write_at_once_one_does_and_nothing_is_left(
    can_rename: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also on a file system, such as NFS, that cannot rename a file without replacing another."""
    if not can_rename:
        monkeypatch.setattr(atomic, "rename_new", lambda src, dst: False)
    out, refused = tmp_path / "report.html", []
    monkeypatch.setattr("zeroelastic.cli.view.page", lambda verb, view: view.sentence)

    def write(text: str) -> None:
        try:
            write_page(out, "verify", View("", (), text, "good"))
        except UsageError:
            refused.append(text)

    texts = [chr(65 + number) * 100_000 for number in range(8)]
    threads = [threading.Thread(target=write, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == 7 and out.read_text() in texts and out.read_text() not in refused
    assert list(tmp_path.iterdir()) == [out]


HOSTILE = "<script>alert(1)</script>\"'&amp;]]>--><img src=x onerror=alert(2)>\x1b[31m\u202e\n"


def hostile_page(verb: str, tmp_path: Path) -> Path:
    """A page on a checkpoint with such names of a parameter and of its directory."""
    run = tmp_path / HOSTILE.replace("/", "\u2215")
    groups = [[Param(HOSTILE, (5, 4)), Param("</title><b>w", (7,))]]
    for step in (1, 2):
        write_checkpoint(
            run / f"global_step{step}", world_size=2, groups=groups, record=True, seed=step, global_steps=step
        )
    damaged = run / "global_step2" / optim_name(1)
    if verb == "verify":
        flip(damaged, damaged.read_bytes().index(b"data/0") + 200)
    first = {"diff": [run / "global_step1"]}.get(verb, [])
    options = ["-n", "3"] if verb == "plan" else []
    done = run_command(verb, *first, run / "global_step2", *options, "--html", tmp_path / "r.html")
    assert done.returncode == {"verify": 3, "diff": 1}.get(verb, 0), done.stdout + done.stderr
    return tmp_path / "r.html"


@pytest.mark.parametrize("verb", VERBS)
def test_names_from_a_checkpoint_are_text(verb: str, tmp_path: Path) -> None:
    """As a parameter's name, and as a directory's; a path cannot have a slash in a name, but everything else."""
    found = Parsed(hostile_page(verb, tmp_path).read_text())
    assert not [tag for tag, _ in found.elements if tag in ("b", "img", "script")]
    assert not [name for _, attributes in found.elements for name in attributes if name.startswith("on")]
    assert "<img src=x onerror=alert(2)>" in found.text and "\\x1b[31m\\u202e" in found.text
    name = {"verify": "</title><b>w", "plan": "<script>alert(1)<"}.get(verb, "<script>alert(1)</script>\"'&amp;]]>-->")
    assert name in found.text


def test_nothing_but_the_style_of_the_page_itself_is_allowed() -> None:
    text = page("inspect", View("x", (Table("t", (Row(("a", "b")),)),), "fine", "good"))
    (policy,) = [a["content"] for tag, a in Parsed(text).elements if tag == "meta" and "http-equiv" in a]
    style = text.split("<style>")[1].split("</style>")[0]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert policy is not None and f"style-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy and "unsafe" not in policy and "script" not in policy


@pytest.mark.extended
def test_a_browser_applies_the_style_and_runs_nothing(tmp_path: Path) -> None:
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("there is no Chromium")
    done = subprocess.run(
        [browser, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
         f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", hostile_page("inspect", tmp_path).as_uri()],
        capture_output=True, text=True, timeout=240, check=True,
    )  # fmt: skip
    assert "Content Security Policy" not in done.stderr, done.stderr
    assert not [tag for tag, _ in Parsed(done.stdout).elements if tag in ("b", "img", "script")]


# --- figures ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["elastic3", "rigid2", "stage2_rank2", "stage2_round_robin_aligned_rank3"])
def test_who_holds_what_adds_up_to_the_elements_of_each_parameter(name: str) -> None:
    from places import GOLDEN

    found = zeroelastic.inspect(GOLDEN / name)
    figure = who_holds_what(found)
    assert figure is not None and len(figure.rows) == found.world_size
    held: dict[str, int] = {}
    for _, marks in figure.rows:
        assert all(mark.x >= 0 and mark.x + mark.width <= 100.001 for mark in marks)
        assert [mark.x for mark in marks] == sorted(mark.x for mark in marks)
        for mark in marks:
            what, numel = re.fullmatch(r"rank \d+: (.*), ([\d,]+) elements", mark.tip).groups()  # type: ignore[union-attr]
            held[what] = held.get(what, 0) + int(numel.replace(",", ""))
    assert sum(held.values()) == found.totals.trained_numel
    sizes = {param.name: param.numel for param in found.params}
    assert all(held[what] == sizes[what] for what in held if what in sizes)


def test_many_ranks_and_small_parameters_are_put_together(tmp_path: Path) -> None:
    write_sample(tmp_path, world_size=40, steps=[1], layers=8)
    figure = who_holds_what(zeroelastic.inspect(tmp_path))
    assert figure is not None and len(figure.rows) <= 17 and figure.rows[-1][0] == "rank 39"
    assert "of 40 ranks are drawn" in figure.note
    assert all(len(marks) <= 200 for _, marks in figure.rows)
    assert any(" parameters from " in mark.tip for mark in figure.rows[0][1])


@pytest.mark.parametrize("world_size", [3, 300])
def test_what_moves_adds_up_to_what_is_read(samples: Path, world_size: int) -> None:
    plan = zeroelastic.plan(samples / "ckpt", world_size=world_size)
    figure = what_moves(plan)
    cells = [mark for _, marks in figure.rows for mark in marks]
    assert len(figure.rows) == 4 and len(cells) <= 4 * 48
    assert any(mark.text for mark in cells) == (world_size == 3)
    if world_size == 3:
        assert [mark.text for mark in figure.rows[0][1]] == ["58.4 KiB", "", ""]
        assert figure.rows[1][1][0].tip == "from rank 1 to rank 0: 19.5 KiB"
    darkest = max(cells, key=lambda mark: mark.opacity)
    assert figure.note.endswith(f"The darkest cell is {darkest.tip.split(': ')[1]}.")


# --- tables -----------------------------------------------------------------------------------------------------------


def test_a_table_that_is_cut_says_how_many_more_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    from zeroelastic.cli.view import print_view

    rows = tuple(Row((f"row {i}",)) for i in range(1500))
    view = View("x", (Table("long", rows, most=3), Table("empty", ())), "fine", "good")
    print_view(view)
    shown = capsys.readouterr().out
    assert "row 2\n  ... and 1,497 more; --json lists them all" in shown and "row 3" not in shown
    text = Parsed(page("inspect", view)).text
    assert "row 999" in text and "row 1000" not in text and "and 500 more" in text and "empty" not in shown + text
