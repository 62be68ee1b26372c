"""Engines whose whole saves and loads are measured on one GPU: how they are built, how their state is compared.

The state is compared by digests that share no code with what saves and loads: for each parameter and state key the sum
of its 32-bit words, each times an odd number that its place in the whole parameter gives, modulo 2^64. A changed word
changes it, a moved one too, and the sums of the ranks add up, so that runs of any number of ranks compare.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from report import REPOSITORY, benchmark_arguments, machine

from zeroelastic.executors.build_info import describe_build
from zeroelastic.testing.state import group_buffers

BATCH = 4
_CHUNK = 1 << 24


@dataclass(frozen=True)
class Model:
    """``layers`` linear layers of ``width`` x ``width`` weights, in 16 bits with fp32 masters, under torch's AdamW."""

    stage: int
    width: int
    layers: int
    seed: int = 0
    installed: bool = True
    elastic: bool = True
    verify: str = "read"
    optimizer: str = "adamw"
    precision: str = "bf16"
    zero: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_params(self) -> int:
        return self.layers * self.width * (self.width + 1)


class Layers(torch.nn.Module):
    """Linear layers, each added to what goes in."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.float().pow(2).mean()


def engine_arguments(
    description: str | None, *, width: int, layers: int, limit: float, limited: str
) -> argparse.ArgumentParser:
    """What every script that builds these engines takes; ``limit`` are the seconds of what is ``limited``."""
    parser = benchmark_arguments(description)
    parser.add_argument("--width", type=int, default=width)
    parser.add_argument("--layers", type=int, default=layers)
    parser.add_argument("--limit", type=float, default=limit, help=f"seconds that {limited} may take")
    parser.add_argument("--cpu", action="store_true", help="on the CPU: to test the script itself")
    parser.add_argument("--channel", type=Path, help=argparse.SUPPRESS)
    return parser


def rank_environment(*, cpu: bool, threads: int) -> dict[str, str]:
    """The environment of a process that is the only rank of its engine."""
    paths = [os.fspath(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        **dict.fromkeys(("RANK", "LOCAL_RANK", "CROSS_RANK"), "0"),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "CROSS_SIZE"), "1"),
        "DS_ACCELERATOR": "cpu" if cpu else "cuda",
        "OMP_NUM_THREADS": str(threads),
        "PYTHONPATH": os.pathsep.join(paths),
    }


def about_engines(arguments: argparse.Namespace) -> dict[str, Any]:
    """The machine, what is installed, and the size of the engines of a script with ``engine_arguments``."""
    return {
        "machine": machine(),
        "gpu": "no GPU" if arguments.cpu else torch.cuda.get_device_name(),
        "cuda": torch.version.cuda,
        "deepspeed": version("deepspeed"),
        "engine": describe_build("cuda").compiler or "none",
        "num_params": Model(3, arguments.width, arguments.layers).num_params,
    }


def join_group(directory: Path) -> None:
    """The process group of the one rank, on the GPU where this process trains on one."""
    store = dist.FileStore(str(directory / "store"), 1)
    if device() == "cuda":
        torch.cuda.set_device(0)
        dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=torch.device("cuda", 0))
    else:
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)


def build_engine(model: Model) -> Any:
    """An engine of this model that has not trained, with zeroelastic or without."""
    import deepspeed

    import zeroelastic

    zeroelastic.install() if model.installed else zeroelastic.uninstall()
    torch.manual_seed(model.seed)
    with torch.device(device()):
        module = Layers(model.width, model.layers)
    config: dict[str, Any] = {
        "train_batch_size": BATCH,
        model.precision: {"enabled": True, **({"initial_scale_power": 8} if model.precision == "fp16" else {})},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": model.stage, **model.zero},
    }
    if model.installed:
        config["zero_optimization"]["elastic_checkpoint"] = model.elastic
        config["zeroelastic"] = {"verify": model.verify}
    return deepspeed.initialize(model=module, optimizer=_optimizer(model, module), config=config)[0]


def _optimizer(model: Model, module: torch.nn.Module) -> torch.optim.Optimizer:
    if model.optimizer == "cpu_adam":
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam(module.parameters(), lr=1e-3)
    return torch.optim.AdamW(module.parameters(), lr=1e-3)


def device() -> str:
    """Where engines of this process train."""
    return "cpu" if os.environ["DS_ACCELERATOR"] == "cpu" else "cuda"


def train_step(engine: Any, step: int) -> float:
    """One optimizer step on the batch of ``step``, the same at every world size; returns this rank's loss."""
    loss = engine(_batch(engine, step))
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


