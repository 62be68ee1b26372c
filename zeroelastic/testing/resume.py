"""A test for any model: train, save, and resume on another number of ranks with the same state."""

from __future__ import annotations

import copy
import functools
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from zeroelastic.testing.pool import RankPool
from zeroelastic.testing.run import run_ranks
from zeroelastic.testing.state import Entry, compare_states, fingerprint, flatten, gather_state

if TYPE_CHECKING:
    import torch

_CLIENT_STATE = {"epoch": 3, "consumed": [1, 2, 5], "note": "kept by zeroelastic.testing"}


@dataclass(frozen=True, slots=True)
class _Job:
    """What both runs are given. ``total`` is the global batch."""

    build: Callable[[], Any]
    batch: Callable[[int, int], Any]
    loss: Callable[[Any, Any], torch.Tensor]
    config: dict[str, Any]
    directory: str
    total: int
    steps_before: int
    steps_after: int


class _Trace(NamedTuple):
    """The record of one rank: the state at the checkpoint, client state included, and the losses after it.

    ``proven``: the resume report confirms the content root.
    """

    state: Mapping[str, Entry]
    losses: list[float]
    proven: bool = True


def assert_resumes(
    build: Callable[[], Any],
    ds_config: Mapping[str, Any],
    save_world_size: int,
    load_world_size: int,
    *,
    batch: Callable[[int, int], Any],
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    steps_before: int = 2,
    steps_after: int = 2,
    rtol: float = 1e-4,
    atol: float = 1e-6,
    backend: str | None = None,
    timeout: float = 300.0,
    pool: RankPool | None = None,
) -> None:
    """Assert that training saved on one number of ranks resumes on another with every bit of its state.

    On ``save_world_size`` ranks, the model of ``build()`` is trained for ``steps_before`` steps, saved, and trained for
    ``steps_after`` more. On ``load_world_size`` ranks, a second model, with all weights and buffers changed, loads the
    checkpoint and is trained for the same ``steps_after`` steps. The result of ``gather_state``, the client state and
    every rank's copy of the weights must be the same bit for bit, the content roots in the resume report equal, and the
    losses within ``rtol`` and ``atol`` (sums are taken in another order; 16-bit training needs about 1e-2).

    ``build()`` returns a model, (model, optimizer), (model, parameter groups) or (model, either, lr scheduler); it is
    called on every rank and must return the same values there. ``batch(step, global_batch)`` returns the whole batch of
    one step: a tensor, or a tuple, list or dict of tensors whose first dimension is the batch. Each rank trains on its
    slice, so switch dropout off. ``loss(engine, batch)`` by default calls the engine with the batch and takes its
    scalar output or its ``.loss``. Define these functions at the top level of a module. The global batch is the
    config's train_batch_size (or micro batch x accumulation x save_world_size) at both sizes, which must both divide
    it. ``backend`` is that of ``run_ranks``. ``pool``, such as the fixture ``rank_pool``, runs on the CPU, without the
    start-up time. ``timeout`` is in seconds, for each size.

        def test_my_model_resumes_on_3_of_4_ranks(rank_pool):
            assert_resumes(build, DS_CONFIG, 4, 3, batch=batch, pool=rank_pool)

    Raises AssertionError naming everything that differs, RankError when a rank fails, ValueError when a batch cannot
    be divided or the machine lacks the GPUs.
    """
    total = _global_batch(ds_config, save_world_size)
    save_config, load_config = (_config_at(ds_config, total, size) for size in (save_world_size, load_world_size))
    run = pool.run if pool is not None else functools.partial(run_ranks, backend=backend)
    with tempfile.TemporaryDirectory(prefix="zeroelastic-resume-") as directory:
        job = _Job(build, batch, loss or _default_loss, save_config, directory, total, steps_before, steps_after)
        saved = run(_save_and_go_on, save_world_size, job, timeout=timeout)
        loaded = run(_load_and_go_on, load_world_size, replace(job, config=load_config), timeout=timeout)
    problems = _compare(saved, loaded, rtol, atol)
    if problems:
        raise AssertionError(
            f"{len(problems)} difference(s) after resuming {save_world_size} -> {load_world_size} ranks:\n  "
            + "\n  ".join(problems)
        )


def _global_batch(config: Mapping[str, Any], world_size: int) -> int:
    if "train_batch_size" in config:
        return int(config["train_batch_size"])
    micro = config.get("train_micro_batch_size_per_gpu")
    if micro is None:
        raise ValueError("the config has neither train_batch_size nor train_micro_batch_size_per_gpu.")
    return int(micro) * int(config.get("gradient_accumulation_steps", 1)) * world_size


def _config_at(config: Mapping[str, Any], total: int, world_size: int) -> dict[str, Any]:
    """The config with the batch sizes that keep the global batch at a world size."""
    adapted = copy.deepcopy(dict(config))
    accumulation = int(adapted.setdefault("gradient_accumulation_steps", 1))
    micro, rest = divmod(total, accumulation * world_size)
    if rest or not micro:
        raise ValueError(
            f"a global batch of {total} cannot be divided among {world_size} ranks with "
            f"gradient_accumulation_steps {accumulation}: choose a train_batch_size that both sizes divide."
        )
    return adapted | {"train_batch_size": total, "train_micro_batch_size_per_gpu": micro}


def _save_and_go_on(job: _Job) -> _Trace:
    engine = _start(job, perturb=False)
    _train(engine, job, range(job.steps_before))
    engine.save_checkpoint(job.directory, client_state=copy.deepcopy(_CLIENT_STATE))
    return _Trace(_record(engine, _CLIENT_STATE), _train_after(engine, job))


