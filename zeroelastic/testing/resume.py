"""A test for any model: train, save, and resume on another number of ranks with the same state."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import SkipTest

from zeroelastic.testing.pool import RankPool
from zeroelastic.testing.run import gpus_available, run_ranks
from zeroelastic.testing.state import Entry, Fingerprint, compare_states, fingerprint, flatten, gather_state

if TYPE_CHECKING:
    import torch

_CLIENT_STATE = {"epoch": 3, "consumed": [1, 2, 5], "note": "kept by zeroelastic.testing"}
_MODEL_ENTRIES = ("weight/", "buffer/")


@dataclass(frozen=True, slots=True)
class _Phase:
    """The work of one world size. ``total`` is the global batch, ``first_step`` the first step to train."""

    build: Callable[[], Any]
    batch: Callable[[int, int], Any]
    loss: Callable[[Any, Any], torch.Tensor] | None
    config: dict[str, Any]
    directory: str
    total: int
    first_step: int
    num_steps: int


@dataclass(frozen=True, slots=True)
class _Trace:
    """The record of one rank: the state at the checkpoint, client state included, and the losses after it.

    ``before`` is the content of the second model before it loads. ``proven``: the resume report confirms the content
    root.
    """

    state: Mapping[str, Entry]
    losses: tuple[float, ...]
    before: Mapping[str, Entry]
    proven: bool


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
    load_config: Mapping[str, Any] | None = None,
    rtol: float = 1e-4,
    atol: float = 1e-6,
    tmp_dir: str | Path | None = None,
    device: str = "auto",
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
    it. ``load_config`` replaces ``ds_config`` for loading. ``device`` "auto" uses NCCL where there are enough GPUs, and
    the CPU elsewhere. ``pool``, such as the fixture ``rank_pool``, saves the start-up time on the CPU. ``timeout`` is
    in seconds, for each size.

        def test_my_model_resumes_on_3_of_4_ranks(rank_pool):
            assert_resumes(build, DS_CONFIG, 4, 3, batch=batch, pool=rank_pool)

    Raises AssertionError naming everything that differs, RankError when a rank fails, ValueError when a
    batch cannot be divided, unittest.SkipTest (which pytest reports as skipped) when device is "cuda" and
    GPUs are missing.
    """
    use_gpus = _use_gpus(device, max(save_world_size, load_world_size))
    total = _global_batch(ds_config, save_world_size)
    sizes = (save_world_size, load_world_size)
    configs = [
        _config_at(config, total, size)
        for config, size in zip((ds_config, ds_config if load_config is None else load_config), sizes, strict=True)
    ]
    with ExitStack() as stack:
        directory = str(tmp_dir or stack.enter_context(tempfile.TemporaryDirectory(prefix="zeroelastic-resume-")))
        run: Callable[..., list[_Trace]] = run_ranks
        if not use_gpus:
            run = (pool or stack.enter_context(RankPool(max(sizes)))).run
        how = {"timeout": timeout, "backend": "nccl" if use_gpus else None}
        save, load = (
            _Phase(build, batch, loss, config, directory, total, first, count)
            for config, first, count in zip(configs, (0, steps_before), (steps_before, steps_after), strict=True)
        )
        saved = run(_save_and_go_on, save_world_size, save, steps_after, **how)
        loaded = run(_load_and_go_on, load_world_size, load, **how)
    problems = _compare(saved, loaded, rtol, atol)
    if problems:
        raise AssertionError(
            f"{len(problems)} difference(s) after resuming {save_world_size} -> {load_world_size} ranks:\n  "
            + "\n  ".join(problems)
        )


def _use_gpus(device: str, num: int) -> bool:
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device is {device!r}; known are 'auto', 'cpu' and 'cuda'.")
    if device == "cpu":
        return False
    found = gpus_available()
    if device == "cuda" and found < num:
        raise SkipTest(f"needs {num} GPUs usable with NCCL, found {found}")
    return found >= num


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