def loss_of(engine: Any, step: int) -> float:
    """The loss on the batch of ``step``, without a step."""
    with torch.no_grad():
        return float(engine(_batch(engine, step)))


def _batch(engine: Any, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 + step)
    batch = torch.randn(BATCH, engine.module.layers[0].in_features, generator=generator)
    mine = BATCH // dist.get_world_size()
    return batch[dist.get_rank() * mine :][:mine].to(device(), engine.module.layers[0].weight.dtype)


@dataclass(frozen=True)
class Piece:
    """What this rank owns of one parameter: ``numel`` elements from ``start`` on, at ``offset`` of the flat master."""

    name: str
    start: int
    master: torch.Tensor
    offset: int
    numel: int


def pieces(engine: Any) -> Iterator[Piece]:
    """Every piece of this rank, by DeepSpeed's own tables at stage 3 and by the memory of weights below it."""
    optimizer, rank = engine.optimizer, dist.get_rank()
    if engine.zero_optimization_stage() == 3:
        for params, master in zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True):
            for param in params:
                _, offset, part = optimizer.grad_position[optimizer.get_param_id(param)]
                start = rank * part
                numel = max(0, min(part, param.ds_numel - start))
                yield Piece(engine.param_names[param], start, master, offset, numel)
        return
    groups = group_buffers(optimizer)
    assert groups is not None
    for group in groups:
        first = rank * group.master.numel()
        for param in group.params:
            begin = (param.data_ptr() - group.weights.data_ptr()) // group.weights.element_size()
            low, high = max(begin, first), min(begin + param.numel(), first + group.master.numel())
            here = max(0, high - low)  # nothing of some parameters, which every rank names all the same
            yield Piece(engine.param_names[param], low - begin, group.master, low - first if here else 0, here)


def masters(engine: Any) -> list[torch.Tensor]:
    """This rank's flat master weights."""
    return list({id(piece.master): piece.master for piece in pieces(engine)}.values())


def moments(engine: Any, master: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors of optimizer state that have the master's shape."""
    state = engine.optimizer.optimizer.state.get(master, {})
    return {key: value for key, value in state.items() if torch.is_tensor(value) and value.shape == master.shape}


def overwrite(engine: Any) -> None:
    """Put garbage in place of the masters and the moments."""
    for master in masters(engine):
        for tensor in (master, *moments(engine, master).values()):
            tensor.detach().fill_(1.5)


def state_digest(engine: Any) -> str:
    """One hash of the digests of all parameters and state keys, and of their names, over all ranks. Collective."""
    found: dict[str, int] = {}
    for piece in pieces(engine):
        for key, tensor in {"fp32": piece.master, **moments(engine, piece.master)}.items():
            values = tensor.detach().narrow(0, piece.offset, piece.numel)
            found[f"{piece.name}/{key}"] = weighted_sum(values, piece.start)
    table = torch.tensor(list(found.values()), dtype=torch.int64, device=device())
    dist.all_reduce(table)
    lines = json.dumps(sorted(zip(found, table.tolist(), strict=True)))
    return hashlib.sha256(lines.encode()).hexdigest()[:16]


def weighted_sum(values: torch.Tensor, start: int) -> int:
    """The sum of the 32-bit words, each times the odd number of its place, modulo 2^64 with a sign."""
    total = 0
    for at in range(0, values.numel(), _CHUNK):
        words = values[at : at + _CHUNK].contiguous().view(torch.int32).to(torch.int64)
        places = torch.arange(start + at, start + at + words.numel(), dtype=torch.int64, device=words.device)
        total += int((words * (2 * places + 1)).sum())
    return (total + 2**63) % 2**64 - 2**63
