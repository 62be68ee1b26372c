"""What DeepSpeed can only do on a GPU, or does otherwise there: offloaded optimizers and ZeRO++, saved and loaded.

    python benchmarks/gpu_features.py --directory /dev/shm --out benchmarks/results
    python benchmarks/gpu_features.py --small --cpu --out /tmp/x    # on the CPU, where ZeRO++ has no ops

needs a CUDA device, else it says so and ends. Writes gpu_features.json and gpu_features.md. Each feature has a process
of its own with one rank, all at the same time. There, an engine trains, saves with zeroelastic and trains on; another
engine, of other weights, loads that and trains on. The same with DeepSpeed's own files: zeroelastic loads them, and
DeepSpeed does, to compare. The state is compared bit for bit, as DeepSpeed's tables and collectives gather it, and the
losses that follow too. DeepSpeed's ops are compiled on first use; what cannot be, or does not work, is in the result
with the text of its error. Seconds mean little here.

One rank gathers nothing and reduces nothing, so DeepSpeed quantizes nothing there: with one rank, qwZ and qgZ show that
the op can be compiled and that state under these flags is exact. With two ranks on the one GPU, over gloo, DeepSpeed
takes each for a node and quantizes what goes between them; the result counts how often. That trains in fp16, because
the op for gradients reads them as fp16 whatever they are.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench_gpu_resume import TAG, cost
from gpu_engines import (
    Model,
    about_engines,
    build_engine,
    device,
    engine_arguments,
    join_group,
    masters,
    moments,
    rank_environment,
    train_step,
)
from report import describe, table, without_paths, write_results

from zeroelastic.testing.rank import prepare_deepspeed
from zeroelastic.testing.state import compare_states, fingerprint, gather_state

STEPS = 2
"""Before a save, and after it."""


@dataclass(frozen=True)
class Feature:
    """A way to train: what its engines have in common, and DeepSpeed's ops that it needs."""

    title: str
    stage: int
    zero: dict[str, Any] = field(default_factory=dict)
    optimizer: str = "adamw"
    ops: tuple[str, ...] = ()
    ranks: int = 1
    precision: str = "bf16"

    def model(self, arguments: argparse.Namespace, directory: Path, **changes: Any) -> Model:
        zero = json.loads(json.dumps(self.zero).replace("NVME", str(directory / "nvme")))
        return replace(
            Model(self.stage, arguments.width, arguments.layers, 0, zero=zero),
            optimizer=self.optimizer,
            precision=self.precision,
            **changes,
        )


def _offload(device: str, **more: Any) -> dict[str, Any]:
    place = {"nvme_path": "NVME", "buffer_count": 10} if device == "nvme" else {}
    return {"offload_optimizer": {"device": device, "pin_memory": True, **place, **more}}


SUB_GROUPS = {"sub_group_size": 2_000_000}
FEATURES = {
    "cpu-3": Feature("optimizer on the CPU, pinned, stage 3", 3, _offload("cpu") | SUB_GROUPS),
    "cpu-2": Feature("optimizer on the CPU, pinned, stage 2", 2, _offload("cpu")),
    "cpu-adam": Feature(
        "optimizer on the CPU, DeepSpeedCPUAdam, stage 3",
        3,
        _offload("cpu") | SUB_GROUPS,
        "cpu_adam",
        ("CPUAdamBuilder",),
    ),
    "params": Feature(
        "optimizer and parameters on the CPU, pinned, stage 3",
        3,
        _offload("cpu") | SUB_GROUPS | {"offload_param": {"device": "cpu", "pin_memory": True}},
    ),
    "nvme": Feature("optimizer on NVMe, stage 3", 3, _offload("nvme") | SUB_GROUPS, ops=("AsyncIOBuilder",)),
    "qwz": Feature("quantized weights (qwZ), stage 3", 3, {"zero_quantized_weights": True}, ops=("QuantizerBuilder",)),
    "qgz": Feature(
        "quantized gradients (qgZ), stage 3", 3, {"zero_quantized_gradients": True}, ops=("QuantizerBuilder",)
    ),
    "qwz-2": Feature(
        "quantized weights (qwZ), stage 3, two ranks over gloo",
        3,
        {"zero_quantized_weights": True},
        ops=("QuantizerBuilder",),
        ranks=2,
        precision="fp16",
    ),
    "qgz-2": Feature(
        "quantized gradients (qgZ), stage 3, two ranks over gloo",
        3,
        {"zero_quantized_gradients": True},
        ops=("QuantizerBuilder",),
        ranks=2,
        precision="fp16",
    ),
    "hpz": Feature("secondary partitions (hpZ), stage 3", 3, {"zero_hpz_partition_size": 1}),
}


