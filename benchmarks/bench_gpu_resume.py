"""What a whole load and a whole save of an engine cost on one GPU, beside DeepSpeed's own and beside plain reading.

    python benchmarks/bench_gpu_resume.py --directory /dev/shm --out benchmarks/results   # 268M parameters
    python benchmarks/bench_gpu_resume.py --small --cpu --out /tmp/x                      # to test the benchmark itself

needs a CUDA device, else it says so and ends. Writes gpu_resume.jsonl (every sample) and gpu_resume.md. At each stage
four ranks on the CPU save an elastic checkpoint and one on the GPU a checkpoint of DeepSpeed alone; one rank on the GPU
loads both, and DeepSpeed its own. Each process is new: its first load is one sample, the loads after it in the same
engine are others. All are started together and measure one after another, while the others wait. Between two loads the
process reads the same optimizer files into pinned memory, with plain system calls on several threads. Masters and
moments are garbage before every load, and compared with what was saved after it. Memory: of torch's allocator and the
whole GPU, and the growth of the resident set to its peak, "above" what the engine already had, which is all that a load
fills. The page cache is warm.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from gpu_engines import (
    Model,
    about_engines,
    build_engine,
    device,
    engine_arguments,
    join_group,
    loss_of,
    overwrite,
    rank_environment,
    state_digest,
    train_step,
)
from meter import status_bytes
from report import describe, table

from zeroelastic.testing import RankError, run_ranks
from zeroelastic.testing.rank import prepare_deepspeed

TAG = "t"
SAVE_RANKS = 4
BLOCK = 8 << 20
GOALS = {"reading": 0.8, "stock": 15.0, "gpu_bytes": 0, "host_bytes": 64 << 20}
TITLES = {
    "elastic-read": 'zeroelastic, elastic, 4 -> 1, "read"',
    "elastic-full": 'zeroelastic, elastic, 4 -> 1, "full"',
    "rigid-read": 'zeroelastic, DeepSpeed\'s files, 1 -> 1, "read"',
    "stock": "DeepSpeed, its own files, 1 -> 1",
    "save-elastic": "zeroelastic saves, elastic, 1 rank",
    "save-stock": "DeepSpeed saves, 1 rank",
}


@dataclass(frozen=True)
class Worker:
    """What one process measures: ``repeats`` loads of ``source`` or, where that is empty, saves below ``target``."""

    system: str
    model: Model
    source: str
    target: str
    repeats: int
    threads: tuple[int, ...]

    @staticmethod
    def of(text: str) -> Worker:
        values = json.loads(text)
        return Worker(**{**values, "model": Model(**values["model"]), "threads": tuple(values["threads"])})


# --- in a process of its own ----------------------------------------------------------------------------------------


def work(worker: Worker, channel: Path) -> None:
    """Build the engine, wait for the turn, measure."""
    prepare_deepspeed()
    join_group(channel)
    engine = build_engine(worker.model)
    train_step(engine, 0)
    (channel / "ready").touch()
    sys.stdin.read()
    with (channel / "samples").open("w", buffering=1) as lines:
        for sample in measure_loads(worker, engine) if worker.source else measure_saves(worker, engine):
            model = worker.model
            about = {"stage": model.stage, "system": worker.system, "process": os.getpid()}
            lines.write(f"{json.dumps({**about, **sample})}\n")
    os._exit(0)  # the next one waits, and nothing is left to do


def measure_loads(worker: Worker, engine: Any) -> Iterator[dict[str, Any]]:
    source = Path(worker.source)
    files = sorted((source / TAG).glob("*optim_states.pt"))
    plain = PlainReading(files) if worker.threads else None
    for number in range(worker.repeats):
        overwrite(engine)
        with cost() as spent:
            path, _ = engine.load_checkpoint(str(source), TAG)
        assert path is not None
        report = getattr(engine, "zeroelastic_report", None)
        yield {
            "number": number,
            **spent,
            "bytes": sum(file.stat().st_size for file in files),
            "digest": state_digest(engine),
            "loss": loss_of(engine, 7),
            "report": None if report is None else report.text().splitlines(),
            "report_seconds": None if report is None else report.seconds,
            "plain_seconds": {count: plain.seconds(count) for count in worker.threads} if plain else {},
        }
    if worker.model.installed:
        overwrite(engine)
        with Lowest() as lowest:
            engine.load_checkpoint(str(source), TAG)
        yield {"number": worker.repeats, "watched": True, **lowest.found(), "digest": state_digest(engine)}


def measure_saves(worker: Worker, engine: Any) -> Iterator[dict[str, Any]]:
    digest = state_digest(engine)
    for number in range(worker.repeats):
        last = number == worker.repeats - 1
        target = Path(worker.target if last else f"{worker.target}-{number}")
        with cost() as spent:
            engine.save_checkpoint(str(target), TAG)
        written = sum(file.stat().st_size for file in (target / TAG).iterdir() if file.is_file())
        unchanged = state_digest(engine) == digest
        yield {"number": number, **spent, "bytes": written, "digest": digest, "unchanged": unchanged}
        if not last:
            shutil.rmtree(target)


@contextmanager
def cost() -> Iterator[dict[str, Any]]:
    """Seconds of a load or a save, from an idle device until it is idle again, and memory above what there was."""
    gc.collect()
    on_gpu = device() == "cuda"
    spent: dict[str, Any] = {}
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        allocated, free = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
    Path("/proc/self/clear_refs").write_text("5")
    resident = status_bytes("VmRSS")
    available = available_bytes()
    began = time.perf_counter()
    yield spent
    if on_gpu:
        torch.cuda.synchronize()
    spent["seconds"] = time.perf_counter() - began
    spent["host_peak_above"] = status_bytes("VmHWM") - resident
    spent["host_kept"] = available - available_bytes()
    if on_gpu:
        spent["gpu_before"] = allocated
        spent["gpu_peak_above"] = torch.cuda.max_memory_allocated() - allocated
        spent["gpu_kept"] = free - torch.cuda.mem_get_info()[0]


def available_bytes() -> int:
    """What the machine could still give to processes; pinned memory is missing from it, the page cache is not."""
    with open("/proc/meminfo") as lines:
        return int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]) * 1024


class Lowest:
    """The least memory that the machine and the GPU had left while this was open: also what other allocators took."""

    def __enter__(self) -> Lowest:
        self._began, self._lowest = self._now(), self._now()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._done.set()
        self._thread.join()

    def found(self) -> dict[str, int]:
        host, gpu = (began - lowest for began, lowest in zip(self._began, self._lowest, strict=True))
        return {"machine_peak_above": host, "whole_gpu_peak_above": gpu}

    def _now(self) -> tuple[int, int]:
        return available_bytes(), torch.cuda.mem_get_info()[0] if device() == "cuda" else 0

    def _watch(self) -> None:
        while not self._done.wait(0.002):
            host, gpu = self._now()
            self._lowest = min(self._lowest[0], host), min(self._lowest[1], gpu)


class PlainReading:
    """Files into pinned memory in blocks, each by one ``preadv``, on several threads."""

    def __init__(self, files: Sequence[Path]) -> None:
        sizes = [file.stat().st_size for file in files]
        self._memory = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=device() == "cuda")
        self._view = memoryview(self._memory.numpy())
        self._view[:: os.sysconf("SC_PAGESIZE")] = bytes(-(-sum(sizes) // os.sysconf("SC_PAGESIZE")))
        self._blocks: list[tuple[Path, int, int, int]] = []
        begin = 0
        for file, size in zip(files, sizes, strict=True):
            self._blocks += [(file, at, begin + at, min(BLOCK, size - at)) for at in range(0, size, BLOCK)]
            begin += size

    def seconds(self, threads: int) -> float:
        """How long all of it takes; opening the files included."""
        with ThreadPoolExecutor(threads) as pool, ExitStack() as stack:
            list(pool.map(time.sleep, [0.0] * threads))
            began = time.perf_counter()
            opened = {file: stack.enter_context(open(file, "rb", buffering=0)).fileno() for file, *_ in self._blocks}

            def read(block: tuple[Path, int, int, int]) -> int:
                file, at, to, size = block
                return os.preadv(opened[file], [self._view[to : to + size]], at)

            done = sum(pool.map(read, self._blocks))
            spent = time.perf_counter() - began
        assert done == len(self._view)
        return spent


# --- the parent -----------------------------------------------------------------------------------------------------


def save_on_cpu(model: Model, directory: str) -> str:
    """On each rank: one step, a save; the digest of the state over all ranks."""
    engine = build_engine(model)
    train_step(engine, 0)
    engine.save_checkpoint(directory, TAG)
    return state_digest(engine)


class Process:
    """A worker's process. It marks that it is ready by a file, begins when its standard input ends, and adds its
    samples to a file; everything else that it prints is in a log."""

    def __init__(self, worker: Worker, environment: dict[str, str], directory: Path) -> None:
        self.worker = worker
        self._samples, self._ready, self._log = (directory / name for name in ("samples", "ready", "log"))
        directory.mkdir(parents=True)
        python = environment.get("PYTHON_EXEC", sys.executable)  # as torchrun has it
        command = [python, os.path.abspath(__file__), "--worker", json.dumps(asdict(worker))]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, "--channel", str(directory)],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def wait_until_ready(self, until: float) -> None:
        """Returns when it waits for its turn, when it has ended, or at a time of ``time.monotonic``."""
        while not self._ready.exists() and self._process.poll() is None and time.monotonic() < until:
            time.sleep(0.05)

    def measure(self, until: float) -> list[dict[str, Any]]:
        """Its samples; where it fails or takes too long, the last of them has an error."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            code = self._process.wait(max(1.0, until - time.monotonic()))
            problem = f"exit code {code}" if code else ""
        except subprocess.TimeoutExpired:
            self.end()
            problem = "it took too long"
        lines = self._samples.read_text().splitlines() if self._samples.exists() else []
        samples = [json.loads(line) for line in lines]
        if problem:
            text = self._log.read_text(errors="replace")[-4000:]
            about = {"stage": self.worker.model.stage, "system": self.worker.system}
            samples.append({**about, "error": problem, "output": text})
        return samples

    def end(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()


def workers(model: Model, directory: Path, arguments: argparse.Namespace) -> list[Worker]:
    """What is measured at one stage, in order: DeepSpeed saves what is loaded later."""
    threads = tuple(arguments.threads)

    def worker(system: str, source: str, repeats: int, **changes: Any) -> Worker:
        ours = not system.endswith("stock")
        own = replace(model, installed=ours, **{"seed": 5, **changes})
        target = "" if source else str(directory / system)
        return Worker(system, own, source and str(directory / source), target, repeats, threads if ours else ())

    loads = arguments.loads
    return [
        worker("save-stock", "", arguments.saves, seed=2),
        *[
            each
            for _ in range(arguments.processes)
            for each in (
                worker("elastic-read", "elastic", loads),
                worker("stock", "save-stock", max(1, loads // 3)),
                worker("rigid-read", "save-stock", loads, elastic=False),
            )
        ],
        worker("elastic-full", "elastic", loads, verify="full"),
        worker("save-elastic", "", arguments.saves + 1, seed=2),
    ]


def measure_stage(stage: int, directory: Path, arguments: argparse.Namespace, out: Path) -> list[dict[str, Any]]:
    """All samples of one stage; each is also appended to the results at once."""
    model = Model(stage, arguments.width, arguments.layers)
    cores = len(os.sched_getaffinity(0))
    environment = rank_environment(cpu=arguments.cpu, threads=cores)
    planned = workers(model, directory, arguments)
    started = [Process(each, environment, directory / "processes" / str(i)) for i, each in enumerate(planned)]
    samples: list[dict[str, Any]] = []

    def keep(more: list[dict[str, Any]]) -> None:
        samples.extend(more)
        with out.open("a") as lines:
            lines.writelines(f"{json.dumps(sample)}\n" for sample in more)

    try:
        os.environ["OMP_NUM_THREADS"] = str(max(1, cores // SAVE_RANKS))
        saver = replace(model, seed=1)
        saved = str(directory / "elastic")
        about = {"stage": stage, "system": "elastic", "ranks": SAVE_RANKS}
        try:
            digests = run_ranks(save_on_cpu, SAVE_RANKS, saver, saved, timeout=arguments.limit)
            keep([{**about, "digest": digests[0]}])
        except RankError as error:  # loads of it fail by themselves; the others need nothing of it
            keep([{**about, "error": str(error)[:4000]}])
        until = time.monotonic() + arguments.limit
        for process in started:
            process.wait_until_ready(until)
        for process in started:
            print(f"stage {stage}: {TITLES[process.worker.system]}", file=sys.stderr, flush=True)
            keep(process.measure(time.monotonic() + arguments.limit))
    finally:
        for process in started:
            process.end()
    return samples


def rows_of(samples: Sequence[dict[str, Any]]) -> list[list[str]]:
    """The rows of the table of one stage."""
    digests = {sample["system"]: sample["digest"] for sample in samples if "digest" in sample}
    rows = []
    for system, title in TITLES.items():
        timed = [sample for sample in samples if sample["system"] == system and "seconds" in sample]
        if not timed:
            continue
        first = [sample["seconds"] for sample in timed if sample["number"] == 0]
        usual = median(later(samples, system) or first)
        beside = later(samples, "save-stock" if system.startswith("save") else "stock") or [
            sample["seconds"] for sample in samples if sample["system"] == "stock" and "seconds" in sample
        ]
        source = "elastic" if system.startswith("elastic") else "save-stock"
        right = all(
            sample.get("unchanged", sample["digest"] == digests.get(source))
            for sample in samples
            if sample["system"] == system and "digest" in sample
        )
        plain = [min(sample["plain_seconds"].values()) for sample in timed if sample.get("plain_seconds")]
        every = [sample for sample in samples if sample["system"] == system]
        rows.append(
            [
                title,
                f"{median(first):.3f}",
                f"{usual:.3f}",
                f"{timed[0]['bytes'] / 1e9 / usual:.1f}",
                f"{median(plain) / usual:.2f}" if plain else "",
                f"{median(beside) / usual:.1f}" if beside else "",
                _mib(every, "gpu_peak_above"),
                _mib(every, "whole_gpu_peak_above"),
                _mib(every, "host_peak_above"),
                _mib(every, "machine_peak_above"),
                "yes" if right else "**no**",
            ]
        )
    return rows


def later(samples: Sequence[dict[str, Any]], system: str) -> list[float]:
    """Seconds of all but the first of each process."""
    timed = [sample for sample in samples if sample["system"] == system and "seconds" in sample]
    return [sample["seconds"] for sample in timed if sample["number"] > 0]


def _mib(samples: Sequence[dict[str, Any]], key: str) -> str:
    found = [sample[key] for sample in samples if key in sample]
    return f"{max(found) / 2**20:.0f}" if found else ""


def tables(about: dict[str, Any], samples: Sequence[dict[str, Any]]) -> str:
    """The results as Markdown."""
    stages = sorted({sample["stage"] for sample in samples}, reverse=True)
    lines = [
        f"# Whole saves and loads on one GPU, stage {' and '.join(map(str, stages))}",
        "",
        f"{about['gpu']}, CUDA {about['cuda']}, DeepSpeed {about['deepspeed']}, engine built by {about['engine']}; "
        f"{about['num_params'] / 1e6:.0f} million parameters in bf16, torch's AdamW; files in {about['directory']}.",
        "",
        *describe(about["machine"]),
        "",
        "Seconds: the median of first loads (saves) in a new process, and of later ones. *Plain*: the time of reading "
        f"the optimizer files into pinned memory on {' or '.join(map(str, about['threads']))} threads, the faster, "
        f"over that of the load (goal: {GOALS['reading']}). *DeepSpeed*: its time over this one's (goal: "
        f"{GOALS['stock']:.0f}). MiB above the state that is filled, the greatest: by torch's allocator (goal: "
        f"{GOALS['gpu_bytes']}) and of the whole GPU; the resident set (goal: {GOALS['host_bytes'] >> 20}) and of the "
        "whole machine, pinned memory included, in a load that is not timed. *Right*: masters and moments are those "
        "that were saved.",
    ]
    for stage in sorted({sample["stage"] for sample in samples}, reverse=True):
        own = [sample for sample in samples if sample["stage"] == stage]
        head = [
            "what",
            "first s",
            "later s",
            "GB/s",
            "plain",
            "DeepSpeed",
            "GPU",
            "whole GPU",
            "host",
            "machine",
            "right",
        ]
        lines += ["", f"## Stage {stage}", "", *table(head, rows_of(own))]
        lines += [f"\n{sample['system']}: {sample['error']}" for sample in own if "error" in sample]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = engine_arguments(__doc__, width=4096, layers=16, limit=120.0, limited="one process")
    parser.add_argument("--stages", type=int, nargs="+", default=[3, 2])
    parser.add_argument("--processes", type=int, default=2, help="processes for each system, but for the slow ones")
    parser.add_argument("--loads", type=int, default=6, help="loads in each process; DeepSpeed does a third of them")
    parser.add_argument("--saves", type=int, default=2, help="saves of DeepSpeed; zeroelastic does one more")
    parser.add_argument("--threads", type=int, nargs="+", default=[8, 16], help="of plain reading")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(Worker.of(arguments.worker), arguments.channel)
        return
    if not arguments.cpu and not torch.cuda.is_available():
        sys.exit("bench_gpu_resume: there is no CUDA device, so nothing is measured.")
    if arguments.small:
        arguments.width, arguments.layers, arguments.processes, arguments.loads = 256, 4, 1, 3
    about: dict[str, Any] = {
        **about_engines(arguments),
        "directory": str(arguments.directory or tempfile.gettempdir()),
        "threads": arguments.threads,
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    out = arguments.out / "gpu_resume.jsonl"
    out.write_text(f"{json.dumps(about)}\n")
    samples: list[dict[str, Any]] = []
    for stage in arguments.stages:
        with tempfile.TemporaryDirectory(prefix="bench-gpu-resume-", dir=arguments.directory) as directory:
            samples += measure_stage(stage, Path(directory), arguments, out)
        (arguments.out / "gpu_resume.md").write_text(tables(about, samples))
    print((arguments.out / "gpu_resume.md").read_text())
    sys.exit(any("error" in sample for sample in samples))


if __name__ == "__main__":
    main()
