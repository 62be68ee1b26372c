"""Make the oracle's own sources and its table: what each source becomes in each sink, and what that reads.

    python tests/oracle/make.py            # the table alone, with the code that is checked out
    python tests/oracle/make.py sources    # the sources, too: their content is another then

A cell is a source (a checkpoint in ``tests/golden`` or here), a sink (native files of a stage and of a
number of ranks, safetensors, FSDP2) and what came of it: the content root of the state (of an export, the digest of
its files), the bytes that the process read in system calls, and how often it opened a file of the source. Native files
are read again: they hold what was reported. The live engine is a sink, too (``load_each``).
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

import zeroelastic
from zeroelastic.testing import RankPool, run_ranks
from zeroelastic.testing.state import fingerprint, flatten

HERE = Path(__file__).resolve().parent
GOLDEN = HERE.parent / "golden"
TABLE = HERE / "table.json"

SIZES = (1, 2, 3, 4, 5, 6)
STAGES = (1, 2, 3)
WHOLE = (
    "elastic2",
    "elastic3",
    "rigid2",
    "rigid3",
    "stage1_rank2",
    "stage1_bf16_optimizer_rank2",
    "stage2_rank2",
    "stage2_elastic_rank2",
    "stage2_round_robin_aligned_rank3",
)
"""Golden checkpoints of one model."""

SLICED: dict[str, tuple[int, dict[str, Any], tuple[dict[str, int], ...]]] = {
    "llama_tp2": (
        4,
        {"model": "llama", "tp": 2, "precision": "bf16", "frozen": True},
        tuple(
            {"tp": tp, "world_size": tp * data, "stage": stage}
            for tp in (1, 2, 4)
            for data in (1, 2, 3)
            for stage in STAGES
            if tp * data <= max(SIZES)
        ),
    ),
    "autoep_ep2": (
        4,
        {"model": "autoep", "ep": 2, "stage": 3, "elastic": False, "installed": False},
        tuple(
            {"ep": ep, "world_size": size, "stage": stage}
            for ep in (1, 2, 4)
            for size in SIZES
            for stage in STAGES
            if size % ep == 0
        ),
    ),
    "moe_ep2": (
        2,
        {"model": "moe", "ep": 2, "stage": 2},
        tuple(
            {"ep": ep, "world_size": size, "stage": stage}
            for ep in (1, 2, 4)
            for size in SIZES
            for stage in (1, 2)
            if size % ep == 0
        ),
    ),
}
"""Checkpoints that topologies cut, by name: ranks, the job (``TopologyJob``), and the sizes that they become."""

UNIVERSAL = "universal"
"""What DeepSpeed's own converter makes of ``rigid2``."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One way from a source to a sink; ``run(target)`` takes it and returns a report."""

    source: str
    path: Path
    sink: str
    run: Callable[[Path], Any]


def cells(source: str) -> Iterator[Cell]:
    """Every way from a source."""
    path = next(folder / source for folder in (HERE, GOLDEN) if (folder / source).exists())
    if source in SLICED:
        for sizes in SLICED[source][2]:
            sink = " ".join(f"{name} {size}" for name, size in sizes.items())
            yield Cell(source, path, sink, _reshard(path, sizes))
    elif source in ("fsdp2", UNIVERSAL):
        given = path / "ckpt" if source == "fsdp2" else path
        for size in SIZES:
            for stage in STAGES:
                yield Cell(source, given, f"stage {stage} ranks {size}", _convert(given, source, size, stage))
        return
    else:
        for size in SIZES:
            for stage in STAGES:
                format = "elastic" if stage == 3 and size % 2 else "rigid"
                options = {"world_size": size, "stage": stage, "format": format}
                yield Cell(source, path, f"{format} stage {stage} ranks {size}", _reshard(path, options))
    yield Cell(source, path, "safetensors", lambda target: zeroelastic.export(path, target, optimizer=True))
    yield Cell(source, path, "fsdp2", lambda target: zeroelastic.convert(path, target, to="fsdp2"))


def _reshard(path: Path, options: Mapping[str, Any]) -> Callable[[Path], Any]:
    return lambda target: zeroelastic.reshard(path, target, **options)


def _convert(path: Path, from_: Any, size: int, stage: int) -> Callable[[Path], Any]:
    return lambda target: zeroelastic.convert(path, target, from_=from_, world_size=size, stage=stage)


SOURCES = (*WHOLE, *SLICED, "fsdp2", UNIVERSAL)


