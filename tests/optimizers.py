"""Optimizers beyond the common ones, by the name that a ``Job`` gives; some of them are made to be refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

Groups = list[dict[str, Any]]


def _fused_adam(groups: Groups) -> torch.optim.Optimizer:
    from deepspeed.ops.adam import FusedAdam

    return FusedAdam(groups, betas=(0.8, 0.95))


def _cpu_adam_16(groups: Groups) -> torch.optim.Optimizer:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam(groups, fp32_optimizer_states=False)


def _cpu_adagrad(groups: Groups) -> torch.optim.Optimizer:
    from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad

    return DeepSpeedCPUAdagrad(groups)


def _cpu_lion(groups: Groups) -> torch.optim.Optimizer:
    from deepspeed.ops.lion import DeepSpeedCPULion

    return DeepSpeedCPULion(groups)


def _muon(groups: Groups, **aux: Any) -> torch.optim.Optimizer:
    """Matrices but the embedding by Muon, the rest by Adam, each half with the options of its own group."""
    import torch._dynamo
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    torch._dynamo.config.disable = True  # compiling its kernels would take longer than the test
    halves: Groups = []
    for group in groups:
        for use_muon in (True, False):
            params = [p for p in group["params"] if (p.ndim > 1 and p.shape[0] != 50) is use_muon]
            for param in params:
                param.use_muon = use_muon
            if params:
                own = {"momentum": 0.9} if use_muon else {"betas": (0.8, 0.95), "eps": 1e-8}
                decay = group.get("weight_decay", 0.0)
                halves.append({"params": params, "use_muon": use_muon, "lr": group["lr"], "weight_decay": decay, **own})
    return MuonWithAuxAdam(halves, **aux)


class Quantised(torch.optim.Optimizer):
    """Keeps its momentum in blocks of 8 bits, each with a scale, as bitsandbytes does."""

    def __init__(self, groups: Groups) -> None:
        super().__init__(groups, {"lr": 1e-3})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                blocks = torch.nn.functional.pad(param.grad, (0, -param.numel() % 4)).view(-1, 4)
                state["absmax"] = blocks.abs().amax(1)
                state["momentum"] = (blocks / (state["absmax"][:, None] + 1e-8) * 127 + 128).to(torch.uint8).flatten()
                param.add_(param.grad, alpha=-group["lr"])


class Factored(torch.optim.Optimizer):
    """Scales its step by a statistic of what it is given, which at stage 3 is one rank's part."""

    def __init__(self, groups: Groups) -> None:
        super().__init__(groups, {"lr": 1e-3})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                state["rms"] = float(param.grad.square().mean().sqrt()) + torch.distributed.get_rank()
                param.add_(param.grad, alpha=-group["lr"] / (1 + state["rms"]))


class Lamb(torch.optim.Optimizer):
    """Moments like Adam's, and a trust ratio that is no state: its state is cut like the weights.

    Its groups have values that it makes at a step, a tensor and lists in a list, and changes in place.
    """

    def __init__(self, groups: Groups, beta: float = 0.9) -> None:
        super().__init__(groups, {"lr": 1e-3, "beta": beta})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group.setdefault("decay", torch.ones(1, dtype=torch.float64)).mul_(0.9)
            group.setdefault("buffer", [[0, None] for _ in range(2)])[0][0] += 1
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state.update(count=0, ema=torch.zeros_like(param, dtype=torch.float64), warm=True)
                state["count"] += 1
                state["warm"] = state["count"] < 3
                state["ema"].lerp_(param.grad.double(), 1 - group["beta"])
                param.add_(state["ema"].float(), alpha=-group["lr"])


class Counting(torch.optim.SGD):
    """Keeps a counter for all parameters together, as MADGRAD does, from its constructor on."""

    def __init__(self, groups: Groups) -> None:
        super().__init__(groups)
        self.state["k"] = torch.zeros(1)  # type: ignore[index]

    def step(self) -> None:  # type: ignore[override]
        self.state["k"] += 1
        super().step()


class ByRank(torch.optim.SGD):
    """Has hyper-parameters that differ by rank: a number of numpy, in a list one whose text has few digits, a dict.

    An object without a text of its own has its address there, and is the same on all ranks.
    """

    def __init__(self, groups: Groups) -> None:
        rank = torch.distributed.get_rank()
        small = [torch.tensor(1.25 + rank * 2**-20)]
        own = {"of_numpy": np.float32(rank), "small": small, "table": {"a": (rank, None)}, "other": [object()]}
        super().__init__([{**group, **own} for group in groups])


