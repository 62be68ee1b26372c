"""The figures in the pages, from the raw results: ``python benchmarks/figures.py`` writes them into the pages.

A sentence or table row of a page stands here as a template, with the name of a figure where the page has its value;
line breaks do not matter. tests/project/test_pages.py compares, so a page never says what no result says.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from string import Formatter
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
RESULTS = REPOSITORY / "benchmarks" / "results"

TEMPLATES: dict[str, tuple[str, ...]] = {
    "README.md": (
        "| load on another number of ranks, 4 -> 1, verified | {gpu_full} s | refused |",
        "| load on the same number of ranks, DeepSpeed's own files | {gpu_same} s | {gpu_stock} s |",
        "| GPU memory beyond the state in a load | {gpu_kb} KB | {gpu_stock_gb} GB |",
        "| load on the same number of ranks, stage 2 | {gpu2_same} s | {gpu2_stock} s |",
        "| save, flushed to the disk | {gpu_save} s | {gpu_stock_save} s |",
        "| load without a GPU, 4 -> 3, verified | {first_load} s | {first_stock} s for 4 -> 4 |",
        "| the same by Universal Checkpoint | | {convert} s to convert, {universal_load} s to load |",
    ),
    "docs/comparison.md": (
        "| a later load of the same engine: 4 -> 3 ranks, {params}M parameters, {gb} GB of state | {load} s, "
        "verified | {convert} s to convert + {universal_load} s to load |",
        "load took {first_load} s, 4 -> 3, verified, and DeepSpeed's own at the same size {first_stock} s",
        "DeepSpeed's own load at the same size (4 -> 4) took {stock_load} s and torch DCP's load {dcp_load} s. Saving "
        "the same state on 4 ranks took {save_flushed} s, with digests and commit record and flushed to the disk; "
        "DeepSpeed alone, flushed, took {stock_save_flushed} s.",
    ),
    "docs/guides/elastic.md": (
        "lost {elastic_lost} steps in all at the three kills and none when nodes joined, and `resume` took at most "
        "{elastic_share} % of the time from a kill to the next step",
    ),
    "benchmarks/README.md": (
        "five rounds): {first_load} s, where DeepSpeed's own same-size load takes {first_stock} s ({first_of_stock} "
        "of it; target: 0.5), and plain reading of the same bytes into new memory {first_plain} s ({first_of_plain} "
        "times its speed; target: 0.6).",
        "The report's seconds are {first_least} to {first_most} of a clock around the call.",
        "**At stage 2** it takes {first_load_stage2} s, DeepSpeed's own {first_stock_stage2} s "
        "({first_of_stock_stage2} of it), plain reading {first_plain_stage2} s ({first_of_plain_stage2} times its "
        "speed), and the report's seconds are {first_least_stage2} to {first_most_stage2} of the clock's",
        "ext4 on a virtual disk, {params} million parameters, {gb} GB of state.",
        "`pread` of the same bytes: >= 0.85; 0.75 | {tensors_pread} | {read_pread} | {full_pread} |",
        "Universal Checkpoint's convert + load: >= 50; 40 | {tensors_universal} | {read_universal} | "
        "{full_universal} |",
        "times faster than torch DCP: >= 10; 4 | {tensors_dcp} | {read_dcp} | {full_dcp} |",
        "own load at the same size on 4 ranks: <= 0.6 | | {read_stock} | {full_stock} |",
        "| cold, the disk's sequential reading: >= 0.85 | {tensors_cold} | {read_cold} | {full_cold} |",
        "| read <= 1.01 of owned | {tensors_amplification} | {read_amplification} | {full_amplification} |",
        "extra memory per rank <= 64 MiB | {tensors_rss} MiB | {read_rss} MiB | {full_rss} MiB |",
        "*The whole load* is the payload ({payload_s} s), verification ({verify_read_s} s as it is read, "
        "{verify_full_s} s in the live state), and the rest ({fixed_s} s)",
        "| >= 1.5 times faster than `torch.save`, or DeepSpeed alone | {file_torch} | {file_torch_flushed} | "
        "{save_stock} | {save_stock_flushed} |",
        "| >= 0.8 of plain parallel writing of the same bytes | {file_plain} | {file_plain_flushed} | {save_plain} | "
        "{save_plain_flushed} |",
        "| extra memory <= 64 MiB | {file_rss} MiB | {file_rss_flushed} MiB | {save_rss} MiB | "
        "{save_rss_flushed} MiB |",
        "*Flushed*, the disk bounds every system: DeepSpeed alone takes {stock_plain_flushed} times as long as plain "
        "writing",
        "reaches {file_reserved} of them without flushing and {file_reserved_flushed} with it.",
        *(
            f"{title} | {{copy_{x}1}}, {{copy_{x}2}} | {{digest_{x}1}} %, {{digest_{x}2}} % | "
            f"{{bf16_{x}1}}, {{bf16_{x}2}} |"
            for x, title in (
                ("a", "| a: 1.3B parameters, 8 -> 6 | 0.92"),
                ("b", "| a': misaligned, 4 -> 3 | 0.92"),
                ("c", "| b: 100,000 of 1 KB | 0.75"),
                ("d", "| c: 6 of 168 MB | 0.95"),
            )
        ),
    ),
}

_FIGURE = r"(\*{0,2}-?[0-9][0-9.,]*\*{0,2})"


def read_result(name: str) -> Any:
    """The raw result ``results/NAME.json``."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def times(ours: dict[str, Any], theirs: dict[str, Any]) -> float:
    """How many times longer theirs takes: the median over rounds, or of the medians when one has fewer rounds."""
    if len(ours["raw_seconds"]) == len(theirs["raw_seconds"]):
        return median(b / a for a, b in zip(ours["raw_seconds"], theirs["raw_seconds"], strict=True))
    return float(median(theirs["raw_seconds"]) / median(ours["raw_seconds"]))


