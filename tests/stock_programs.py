"""Programs of DeepSpeed, and jobs without zeroelastic, in processes of their own.

Run by torchrun, this file is such a job, in which zeroelastic cannot be imported:

    torchrun --nproc_per_node M tests/stock_programs.py DIRECTORY OUT JOB

It loads DIRECTORY, and writes what rank 0 sees and the losses of the steps that follow to OUT as JSON.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import json
import os
import runpy
import subprocess
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from places import ROOT, TESTS
from warm_python import executable


def resume_on_stock(directory: Path, scratch: Path, world_size: int, changes: Mapping[str, object]) -> dict[str, Any]:
    """What this file, run as a job, sees after its load of ``directory``.

    ``changes`` are those of the job (training.Job); ``scratch`` is an existing directory.
    """
    python, seen = executable(), scratch / "seen.json"
    command = [python, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(world_size)]
    command += [__file__, str(directory), str(seen), json.dumps(changes)]
    env = {**os.environ, "PYTHONPATH": str(TESTS), "PYTHON_EXEC": python}
    done = subprocess.run(command, cwd=scratch, timeout=280, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:6000]
    found: dict[str, Any] = json.loads(seen.read_text())
    return found


def ds_to_universal(tag_dir: Path, target: Path, *options: str) -> str:
    """DeepSpeed's conversion to a Universal Checkpoint; what it prints."""
    command = [executable(), "-m", "deepspeed.checkpoint.ds_to_universal", *options]
    command += ["--input_folder", str(tag_dir), "--output_folder", str(target)]
    command += ["--num_extract_workers", "1", "--num_merge_workers", "1"]
    return subprocess.run(command, check=True, timeout=300, capture_output=True, text=True).stdout


def make_universal(tag_dir: Path, parent: Path) -> Path:
    """DeepSpeed's conversion in this process, to ``parent`` / the tag's name; returns ``parent``, which it makes."""
    from deepspeed.checkpoint import ds_to_universal

    options = {"keep_temp_folder": False, "inject_missing_state": True, "strict": True}
    workers = {"num_extract_workers": 1, "num_merge_workers": 1}
    parent.mkdir(exist_ok=True)
    target = str(parent / tag_dir.name)
    ds_to_universal.main(Namespace(input_folder=str(tag_dir), output_folder=target, **options, **workers))
    return parent


def merged_by_zero_to_fp32(directories: Sequence[Path], scratch: Path) -> list[dict[str, torch.Tensor]]:
    """Full fp32 weights of each directory's checkpoint, by the script that lies in it; one process runs them all."""
    program = """
import importlib.util, sys, torch
target, *directories = sys.argv[1:]
merged = []
for directory in directories:
    spec = importlib.util.spec_from_file_location("zero_to_fp32", f"{directory}/zero_to_fp32.py")
    script = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = script
    spec.loader.exec_module(script)
    merged.append(script.get_fp32_state_dict_from_zero_checkpoint(directory))
torch.save(merged, target)
"""
    command = [executable(), "-c", program, str(scratch / "merged.bin"), *map(str, directories)]
    subprocess.run(command, check=True, timeout=180, capture_output=True, cwd=scratch)
    merged = torch.load(scratch / "merged.bin", weights_only=True)
    assert len(merged) == len(directories)
    return merged


class NotHere(importlib.abc.MetaPathFinder):
    """zeroelastic is not installed."""

    def find_spec(self, name: str, path: object, target: object = None) -> None:
        if name.partition(".")[0] == "zeroelastic":
            raise ImportError(f"{name} is not installed")


def main(directory: str, out: str, changes: dict[str, Any]) -> None:
    sys.meta_path.insert(0, NotHere())
    from training import Job, build_engine, gathered, stepped_params, sub_group_steps, train_step

    assert not any(name.startswith("zeroelastic") for name in sys.modules)
    try:
        importlib.util.find_spec("zeroelastic")
        raise AssertionError("zeroelastic can be imported")
    except ImportError:
        pass
    job = Job(installed=False, **changes)
    engine = build_engine(job)
    path, client_state = engine.load_checkpoint(directory)
    assert path is not None
    if job.stage == 0:
        steps = [float(scalars["step"]) for _, _, _, scalars in stepped_params(engine)]
        distinct = len(steps)
    else:
        steps, distinct = sub_group_steps(engine)
    # A module that imports nothing of zeroelastic, read by its path.
    gather = runpy.run_path(str(ROOT / "zeroelastic/testing/state.py"))["gather_state"]
    seen = {
        "gathered": gathered(engine, gather(engine) if job.stage else None),
        "groups": [
            {key: value for key, value in group.items() if key != "params" and isinstance(value, (int, float, list))}
            for group in engine.optimizer.optimizer.param_groups
        ],
        "steps": steps,
        "distinct_steps": distinct,
        "buffers": {name: value.tolist() for name, value in engine.module.named_buffers()},
        "global_steps": engine.global_steps,
        "scheduler": engine.lr_scheduler.last_epoch,
        "note": client_state["note"],
        "losses": [train_step(engine, step) for step in range(3, 5)],
    }
    if torch.distributed.get_rank() == 0:
        Path(out).write_text(json.dumps(seen))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # torch with gloo now and then aborts at an interpreter's exit


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))
