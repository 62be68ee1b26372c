"""What becomes slow or large where there is much of it: tags, parameters, ranks' files.

``make bench-scale`` writes scale.json and scale.md. Each part runs in a process of its own, whose time and peak memory
are what is recorded: 5,000 tags in one directory; 1,000,000 parameters in one header and in one commit record; 24
ranks' files with real bytes, read.
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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from meter import status_bytes
from report import REPOSITORY, table, write_results

if TYPE_CHECKING:
    from zeroelastic.core.layout import Param

sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests")]


@dataclass(frozen=True)
class Scale:
    """How much of everything."""

    tags: int = 5_000
    params: int = 1_000_000
    ranks: int = 24
    rank_elements: int = 1 << 22


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
    tags, params = (max(2, value // options.divide) for value in (full.tags, full.params))
    scale = Scale(tags, params, full.ranks, full.rank_elements // options.divide)
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
    """Do something, and write down its time, the memory it took on top of what there was, and the process's peak."""
    Path("/proc/self/clear_refs").write_text("5")  # begins a new peak
    before = status_bytes("VmRSS")
    began, cpu = time.perf_counter(), time.process_time()
    value = action()
    steps[what] = {
        "seconds": round(time.perf_counter() - began, 3),
        "cpu_seconds": round(time.process_time() - cpu, 3),
        "extra_mib": (status_bytes("VmHWM") - before) >> 20,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
    }
    return value


def tags(scale: Scale, work: Path) -> Steps:
    """The work of the verbs and of a resume before they open a tag, with many tags of which two are whole."""
    import shutil

    from zeroelastic.checkpoint.commit_record import read_record, record_text
    from zeroelastic.runs.candidates import check_quickly, find_newest, list_run
    from zeroelastic.runs.locate import find_source, list_tags
    from zeroelastic.runs.prune import plan_prune
    from zeroelastic.verbs.inspect.inspect import inspect_source

    golden = REPOSITORY / "tests" / "golden" / "elastic2" / "global_step2"
    record = read_record(golden)
    assert record is not None
    for number in range(scale.tags):
        tag = work / f"global_step{number}"
        shutil.copytree(golden, tag)
        at_step = record.model_copy(update={"global_steps": number, "committed_at": 1e9 + number})
        (tag / "zeroelastic.json").write_bytes(record_text(at_step))
    (work / "latest").write_text(f"global_step{scale.tags - 1}")
    steps: Steps = {}
    timed(steps, "find the source", lambda: find_source(work))
    timed(steps, "inspect", lambda: inspect_source(find_source(work)))
    run = timed(steps, "list the run", lambda: list_run(work))
    timed(steps, "the newest whole one", lambda: find_newest(run.tags, check_quickly))  # type: ignore[attr-defined]
    timed(steps, "the names of all tags", lambda: list_tags(work))
    timed(steps, "plan to prune", lambda: plan_prune(work, keep=2, check=check_quickly))
    return steps


def _members(scale: Scale) -> list[Param]:
    from zeroelastic.core.layout import Param

    return [Param(f"model.layers.{i}.mlp.weight", (4, i % 7 + 1)) for i in range(scale.params)]


def record(scale: Scale, work: Path) -> Steps:
    """A commit record of many parameters under Adam, written and read."""
    from zeroelastic.checkpoint.commit_record import read_record

    _in_a_process(_write_record, scale, work)
    steps: Steps = json.loads((work / "steps.json").read_text())
    timed(steps, "read the record", lambda: read_record(work))
    steps["read the record"]["mib"] = (work / "zeroelastic.json").stat().st_size >> 20
    return steps


def _write_record(scale: Scale, work: Path) -> Path:
    from zeroelastic.checkpoint.commit_record import RECORD_VERSION, CommitRecord, Versions, record_text
    from zeroelastic.checkpoint.param_table import param_records
    from zeroelastic.core.digest import ParamContent, ScalarValue

    keys, scalars = ("fp32", "exp_avg", "exp_avg_sq"), {"step": ScalarValue("float32", 3.0)}
    contents = [
        ParamContent(param, {key: ("float32", (i * 3 + k) * 0x9E3779B97F4A7C15 % 2**64) for k, key in enumerate(keys)},
                     scalars)
        for i, param in enumerate(_members(scale))
    ]  # fmt: skip
    trained = frozenset(content.param.name for content in contents)
    steps: Steps = {}
    table = timed(steps, "the digests in columns", lambda: param_records(contents, trained))
    made = timed(
        steps,
        "write the record, its root included",
        lambda: (work / "zeroelastic.json").write_bytes(
            record_text(
                CommitRecord(
                    format_version=RECORD_VERSION, checkpoint_format="elastic", save_id="0" * 32, tag="t", world_size=4,
                    global_steps=1, train_batch_size=4, versions=Versions(zeroelastic="0", deepspeed="0", torch="0"),
                    files={}, params=table, content_root=table.root,
                )
            )
        ),
    )  # fmt: skip
    assert made
    (work / "steps.json").write_text(json.dumps(steps))
    return work