# --- in a process of its own ----------------------------------------------------------------------------------------


class Trial:
    """The phases of one feature; one that needs another which failed is left out."""

    def __init__(self, feature: Feature, arguments: argparse.Namespace, directory: Path) -> None:
        self.feature, self.arguments, self.directory = feature, arguments, directory
        self.phases: dict[str, dict[str, Any]] = {}
        self.quantized = count_quantized()

    def run(self) -> None:
        self._try("ops", self._load_ops)
        if "error" in self.phases["ops"]:
            return
        for kind in ("elastic", "rigid"):
            ours = kind == "elastic"
            saved: dict[str, Any] = {}
            self._try(f"save {kind}", partial(self._save, kind, saved, installed=ours))
            if not saved:
                continue
            self._try(f"load {kind}", partial(self._load, kind, saved, installed=True))
            if not ours:
                self._try("DeepSpeed loads rigid", partial(self._load, kind, saved, installed=False))

    def _try(self, name: str, phase: Callable[[], dict[str, Any]]) -> None:
        began = time.perf_counter()
        try:
            found = phase()
        except Exception as error:
            text = without_paths("".join(traceback.format_exception(error)))
            found = {"error": f"{type(error).__name__}: {error}"[:2000], "traceback": text[-3000:]}
        self.phases[name] = {**found, "phase_seconds": round(time.perf_counter() - began, 2)}
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        print(f"PHASES {json.dumps(self.phases)}", flush=True)

    def _load_ops(self) -> dict[str, Any]:
        from deepspeed.accelerator import get_accelerator

        for name in self.feature.ops:
            builder = get_accelerator().create_op_builder(name)
            if builder is None:
                raise RuntimeError(f"DeepSpeed has no {name} for this device")
            if not builder.is_compatible(verbose=True):
                raise RuntimeError(
                    f"DeepSpeed's op {builder.NAME} cannot be built here: {builder.error_log or 'see the log'}"
                )
            builder.load()
        return {"ops": list(self.feature.ops)}

    def _engine(self, kind: str, seed: int, installed: bool) -> Any:
        own = self.directory / f"{kind}-{seed}-{installed}"
        (own / "nvme").mkdir(parents=True, exist_ok=True)  # by either rank
        model = self.feature.model(self.arguments, own, seed=seed, installed=installed, elastic=kind == "elastic")
        return build_engine(replace(model, verify="full"))

    def _save(self, kind: str, saved: dict[str, Any], *, installed: bool) -> dict[str, Any]:
        engine = self._engine(kind, 1, installed)
        for step in range(STEPS):
            train_step(engine, step)
        state = fingerprint(gather_state(engine))
        with cost() as spent:
            engine.save_checkpoint(str(self.directory / kind), TAG)
        changed = compare_states(state, fingerprint(gather_state(engine)))
        pinned = _pinned(engine)
        losses = [train_step(engine, step) for step in range(STEPS, 2 * STEPS)]
        saved |= {"state": state, "losses": losses}
        return {
            "seconds": spent,
            "changed by the save": changed[:5],
            "pinned": pinned,
            "losses": losses,
            "quantized": dict(self.quantized),
        }

    def _load(self, kind: str, saved: dict[str, Any], *, installed: bool) -> dict[str, Any]:
        engine = self._engine(kind, 9, installed)
        train_step(engine, 50)
        with cost() as spent:
            path, _ = engine.load_checkpoint(str(self.directory / kind), TAG)
        if path is None:
            raise RuntimeError("load_checkpoint returned no path")
        differences = compare_states(saved["state"], fingerprint(gather_state(engine)))
        report = getattr(engine, "zeroelastic_report", None)
        pinned = _pinned(engine)
        losses = [train_step(engine, step) for step in range(STEPS, 2 * STEPS)]
        return {
            "seconds": spent,
            "num_compared": len(saved["state"]),
            "num_different": len(differences),
            "differences": differences[:8],
            "pinned": pinned,
            "losses": losses,
            "quantized": dict(self.quantized),
            "same_losses": losses == saved["losses"],
            "greatest_loss_difference": max(abs(a / b - 1) for a, b in zip(losses, saved["losses"], strict=True)),
            "report": None if report is None or not installed else report.text().splitlines(),
        }