def _save_and_go_on(phase: _Phase, steps_after: int) -> _Trace:
    engine = _start(phase, perturb=False)
    _train(engine, phase, range(phase.num_steps))
    engine.save_checkpoint(phase.directory, client_state=copy.deepcopy(_CLIENT_STATE))
    state = _record(engine, _CLIENT_STATE)
    return _Trace(state, _train(engine, phase, range(phase.num_steps, phase.num_steps + steps_after)), {}, True)


def _load_and_go_on(phase: _Phase) -> _Trace:
    engine = _start(phase, perturb=True)
    before = {key: entry for key, entry in fingerprint(gather_state(engine)).items() if key.startswith(_MODEL_ENTRIES)}
    path, client_state = engine.load_checkpoint(phase.directory)
    if path is None:
        raise RuntimeError(f"{phase.directory}: load_checkpoint found nothing to load.")
    kept = {key: client_state.get(key) for key in _CLIENT_STATE}
    state = _record(engine, kept)
    losses = _train(engine, phase, range(phase.first_step, phase.first_step + phase.num_steps))
    report = engine.zeroelastic_report
    # Without a commit record, as in a checkpoint that was not saved elastic, there is no root to match.
    return _Trace(state, losses, before, report.saved_root is None or bool(report.root_matches))


def _start(phase: _Phase, *, perturb: bool) -> Any:
    """An engine with the model of build()."""
    import deepspeed
    import torch

    import zeroelastic

    zeroelastic.install()
    torch.manual_seed(0)
    built = phase.build()
    model, second, scheduler = (*built, None, None)[:3] if isinstance(built, tuple) else (built, None, None)
    by_optimizer = isinstance(second, torch.optim.Optimizer)
    if not by_optimizer and "optimizer" not in phase.config:
        raise ValueError("there is no optimizer: let build() return (model, optimizer), or put one into the config.")
    if perturb:
        _perturb(model)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=second if by_optimizer else None,
        model_parameters=second if second is not None and not by_optimizer else _trained(model),
        lr_scheduler=scheduler,
        config=copy.deepcopy(phase.config),
    )
    return engine


def _trained(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


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


def _train(engine: Any, phase: _Phase, steps: range) -> tuple[float, ...]:
    """The global mean loss of each step."""
    import torch

    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    accumulation = engine.gradient_accumulation_steps()
    losses = []
    for step in steps:
        whole = phase.batch(step, phase.total)
        mean = torch.zeros((), dtype=torch.float64, device=engine.device)
        for micro in range(accumulation):
            number, count = rank * accumulation + micro, world_size * accumulation
            piece = _piece(whole, number, count, phase.total, engine.device)
            value = (phase.loss or _default_loss)(engine, piece)
            engine.backward(value)
            engine.step()
            mean += value.detach().double() / (accumulation * world_size)
        torch.distributed.all_reduce(mean)
        losses.append(float(mean))
    return tuple(losses)


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
        expected, found = saved[rank if rank < len(saved) else 0].state, trace.state
        if rank:
            expected, found = fingerprint(expected), fingerprint(found)
        problems += [f"rank {rank}: {line}" for line in compare_states(expected, found)]
        if not trace.proven:
            problems.append(f"rank {rank}: the resume report does not confirm the saved content root")
    problems += _vacuous(saved[0].state, loaded[0].before)
    for index, (first, second) in enumerate(zip(saved[0].losses, loaded[0].losses, strict=True)):
        if not abs(first - second) <= atol + rtol * abs(first):
            problems.append(f"loss {index + 1}: is {second!r}, expected {first!r} (rtol {rtol}, atol {atol})")
    return problems


def _vacuous(saved: Mapping[str, Entry], before: Mapping[str, Entry]) -> list[str]:
    """Weights and buffers that had their saved content before the load."""
    reference = fingerprint(saved)
    return [
        f"{key}: the second model held the saved content before it loaded, so this shows nothing"
        for key, entry in before.items()
        if isinstance(entry, Fingerprint) and 0 not in entry.shape and reference.get(key) == entry
    ]