def _load_and_go_on(job: _Job) -> _Trace:
    engine = _start(job, perturb=True)
    path, client_state = engine.load_checkpoint(job.directory)
    if path is None:
        raise RuntimeError(f"{job.directory}: load_checkpoint found nothing to load.")
    state = _record(engine, {key: client_state.get(key) for key in _CLIENT_STATE})
    report = engine.zeroelastic_report
    # Without a commit record, as in a checkpoint that was not saved elastic, there is no root to match.
    return _Trace(state, _train_after(engine, job), report.saved_root is None or bool(report.root_matches))


def _start(job: _Job, *, perturb: bool) -> Any:
    """An engine with the model of build()."""
    import deepspeed
    import torch

    import zeroelastic

    zeroelastic.install()
    torch.manual_seed(0)
    built = job.build()
    model, second, scheduler = (*built, None, None)[:3] if isinstance(built, tuple) else (built, None, None)
    by_optimizer = isinstance(second, torch.optim.Optimizer)
    if not by_optimizer and "optimizer" not in job.config:
        raise ValueError("there is no optimizer: let build() return (model, optimizer), or put one into the config.")
    if perturb:
        _perturb(model)
    trained = [param for param in model.parameters() if param.requires_grad]
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=second if by_optimizer else None,
        model_parameters=second if second is not None and not by_optimizer else trained,
        lr_scheduler=scheduler,
        config=copy.deepcopy(job.config),
    )
    return engine


def _perturb(model: torch.nn.Module) -> None:
    """Change every element of every weight and persistent buffer, so that only loading can make them right."""
    import deepspeed
    import torch

    persistent = model.state_dict().keys()
    with torch.no_grad():
        for param in model.parameters():
            with deepspeed.zero.GatheredParameters([param], modifier_rank=0, enabled=hasattr(param, "ds_id")):
                param.add_(param.abs() + 1)
        for name, buffer in model.named_buffers():
            if name in persistent:
                buffer.copy_(buffer.logical_not() if buffer.dtype == torch.bool else buffer + buffer.abs() + 1)


def _train_after(engine: Any, job: _Job) -> list[float]:
    return _train(engine, job, range(job.steps_before, job.steps_before + job.steps_after))


def _train(engine: Any, job: _Job, steps: range) -> list[float]:
    """The global mean loss of each step."""
    import torch

    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    accumulation = engine.gradient_accumulation_steps()
    losses = []
    for step in steps:
        whole = job.batch(step, job.total)
        mean = torch.zeros((), dtype=torch.float64, device=engine.device)
        for micro in range(accumulation):
            piece = _piece(whole, rank * accumulation + micro, world_size * accumulation, job.total, engine.device)
            value = job.loss(engine, piece)
            engine.backward(value)
            engine.step()
            mean += value.detach().double() / (accumulation * world_size)
        torch.distributed.all_reduce(mean)
        losses.append(float(mean))
    return losses


def _piece(batch: Any, index: int, count: int, total: int, device: torch.device) -> Any:
    """One of ``count`` equal pieces of a batch along the first dimension of its tensors, on a device."""
    import torch

    def piece(part: Any) -> Any:
        return _piece(part, index, count, total, device)

    if isinstance(batch, torch.Tensor):
        if batch.shape[0] != total:
            raise ValueError(f"batch() returned a tensor of {batch.shape[0]} rows; the global batch is {total}.")
        length = total // count
        return batch[index * length : (index + 1) * length].to(device)
    if isinstance(batch, Mapping):
        return {key: piece(part) for key, part in batch.items()}
    if isinstance(batch, (tuple, list)):
        return type(batch)(map(piece, batch))
    raise TypeError(
        f"batch() returned a {type(batch).__qualname__}; known are tensors and tuples, lists, dicts of them."
    )


def _default_loss(engine: Any, batch: Any) -> torch.Tensor:
    import torch

    if isinstance(batch, Mapping):
        output = engine(**batch)
    else:
        output = engine(*batch) if isinstance(batch, (tuple, list)) else engine(batch)
    value = getattr(output, "loss", output)
    if not isinstance(value, torch.Tensor) or value.dim() != 0:
        raise TypeError("the model returns neither a scalar loss nor an object with one: pass loss=.")
    return value


def _record(engine: Any, client_state: Mapping[str, Any]) -> Mapping[str, Entry]:
    """This rank's state: tensors on rank 0, fingerprints on the others."""
    import torch

    state = gather_state(engine) | flatten("client", dict(client_state))
    return state if torch.distributed.get_rank() == 0 else fingerprint(state)


def _compare(saved: list[_Trace], loaded: list[_Trace], rtol: float, atol: float) -> list[str]:
    """The differences, one line each. A rank that did not save is compared with rank 0."""
    problems = []
    for rank, trace in enumerate(loaded):
        expected = saved[rank if rank < len(saved) else 0].state
        problems += [f"rank {rank}: {line}" for line in compare_states(expected, trace.state)]
        if not trace.proven:
            problems.append(f"rank {rank}: the resume report does not confirm the saved content root")
    for index, (first, second) in enumerate(zip(saved[0].losses, loaded[0].losses, strict=True)):
        if not abs(first - second) <= atol + rtol * abs(first):
            problems.append(f"loss {index + 1}: is {second!r}, expected {first!r} (rtol {rtol}, atol {atol})")
    return problems
