"""The drawings of the pages: ``python docs/tools/drawings.py`` writes docs/assets/*.svg (`make drawings`).

The layouts and the plan are drawn from what ``zeroelastic.core`` computes, so they cannot show anything else.
tests/project/test_pages.py compares the files with this script.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from zeroelastic.core.layout import Layout, Param, buffer_order, group_split_layout, layout_from_sub_groups
from zeroelastic.core.plan import make_plan

sys.path.insert(0, str(Path(__file__).parent))
from drawing import FILLS, Drawing, site_style

ASSETS = Path(__file__).resolve().parents[1] / "assets"

PARAMS = (Param("embed", (14,)), Param("attn", (10,)), Param("mlp", (12,)), Param("norm", (3,)))
SUB_GROUPS = (PARAMS[:2], PARAMS[2:])
CELL = 15


def _rows(drawing: Drawing, layout: Layout, *, cell: float, left: float, top: float, step: float) -> list[list[float]]:
    """Every rank's buffers as rows of cells; returns the left edge of each buffer of each rank."""
    edges: list[list[float]] = []
    for rank in range(layout.world_size):
        x, y = left, top + rank * step
        drawing.text(left - 12, y + 17, f"rank {rank}", anchor="end")
        start, numel = layout.owned(rank)
        begins = layout.buffer_offset(rank)
        edges.append([])
        for buffer, total in enumerate(layout.sub_group_numel.tolist()):
            edges[-1].append(x)
            drawing.box(x, y, total * cell, 26)
            for i, param in enumerate(layout.params):
                if layout.sub_group[i] == buffer and numel[i]:
                    first, last = int(start[i]), int(start[i] + numel[i]) - 1
                    width = int(numel[i]) * cell
                    label = _label(first, last, width, name=param.name)
                    place = x + int(begins[i]) * cell
                    drawing.box(place, y, width, 26, kind=f"fill{i % FILLS}", label=label)
            x += total * cell + 24
    return edges


def _label(first: int, last: int, width: float, *, name: str = "") -> str:
    """The elements of a box, with the name of their parameter, as much as its width takes."""
    numbers = f"{first}" if first == last else f"{first}-{last}"
    return next((text for text in (f"{name} {numbers}".strip(), numbers) if 7.3 * len(text) < width), "")


def _legend(drawing: Drawing, params: Sequence[Param], y: float, *, left: float) -> None:
    """A patch of colour for each parameter, and for what belongs to none."""
    x = left
    for i, param in enumerate(params):
        drawing.box(x, y, 16, 16, kind=f"fill{i % FILLS}")
        drawing.text(x + 22, y + 13, f"{param.name}, {param.numel} elements", kind="quiet")
        x += 36 + 7.2 * len(f"{param.name}, {param.numel} elements")
    drawing.box(x, y, 16, 16)
    drawing.text(x + 22, y + 13, "padding", kind="quiet")


def layout_stage3() -> Drawing:
    """ZeRO-3: each parameter cut over all ranks, sub-group by sub-group."""
    layout = layout_from_sub_groups(SUB_GROUPS, 4)
    drawing = Drawing(
        "layout-stage3",
        "The layout of ZeRO stage 3",
        "Four ranks, each with two buffers, one per sub-group. Every parameter is cut into four parts; rank 0 has the "
        "first part of each, rank 3 the last, which is shorter and padded.",
        760,
        230,
    )
    edges = _rows(drawing, layout, cell=2 * CELL, left=80, top=40, step=34)
    for number, x in enumerate(edges[0]):
        drawing.text(x, 26, f"sub-group {number}", kind="bold")
    _legend(drawing, PARAMS, 194, left=20)
    return drawing


def layout_stage2() -> Drawing:
    """ZeRO-1 and 2: all parameters of a group end to end, cut into equal parts."""
    drawing = Drawing(
        "layout-stage2",
        "The layout of ZeRO stages 1 and 2",
        "The parameters of an optimizer group lie end to end in one buffer, which is cut into equal parts, one for "
        "each rank; a cut may go through a parameter. With round_robin_gradients the order of the parameters depends "
        "on the number of ranks.",
        760,
        330,
    )
    order = {param.name: number for number, param in enumerate(PARAMS)}
    rows = (
        ("4 ranks", 4, False),
        ("2 ranks, round_robin_gradients", 2, True),
        ("3 ranks, round_robin_gradients", 3, True),
    )
    for number, (words, ranks, round_robin) in enumerate(rows):
        layout = group_split_layout(buffer_order([PARAMS], [ranks], round_robin=round_robin)[0], ranks)
        y, part = 36 + 92 * number, int(layout.part[0]) * CELL
        drawing.text(40, y - 12, words, kind="bold")
        drawing.box(40, y, part * ranks, 26)
        for i, param in enumerate(layout.params):
            kind = f"fill{order[param.name] % FILLS}"
            drawing.box(40 + int(layout.origin[i]) * CELL, y, param.numel * CELL, 26, kind=kind)
            drawing.text(46 + int(layout.origin[i]) * CELL, y + 17.5, param.name)
        for rank in range(ranks):
            if rank:
                drawing.line(40 + rank * part, y - 8, 40 + rank * part, y + 34, kind="cut")
            drawing.text(40 + rank * part + part / 2, y + 44, f"rank {rank}", kind="quiet", anchor="middle")
    _legend(drawing, PARAMS, 302, left=20)
    return drawing