class OwnEntry(torch.optim.SGD):
    """Counts its steps by itself, and has the number in its state dict, beside groups and state."""

    calls = 0

    def step(self) -> None:  # type: ignore[override]
        self.calls += 1
        super().step()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "calls": self.calls}


class Unplain(torch.optim.SGD):
    """Has a hyper-parameter that no checkpoint of ours can hold."""

    def __init__(self, groups: Groups) -> None:
        super().__init__([{**group, "schedule": {"warm": 3}} for group in groups])


class TextOfNumpy(torch.optim.SGD):
    """Has a hyper-parameter that is a text of numpy's own class."""

    def __init__(self, groups: Groups) -> None:
        super().__init__([{**group, "schedule": np.str_("cosine")} for group in groups])


class Numbered(torch.optim.SGD):
    """Has a number as the key of a state."""

    def step(self) -> None:  # type: ignore[override]
        super().step()
        for state in (self.state[param] for group in self.param_groups for param in group["params"]):
            state[0] = state.get(0, 0) + 1


class Complex(torch.optim.SGD):
    """Has a complex number as a state."""

    def step(self) -> None:  # type: ignore[override]
        super().step()
        for state in (self.state[param] for group in self.param_groups for param in group["params"]):
            state["phase"] = torch.zeros((), dtype=torch.complex64)


class ScheduleFree(torch.optim.Optimizer):
    """SGD of schedulefree: its parameters are averages of steps in ``eval()``, and something else in ``train()``."""

    def __init__(self, groups: Groups, beta: float = 0.9) -> None:
        super().__init__(groups, {"lr": 1e-2, "beta": beta, "k": 0, "train_mode": True})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] += 1
            for param in group["params"]:
                z = self.state[param].setdefault("z", param.clone())
                param.lerp_(z, 1 / group["k"]).add_(param.grad, alpha=group["lr"] * (group["beta"] - 1))
                z.sub_(param.grad, alpha=group["lr"])

    def train(self) -> None:
        self._change(True, lambda beta: 1 - beta)

    def eval(self) -> None:
        self._change(False, lambda beta: 1 - 1 / beta)

    @torch.no_grad()
    def _change(self, mode: bool, weight: Callable[[float], float]) -> None:
        for group in self.param_groups:
            if group["train_mode"] != mode:
                group["train_mode"] = mode
                for param in group["params"]:
                    param.lerp_(self.state[param]["z"], weight(group["beta"]))


OTHER_OPTIMIZERS: dict[str, Callable[[Groups], torch.optim.Optimizer]] = {
    "adam": lambda groups: torch.optim.Adam(groups, betas=(0.8, 0.95)),
    "nadam": lambda groups: torch.optim.NAdam(groups),
    "radam": lambda groups: torch.optim.RAdam(groups),
    "adamax": lambda groups: torch.optim.Adamax(groups),
    "adadelta": lambda groups: torch.optim.Adadelta(groups),
    "rprop": lambda groups: torch.optim.Rprop([{"params": group["params"], "lr": group["lr"]} for group in groups]),
    "asgd": lambda groups: torch.optim.ASGD(groups),
    "fused_adam": _fused_adam,
    "cpu_adam_16": _cpu_adam_16,
    "cpu_adagrad": _cpu_adagrad,
    "cpu_lion": _cpu_lion,
    "muon": _muon,
    "muon_torch_adam": lambda groups: _muon(groups, adam_optimizer=torch.optim.AdamW),
    "muon_fused_adam": lambda groups: _muon(groups, adam_optimizer=_fused_class()),
    "quantised": Quantised,
    "factored": Factored,
    "lamb": Lamb,
    "unplain": Unplain,
    "text_of_numpy": TextOfNumpy,
    "counting": Counting,
    "own_entry": OwnEntry,
    "by_rank": ByRank,
    "numbered": Numbered,
    "complex": Complex,
    "schedule_free": ScheduleFree,
}


def _fused_class() -> type[torch.optim.Optimizer]:
    from deepspeed.ops.adam import FusedAdam

    return FusedAdam