def goal(value: float, places: int, target: float) -> str:
    """A figure, bold where it misses a target that it should reach."""
    text = f"{value:.{places}f}"
    return text if value >= target else f"**{text}**"


def limit(value: float, places: int, most: float) -> str:
    """A figure, bold where it is above what it may be."""
    text = f"{value:.{places}f}"
    return text if value <= most else f"**{text}**"


def figures() -> dict[str, str]:
    """Every figure by its name, as pages have it."""
    return dict(
        [
            *_loading(),
            *_first_loading(),
            *_on_gpu(),
            *_saving(),
            *_segments(),
            *_elastic(),
        ]
    )


def _mib(row: dict[str, Any]) -> float:
    return float(row["extra_rss"]) / (1 << 20)


def _loading() -> Iterator[tuple[str, str]]:
    result = read_result("load")
    first, warm, cold = (
        {row["system"]: row for row in result["rows"] if (row["cache"], row["first"]) == kind}
        for kind in (("warm", True), ("warm", False), ("cold", False))
    )
    for system in ("universal-convert", "universal-load", "universal"):  # these load once in a process
        warm.setdefault(system, first[system]) if system in first else None
    yield "params", f"{result['saved']['numel'] / 1e6:.0f}"
    yield "gb", f"{result['saved']['state_bytes'] / 1e9:.2f}"
    names = {"load": "elastic", "stock_load": "stock", "dcp_load": "dcp", "payload_s": "tensors"}
    yield from ((name, f"{warm[system]['seconds'][1]:.2f}") for name, system in names.items())
    yield "convert", f"{warm['universal-convert']['seconds'][1]:.1f}"
    yield "universal_load", f"{warm['universal-load']['seconds'][1]:.1f}"
    seconds = {system: row["seconds"][1] for system, row in warm.items()}
    yield "verify_read_s", f"{seconds['elastic-read'] - seconds['elastic-quick']:.2f}"
    yield "verify_full_s", f"{seconds['elastic'] - seconds['elastic-quick']:.2f}"
    yield "fixed_s", f"{seconds['elastic-quick'] - seconds['tensors']:.2f}"
    for name, system in (("tensors", "tensors"), ("read", "elastic-read"), ("full", "elastic")):
        whole = name != "tensors"
        yield f"{name}_pread", goal(times(warm[system], warm["ceiling"]), 2, 0.75 if whole else 0.85)
        yield f"{name}_universal", goal(times(warm[system], warm["universal"]), 0, 40 if whole else 50)
        yield f"{name}_dcp", goal(times(warm[system], warm["dcp"]), 1, 4 if whole else 10)
        yield f"{name}_cold", goal(times(cold[system], cold["ceiling"]), 2, 0.85)
        yield f"{name}_amplification", f"{warm[system]['amplification']:.3f}"
        yield f"{name}_rss", f"{_mib(warm[system]):.1f}"
        if whole:
            yield f"{name}_stock", f"{1 / times(warm[system], warm['stock']):.2f}"


def _first_loading() -> Iterator[tuple[str, str]]:
    for end in ("", "_stage2"):
        rows = {row["system"]: row for row in read_result(f"first_load{end}")["rows"] if row["first"]}
        ours, stock, plain = (rows[system]["seconds"][1] for system in ("elastic-read", "stock", "ceiling"))
        seconds = {"load": ours, "stock": stock, "plain": plain}
        yield from ((f"first_{name}{end}", f"{value:.2f}") for name, value in seconds.items())
        yield f"first_of_stock{end}", limit(ours / stock, 2, 0.5)
        yield f"first_of_plain{end}", goal(plain / ours, 2, 0.6)
        for which, value in zip(("least", "most"), rows["elastic-read"]["reported_of_call"], strict=True):
            yield f"first_{which}{end}", f"{value:.2f}"


