"""Programs of DeepSpeed, and jobs without zeroelastic, in processes of their own."""

from __future__ import annotations

import json
import subprocess
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from places import TESTS
from programs import run_program
from warm_python import executable


def resume_on_stock(directory: Path, scratch: Path, world_size: int, changes: Mapping[str, object]) -> dict[str, Any]:
    """What ``stock_resume.py``, in which zeroelastic cannot be imported, sees after its load of ``directory``.

    ``changes`` are those of the job (training.Job); ``scratch`` is an existing directory.
    """
    python, seen = executable(), scratch / "seen.json"
    command = [python, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(world_size)]
    command += [str(TESTS / "stock_resume.py"), str(directory), str(seen), json.dumps(changes)]
    done = run_program(*command, cwd=scratch, timeout=280, PYTHONPATH=str(TESTS), PYTHON_EXEC=python)
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
