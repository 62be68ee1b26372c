"""Every byte once: what a load reads, by its own report and by the operating system's count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from saved_files import process_status, record_of, reset_peak, state_bytes, watch_opens
from training import WIDE, build_wide, save_wide

from zeroelastic.testing import RankPool

PAIRS = ((4, 3), (3, 4), (4, 6), (6, 2))


def load(
    directory: str, frozen: bool, executor: str, stage: int = 3, width: int = WIDE
) -> tuple[Any, int, list[str], int]:
    """The report, bytes read by system calls, checkpoint files opened, and peak growth of resident memory in bytes."""
    engine = build_wide(stage == 3, frozen, executor, stage, width)
    engine.load_checkpoint(directory)  # imports and caches are warm; optimizer state exists
    opened = watch_opens()
    reset_peak()
    before, resident = _bytes_read(), process_status("VmRSS")
    engine.load_checkpoint(directory)
    read = _bytes_read() - before
    opened = [path for path in opened if path.startswith(directory)]
    return engine.zeroelastic_report, read, opened, process_status("VmHWM") - resident


def _bytes_read() -> int:
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


@pytest.mark.parametrize(
    ("elastic", "frozen", "executor"),
    [
        (True, False, "numpy"),
        (True, True, "numpy"),
        pytest.param(False, False, "numpy", marks=pytest.mark.sweep),
        (False, True, "auto"),
    ],
)
def test_bytes_files_and_memory_of_a_load(
    rank_pool: RankPool, tmp_path: Path, elastic: bool, frozen: bool, executor: str
) -> None:
    """Python's opens are all seen under the numpy executor; bytes are the kernel's own count under each."""
    pairs = PAIRS if elastic and not frozen else PAIRS[:2]
    for save_world_size in sorted({pair[0] for pair in pairs}):
        rank_pool.run(save_wide, save_world_size, str(tmp_path / str(save_world_size)), elastic, frozen)
    for save_world_size, world_size in pairs:
        directory = str(tmp_path / str(save_world_size))
        outcomes = rank_pool.run(load, world_size, directory, frozen, executor)
        report = outcomes[0][0]
        assert report.root_matches
        assert report.bytes_read <= 1.01 * report.bytes_owned
        state = state_bytes(Path(directory))
        assert report.total_bytes_read == state, "all ranks together read the state once"
        for rank, (_, read, opened, growth) in enumerate(outcomes):
            where = f"{save_world_size} -> {world_size}, rank {rank}"
            # The system also counts what DeepSpeed and gloo read; headers stay below 256 KiB.
            assert read <= 1.01 * report.bytes_owned + report.header_bytes + 64 * 1024, where
            assert report.header_bytes < 256 * 1024, where
            allowed = needed_files(Path(directory), world_size, rank)
            names = {Path(path).name for path in opened}
            assert any(name.endswith(".pt") for name in names), (where, opened)
            assert names <= allowed, (where, names - allowed)
            assert len({n for n in names if n.endswith(".pt")}) <= report.files_opened
            assert growth < 64 << 20, (where, growth)


@pytest.mark.extended
def test_a_load_at_stage_2_adds_little_memory(rank_pool: RankPool, tmp_path: Path) -> None:
    """To a state of 192 MiB, of which DeepSpeed's own load unpickles a rank's half as a whole."""
    rank_pool.run(save_wide, 2, str(tmp_path), False, False, stage=2, width=1448)
    for ranks in (2, 3):
        for report, *_, growth in rank_pool.run(load, ranks, str(tmp_path), False, "auto", stage=2, width=1448):
            assert report.total_bytes_read > 190 << 20 and growth < 64 << 20, (ranks, growth)


def needed_files(directory: Path, world_size: int, rank: int) -> set[str]:
    """The only files that may be opened, from first principles: of ranks that own a piece of what this one owns."""

    tag = next(directory.glob("global_step*"))
    record = record_of(tag)
    saved = record.world_size
    names = {"latest", "zeroelastic.json", tag.name}
    names.add(f"zero_pp_rank_{rank if rank < saved else 0}_mp_rank_00_model_states.pt")
    for param in (content.param for content in record.contents()):
        numel, trained = param.numel, param.name in record.params.trained
        part, saved_part = -(-numel // world_size), -(-numel // saved)
        mine = range(min(rank * part, numel), min((rank + 1) * part, numel))
        if len(mine):
            for source in range(mine[0] // saved_part, mine[-1] // saved_part + 1):
                kind = "optim" if trained else "model"
                prefix = "bf16_" if trained else ""
                names.add(f"{prefix}zero_pp_rank_{source}_mp_rank_00_{kind}_states.pt")
    return names
