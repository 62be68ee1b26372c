"""What a save on one GPU costs: ours and DeepSpeed's, phase by phase, and how long training is held up by each way.

    python benchmarks/bench_gpu_saves.py --out benchmarks/results                      # 268M parameters, two minutes
    python benchmarks/bench_gpu_saves.py --cpu --small --out /tmp/x                    # to try it out, without a GPU

One rank, ZeRO-3, bf16 with torch's AdamW; `--cpu` takes gloo and host memory. What fails, or begins after the time
limit, is named in the results.

Whole calls of `save_checkpoint` in turns on one engine: ours flushed to the device, ours not flushed, DeepSpeed's, the
same and a flush of its files, and DeepSpeed's by its fast writer (`"checkpoint": {"writer": {"type": "fast"}}` as
DeepSpeed sets it up by default), which writes by libaio past the page cache and flushes each file. For comparison the
bytes of the checkpoint in plain writes from host memory, past the page cache and through it. Then what training waits
for a save in the background (`"async_save"`), for one by DeepSpeed's decoupled fast writer and for a checkpoint in
memory (`"memory"`), with the host memory that ours pin. The decoupled writer reads the live state in another process,
and the next optimizer step waits until all is written: that time counts.

`--writer python` is for machines on which DeepSpeed has no fast writer, as it is on a CPU.

Writes gpu_saves.json (every sample) and gpu_saves.md.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from gpu_engines import Model, build_engine, engine_arguments, join_group, rank_environment, train_step
from report import describe, machine, spread, table, write_results

from zeroelastic.testing.rank import prepare_deepspeed

OURS, OURS_UNFLUSHED = "zeroelastic, flushed", "zeroelastic, not flushed"
STOCK, STOCK_FLUSHED = "DeepSpeed, not flushed", "DeepSpeed, flushed"
DIRECT, CACHED = "plain writes past the page cache, flushed", "plain writes through the page cache, flushed"
WRITERS = {"fast": "DeepSpeed, fast writer, flushed", "python": "DeepSpeed, python writer, not flushed"}
BACKGROUND, MEMORY, DECOUPLED = "in the background", "in memory", "by DeepSpeed's decoupled writer"
PINNED = ("pinned_by_zeroelastic", "pinned_by_torch")
_TAG = "tag"


class Part:
    """An engine on one rank, and what is measured on it until ``deadline``; ``found`` is the result so far."""

    def __init__(self, arguments: argparse.Namespace, directory: Path) -> None:
        self.directory, self.deadline = directory, time.monotonic() + arguments.limit
        self.rounds, self.on_gpu, self.writer = arguments.rounds, not arguments.cpu, arguments.writer
        self.found: dict[str, Any] = {"seconds": {}, "not_measured": {}}
        self.after_each: Callable[[], None] = lambda: None
        prepare_deepspeed()
        join_group(directory)
        model = Model(3, arguments.width, arguments.layers)
        self.engine = build_engine(model)
        self.step()  # from here on there are moments
        self.found["numel"] = model.num_params
        self.found["device"] = torch.cuda.get_device_name() if self.on_gpu else "CPU"

    def options(self, **options: Any) -> None:
        """The ``"zeroelastic"`` block from here on."""
        self.engine._config._param_dict["zeroelastic"] = options

    def wait_for_device(self) -> None:
        """Wait for the device."""
        if self.on_gpu:
            torch.cuda.synchronize()

    def timed(self, action: Callable[[], object]) -> float:
        """Seconds of an action, from an idle device to an idle device."""
        self.wait_for_device()
        began = time.perf_counter()
        action()
        self.wait_for_device()
        return time.perf_counter() - began

    def step(self) -> None:
        """A training step."""
        train_step(self.engine, 0)

    def fresh(self, name: str) -> Path:
        """An empty place for a checkpoint; nothing waits to be written."""
        folder = self.directory / name
        shutil.rmtree(folder, ignore_errors=True)
        os.sync()
        gc.collect()
        return folder

    def save(self, folder: Path) -> None:
        self.engine.save_checkpoint(os.fspath(folder), tag=_TAG)

    def attempt(self, name: str, action: Callable[[], None]) -> None:
        """One measurement; why there is none is kept under its name."""
        if time.monotonic() > self.deadline:
            self.found["not_measured"][name] = "no time was left"
            return
        print(f"  {name}", file=sys.stderr, flush=True)
        try:
            action()
        except Exception as error:
            traceback.print_exc()
            self.found["not_measured"][name] = f"{type(error).__name__}: {error}"
        self.after_each()

    def sample(self, name: str, seconds: float) -> None:
        self.found["seconds"].setdefault(name, []).append(seconds)


@contextmanager
def deepspeed_alone(part: Part, **writer: Any) -> Iterator[None]:
    """Without zeroelastic; a writer of DeepSpeed's of this configuration writes, where one is given."""
    from deepspeed.runtime.model_checkpointing.config import get_checkpoint_config

    import zeroelastic

    engine = part.engine
    config, before = engine._config, (engine.checkpoint_engine, engine._config.checkpoint_config)
    zeroelastic.uninstall()
    config.zero_config.elastic_checkpoint = False
    try:
        if writer:
            config.checkpoint_config = get_checkpoint_config({"checkpoint": {"writer": writer}})
            engine._configure_checkpointing()
            part.found.setdefault("writers", []).append(f"{type(engine.checkpoint_engine).__name__}, {writer}")
        yield
    finally:
        if engine.checkpoint_engine.is_decoupled():
            engine.checkpoint_engine.cleanup()
        engine.checkpoint_engine, config.checkpoint_config = before
        config.zero_config.elastic_checkpoint = True
        zeroelastic.install()


