"""Hooks in DeepSpeed's engine that record one run: its state after the load, its losses, its state after the last step.

Recording begins with the load of the checkpoint that is proved. Other loads are unchanged; saves are skipped. After the
last step every rank is stopped at the same place, by an exception that no ``except Exception`` catches.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
import platform
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed import __version__ as deepspeed_version
from deepspeed.runtime.engine import DeepSpeedEngine

from zeroelastic import __version__
from zeroelastic.deepspeed.live.kinds import kind_of
from zeroelastic.deepspeed.live.replicated import precision_of
from zeroelastic.deepspeed.live.topology import tensor_parallel
from zeroelastic.distributed.collective import all_gather, broadcast
from zeroelastic.errors import UnsupportedError
from zeroelastic.proving.records import RunRecord, RunSpec, write_record
from zeroelastic.testing.state import Fingerprints, compare_states, fingerprint_state

_MOST_REPLICAS = 20

Method = Callable[..., Any]


class Stop(SystemExit):
    """Ends a script when there is nothing more to record."""


class Recorder:
    """The recorder of one run in one process; ``hook`` once, before the script builds its engine."""

    def __init__(self, run: RunSpec) -> None:
        self.run = run
        self.record = RunRecord(run.role, run.world_size)
        self.engine: Any = None
        self.stopped = False
        self._save: Method = DeepSpeedEngine.save_checkpoint
        self._loss: float | None = None
        self._output: float | None = None
        self._rows: list[bytes] | None = []

    def hook(self) -> None:
        """Wrap the engine's methods until the process ends."""
        for name in ("load_checkpoint", "save_checkpoint", "save_16bit_model", "forward", "backward", "step"):
            original = getattr(DeepSpeedEngine, name)
            setattr(DeepSpeedEngine, name, self._wrapped(original, getattr(self, f"_{name}")))

    def leave(self) -> None:
        """Write an unfinished record for a script that ended by itself."""
        if not self.record.finished and os.environ.get("RANK", "0") == "0":
            write_record(self.run.record_path, self.record)

    def _wrapped(self, original: Method, ours: Method) -> Method:
        @functools.wraps(original)
        def method(engine: Any, *args: Any, **kwargs: Any) -> Any:
            if self.stopped:  # the script caught the exception
                raise Stop(0)
            return ours(functools.partial(original, engine), engine, *args, **kwargs)

        return method

    def _load_checkpoint(
        self, original: Method, engine: Any, load_dir: Any, tag: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        place = _place(load_dir, tag)
        self.record.loads.append(str(place))
        if os.path.realpath(place) != os.path.realpath(self.run.source):
            return original(load_dir, tag, *args, **kwargs)
        if self.run.instead is not None:
            load_dir, tag = self.run.instead
        _refuse(engine)
        engine._config._param_dict.setdefault("zeroelastic", {})["verify"] = "full"
        outcome = original(load_dir, tag, *args, **kwargs)
        if outcome[0] is None:
            return outcome
        self._describe(engine)
        self.engine, self.record.started = engine, None
        self.record.loaded = self._look(engine, "after the load")
        if self.run.steps == 0:
            self._finish(engine)
        return outcome

    def _describe(self, engine: Any) -> None:
        record, report = self.record, getattr(engine, "zeroelastic_report", None)
        record.report = None if report is None else report.to_dict()
        record.global_batch = engine.train_batch_size()
        record.accumulation = engine.gradient_accumulation_steps()
        record.precision = precision_of(engine._config._param_dict)
        record.device = torch.cuda.get_device_name() if engine.device.type == "cuda" else "cpu"
        record.versions = {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "deepspeed": deepspeed_version,
            "zeroelastic": __version__,
        }

    def _save_checkpoint(self, original: Method, engine: Any, *args: Any, **kwargs: Any) -> bool:
        self.record.saves_skipped += 1
        return True

    _save_16bit_model = _save_checkpoint

    def _forward(self, original: Method, engine: Any, *args: Any, **kwargs: Any) -> Any:
        if engine is not self.engine or not engine.training:
            return original(*args, **kwargs)
        if self.record.started is None:
            self.record.started = self._look(engine, "at the first step")
        if self._rows is not None:
            rows = _sample_digests((args, kwargs))
            self._rows = None if rows is None else self._rows + rows
        output = original(*args, **kwargs)
        self._output = _scalar_loss(output)
        return output

    def _backward(self, original: Method, engine: Any, loss: Any, *args: Any, **kwargs: Any) -> Any:
        if engine is self.engine:
            scaled_here = kwargs.get("scale_wrt_gas", args[1] if len(args) > 1 else True)
            value = float(loss.detach().float().mean()) if isinstance(loss, torch.Tensor) else math.nan
            self._add(value / (engine.gradient_accumulation_steps() if scaled_here else 1))
        return original(loss, *args, **kwargs)

    def _add(self, share: float) -> None:
        """Add a micro step's share of the loss, and forget the model's output of that micro step."""
        self._loss = share if self._loss is None else self._loss + share
        self._output = None

    def _step(self, original: Method, engine: Any, *args: Any, **kwargs: Any) -> Any:
        if engine is not self.engine:
            return original(*args, **kwargs)
        if self._output is not None:  # the script called loss.backward()
            self._add(self._output / engine.gradient_accumulation_steps())
        boundary = engine.is_gradient_accumulation_boundary()
        outcome = original(*args, **kwargs)
        if boundary:
            self._end_step()
            if len(self.record.losses) == self.run.steps:
                self._finish(engine)
        return outcome

    def _end_step(self) -> None:
        """Record the loss and the samples of one optimizer step. Collective."""
        ranks = all_gather((self._loss, self._rows))
        self.record.losses.append(sum(math.nan if loss is None else loss for loss, _ in ranks) / len(ranks))
        complete = all(rows is not None for _, rows in ranks)
        whole = sorted(row for _, rows in ranks for row in rows or ()) if complete else None
        self.record.samples.append(None if not whole else hashlib.sha256(b"".join(whole)).hexdigest())
        self._loss, self._rows = None, []

    def _finish(self, engine: Any) -> None:
        """Write the record and stop every rank. Collective."""
        self.record.ended = self._look(engine, "after the last step") if self.run.steps else self.record.loaded
        if self.run.save_to is not None:
            self._save(engine, self.run.save_to[0], tag=self.run.save_to[1])
        self.record.finished = self.stopped = True
        if dist.get_rank() == 0:
            write_record(self.run.record_path, self.record)
        dist.barrier()
        raise Stop(0)

    def _look(self, engine: Any, when: str) -> Fingerprints:
        """Rank 0's state, on every rank; differences of other ranks go to ``record.replicas``. Collective."""
        own = fingerprint_state(engine)
        state = broadcast(own)
        lines = [f"rank {dist.get_rank()} {when}: {line}" for line in compare_states(state, own)]
        self.record.replicas += [line for rank in all_gather(lines[:_MOST_REPLICAS]) for line in rank]
        return state


def _place(load_dir: Any, tag: Any) -> Path:
    """The tag directory that a load reads; without ``latest`` the directory itself."""
    root = Path(load_dir)
    try:
        return root / (str(tag) if tag is not None else (root / "latest").read_text().strip())
    except OSError:
        return root


def _refuse(engine: Any) -> None:
    if kind_of(engine.optimizer) is None:
        raise UnsupportedError(
            "the script's engine is of a kind that zeroelastic leaves to DeepSpeed (see docs/guides/zero2.md); there "
            "is nothing to prove."
        )
    if tensor_parallel(engine.optimizer).size > 1:
        raise UnsupportedError("prove compares data parallel runs; this one is tensor parallel.")


def _scalar_loss(output: Any) -> float:
    """The loss in a model's output: the output, its ``loss``, or its first element; NaN where that is no scalar."""
    if isinstance(output, Mapping):
        output = output.get("loss")
    elif isinstance(output, (tuple, list)):
        output = output[0] if output else None
    else:
        output = getattr(output, "loss", output)
    if not isinstance(output, torch.Tensor) or output.numel() != 1:
        return math.nan
    return float(output.detach())


def _sample_digests(inputs: Any) -> list[bytes] | None:
    """A digest of each sample of a micro batch, as far as its inputs are tensors of one first dimension, or None."""
    tensors = [tensor for tensor in _tensors(inputs) if tensor.dim() > 0]
    if not tensors or len({len(tensor) for tensor in tensors}) != 1:
        return None
    rows = [tensor.detach().cpu().contiguous().reshape(len(tensor), -1).view(torch.uint8).numpy() for tensor in tensors]
    return [
        hashlib.blake2b(b"".join(row[i].tobytes() for row in rows), digest_size=16).digest()
        for i in range(len(tensors[0]))
    ]


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from _tensors(value[key])
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
