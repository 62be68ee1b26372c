"""What a rank's headers and the commit record take where there are many parameters and many ranks.

    python benchmarks/bench_scale.py --out benchmarks/results

Writes scale.json. Each step runs in a process of its own, several times; seconds are of a clock, memory is what the
step took at its highest on top of what there was before it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from meter import status_bytes
from report import REPOSITORY, machine

if TYPE_CHECKING:
    from zeroelastic.core.layout import Param

sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests")]


def members(num_params: int) -> list[Param]:
    """Parameters of a few elements each: what they take is their names, shapes and places."""
    from zeroelastic.core.layout import Param

    return [Param(f"model.layers.{i}.mlp.weight", (4, i % 7 + 1)) for i in range(num_params)]


def write_files(tag: Path, num_params: int) -> None:
    """The files of one rank at stage 3, as DeepSpeed and zeroelastic write them, under Adam."""
    from synthetic import write_checkpoint

    write_checkpoint(tag, world_size=1, groups=[members(num_params)], sub_group_size=None, frozen=None, alias=False)


def write_record(tag: Path, num_params: int, num_ranks: int) -> None:
    """A commit record of many parameters under Adam, and of the two files of each of many ranks."""
    from zeroelastic.checkpoint.commit_record import RECORD_VERSION, CommitRecord, SavedWith, param_records, record_text
    from zeroelastic.core.digest import ParamContent, ScalarValue

    keys, scalars = ("fp32", "exp_avg", "exp_avg_sq"), {"step": ScalarValue("float32", 3.0)}
    contents = [
        ParamContent(
            param,
            {key: ("float32", (i * 3 + k) * 0x9E3779B97F4A7C15 % 2**64) for k, key in enumerate(keys)},
            scalars,
        )
        for i, param in enumerate(members(num_params))
    ]
    table = param_records(contents, frozenset(content.param.name for content in contents))
    names = [f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in range(num_ranks)]
    names += [f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(num_ranks)]
    record = CommitRecord(
        format_version=RECORD_VERSION, checkpoint_format="elastic", save_id="0" * 32, tag=tag.name,
        world_size=num_ranks, global_steps=1, train_batch_size=num_ranks,
        versions=SavedWith(zeroelastic="0", deepspeed="0", torch="0"),
        files={name: 1_000_000 + i for i, name in enumerate(names)}, params=table, content_root=table.root,
    )  # fmt: skip
    (tag / "zeroelastic.json").write_bytes(record_text(record))


def open_model_states(tag: Path) -> object:
    from zeroelastic.checkpoint import model_states

    return model_states.open_model_states(next(tag.glob("*model_states.pt")), 0, world_size=1)


def open_optimizer_file(tag: Path) -> object:
    from zeroelastic.checkpoint.optimizer_reader import read_optimizer_file

    return read_optimizer_file(next(tag.glob("*optim_states.pt")), world_size=1).header(0, params=None)


def read_record(tag: Path) -> object:
    from zeroelastic.checkpoint import commit_record

    return commit_record.read_record(tag)


STEPS = (open_model_states, open_optimizer_file, read_record)


def measure(step: Callable[[Path], object], tag: Path) -> dict[str, Any]:
    """One sample of a step, in this process, which has done nothing before."""
    import zeroelastic.checkpoint.open  # noqa: F401  what it takes to import is not counted

    Path("/proc/self/clear_refs").write_text("5")  # begins a new peak
    before, began, cpu = status_bytes("VmRSS"), time.perf_counter(), time.process_time()
    step(tag)
    return {
        "seconds": time.perf_counter() - began,
        "cpu_seconds": time.process_time() - cpu,
        "extra_mib": (status_bytes("VmHWM") - before) >> 20,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--params", type=int, default=100_000)
    parser.add_argument("--ranks", type=int, default=4_096)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    steps: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory(prefix="zeroelastic_scale_") as directory:
        tag = Path(directory) / "global_step3"
        with spawn.Pool(1) as pool:
            pool.apply(write_files, (tag, options.params))
            pool.apply(write_record, (tag, options.params, options.ranks))
        for _ in range(options.repeats):
            for step in STEPS:
                with spawn.Pool(1) as pool:
                    steps.setdefault(step.__name__, []).append(pool.apply(measure, (step, tag)))
    result = {
        "machine": machine(),
        "params": options.params,
        "ranks": options.ranks,
        "load_average": round(os.getloadavg()[0], 1),
        "steps": {
            name: {"median_seconds": median(sample["seconds"] for sample in samples), "samples": samples}
            for name, samples in steps.items()
        },
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "scale.json").write_text(json.dumps(result, indent=1) + "\n")
    for name, found in result["steps"].items():
        print(f"{name}: {found['median_seconds']:.2f} s, {max(s['extra_mib'] for s in found['samples'])} MiB")


if __name__ == "__main__":
    main()