def peak_since(action: Callable[[], object]) -> dict[str, int]:
    """How far the resident set grows in an action, and what torch's allocator and zeroelastic have pinned after it."""
    from meter import status_bytes

    from zeroelastic.torch_file.image import pinned_bytes

    Path("/proc/self/clear_refs").write_text("5")
    before = status_bytes("VmRSS")
    action()
    by_torch = getattr(torch.cuda, "host_memory_stats", dict)() if torch.cuda.is_initialized() else {}
    return {
        "rss_growth": status_bytes("VmHWM") - before,
        "pinned_by_zeroelastic": pinned_bytes(),
        "pinned_by_torch": int(by_torch.get("allocated_bytes.current", 0)),
    }


def flush(folder: Path) -> None:
    """Flush all files of a directory to the device."""
    for path in folder.rglob("*"):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def measure_saves(part: Part) -> None:
    """Everything that needs our engine, the synchronous saves first."""
    part.found["memory"] = {}

    def ours(name: str, *, fsync: bool, number: int) -> None:
        part.options(fsync=fsync)
        folder = part.fresh("ours")
        part.found["memory"][name] = peak_since(lambda: part.sample(name, part.timed(lambda: part.save(folder))))
        if number == 0:
            part.found["nbytes"] = sum(path.stat().st_size for path in folder.rglob("*.pt"))

    def stock(name: str, flushed: str, **writer: Any) -> None:
        folder = part.fresh("stock")
        with deepspeed_alone(part, **writer):
            part.found["memory"][name] = peak_since(lambda: part.sample(name, part.timed(lambda: part.save(folder))))
        if flushed:
            part.sample(flushed, part.found["seconds"][name][-1] + part.timed(lambda: flush(folder)))

    for number in range(part.rounds):
        for name, measure in (
            (OURS, partial(ours, OURS, fsync=True, number=number)),
            (STOCK, partial(stock, STOCK, STOCK_FLUSHED)),
            (OURS_UNFLUSHED, partial(ours, OURS_UNFLUSHED, fsync=False, number=number)),
            (WRITERS[part.writer], partial(stock, WRITERS[part.writer], "", type=part.writer)),
        ):
            part.attempt(name, measure)
    shutil.rmtree(part.directory / "stock", ignore_errors=True)
    part.options()
    part.attempt(BACKGROUND, lambda: measure_background(part))
    part.attempt(MEMORY, lambda: measure_memory(part))
    part.attempt(DIRECT, lambda: measure_writes(part))
    part.attempt(DECOUPLED, lambda: measure_decoupled(part))