def count_quantized() -> dict[str, int]:
    """How often, from now on, DeepSpeed quantizes weights and gradients that it sends, by the name of its function."""
    from deepspeed.runtime.zero import partition_parameters, stage3

    found: dict[str, int] = {}

    def counting(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **more: Any) -> Any:
            found[name] = found.get(name, 0) + 1
            return original(*args, **more)

        return counted

    for place, name in ((partition_parameters.CUDAQuantizer, "quantize"), (stage3, "all_to_all_quant_reduce")):
        setattr(place, name, counting(name, getattr(place, name)))
    return found


def join(feature: Feature, channel: Path) -> None:
    """The process group of the feature's ranks, by gloo where one GPU has several, which NCCL refuses."""
    if feature.ranks == 1:
        return join_group(channel)
    if device() == "cuda":
        torch.cuda.set_device(0)
    store = dist.FileStore(str(channel / "store"), feature.ranks)
    dist.init_process_group("gloo", store=store, rank=int(os.environ["RANK"]), world_size=feature.ranks)
    from deepspeed.runtime.zero import partition_parameters

    gather = partition_parameters._dist_allgather_fn

    # NCCL gathers tensors of any shape; gloo compares the shape of the scales of quantized weights with the result's.
    def gather_flat(piece: torch.Tensor, *others: Any, **more: Any) -> Any:
        return gather(piece.reshape(-1), *others, **more)

    partition_parameters._dist_allgather_fn = gather_flat


def _pinned(engine: Any) -> dict[str, Any]:
    """How many of the masters and the moments are pinned, and how many there are, by device."""
    found: dict[str, int] = {}
    for master in masters(engine):
        for key, tensor in {"fp32": master, **moments(engine, master)}.items():
            kind = f"{key} {tensor.device.type}{' pinned' if tensor.is_cpu and tensor.is_pinned() else ''}"
            found[kind] = found.get(kind, 0) + 1
    return found


# --- the parent -----------------------------------------------------------------------------------------------------