def _on_gpu() -> Iterator[tuple[str, str]]:
    """Of the first load of each process."""
    for stage, end in ((3, ""), (2, "2")):
        lines = (RESULTS / "h200" / f"gpu_resume_stage_{stage}.jsonl").read_text().splitlines()
        first = {line["system"]: line for line in map(json.loads, lines) if line.get("number") == 0}
        yield f"gpu{end}_same", f"{first['rigid-read']['seconds']:.2f}"
        yield f"gpu{end}_stock", f"{first['stock']['seconds']:.2f}"
        if stage == 3:
            yield "gpu_full", f"{first['elastic-full']['seconds']:.2f}"
            yield "gpu_kb", f"{first['elastic-full']['gpu_peak_above'] / 1024:.1f}"
            yield "gpu_stock_gb", f"{first['stock']['gpu_peak_above'] / 1e9:.1f}"
    saves = read_result("h200/gpu_saves")["parts"]["saves"]["seconds"]
    yield "gpu_save", f"{median(saves['zeroelastic, flushed']):.2f}"
    yield "gpu_stock_save", f"{median(saves['DeepSpeed, flushed']):.2f}"


def _saving() -> Iterator[tuple[str, str]]:
    rows = {(row["system"], row["durable"]): row for row in read_result("save")["rows"] if not row["first"]}
    yield "save_flushed", f"{rows['elastic', True]['seconds'][1]:.2f}"
    yield "stock_save_flushed", f"{rows['stock', True]['seconds'][1]:.2f}"
    yield "stock_plain_flushed", f"{times(rows['plain', True], rows['stock', True]):.1f}"
    for durable, end in ((False, ""), (True, "_flushed")):
        file, save = rows["file-digests", durable], rows["elastic", durable]
        yield f"file_torch{end}", goal(times(file, rows["torch", durable]), 1, 1.5)
        yield f"save_stock{end}", goal(times(save, rows["stock", durable]), 1, 1.5)
        yield f"file_plain{end}", goal(times(file, rows["plain", durable]), 2, 0.8)
        yield f"save_plain{end}", goal(times(save, rows["plain", durable]), 2, 0.8)
        yield f"file_reserved{end}", f"{times(file, rows['reserved', durable]):.2f}"
        yield f"file_rss{end}", f"{_mib(file):.1f}"
        yield f"save_rss{end}", f"{_mib(save):.1f}"


def _segments() -> Iterator[tuple[str, str]]:
    rows = {(row["key"], row["threads"], row["method"]): row for row in read_result("kernel")["rows"]}
    for letter, key in zip("abcd", ("a", "a'", "b", "c"), strict=True):
        for threads in (1, 2):
            copy, digest = (rows[key, threads, method] for method in ("native", "native + digest"))
            yield f"copy_{letter}{threads}", f"{copy['ratio'][1]:.2f}"
            yield f"digest_{letter}{threads}", limit(100 * (times(copy, digest) - 1), 0, 10)
            yield f"bf16_{letter}{threads}", goal(rows[key, threads, "native to bf16"]["ratio"][1], 2, 1)


def _elastic() -> Iterator[tuple[str, str]]:
    """Of ``make demo-elastic``: the steps that were lost, and the share of ``resume`` in a restart."""
    restarts = read_result("elastic")["restarts"]
    kills = [one for one in restarts if one["lost_steps"]]
    yield "elastic_lost", f"{sum(one['lost_steps'] for one in restarts)}"
    yield "elastic_share", f"{100 * max(one['our_share'] for one in kills):.1f}"


def names_in(template: str) -> list[str]:
    """The names of the figures in a template, in order."""
    return [name for _, name, *_ in Formatter().parse(template) if name]


def written(text: str, templates: tuple[str, ...], values: dict[str, str]) -> str:
    """A page with these values in place of its own. Raises ValueError where a template is not in the page once."""
    for template in templates:
        parts = [(re.escape(words).replace(r"\ ", r"\s+"), name) for words, name, *_ in Formatter().parse(template)]
        pattern = "".join(words + (_FIGURE if name else "") for words, name in parts)
        places = list(re.finditer(pattern, text))
        if len(places) != 1:
            raise ValueError(f"{len(places)} places look like {template!r}")
        for number, name in reversed([*enumerate(names_in(template), 1)]):
            begin, end = places[0].span(number)
            text = text[:begin] + values[name] + text[end:]
    return text


def main() -> None:
    """Write the figures into the pages."""
    values = figures()
    for page, templates in TEMPLATES.items():
        path = REPOSITORY / page
        path.write_text(written(path.read_text(), templates, values))


if __name__ == "__main__":
    main()