def plan() -> Drawing:
    """What moves from 4 ranks to 3: the segments of the plan of every rank."""
    cell = 21
    params = (Param("embed", (14,)), Param("mlp", (12,)))
    src, dst = (layout_from_sub_groups([params], size) for size in (4, 3))
    drawing = Drawing(
        "plan",
        "A plan from 4 ranks to 3",
        "Above the buffers of the four ranks that saved, below those of the three ranks that load. Bands connect each "
        "range of elements with its new place. Every element moves exactly once, and each rank reads "
        "neighbouring files.",
        760,
        240,
    )

    def left(layout: Layout, rank: int) -> float:
        width = int(layout.sub_group_numel[0]) * cell + 24
        return 40 + (720 - width * layout.world_size) / 2 + rank * width

    for layout, y, words in ((src, 40, "saved by"), (dst, 172, "loads on")):
        for rank in range(layout.world_size):
            x = left(layout, rank)
            drawing.text(x, y - 8 if layout is src else y + 42, f"{words} rank {rank}", kind="quiet")
            drawing.box(x, y, int(layout.sub_group_numel[0]) * cell, 26)
    for rank in range(dst.world_size):
        one = make_plan(src, dst, rank)
        for row in range(one.num_segments):
            param, length = int(one.param[row]), int(one.length[row]) * cell
            x = left(src, int(one.src_rank[row])) + int(one.src_offset[row]) * cell
            u = left(dst, rank) + int(one.dst_offset[row]) * cell
            first = int(one.start[row])
            label = _label(first, first + int(one.length[row]) - 1, length)
            kind = f"fill{param}"
            drawing.band((x, 66, length), (u, 172, length), kind=kind)
            drawing.box(x, 40, length, 26, kind=kind, label=label)
            drawing.box(u, 172, length, 26, kind=kind, label=label)
    return drawing


def digest() -> Drawing:
    """From elements to the content root."""
    drawing = Drawing(
        "digest",
        "From elements to the content root",
        "Each rank computes a partial digest of the elements that it owns. The sum of the partial digests is the "
        "digest of the tensor, whatever the number of ranks. The digests, shapes and names of all parameters together "
        "give the content root.",
        760,
        290,
    )
    for y, ranks, words in ((30, 4, "saved by 4 ranks"), (110, 3, "loaded on 3 ranks")):
        drawing.text(20, y - 8, words, kind="bold")
        width = 300 / ranks
        for rank in range(ranks):
            drawing.box(20 + rank * width, y, width - 4, 34, kind="fill0", label=f"rank {rank}")
        drawing.line(322, y + 17, 372, y + 17, arrow=True)
        drawing.text(348, y + 8, "sum", kind="quiet", anchor="middle")
        drawing.box(378, y, 230, 34, kind="fill1", label="digest e1c5... of fp32, mlp.weight")
    drawing.line(493, 66, 493, 108)
    drawing.text(504, 92, "equal", kind="bold")
    for number, name in enumerate(("fp32, mlp.weight", "exp_avg, mlp.weight", "fp32, norm.weight", "...")):
        drawing.box(20 + number * 155, 186, 145, 30, kind="fill1", label=name)
        drawing.line(92 + number * 155, 218, 320 + number * 20, 246, arrow=True)
    drawing.box(230, 248, 240, 34, kind="fill3", label="content root 92a1cbdb16dd...")
    return drawing


