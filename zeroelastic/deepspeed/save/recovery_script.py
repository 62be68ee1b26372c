"""DeepSpeed's script of this name, but for a checkpoint that takes its frozen weights from files beside it.

zeroelastic puts this into a run directory under the names of DeepSpeed's zero_to_fp32.py and zero_to_torch.py when it
saves with "lean": true. DeepSpeed's script does not read such a checkpoint; this one names the command that does. For
every other checkpoint it runs DeepSpeed's script. It needs the standard library alone, and DeepSpeed for the latter.
"""

from __future__ import annotations

import argparse
import json
import runpy
import sys
from pathlib import Path


def lean_tag(arguments: list[str]) -> tuple[Path, str] | None:
    """The tag directory that these arguments of DeepSpeed's script name, and the output; None unless it is lean."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("checkpoint_dir", nargs="?")
    parser.add_argument("output_dir", nargs="?", default="OUT")
    for option in ("--max_shard_size", "--dtype"):
        parser.add_argument(option)
    parser.add_argument("-t", "--tag")
    given = parser.parse_known_args(arguments)[0]
    if given.checkpoint_dir is None:
        return None
    try:
        tag = given.tag or Path(given.checkpoint_dir, "latest").read_text().strip()
        record = json.loads(Path(given.checkpoint_dir, tag, "zeroelastic.json").read_text())
        shared = record.get("shared")
    except (OSError, ValueError, AttributeError):
        return None
    return (Path(given.checkpoint_dir, tag), given.output_dir) if shared else None


def main() -> None:
    """Run DeepSpeed's script, or end with a sentence."""
    found = lean_tag(sys.argv[1:])
    if found is None:
        runpy.run_module(f"deepspeed.utils.{Path(__file__).stem}", run_name="__main__", alter_sys=True)
        return
    tag_dir, output = found
    sys.exit(
        f'{tag_dir}: was saved with "lean": true of zeroelastic. Its frozen weights are in files beside it, which '
        "DeepSpeed's script does not read. Write the weights as safetensors files with\n"
        f"    zeroelastic export {tag_dir} {output}"
    )


if __name__ == "__main__":
    main()
