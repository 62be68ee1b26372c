"""``python tests/report_images.py docs/assets/reports``: the pictures of docs/guides/reports.md, by Chromium.

Of the checkpoints that the page's commands make, in small PNGs of few colours.
"""

from __future__ import annotations

import io
import json
import os
import sys
import tempfile
from pathlib import Path

from browser import Browser, Page
from commands import run_command
from PIL import Image

from zeroelastic.cli.pages import report
from zeroelastic.testing.sample import write_sample

_COLOURS = 96


def make_reports(root: Path) -> None:
    """The reports of docs/guides/reports.md, in this directory, which becomes the current one."""
    os.chdir(root)
    write_sample(Path("ckpt"), world_size=4)
    write_sample(Path("damaged"), world_size=4)
    (optimizer,) = Path("damaged/global_step4").glob("*rank_2_*optim_states.pt")
    data = bytearray(optimizer.read_bytes())
    data[len(data) // 2 + 4096] ^= 1
    optimizer.write_bytes(data)
    (model,) = Path("damaged/global_step4").glob("zero_pp_rank_1_*model_states.pt")
    model.unlink()
    for name, *arguments in (
        ("inspect", "inspect", "ckpt"),
        ("verify", "verify", "damaged"),
        ("plan", "plan", "ckpt", "-n", "6"),
        ("diff", "diff", "ckpt/global_step2", "ckpt"),
    ):
        printed = run_command(*arguments, "--json").stdout.replace(str(root), "/scratch/run")
        Path(f"{name}.html").write_text(report(name, json.loads(printed)))


def picture(page: Page, path: Path, height: int) -> None:
    """The upper part of a page."""
    whole = Path("shot.png")
    page.screenshot(whole)
    with Image.open(whole) as image:
        part = image.convert("RGB").crop((0, 0, image.width, min(height, image.height)))
        small = io.BytesIO()
        part.quantize(_COLOURS).save(small, format="PNG", optimize=True)
    path.write_bytes(small.getvalue())


def main(out: Path) -> None:
    """Each report as it looks on a desk, and some on a phone in the dark."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, Browser() as browser:
        make_reports(Path(folder).resolve())
        for name in ("inspect", "verify", "plan", "diff"):
            page = browser.open(Path(f"{name}.html"), width=900)
            picture(page, out / f"{name}.png", 1150)
            page.close()
        for name in ("verify", "plan"):
            page = browser.open(Path(f"{name}.html"), width=360, dark=True)
            picture(page, out / f"{name}-phone.png", 1150)
            page.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
