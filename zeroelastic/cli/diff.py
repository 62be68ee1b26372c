"""``zeroelastic diff``: how two checkpoints differ, whatever the number of ranks and the format of each."""

from __future__ import annotations

import json
import math
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from zeroelastic.cli.outcome import FAILED
from zeroelastic.cli.sizes import format_size, parse_size

if TYPE_CHECKING:
    from zeroelastic.comparison import Comparison, TensorDifference, ValueDifference

_MOST_SHOWN = 15
_WIDE = 1000  # columns where there is no terminal: a name stays in one piece for grep
_LEAST_MEMORY = 16 << 20


def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="A checkpoint: its tag directory, or the one above.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Another one.")],
    params: Annotated[
        str | None, typer.Option(metavar="PATTERN", help="Only parameters whose name fits, such as '*.bias'.")
    ] = None,
    show_all: Annotated[bool, typer.Option("--all", help="Show every tensor, not the worst few.")] = False,
    max_memory: Annotated[str, typer.Option(metavar="SIZE", help="Memory for the tensors of both.")] = "256MiB",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> None:
    """Compare two checkpoints: every tensor bit for bit, hyper-parameters, counters, client state.

    They may have been saved at different steps, by different numbers of ranks and in different formats; the last two do
    not make them differ.
    Exit code 0: equal; 1: they differ; 2: wrong usage; 3: one of them is invalid.

    \b
    Examples:
        zeroelastic diff ckpt/global_step4 ckpt
        zeroelastic diff ckpt ckpt/global_step4 --params *.norm.weight --json
    """
    found = _compare(a, b, params, _memory(max_memory))
    if as_json:
        typer.echo(json.dumps(_document(found), indent=2))
    else:
        _show(found, show_all)
    if not found.equal:
        raise typer.Exit(FAILED)


def _memory(text: str) -> int:
    try:
        nbytes = parse_size(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="'--max-memory'") from None
    if nbytes < _LEAST_MEMORY:
        raise typer.BadParameter(f"at least {format_size(_LEAST_MEMORY)}.", param_hint="'--max-memory'")
    return nbytes


def _compare(a: str, b: str, params: str | None, max_memory: int) -> Comparison:
    from zeroelastic.checkpoint import open_checkpoint
    from zeroelastic.cli.progress import progress_bar
    from zeroelastic.comparison import compare_checkpoints, comparison_nbytes
    from zeroelastic.one_save import one_save
    from zeroelastic.source import find_source
    from zeroelastic.state import open_state

    sources = find_source(a), find_source(b)
    with one_save(*(source.tag_dir for source in sources)):
        left, right = (open_state(open_checkpoint(source.tag_dir)) for source in sources)
        with progress_bar("diff", comparison_nbytes(left, right, params=params)) as advance:
            return compare_checkpoints(left, right, params=params, max_memory=max_memory, progress=advance)


def _document(found: Comparison) -> dict[str, object]:
    """What --json prints; the keys are documented in docs/cli.md."""
    return {
        "equal": found.equal,
        "a": found.left,
        "b": found.right,
        "content_root": {"a": found.left_root, "b": found.right_root},
        "num_tensors": len(found.tensors),
        "num_equal": len(found.tensors) - len(found.differing),
        "num_bytes": found.num_bytes,
        "tensors": [_tensor_document(tensor) for tensor in found.differing],
        "only_a": [{"param": param, "key": key} for param, key in found.only_left],
        "only_b": [{"param": param, "key": key} for param, key in found.only_right],
        "state": [_value_document(value) for value in found.state],
        "saving": [_value_document(value) for value in found.saving],
    }


def _tensor_document(tensor: TensorDifference) -> dict[str, object]:
    stats = tensor.stats
    return {
        "param": tensor.param,
        "key": tensor.key,
        "dtype": {"a": tensor.left_dtype, "b": tensor.right_dtype},
        "shape": {"a": list(tensor.left_shape), "b": list(tensor.right_shape)},
        "num_elements": None if stats is None else stats.num,
        "num_different": None if stats is None else stats.num_different,
        "num_nonfinite": None if stats is None else stats.num_nonfinite,
        "max_abs": None if stats is None else _finite(stats.max_abs),
        "max_ulp": None if stats is None else stats.max_ulp,
        "norm": _finite(tensor.norm),
        "relative_norm": _finite(tensor.relative_norm),
        "num_nan": None if stats is None else {"a": stats.left_nan, "b": stats.right_nan},
        "num_inf": None if stats is None else {"a": stats.left_inf, "b": stats.right_inf},
    }


