"""What runs with faulty_io.c preloaded: a torch file is written and read again; prints what came of it.

By each executor in a fork of its own, which counts its calls from the first.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from zeroelastic.core.digest import stream_seed
from zeroelastic.executors.dispatch import CopyTable, read_segments
from zeroelastic.io.atomic import write_atomically
from zeroelastic.torch_file.header import read_torch_file
from zeroelastic.torch_file.save import DigestRange, write_torch_file


def main(directory: Path, executor: Any) -> dict[str, object]:
    state = {"w": torch.arange(50_000, dtype=torch.float32), "b": torch.arange(7, dtype=torch.int64)}
    path = directory / "marked.pt"
    digests = write_torch_file(
        state, path, digest_ranges=[DigestRange(state["w"], stream_seed("w", "fp32"), 0)], sync=True, executor=executor
    )
    torch.save(state, directory / "expected" / path.name)
    expected = (directory / "expected" / path.name).read_bytes()
    got = np.zeros(path.stat().st_size, dtype=np.uint8)
    zero = np.zeros(1, dtype=np.int64)
    table = CopyTable(zero, zero, zero, zero, np.array([len(got)], dtype=np.int64))
    read_segments(table, [path], [got], executor=executor)
    header = read_torch_file(path).root
    write_atomically(directory / "marked.json", b"x" * 5000)
    return {
        "digest": digests[0],
        "same": got.tobytes() == expected,
        "keys": sorted(header) if isinstance(header, dict) else [],
        "json": (directory / "marked.json").stat().st_size,
    }


if __name__ == "__main__":
    for executor in sys.argv[2:]:
        if os.fork():
            assert os.wait()[1] == 0
            continue
        try:
            print(json.dumps(main(Path(sys.argv[1]), executor)), flush=True)
        except Exception as error:
            print(json.dumps({"error": type(error).__name__, "text": str(error)}), flush=True)
        os._exit(0)