def try_all(names: list[str], arguments: argparse.Namespace, directory: Path) -> dict[str, dict[str, Any]]:
    """The phases of every feature, each from a process with a time limit."""
    environment = rank_environment(cpu=arguments.cpu, threads=2)
    started: list[tuple[str, subprocess.Popen[bytes], Path]] = []
    same = ["--width", str(arguments.width), "--layers", str(arguments.layers)] + ["--cpu"] * arguments.cpu
    for name in names:
        own = directory / name
        own.mkdir()
        python = environment.get("PYTHON_EXEC", sys.executable)  # as torchrun has it
        command = [python, os.path.abspath(__file__), "--feature", name, "--channel", str(own), *same]
        ranks = FEATURES[name].ranks
        for rank in reversed(range(ranks)):  # the phases of rank 0 are the last to be read
            log, environment = own / f"log-{rank}", {**environment, "RANK": str(rank), "WORLD_SIZE": str(ranks)}
            with log.open("wb") as output:
                process = subprocess.Popen(
                    command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
                )
            started.append((name, process, log))
    until = time.monotonic() + arguments.limit
    results: dict[str, dict[str, Any]] = {}
    for name, process, log in started:
        problem = ""
        try:
            code = process.wait(max(0.1, until - time.monotonic()))
            problem = f"the process ended with exit code {code}" if code else ""
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            problem = f"the process took longer than {arguments.limit:.0f} s"
        text = without_paths(log.read_text(errors="replace"))
        phases = [line for line in text.splitlines() if line.startswith("PHASES ")]
        results[name] = results.get(name, {}) | (json.loads(phases[-1].removeprefix("PHASES ")) if phases else {})
        if problem:
            results[name]["process"] = {"error": problem, "traceback": text[-4000:]}
    return results


def verdict(phases: dict[str, Any], name: str) -> str:
    """What one cell of the table says of a phase."""
    phase = phases.get(name)
    if phase is None:
        return ""
    if "error" in phase:
        return "**failed**"
    if "num_different" in phase:
        wrong = phase["num_different"]
        state = "exact" if not wrong else f"**{wrong} of {phase['num_compared']} differ**"
        return (
            f"{state}, losses {'equal' if phase['same_losses'] else format(phase['greatest_loss_difference'], '.1e')}"
        )
    return "changed the state" if phase.get("changed by the save") else "done"


def tables(document: dict[str, Any]) -> str:
    """The results as Markdown."""
    phases = ("save elastic", "load elastic", "save rigid", "load rigid", "DeepSpeed loads rigid")
    rows = [
        [FEATURES[name].title, *(verdict(found, phase) for phase in phases)]
        for name, found in document["results"].items()
    ]
    lines = [
        "# Offload and ZeRO++ on one GPU",
        "",
        f"{document['gpu']}, CUDA {document['cuda']}, DeepSpeed {document['deepspeed']}; "
        f"{document['num_params'] / 1e6:.1f} million parameters, one rank. *Losses*: the two after the load, compared "
        "with those of the run that saved; equal, or the greatest relative difference.",
        "",
        *describe(document["machine"]),
        "",
        *table(["feature", *phases], rows, text_columns=6),
    ]
    for name, found in document["results"].items():
        if FEATURES[name].ranks > 1 and "quantized" in found.get("save elastic", {}):
            lines += ["", f"{FEATURES[name].title}: quantized in training {found['save elastic']['quantized']}"]
        for phase, about in found.items():
            if "error" in about:
                lines += ["", f"{FEATURES[name].title}, {phase}: {about['error'].splitlines()[0]}"]
            elif about.get("differences"):
                lines += ["", f"{FEATURES[name].title}, {phase}: {'; '.join(about['differences'][:3])}"]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = engine_arguments(__doc__, width=1536, layers=6, limit=160.0, limited="all of it")
    parser.add_argument("--only", nargs="+", choices=list(FEATURES), default=list(FEATURES))
    parser.add_argument("--feature", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.feature:
        prepare_deepspeed()
        join(FEATURES[arguments.feature], arguments.channel)
        Trial(FEATURES[arguments.feature], arguments, arguments.channel).run()
        sys.stdout.flush()
        os._exit(0)
    if not arguments.cpu and not torch.cuda.is_available():
        sys.exit("gpu_features: there is no CUDA device, so nothing is tried.")
    if arguments.small:
        arguments.width, arguments.layers = 640, 3
    document: dict[str, Any] = about_engines(arguments)
    with tempfile.TemporaryDirectory(prefix="gpu-features-", dir=arguments.directory) as directory:
        document["results"] = try_all(arguments.only, arguments, Path(directory))
    write_results(arguments.out, "gpu_features", document, tables(document))


if __name__ == "__main__":
    main()
