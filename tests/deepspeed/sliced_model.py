"""A model that DeepSpeed slices without saying how, and what stands for the parts that need CUDA or Megatron."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import training
from training import Job, Outcome


class HostQuantizer:
    """In place of DeepSpeed's CUDA op, which does not run on a CPU: one int8 scale per partition, by torch.

    Everything else of quantised communication is DeepSpeed's own.
    """

    calls = 0

    def quantize(self, param: torch.Tensor, groups: object = None) -> tuple[torch.Tensor, torch.Tensor]:
        HostQuantizer.calls += 1
        scale = (param.float().abs().max() / 127).clamp(min=1e-12).view(1)
        return (param.float() / scale).round().to(torch.int8), scale

    def dequantize(self, quantized: torch.Tensor, scale: torch.Tensor, dtype: Any = None) -> torch.Tensor:
        part = -(-quantized.numel() // scale.numel())  # the last one is cut short
        scales = scale.view(-1)[torch.arange(quantized.numel()) // part]
        whole = quantized.float() * scales.view_as(quantized)
        return whole if dtype is None else whole.to(dtype)


class Block(torch.nn.Module):
    """A column parallel and a row parallel layer, 9 of 18 columns each on two ranks, between layers that are copied."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(10)
        self.up_proj = torch.nn.Linear(10, 18)
        self.down_proj = torch.nn.Linear(18, 10)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down_proj(torch.tanh(self.up_proj(self.norm(hidden))))


class SlicedModel(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(20, 10)
        self.blocks = torch.nn.ModuleList([Block(), Block(), Block()])
        self.blocks[2].requires_grad_(False)
        self.scale = torch.nn.Parameter(torch.ones(1))
        self.register_buffer("batches_seen", torch.zeros(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.batches_seen += torch.tensor([1.0, 0.25], dtype=self.batches_seen.dtype)
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return (hidden * self.scale).float().pow(2).mean()


TP_BATCH = 12


def build_sliced(job: Job, tp_size: int, model: torch.nn.Module | None = None) -> Any:
    """An engine whose model DeepSpeed slices itself (AutoTP), ``without_maps``."""
    import deepspeed

    import zeroelastic

    if job.installed:
        zeroelastic.install()
    torch.manual_seed(1234)
    model = model or SlicedModel()
    if job.perturb:
        with torch.no_grad():
            for tensor in [*model.parameters(), *model.buffers()]:
                tensor.add_(job.perturb)
    optimizer = training.build_optimizer(job, model)
    config = training.ds_config(job)
    if tp_size > 1:
        config["tensor_parallel"] = {
            "autotp_size": tp_size,
            "partition_config": {
                "use_default_specs": False,
                "layer_specs": [
                    {"patterns": [r".*up_proj\.weight$"], "partition_type": "column"},
                    {"patterns": [r".*down_proj\.weight$"], "partition_type": "row"},
                ],
            },
        }
    with without_maps():
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine


@contextmanager
def without_maps() -> Iterator[None]:
    """Within this context DeepSpeed does not say which slices of tensors AutoTP gives to ranks, as before 0.19.8.

    Each tensor parallel rank is then a run of its own. ``topologies`` has runs of which DeepSpeed says it.
    """
    from deepspeed.runtime import engine as ds_engine

    with mock.patch.object(ds_engine, "collect_autotp_universal_checkpoint_info", lambda model: {}, create=True):
        yield


def sliced_step(engine: Any, step: int) -> float:
    """One step on the global batch of ``step``: data parallel ranks share it, tensor parallel ranks see the same."""
    tokens = torch.randint(0, 20, (TP_BATCH, 5), generator=torch.Generator().manual_seed(step))
    group = engine.optimizer.dp_process_group
    per_rank = TP_BATCH // torch.distributed.get_world_size(group)
    rank = torch.distributed.get_rank(group)
    loss = engine(tokens[rank * per_rank : (rank + 1) * per_rank])
    engine.backward(loss)
    engine.step()
    total = loss.detach().double()
    torch.distributed.all_reduce(total, group=group)
    return float(total / torch.distributed.get_world_size(group))


def use_sliced(
    job: Job, tp_size: int, directory: str, *, save: bool = False, target: str = "", **load: Any
) -> tuple[int, Outcome]:
    """Save after three steps, or load; then two more steps. Also tells this rank's tensor parallel rank."""
    engine = build_sliced(job, tp_size)
    client_state: Any = {"note": "hello"}
    if save:
        for step in range(3):
            sliced_step(engine, step)
        engine.save_checkpoint(directory, client_state=client_state)
    else:
        path, client_state = engine.load_checkpoint(directory, **load)
        assert path is not None
        if target:
            engine.save_checkpoint(target)
    state, gathered = training.look(engine)
    steps = training.sub_group_steps(engine)
    losses = [sliced_step(engine, step) for step in (3, 4)]
    report = getattr(engine, "zeroelastic_report", None)
    tp_rank = engine.optimizer.model_parallel_rank
    return tp_rank, Outcome(state, gathered, losses, report, client_state, steps)


class ByHand:
    """A model parallel unit of the kind that Megatron passes: DeepSpeed asks it for groups and slices nothing."""

    def __init__(self, size: int) -> None:
        world = torch.distributed.get_world_size()
        rows = torch.arange(world).view(-1, size)
        self.model_parallel = self._mine(rows.tolist())
        self.data_parallel = self._mine(rows.T.tolist())

    def _mine(self, groups: list[list[int]]) -> Any:
        made = [(ranks, torch.distributed.new_group(ranks)) for ranks in groups]
        return next(group for ranks, group in made if torch.distributed.get_rank() in ranks)

    def get_model_parallel_group(self) -> Any:
        return self.model_parallel

    def get_model_parallel_rank(self) -> int:
        return torch.distributed.get_rank(self.model_parallel)

    def get_model_parallel_world_size(self) -> int:
        return torch.distributed.get_world_size(self.model_parallel)

    def get_data_parallel_group(self) -> Any:
        return self.data_parallel

    def get_data_parallel_rank(self) -> int:
        return torch.distributed.get_rank(self.data_parallel)

    def get_data_parallel_world_size(self) -> int:
        return torch.distributed.get_world_size(self.data_parallel)
