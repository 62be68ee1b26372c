"""What becomes slow or large where there is much of it: tags, parameters, ranks' files, loaders of one checkpoint.

``make bench-scale`` writes scale.json and scale.md. Each part runs in a process of its own, whose time and peak memory
are what is recorded: 5,000 tags in one directory; 1,000,000 parameters in one header; 24 ranks' files with real bytes,
resharded on paper and read; 8 processes that read their own ranges of that checkpoint at the same time.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]


@dataclass(frozen=True)
class Scale:
    """How much of everything."""

    tags: int = 5_000
    params: int = 1_000_000
    ranks: int = 24
    rank_elements: int = 1 << 22
    loaders: int = 8


def main() -> None:
    """Run every part, or the named ones."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", default=" ".join(PARTS))
    parser.add_argument("--divide", type=int, default=1, help="a smaller scale, to try it out")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    full = Scale()
    scale = Scale(*(max(2, value // options.divide) for value in (full.tags, full.params)), full.ranks,
                  full.rank_elements // options.divide, full.loaders)  # fmt: skip
    if options.one:
        print(json.dumps(PARTS[options.one](scale, options.work)))
        return
    path = options.out / "scale.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    for name in options.parts.split():
        with tempfile.TemporaryDirectory(prefix="zeroelastic_scale_") as work:
            command = [sys.executable, __file__, "--one", name, "--work", work, "--out", str(options.out)]
            command += ["--divide", str(options.divide)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=3600)
        load = os.getloadavg()[0]
        results[name] = {
            "scale": asdict(scale),
            "load_average": round(load, 1),
            "cpus": os.cpu_count(),
            "steps": json.loads(done.stdout),
        }
        print(name, json.dumps(results[name]), flush=True)
        write(options.out, results)


Steps = dict[str, dict[str, float]]


def timed(steps: Steps, what: str, action: Callable[[], object]) -> object:
    """Do something, and write down its time and the process's peak memory so far."""
    began, cpu = time.perf_counter(), time.process_time()
    value = action()
    steps[what] = {
        "seconds": round(time.perf_counter() - began, 3),
        "cpu_seconds": round(time.process_time() - cpu, 3),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
    }
    return value


def tags(scale: Scale, work: Path) -> Steps:
    """The work of the verbs and of a resume before they open a tag, with many tags of which two are whole."""
    import shutil

    from zeroelastic.offline.inspect.inspect import inspect_source
    from zeroelastic.tags.candidates import check_quickly, find_newest, list_run
    from zeroelastic.tags.locate import find_source, list_tags
    from zeroelastic.tags.prune import plan_prune

    golden = ROOT / "tests" / "golden" / "elastic2" / "global_step2"
    for number in range(scale.tags):
        tag = work / f"global_step{number}"
        shutil.copytree(golden, tag)
        record = (tag / "zeroelastic.json").read_text()
        (tag / "zeroelastic.json").write_text(record.replace('"global_steps": 2,', f'"global_steps": {number},', 1))
    (work / "latest").write_text(f"global_step{scale.tags - 1}")
    steps: Steps = {}
    timed(steps, "find the source", lambda: find_source(work))
    timed(steps, "inspect", lambda: inspect_source(find_source(work)))
    run = timed(steps, "list the run", lambda: list_run(work))
    timed(steps, "the newest whole one", lambda: find_newest(run.tags, check_quickly))  # type: ignore[attr-defined]
    timed(steps, "the names of all tags", lambda: list_tags(work))
    timed(steps, "plan to prune", lambda: plan_prune(work, keep=2, check=check_quickly))
    return steps


def params(scale: Scale, work: Path) -> Steps:
    """Many parameters: layout, plan, the record, and one rank's header."""
    import numpy as np

    from zeroelastic.checkpoint.commit_record import (
        RECORD_VERSION,
        CommitRecord,
        Versions,
        param_records,
        read_record,
        record_text,
    )
    from zeroelastic.core.digest import ParamContent, content_root
    from zeroelastic.core.layout import Param, layout_from_sub_groups
    from zeroelastic.core.plan import make_plan
    from zeroelastic.torch_file.graph_reader import read_graph
    from zeroelastic.torch_file.header import read_torch_file
    from zeroelastic.torch_file.pickle_graph import new_storage, tensor, torch_size
    from zeroelastic.torch_file.zip_writer import Archive

    members = [Param(f"model.layers.{i}.mlp.weight", (4, i % 7 + 1)) for i in range(scale.params)]
    steps: Steps = {}
    saved = timed(steps, "layout of 4 ranks", lambda: layout_from_sub_groups([members], 4))
    new = timed(steps, "layout of 3 ranks", lambda: layout_from_sub_groups([members], 3))
    timed(steps, "plan of one rank", lambda: make_plan(saved, new, 0))  # type: ignore[arg-type]
    storage = new_storage("float32", scale.params * 2)
    root = {
        "optimizer_state_dict": {"exp_avg": [tensor(storage, i * 2, (2,)) for i in range(scale.params)]},
        "param_shapes": {param.name: torch_size(param.shape) for param in members},
    }
    path = work / "header.pt"
    archive = timed(steps, "write a header", lambda: Archive(path, root))
    archive.finish(dict.fromkeys(archive.storages, 0))  # type: ignore[attr-defined]
    file = timed(steps, "read the header", lambda: read_torch_file(path))
    refs = file.root["optimizer_state_dict"]["exp_avg"]  # type: ignore[attr-defined]
    offsets = timed(steps, "where its tensors are", lambda: np.array([file.extent(r).offset for r in refs]))  # type: ignore[attr-defined]
    assert len(offsets) == scale.params  # type: ignore[arg-type]
    timed(steps, "read it as a graph", lambda: read_graph(path))
    contents = [ParamContent(param, {"fp32": ("float32", i)}, {}) for i, param in enumerate(members)]
    record = CommitRecord(
        format_version=RECORD_VERSION, checkpoint_format="elastic", save_id="0" * 32, tag="t", world_size=4,
        global_steps=1, train_batch_size=4, versions=Versions(zeroelastic="0", deepspeed="0", torch="0"), files={},
        params=param_records(contents, frozenset()), content_root=content_root(contents),
    )  # fmt: skip
    (work / "zeroelastic.json").write_bytes(record_text(record))
    timed(steps, "read the record", lambda: read_record(work))
    return steps


def _ranks_checkpoint(scale: Scale, work: Path) -> Path:
    from synthetic import write_checkpoint

    from zeroelastic.core.layout import Param

    groups = [[Param(f"w{i}", (scale.rank_elements,)) for i in range(scale.ranks)]]
    tag = work / "global_step3"
    write_checkpoint(tag, world_size=scale.ranks, groups=groups, sub_group_size=None, frozen=None)
    return tag


def ranks(scale: Scale, work: Path) -> Steps:
    """The files of many ranks: every header, every byte."""
    from zeroelastic.checkpoint.open import open_checkpoint
    from zeroelastic.checkpoint.saved_state import open_state
    from zeroelastic.offline.verify.header_check import check_headers
    from zeroelastic.offline.verify.verify import verify_from_headers

    tag = _in_a_process(_ranks_checkpoint, scale, work)
    steps: Steps = {}
    timed(steps, "open all headers", lambda: open_state(open_checkpoint(tag)))
    headers = timed(steps, "check the headers", lambda: check_headers(tag))
    timed(steps, "read and digest every byte", lambda: verify_from_headers(headers))  # type: ignore[arg-type]
    steps["read and digest every byte"]["mib"] = sum(f.stat().st_size for f in tag.iterdir()) >> 20
    return steps


def loaders(scale: Scale, work: Path) -> Steps:
    """Processes that each read their own ranges of one checkpoint at the same time, and one that does so alone."""
    tag = _in_a_process(_ranks_checkpoint, scale, work)
    steps: Steps = {}
    for count in (1, scale.loaders):
        with multiprocessing.get_context("spawn").Pool(count) as pool:
            pool.map(_nothing, range(count))
            began = time.perf_counter()
            done = pool.starmap(_load, [(tag, rank, scale.loaders) for rank in range(count)])
            steps[f"{count} of {scale.loaders} loaders"] = {
                "seconds": round(time.perf_counter() - began, 3),
                "cpu_seconds": round(sum(cpu for _, cpu, _ in done), 3),
                "peak_mib": max(peak for *_, peak in done),
                "mib": sum(nbytes for nbytes, *_ in done) >> 20,
            }
    return steps


def _nothing(_: int) -> None:
    import zeroelastic.checkpoint.open
    import zeroelastic.io.storage  # noqa: F401


def _load(tag: Path, rank: int, world_size: int) -> tuple[int, float, int]:
    """The bytes that one rank of another world size needs, read; how many, the time and the memory it took."""
    from zeroelastic.checkpoint.open import open_checkpoint
    from zeroelastic.core.plan import source_ranks
    from zeroelastic.io.storage import read_range
    from zeroelastic.torch_file.header import DTYPE_BYTES

    cpu, nbytes = time.process_time(), 0
    checkpoint = open_checkpoint(tag)
    first = checkpoint.model_states(0)
    numels = [param.numel for members in first.sub_groups for param in members]
    near = source_ranks(numels, saved_world_size=checkpoint.world_size, world_size=world_size, rank=rank)
    for saved in near:
        shard = checkpoint.shard(saved)
        start, length = shard.layout.owned(saved)
        for p, param in enumerate(shard.layout.params):
            part = -(-param.numel // world_size)
            begin = max(int(start[p]), rank * part)
            end = min(int(start[p] + length[p]), (rank + 1) * part, param.numel)
            for extents in shard.extents.values():
                size = DTYPE_BYTES[extents.dtype[int(shard.layout.sub_group[p])]]
                at = int(extents.offset[p]) + (begin - int(start[p])) * size
                for offset in range(0, max(0, end - begin) * size, 4 << 20):
                    nbytes += len(read_range(extents.path, at + offset, min(4 << 20, (end - begin) * size - offset)))
    return nbytes, time.process_time() - cpu, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


def _in_a_process(function: Callable[[Scale, Path], Path], scale: Scale, work: Path) -> Path:
    """Write files elsewhere, so that its memory is not counted."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, (scale, work))


PARTS = {"tags": tags, "params": params, "ranks": ranks, "loaders": loaders}


def write(out: Path, results: dict[str, dict[str, object]]) -> None:
    """scale.json and scale.md."""
    (out / "scale.json").write_text(json.dumps(results, indent=1) + "\n")
    lines = ["# Scale", "", "`make bench-scale`; peak memory is that of the process so far.", ""]
    for name, result in results.items():
        steps: Steps = result["steps"]  # type: ignore[assignment]
        lines += [
            f"## {name}",
            "",
            f"{result['cpus']} processors, load average {result['load_average']} at the end.",
            "",
        ]
        lines += ["| step | seconds | of the processor | peak MiB | read, MiB |", "|---|---:|---:|---:|---:|"]
        lines += [
            f"| {what} | {s['seconds']} | {s['cpu_seconds']} | {s['peak_mib']} | {s.get('mib', '')} |"
            for what, s in steps.items()
        ]
        lines += [""]
    (out / "scale.md").write_text("\n".join(lines).rstrip() + "\n")


if __name__ == "__main__":
    main()