def measure_background(part: Part) -> None:
    """How long a save in the background holds up training; the first one makes the memory for it."""
    import zeroelastic
    from zeroelastic.deepspeed.save.background import background_of, pending_of, saving_in_background

    plain = [part.timed(part.step) for _ in range(10)]
    rounds = []
    for _ in range(part.rounds + 1):
        folder, stall = part.fresh("background"), 0.0
        began = time.perf_counter()

        def save(folder: Path = folder) -> None:
            nonlocal stall
            with saving_in_background(part.engine, True):
                stall = part.timed(lambda: part.save(folder))

        cost = peak_since(save)
        pending, during = pending_of(part.engine), []
        while pending is not None and not pending.is_done() and time.monotonic() < part.deadline:
            during.append(part.timed(part.step))
        zeroelastic.wait_for_save(part.engine)
        whole = time.perf_counter() - began
        nbytes = sum(block.numel() for block, _ in background_of(part.engine).memory._used)
        rounds.append({"stall": stall, "whole": whole, "during": during, "snapshot_bytes": nbytes, **cost})
    part.found[BACKGROUND] = {"plain_steps": plain, "rounds": rounds}
    zeroelastic.wait_for_save(part.engine)


def measure_decoupled(part: Part) -> None:
    """How long saves by DeepSpeed's decoupled writer hold up training; its process starts with the first."""
    plain, rounds = median(part.timed(part.step) for _ in range(10)), []
    with deepspeed_alone(part, type=part.writer, decoupled=True):
        for _ in range(part.rounds + 1):
            folder = part.fresh("decoupled")
            call = part.timed(partial(part.save, folder))
            step = part.timed(part.step)
            rounds.append({"stall": call + step - plain, "call": call, "step": step, "whole": call + step})
    part.found[DECOUPLED] = {"plain_step": plain, "rounds": rounds}


def measure_memory(part: Part) -> None:
    """How long a checkpoint in memory holds up training; the first ones make the pages of two generations."""
    from zeroelastic.elastic.memory.checkpoints import MemoryCheckpoints
    from zeroelastic.io.paths import as_path

    part.options(memory={"every": 1, "copies": 1})
    memory = MemoryCheckpoints(part.engine, as_path(os.fspath(part.directory / "run")))
    rounds: list[dict[str, Any]] = []
    try:
        for _ in range(2 * part.rounds + 2):
            part.step()
            stall = 0.0

            def capture() -> None:
                nonlocal stall
                stall = part.timed(lambda: memory.capture({}))

            cost = peak_since(capture)
            began = time.perf_counter()
            memory.wait()
            if memory.error is not None:
                raise RuntimeError("no memory checkpoint") from memory.error
            complete = stall + time.perf_counter() - began
            rounds.append({"stall": stall, "complete": complete, **cost})
    finally:
        memory.close()
        part.options()
    part.found[MEMORY] = {"rounds": rounds}


def measure_writes(part: Part) -> None:
    """As many bytes as the checkpoint has, from host memory to the same disk, and nothing else."""
    from zeroelastic.torch_file.image import host_memory, write_past_cache
    from zeroelastic.torch_file.save import reserve

    nbytes = part.found["nbytes"]
    data = host_memory(nbytes).fill_(1).numpy()

    def file() -> Path:
        path = part.fresh("plain").with_suffix(".bin")
        with open(path, "wb") as made:
            made.truncate(nbytes)
        reserve(path)
        return path

    def through_cache(path: Path, data: np.ndarray) -> None:
        with open(path, "r+b", buffering=0) as target:
            for at in range(0, nbytes, 16 << 20):
                target.write(data[at : at + (16 << 20)].data)
            os.fsync(target.fileno())

    for _ in range(part.rounds):
        direct, cached = file(), None
        part.sample(DIRECT, part.timed(partial(write_past_cache, os.fspath(direct), data, sync=True)))
        direct.unlink()
        cached = file()
        part.sample(CACHED, part.timed(partial(through_cache, cached, data)))
        cached.unlink()


