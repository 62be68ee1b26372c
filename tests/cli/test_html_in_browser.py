"""Reports in a browser: nothing is loaded, nothing goes wrong, everything can be read, reached and printed."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Browser, Page
from commands import run_command
from report_documents import inspect_document, plan_document, verify_document
from saved_files import flip

from zeroelastic.cli.pages import report
from zeroelastic.testing.sample import write_sample

pytestmark = pytest.mark.starts_processes

REPORTS = ("inspect", "verify", "invalid", "plan", "diff", "ranks")

# All texts that are seen, with the ratio of the contrast to what lies beneath them: those that are below WCAG's AA.
CONTRAST = """
(() => {
  const parse = (text) => {
    const found = text.match(/rgba?\\(([^)]*)\\)/);
    if (found === null) return null;
    const [r, g, b, a] = found[1].split(",").map(Number);
    return [r, g, b, a === undefined ? 1 : a];
  };
  const over = (top, ground) => ground.map((value, i) => top[i] * top[3] + value * (1 - top[3]));
  const light = (color) => {
    const [r, g, b] = color.map((v) => (v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const beneath = (x, y) => {
    let ground = [255, 255, 255];
    for (const node of document.elementsFromPoint(x, y).reverse()) {
      const style = getComputedStyle(node);
      const shape = node instanceof SVGGeometryElement;
      if (node instanceof SVGElement && !shape) continue;
      const color = parse(shape ? style.fill : style.backgroundColor);
      if (color === null) continue;
      if (shape) color[3] *= Number(style.fillOpacity);
      ground = over(color, ground);
    }
    return ground;
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const low = [];
  let number = 0;
  while (walker.nextNode()) {
    const parent = walker.currentNode.parentElement;
    const text = walker.currentNode.textContent.trim();
    if (text === "" || ["SCRIPT", "STYLE"].includes(parent.tagName) || !parent.checkVisibility()) continue;
    const range = document.createRange();
    range.selectNodeContents(walker.currentNode);
    const box = range.getClientRects()[0];
    if (box === undefined) continue;
    const [x, y] = [box.left + box.width / 2, box.top + box.height / 2];
    const inSvg = parent instanceof SVGElement;
    if (!inSvg && !document.elementsFromPoint(x, y).includes(parent)) continue;  // scrolled away
    const style = getComputedStyle(parent);
    const outlined = inSvg && style.paintOrder.startsWith("stroke");
    const ground = outlined ? parse(style.stroke) : beneath(x, y);
    const color = over(parse(inSvg ? style.fill : style.color), ground.slice(0, 3));
    const [a, b] = [light(color), light(ground.slice(0, 3))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    number += 1;
    if (ratio < 4.5) low.push(`${text.slice(0, 40)}: ${ratio.toFixed(2)}`);
  }
  return { number, low };
})()
"""


def contrast(page: Page) -> Any:
    """What CONTRAST finds in the whole page, which must be on the screen for it."""
    size = page.evaluate("[innerWidth, document.documentElement.scrollHeight]")
    page.call("Emulation.setDeviceMetricsOverride", width=size[0], height=size[1], deviceScaleFactor=1, mobile=False)
    return page.evaluate(CONTRAST)


# What can be used or looked at, and has no name for those who do not see it.
NAMELESS = """
[...document.querySelectorAll("svg, button, input, table, [tabindex], [role]")].filter((node) => {
  if (node.getAttribute("aria-hidden") === "true" || node.closest("[aria-hidden=true]") !== null) return false;
  if (node.tagName === "svg" && node.parentElement.closest("svg[aria-label]") !== null) return false;
  return !(node.getAttribute("aria-label") || (node.tagName !== "svg" && node.textContent.trim()));
}).map((node) => node.outerHTML.slice(0, 100))
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as running:
        yield running


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of each kind, and one of very many ranks."""
    root = tmp_path_factory.mktemp("reports")
    ckpt = root / "ckpt"
    write_sample(ckpt, world_size=4)
    shutil.copytree(ckpt, root / "broken")
    damaged = next((root / "broken/global_step4").glob("*rank_2_*optim_states.pt"))
    flip(damaged)
    next((root / "broken/global_step4").glob("zero_pp_rank_1_*model_states.pt")).unlink()
    for name, *arguments in (
        ("inspect", "inspect", ckpt),
        ("verify", "verify", ckpt),
        ("invalid", "verify", root / "broken"),
        ("plan", "plan", ckpt, "-n", 3, "--bandwidth", "2GB"),
        ("diff", "diff", ckpt / "global_step2", ckpt),
    ):
        run_command(*arguments, "--html", root / f"{name}.html")
    sample = json.loads(run_command("verify", ckpt, "--json").stdout)
    (root / "ranks.html").write_text(report("verify", verify_document(sample, 1000, range(5, 1000, 170))))
    return root


@pytest.mark.parametrize("name", REPORTS)
def test_a_report_is_whole_on_a_desk_on_a_phone_and_on_paper(name: str, reports: Path, browser: Browser) -> None:
    path = reports / f"{name}.html"
    for width, dark, media in ((1000, False, ""), (1000, True, ""), (360, True, ""), (700, True, "print")):
        page = browser.open(path, width=width, dark=dark, media=media)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        found = contrast(page)
        assert found["number"] > 20 and found["low"] == []
        assert page.evaluate(NAMELESS) == []
        assert page.evaluate("document.querySelectorAll('svg.plot').length") > 0
        ground = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
        assert ground == ("rgb(255, 255, 255)" if media or not dark else "rgb(17, 20, 24)")
        assert page.problems == [] and page.requests == [path.as_uri()]
        page.close()


def test_the_check_of_contrast_can_fail(reports: Path, browser: Browser, tmp_path: Path) -> None:
    text = (reports / "plan.html").read_text()
    script = "document.querySelector('h1').style.color = '#eee'"
    (tmp_path / "pale.html").write_text(text)
    page = browser.open(tmp_path / "pale.html")
    page.evaluate(script)
    low = [said.rsplit(": ", 1)[0] for said in contrast(page)["low"]]
    assert "".join(low) == page.evaluate("document.querySelector('h1').textContent")
    page.evaluate("console.error('seen')")
    page.evaluate("new Promise((done) => { fetch('https://example.com').then(done, done) })")
    assert any("seen" in said for said in page.problems)
    assert any("Content Security Policy" in said for said in page.problems)
    page.close()


def readout(page: Page) -> str:
    text: str = page.evaluate("document.querySelector('.readout').textContent")
    return text


def test_marks_are_read_out_by_keyboard_pointer_and_tap(reports: Path, browser: Browser) -> None:
    page = browser.open(reports / "plan.html")
    page.evaluate("document.querySelector('.chart').focus()")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')").startswith("Bytes that each target rank")
    said = []
    for key in ("ArrowRight", "ArrowRight", "ArrowDown", "ArrowLeft", "End", "ArrowRight", "Home", "ArrowUp"):
        page.press(key)
        said.append(re.findall(r"rank (\d+)", readout(page)))
    assert said == [[*pair] for pair in ("00", "01", "11", "10", "32", "32", "00", "00")]
    assert page.evaluate("document.querySelectorAll('.on').length") == 1
    where = "document.querySelectorAll('.chart [data-tip]')[4].getBoundingClientRect()"
    x, y = page.evaluate(f"{where}.x + 9"), page.evaluate(f"{where}.y + 9")
    page.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    assert readout(page).startswith("saved rank 1 to target rank 1: ")
    page.close()
    page = browser.open(reports / "invalid.html", width=360)
    where = "document.querySelector('.damage[data-tip], .damage-all[data-tip]').getBoundingClientRect()"
    page.evaluate("document.querySelector('.chart').scrollIntoView()")
    x, y = page.evaluate(f"{where}.x + 4"), page.evaluate(f"{where}.y + 9")
    page.call("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}])
    page.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
    page.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    assert "zero_pp_rank_1_mp_rank_00_model_states.pt: is missing" in readout(page)
    page.close()


def test_a_long_table_is_filtered_and_the_data_can_be_saved(reports: Path, browser: Browser, tmp_path: Path) -> None:
    page = browser.open(reports / "diff.html")
    page.evaluate("document.querySelector('input').focus()")
    page.call("Input.insertText", text="NORM")
    shown = page.evaluate("[...document.querySelectorAll('.table')].find((t) => t.querySelector('input'))"
                          ".querySelectorAll('tbody tr:not([hidden])').length")  # fmt: skip
    every = page.evaluate("document.querySelectorAll('input')[0].closest('.table').querySelectorAll('tbody tr').length")
    assert 0 < shown < every
    page.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    page.evaluate("document.getElementById('save').click()")
    for _ in range(600):
        if (tmp_path / "diff.json").exists():
            break
        page.evaluate("new Promise((done) => setTimeout(done, 100))")
    assert json.loads((tmp_path / "diff.json").read_text())["weights_equal"] is False
    assert page.problems == []
    page.close()


@pytest.mark.parametrize("verb", ["inspect", "plan"])
def test_a_report_of_the_largest_kind_opens_within_two_seconds(
    verb: str, reports: Path, browser: Browser, tmp_path: Path
) -> None:
    options = ["-n", "3"] if verb == "plan" else []
    sample = json.loads(run_command(verb, reports / "ckpt", *options, "--json").stdout)
    document = inspect_document(sample, 30_000, 1000) if verb == "inspect" else plan_document(sample, 1000, 1000, 40)
    path = tmp_path / f"{verb}.html"
    path.write_text(report(verb, document))
    times = []
    for _ in range(3):  # other work runs on this machine: the best of three
        page = browser.open(path)
        times.append(page.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd"))
        assert page.evaluate("document.documentElement.scrollWidth") <= 1000 and page.problems == []
        page.close()
        if min(times) < 2000:
            break
    assert min(times) < 2000, times


def test_it_prints_on_white_paper_with_few_pages(reports: Path, browser: Browser, tmp_path: Path) -> None:
    page = browser.open(reports / "diff.html", dark=True)
    page.pdf(tmp_path / "diff.pdf")
    data = (tmp_path / "diff.pdf").read_bytes()
    assert data.startswith(b"%PDF") and 2 <= len(re.findall(rb"/Type\s*/Page\b", data)) <= 6
    page.close()