def load_each(stage: int) -> dict[str, list[Any]]:
    """Load every golden checkpoint of the model into one live engine, on this rank.

    Returns, by source, the content root of what is in the engine, the payload that all ranks read together, and the
    header bytes and files of the worst rank.
    """
    import torch.distributed as dist
    from golden.make import Run, build

    zeroelastic.install()
    engine = build(Run(dist.get_world_size(), stage, elastic=True, config={"zeroelastic": {"verify": True}}))
    found: dict[str, list[Any]] = {}
    for source in WHOLE:
        engine.load_checkpoint(str(GOLDEN / source))
        report = engine.zeroelastic_report
        found[source] = [report.loaded_root, report.total_bytes_read, report.header_bytes, report.files_opened]
    return found


_opened: list[str] = []


def measure(source: str) -> dict[str, list[Any]]:
    """The cells of a source by sink: content root, bytes read, opens of the source's files.

    A process does this once: its opens are watched from here on.
    """
    sys.addaudithook(lambda event, arguments: _opened.append(str(arguments[0])) if event == "open" else None)
    found: dict[str, list[Any]] = {}
    every = list(cells(source))
    # The first run of each kind imports modules, which is no part of its cell: it is measured again.
    with patch("time.time", lambda: 1.7e9):  # a commit record has the time in it, and its size is counted
        for cell in (every[0], *every[-2:], *every):
            with tempfile.TemporaryDirectory() as directory:
                _opened.clear()
                before = _bytes_read()
                report = _run(cell, Path(directory, "out"))
                read = _bytes_read() - before
                opened = sum(path.startswith((str(HERE), str(GOLDEN))) for path in _opened)
                content = _content(cell, report, Path(directory, "out"))
            found.pop(cell.sink, None)
            found[cell.sink] = [content, read, opened]
    return found


def _run(cell: Cell, target: Path) -> Any:
    """The report of a cell, or the error that refused it."""
    try:
        return cell.run(target)
    except zeroelastic.ZeroElasticError as error:
        return error


def _content(cell: Cell, report: Any, target: Path) -> str:
    """The name of the error; the content root; or for an export, which has none, the digest of its files."""
    if isinstance(report, Exception):
        return type(report).__name__
    if root := getattr(report, "content_root", None):
        _read_again(cell, root, target)
        return str(root)
    digest = hashlib.sha256()
    if (target / ".metadata").exists():  # of FSDP2, whose files have random names of their own in them
        for name, value in sorted(flatten("", _load_state_dict_from_keys(checkpoint_id=target)).items()):
            digest.update(f"{name} {fingerprint({name: value})}".encode())
        return digest.hexdigest()
    for path in sorted(path for path in target.rglob("*") if path.is_file()):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _read_again(cell: Cell, root: str, target: Path) -> None:
    """Files that are written hold the content that was reported; those of a model without slices, all else, too."""
    assert zeroelastic.verify(target).content_root == root, cell
    if cell.source not in WHOLE:
        return
    with zeroelastic.open(target) as made:
        assert f"stage {made.stage} ranks {made.world_size}" in cell.sink
    found = zeroelastic.diff(cell.path, target)
    assert not (found.tensors or found.only_a or found.only_b), cell
    has_scaler = "bf16_optimizer" not in cell.source  # the files of a BF16_Optimizer have none
    assert all(not has_scaler and "loss scaler" in difference.what for difference in found.state), (cell, found.state)


def _bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def make_sources() -> None:
    """Train and save the sliced checkpoints, and convert the Universal one."""
    from stock_programs import make_universal
    from topologies import TopologyJob, save_run

    for name, (ranks, job, _) in SLICED.items():
        folder = HERE / name
        shutil.rmtree(folder, ignore_errors=True)
        run_ranks(save_run, ranks, TopologyJob(**job), str(folder), timeout=300)
        for script in folder.glob("zero_to_*.py"):
            script.unlink()
    shutil.rmtree(HERE / UNIVERSAL, ignore_errors=True)
    make_universal(GOLDEN / "rigid2/global_step2", HERE / UNIVERSAL)


def main() -> None:
    """Write the table; with ``sources`` as an argument, make the sources first."""
    if "sources" in sys.argv[1:]:
        make_sources()
    with RankPool(preload=("golden.make", "oracle.make")) as pool:
        table = {source: pool.run(measure, 1, source)[0] for source in SOURCES}
        for size in SIZES:
            for stage in STAGES:
                table[f"live stage {stage} ranks {size}"] = pool.run(load_each, size, stage)[0]
    lines = [
        f" {json.dumps(source)}: {{\n"
        + ",\n".join(f"  {json.dumps(sink)}: {json.dumps(cell)}" for sink, cell in found.items())
        + "\n }"
        for source, found in table.items()
    ]
    TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    sys.path.append(str(HERE.parent))
    main()