def _seconds(values: Sequence[float]) -> list[str]:
    return [f"{value:.2f}" for value in spread(values)]


def _mib(nbytes: float) -> str:
    return f"{nbytes / 2**20:,.0f}"


def tables(document: Mapping[str, Any]) -> str:
    """The results as Markdown."""
    saves = document["parts"]["saves"]
    lines = ["# Saves on a GPU", "", *describe(document["machine"]), ""]
    seconds: dict[str, list[float]] = saves["seconds"]
    gigabytes = saves.get("nbytes", 0) / 1e9
    if "numel" in saves:
        lines += [
            f"{saves['device']}, {saves['numel']:,} parameters, bf16 with AdamW, {gigabytes:.2f} GB of files on "
            f"{document['filesystem']}, one rank, {document['rounds']} rounds.",
            "",
        ]
    if seconds:
        memory = saves.get("memory", {})
        rows = [
            [
                name,
                *_seconds(values),
                f"{gigabytes / median(values):.2f}",
                _mib(memory[name]["rss_growth"]) if name in memory else "",
            ]
            for name, values in seconds.items()
        ]
        lines += [*table(["seconds", "least", "median", "most", "GB/s", "memory, MiB"], rows), ""]
    rows = []
    for name in (BACKGROUND, DECOUPLED, MEMORY):
        if name not in saves:
            continue
        first, *later = saves[name]["rounds"][name == MEMORY :]
        during = [step for one in saves[name]["rounds"] for step in one.get("during", ())]
        plain = saves[name].get("plain_steps")
        rows.append(
            [
                name,
                f"{median(one['stall'] for one in later):.3f}",
                f"{saves[name]['rounds'][0]['stall']:.3f}",
                f"{median(one['complete' if name == MEMORY else 'whole'] for one in later):.2f}",
                f"{median(during) / median(plain):.2f} times as long" if during else "",
                *(_mib(max(one[key] for one in later)) if key in first else "" for key in PINNED),
            ]
        )
    if rows:
        head = ["a checkpoint", "training waits, s", "for the first", "complete after, s", "steps meanwhile take"]
        lines += [*table([*head, "pinned by zeroelastic, MiB", "by torch, MiB"], rows), ""]
    if DECOUPLED in saves:
        plain = saves[DECOUPLED]["plain_step"]
        lines += [f"A step without a save takes {plain:.3f} s; for a decoupled one both call and next step wait.", ""]
    if missing := saves["not_measured"]:
        lines += ["Not measured:", "", *(f"* {name}: {why.splitlines()[0]}" for name, why in missing.items()), ""]
    return "\n".join(lines)


def main() -> None:
    parser = engine_arguments(__doc__, width=4096, layers=16, limit=150.0, limited="all measurements but the last")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--writer", default="fast", choices=list(WRITERS), help="of DeepSpeed's own writers")
    arguments = parser.parse_args()
    if not arguments.cpu and not torch.cuda.is_available():
        sys.exit("bench_gpu_saves: there is no CUDA device, so nothing is measured.")
    if arguments.small:
        arguments.width, arguments.layers = 256, 4
    os.environ.update(rank_environment(cpu=arguments.cpu, threads=len(os.sched_getaffinity(0))))
    from load_systems import filesystem

    document: dict[str, Any] = {"machine": machine() | {"deepspeed": version("deepspeed")}, "rounds": arguments.rounds}
    with tempfile.TemporaryDirectory(prefix="bench-gpu-saves-", dir=arguments.directory) as directory:
        document["filesystem"] = filesystem(Path(directory).resolve())
        part = Part(arguments, Path(directory))
        document["parts"] = {"saves": part.found}
        part.after_each = lambda: write_results(arguments.out, "gpu_saves", document, tables(document), shown=False)
        measure_saves(part)
        part.wait_for_device()
        part.engine.destroy()
        torch.distributed.destroy_process_group()
    write_results(arguments.out, "gpu_saves", document, tables(document))


if __name__ == "__main__":
    main()
