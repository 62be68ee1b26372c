"""A test for any model: train, save, and resume on another number of ranks with the same state."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from zeroelastic.testing.pool import RankPool
from zeroelastic.testing.state import Entry, compare_states, fingerprint, flatten, gather_state

if TYPE_CHECKING:
    import torch

_CLIENT_STATE = {"epoch": 3, "consumed": [1, 2, 5], "note": "kept by zeroelastic.testing"}
_STEPS_BEFORE, _STEPS_AFTER = 2, 2


class _Model(NamedTuple):
    """The model, data and configuration of both runs."""

    build: Callable[[], Any]
    batch: Callable[[int, int], Any]
    loss: Callable[[Any, Any], torch.Tensor]
    config: dict[str, Any]


_Trace: TypeAlias = tuple[Mapping[str, Entry], list[float]]
"""Of one rank: the state at the checkpoint, client state included, and the losses after it."""


def assert_resumes(
    build: Callable[[], Any],
    ds_config: Mapping[str, Any],
    save_world_size: int,
    load_world_size: int,
    *,
    batch: Callable[[int, int], Any],
    loss: Callable[[Any, Any], torch.Tensor],
    rtol: float = 1e-4,
    atol: float = 1e-6,
    timeout: float = 300.0,
    pool: RankPool | None = None,
) -> None:
    """Assert that training saved on one number of ranks resumes on another with every bit of state.

    On ``save_world_size`` ranks, the model of ``build()`` is trained for two steps, saved, and trained for two more. On
    ``load_world_size`` ranks, a second model, with all weights and buffers changed, loads the checkpoint and is trained
    for the last two steps. The result of ``gather_state``, the client state and every rank's copy of the weights must
    be the same bit for bit, the content roots equal, and the losses within ``rtol`` and ``atol`` (sums are taken in
    another order; 16-bit training needs about 1e-2).

    ``build()`` returns a model, (model, optimizer) or (model, optimizer, lr scheduler), with the same values on every
    rank. ``batch(step, global_batch)`` returns the whole batch of one step: a tensor, or a tuple, list or dict of
    tensors; each rank trains on its slice, so switch dropout off. ``loss(engine, batch)`` returns the mean loss of a
    slice. Define these at the top level of a module. Both sizes must divide train_batch_size. ``pool``, such as the
    fixture ``rank_pool``, saves the start-up time; ``RankPool(backend="nccl")`` runs on GPUs. ``timeout`` is in
    seconds, for each size.

        def test_my_model_resumes_on_3_of_4_ranks(rank_pool):
            assert_resumes(build, DS_CONFIG, 4, 3, batch=batch, loss=loss, pool=rank_pool)

    Raises AssertionError naming everything that differs, and RankError when a rank fails.
    """
    with nullcontext(pool) if pool else RankPool() as ranks, tempfile.TemporaryDirectory() as directory:
        model = _Model(build, batch, loss, dict(ds_config))
        saved = ranks.run(_save_and_go_on, save_world_size, model, directory, timeout=timeout)
        loaded = ranks.run(_load_and_go_on, load_world_size, model, directory, timeout=timeout)
    problems = _compare(saved, loaded, rtol, atol)
    if problems:
        raise AssertionError(
            f"{len(problems)} difference(s) after resuming {save_world_size} -> {load_world_size} ranks:\n  "
            + "\n  ".join(problems)
        )


def _save_and_go_on(model: _Model, directory: str) -> _Trace:
    engine = _start(model, perturb=False)
    _train(engine, model, 0, _STEPS_BEFORE)
    engine.save_checkpoint(directory, client_state=copy.deepcopy(_CLIENT_STATE))
    return _record(engine, _CLIENT_STATE), _train(engine, model, _STEPS_BEFORE, _STEPS_AFTER)


def _load_and_go_on(model: _Model, directory: str) -> _Trace:
    engine = _start(model, perturb=True)
    path, client_state = engine.load_checkpoint(directory)
    if path is None:
        raise RuntimeError(f"{directory}: load_checkpoint found nothing to load.")
    state = _record(engine, {key: client_state.get(key) for key in _CLIENT_STATE})
    report = engine.zeroelastic_report
    # Without a commit record, as in a checkpoint that was not saved elastic, there is no root to match.
    if report.saved_root is not None and not report.root_matches:
        raise RuntimeError("the resume report does not confirm the saved content root.")
    return state, _train(engine, model, _STEPS_BEFORE, _STEPS_AFTER)


def _start(of: _Model, *, perturb: bool) -> Any:
    """An engine with the model of build()."""
    import deepspeed
    import torch

    import zeroelastic

    zeroelastic.install()
    torch.manual_seed(0)
    built = of.build()
    model, optimizer, scheduler = (*built, None)[:3] if isinstance(built, tuple) else (built, None, None)
    if perturb:
        _perturb(model)
    trained = [param for param in model.parameters() if param.requires_grad]
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        model_parameters=trained,
        lr_scheduler=scheduler,
        config=copy.deepcopy(of.config),
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


def _train(engine: Any, model: _Model, first: int, count: int) -> list[float]:
    """The global mean loss of each step."""
    import torch
    from torch.utils._pytree import tree_map

    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    accumulation, micro_batch = engine.gradient_accumulation_steps(), engine.train_micro_batch_size_per_gpu()
    losses = []
    for step in range(first, first + count):
        whole = model.batch(step, engine.train_batch_size())
        mean = torch.zeros((), dtype=torch.float64, device=engine.device)
        for micro in range(accumulation):
            begin = (rank * accumulation + micro) * micro_batch
            piece = tree_map(lambda part, of=slice(begin, begin + micro_batch): part[of].to(engine.device), whole)
            value = model.loss(engine, piece)
            engine.backward(value)
            engine.step()
            mean += value.detach().double() / (accumulation * world_size)
        torch.distributed.all_reduce(mean)
        losses.append(float(mean))
    return losses


def _record(engine: Any, client_state: Mapping[str, Any]) -> Mapping[str, Entry]:
    """This rank's state: tensors on rank 0, fingerprints on the others."""
    import torch

    state = gather_state(engine) | flatten("client", dict(client_state))
    return state if torch.distributed.get_rank() == 0 else fingerprint(state)


def _compare(saved: list[_Trace], loaded: list[_Trace], rtol: float, atol: float) -> list[str]:
    """The differences, one line each. A rank that did not save is compared with rank 0."""
    problems = []
    for rank, (state, _) in enumerate(loaded):
        expected, _ = saved[rank if rank < len(saved) else 0]
        problems += [f"rank {rank}: {line}" for line in compare_states(expected, state)]
    for index, (first, second) in enumerate(zip(saved[0][1], loaded[0][1], strict=True)):
        if not abs(first - second) <= atol + rtol * abs(first):
            problems.append(f"loss {index + 1}: is {second!r}, expected {first!r} (rtol {rtol}, atol {atol})")
    return problems