def graph(scale: Scale, work: Path) -> Steps:
    """A header that is rewritten, of many parameters: written, and read as a graph."""
    from zeroelastic.torch_file.graph import Archive, new_storage, read_graph, tensor, torch_size

    storage = new_storage("float32", scale.params * 2)
    root = {
        "optimizer_state_dict": {"exp_avg": [tensor(storage, i * 2, (2,)) for i in range(scale.params)]},
        "param_shapes": {param.name: torch_size(param.shape) for param in _members(scale)},
    }
    path = work / "header.pt"
    steps: Steps = {}
    archive = timed(steps, "write a header", lambda: Archive(path, root))
    archive.finish(dict.fromkeys(archive.storages, 0))  # type: ignore[attr-defined]
    timed(steps, "read it as a graph", lambda: read_graph(path))
    return steps


def header(scale: Scale, work: Path) -> Steps:
    """The files of one rank with many parameters, as stage 3 and zeroelastic write them: opened, header only.

    Then what a load does with them before it reads payload, and last the checksums of a verified load.
    """
    from zeroelastic.checkpoint.contradictions import check_same_models, check_same_save
    from zeroelastic.checkpoint.model_states import open_model_states
    from zeroelastic.checkpoint.open import open_checkpoint
    from zeroelastic.checkpoint.optimizer_reader import open_shard
    from zeroelastic.checkpoint.param_changes import ParamSet, compare
    from zeroelastic.torch_file.zip_check import check_archive

    tag = _in_a_process(_many_params, scale, work)
    steps: Steps = {}
    optim, models = (next(tag.glob(f"*_{kind}_states.pt")) for kind in ("optim", "model"))
    timed(steps, "open the model states", lambda: open_model_states(models, 0, world_size=1))
    timed(steps, "open the optimizer file", lambda: open_shard(optim, 0, world_size=1, rigid_params=None))
    checkpoint = open_checkpoint(tag)
    model, shard = checkpoint.model_states(0), checkpoint.shard(0)
    params, names = ParamSet(shard.layout.params, None), [group.params for group in shard.groups]
    timed(steps, "compare with the run", lambda: compare(params, params, shard.groups, names))
    timed(steps, "compare two ranks", lambda: check_same_save({0: shard, 1: replace(shard)}, shard))
    timed(steps, "compare both files", lambda: check_same_models([model], shard, checkpoint.record))
    timed(
        steps, "check the model states, as a verified load does", lambda: check_archive(models, models.stat().st_size)
    )
    return steps


def _many_params(scale: Scale, work: Path) -> Path:
    from synthetic import write_checkpoint

    tag = work / "global_step3"
    write_checkpoint(tag, world_size=1, groups=[_members(scale)], sub_group_size=None, frozen=None, alias=False)
    return tag


def _ranks_checkpoint(scale: Scale, work: Path) -> Path:
    from synthetic import write_checkpoint

    from zeroelastic.core.layout import Param

    groups = [[Param(f"w{i}", (scale.rank_elements,)) for i in range(scale.ranks)]]
    tag = work / "global_step3"
    write_checkpoint(tag, world_size=scale.ranks, groups=groups, sub_group_size=None, frozen=None)
    return tag


def ranks(scale: Scale, work: Path) -> Steps:
    """The files of many ranks: every header, every byte."""
    from zeroelastic.checkpoint.checker import check_headers
    from zeroelastic.checkpoint.open import open_checkpoint
    from zeroelastic.checkpoint.saved_state import open_state
    from zeroelastic.verbs.verify.verify import verify_from_headers

    tag = _in_a_process(_ranks_checkpoint, scale, work)
    steps: Steps = {}
    timed(steps, "open all headers", lambda: open_state(open_checkpoint(tag)))
    headers = timed(steps, "check the headers", lambda: check_headers(tag))
    timed(steps, "read and digest every byte", lambda: verify_from_headers(headers))  # type: ignore[arg-type]
    steps["read and digest every byte"]["mib"] = sum(f.stat().st_size for f in tag.iterdir()) >> 20
    return steps


def _in_a_process(function: Callable[[Scale, Path], Path], scale: Scale, work: Path) -> Path:
    """Write files elsewhere, so that its memory is not counted."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, (scale, work))


PARTS = {
    "tags": tags, "record": record, "header": header, "graph": graph, "ranks": ranks,
}  # fmt: skip


def write(out: Path, results: dict[str, dict[str, object]]) -> None:
    """scale.json and scale.md."""
    lines = [
        "# Scale",
        "",
        "`make bench-scale`; extra memory is what a step took at its highest on top of what there was before it, peak",
        "memory that of the process so far.",
        "",
    ]
    for name, result in results.items():
        steps: Steps = result["steps"]  # type: ignore[assignment]
        lines += [
            f"## {name}",
            "",
            f"{result['cpus']} processors, load average {result['load_average']} at the end.",
            "",
        ]
        head = ["step", "seconds", "of the processor", "extra MiB", "peak MiB", "read, MiB"]
        keys = ("seconds", "cpu_seconds", "extra_mib", "peak_mib", "mib")
        lines += [*table(head, [[what, *(str(s.get(key, "")) for key in keys)] for what, s in steps.items()]), ""]
    write_results(out, "scale", results, "\n".join(lines).rstrip() + "\n")


if __name__ == "__main__":
    main()