def _value_document(value: ValueDifference) -> dict[str, object]:
    return {"what": value.what, "a": value.left, "b": value.right}


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _show(found: Comparison, show_all: bool) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    out = Console() if sys.stdout.isatty() else Console(width=_WIDE)

    def say(*parts: str | tuple[str, str]) -> None:
        out.print(Text.assemble(*parts), soft_wrap=True)

    def table(title: str, *columns: str, rows: list[tuple[str, ...]]) -> None:
        made = Table(title=title, title_justify="left", box=None, pad_edge=False, title_style="bold")
        for number, column in enumerate(columns):
            made.add_column(
                column,
                overflow="fold",
                no_wrap=column == "key",
                justify="right" if column in _NUMBERS and number else "left",
            )
        shown = rows if show_all else rows[:_MOST_SHOWN]
        for row in shown:
            made.add_row(*(Text(cell) for cell in row))
        out.print(made)
        if len(shown) < len(rows):
            say(f"  and {len(rows) - len(shown)} more; --all shows them")

    say(("A  ", "bold"), found.left)
    say(("B  ", "bold"), found.right)
    differing = sorted(found.differing, key=_badness)
    shown = [*differing, *(t for t in found.tensors if t.equal)] if show_all else differing
    if shown:
        table(
            "Tensors" if show_all else "Tensors, the worst first",
            "parameter", "key", "different", "of", "max abs", "max ulp", "relative norm", "",
            rows=[_tensor_row(tensor) for tensor in shown],
        )  # fmt: skip
    for side, only in (("A", found.only_left), ("B", found.only_right)):
        if only:
            table(f"Only in {side}", "parameter", "key", rows=list(only))
    for title, values in (("State", found.state), ("How they were saved (no difference)", found.saving)):
        if values:
            table(title, "what", "A", "B", rows=[(v.what, v.left or "-", v.right or "-") for v in values])
    if found.left_root is not None and found.left_root == found.right_root:
        say("content root ", found.left_root[:12], " of both")
    elif found.left_root is not None and found.right_root is not None:
        say(f"content roots {found.left_root[:12]} and {found.right_root[:12]}")
    count = f"{len(found.tensors) - len(differing)} of {len(found.tensors)} common tensors are equal bit for bit"
    say(
        ("Equal: ", "green") if found.equal else ("Different: ", "bold red"),
        count,
        f" ({format_size(found.num_bytes)})",
    )


_NUMBERS = {"different", "of", "max abs", "max ulp", "relative norm"}


def _badness(tensor: TensorDifference) -> tuple[float, float, str, str]:
    """What sorts the worst difference first: other shapes and dtypes, then by relative norm."""
    relative = tensor.relative_norm
    stats = tensor.stats
    different = 0.0 if stats is None or not stats.num else stats.num_different / stats.num
    rank = math.inf if relative is None or not math.isfinite(relative) or (stats and stats.num_nonfinite) else relative
    return (-rank, -different, tensor.param, tensor.key)


def _tensor_row(tensor: TensorDifference) -> tuple[str, ...]:
    notes = []
    if tensor.left_shape != tensor.right_shape:
        notes.append(f"shape {list(tensor.left_shape)} and {list(tensor.right_shape)}")
    if tensor.left_dtype != tensor.right_dtype:
        notes.append(f"{tensor.left_dtype} and {tensor.right_dtype}")
    stats = tensor.stats
    if stats is None:
        return tensor.param, tensor.key, "", "", "", "", "", "; ".join(notes)
    if stats.num_nonfinite:
        notes.append(f"{stats.num_nonfinite} of them NaN or infinite")
    relative = tensor.relative_norm
    return (
        tensor.param,
        tensor.key,
        str(stats.num_different),
        str(stats.num),
        f"{stats.max_abs:.3g}",
        "" if stats.max_ulp is None else str(stats.max_ulp),
        "" if relative is None else f"{relative:.3g}",
        "; ".join(notes),
    )