def commit() -> Drawing:
    """The steps of a save, and what a crash in each leaves."""
    before, after = "the last save", "both saves"
    steps = (
        ("1  directory", "hidden, .tmp", before),
        ("2  files", "of every rank", before),
        ("3  commit record", "zeroelastic.json", before),
        ("4  rename", "to global_step8", after),
        ("5  latest", "names it", after),
    )
    drawing = Drawing(
        "commit",
        "The steps of a save",
        "Five steps in order: the hidden directory is made, every rank writes its files, rank 0 writes the commit "
        "record, renames the directory to the tag, and replaces latest. A crash before the rename leaves the last "
        "save; after it both saves are complete.",
        760,
        190,
    )
    for number, (title, detail, left) in enumerate(steps):
        x = 10 + number * 150
        kind = "fill0" if number < 3 else "fill1"
        drawing.box(x, 30, 136, 64, kind=kind)
        drawing.text(x + 8, 52, title, kind="bold")
        drawing.text(x + 8, 78, detail)
        if number:
            drawing.line(x - 13, 62, x - 2, 62, arrow=True)
        drawing.text(x + 68, 134, "a crash here leaves", kind="quiet", anchor="middle")
        drawing.text(x + 68, 152, left, anchor="middle")
    drawing.line(452, 14, 452, 172, kind="cut")
    drawing.text(460, 180, "from here on the save counts", kind="quiet")
    return drawing


def background() -> Drawing:
    """A save in the background beside the steps of training."""
    drawing = Drawing(
        "background",
        "A save in the background",
        "Training stops only while the state is copied to host memory, then goes on; meanwhile a thread writes the "
        "files, makes them durable and commits them. Without async_save training waits for all of it.",
        760,
        230,
    )
    drawing.text(10, 24, '"async_save": false', kind="bold")
    drawing.text(10, 124, '"async_save": true', kind="bold")
    drawing.text(10, 56, "training")
    for x, width, kind, label in ((90, 150, "fill1", "steps"), (240, 250, "fill2", "copy, write, sync, commit")):
        drawing.box(x, 38, width, 28, kind=kind, label=label)
    drawing.box(490, 38, 250, 28, kind="fill1", label="steps")
    drawing.text(10, 156, "training")
    drawing.box(90, 138, 150, 28, kind="fill1", label="steps")
    drawing.box(240, 138, 50, 28, kind="fill2", label="copy")
    drawing.box(290, 138, 450, 28, kind="fill1", label="steps")
    drawing.text(10, 198, "thread")
    drawing.box(290, 180, 230, 28, kind="fill0", label="write, sync, commit")
    drawing.line(520, 172, 520, 216, kind="cut")
    drawing.text(528, 212, "the tag appears, latest names it", kind="quiet")
    return drawing


WALKS = {
    "load": (
        *("choose_tag", "open_checkpoint", "preflight", "make_plan"),
        *("extent_windows", "read_segments", "local_digests", "load_report"),
    ),
    "save": (
        *("SaveBarrier", "covered_live", "elastic_state_dict", "write_skeleton"),
        *("write_segments", "whole_contents", "commit", "publish_tag"),
    ),
    "reshard": (
        *("find_source", "open_state", "plan_reshard", "NativeSink"),
        *("make_plan", "move_segments", "content_root", "new_directory"),
    ),
}
"""The stops of docs/architecture.md that the drawing shows; tests/project/test_architecture.py looks for each there."""


def walk() -> Drawing:
    """The three walks of docs/architecture.md side by side."""
    drawing = Drawing(
        "walk",
        "The walks of a load, a save and a reshard",
        "Three columns of functions, in the order in which they run: "
        + "; ".join(f"{name}: {', '.join(stops)}" for name, stops in WALKS.items())
        + ".",
        760,
        410,
    )
    for column, (name, stops) in enumerate(WALKS.items()):
        x = 30 + column * 245
        drawing.text(x + 105, 22, name, kind="bold", anchor="middle")
        for row, stop in enumerate(stops):
            drawing.box(x, 34 + row * 47, 210, 30, kind=f"fill{column}", label=stop)
            if row:
                drawing.line(x + 105, 17 + row * 47, x + 105, 32 + row * 47, arrow=True)
    return drawing


DRAWINGS: tuple[Callable[[], Drawing], ...] = (layout_stage3, layout_stage2, plan, digest, commit, background, walk)


def files() -> dict[str, str]:
    """Every file of docs/assets that this script makes."""
    made = {f"{drawing.name}.svg": drawing.svg() for drawing in (draw() for draw in DRAWINGS)}
    return {**made, "drawings.css": site_style()}


def inline() -> dict[str, str]:
    """File name -> the drawing as a part of a page."""
    return {f"{drawing.name}.svg": drawing.inline() for drawing in (draw() for draw in DRAWINGS)}


def main() -> None:
    """Write all files."""
    ASSETS.mkdir(exist_ok=True)
    for name, text in files().items():
        (ASSETS / name).write_text(text)


if __name__ == "__main__":
    main()
