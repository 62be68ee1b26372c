"""Runs whose loads are DeepSpeed's own: at the size that saved, the same with and without us; at another, refused.

Experts with buffers, tensor parallelism at stages 1 and 2 of a DeepSpeed that does not say which slices ranks have, and
optimizers whose values follow from a rank's part of the weights. DeepSpeed compares the data parallel size alone, and
flat buffers of another arrangement may have the same length, so every load is followed by a step: it makes the weights
from the state that was loaded. Ranks that raise do so together: none is left waiting.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from extended import with_swept
from saved_files import flip, logged
from sliced_model import without_maps
from training import Job, allow_fp16_on_cpu, build_engine, raised

from zeroelastic.errors import UnsupportedError
from zeroelastic.testing import RankPool
from zeroelastic.verbs.convert.convert import export
from zeroelastic.verbs.reshard.reshard import reshard
from zeroelastic.verbs.tags import latest
from zeroelastic.verbs.verify.verify import verify

SECTION = "Parallelism and communication"


class Run(NamedTuple):
    """A run: its kind, how many ranks share its experts or its layers, ZeRO stage, DeepSpeed's flag, and precision."""

    kind: str
    size: int
    stage: int = 2
    elastic: bool = False
    precision: str = "bf16"


class Seen(NamedTuple):
    """What a rank has: its 16-bit weights after a load, and after one step more; or the error of the load."""

    loaded: dict[str, str]
    stepped: dict[str, str]
    error: tuple[str, str] | None = None


class _OwnExperts(torch.nn.Module):
    """A layer of DeepSpeed's own experts, each of which has a buffer."""

    def __init__(self, size: int) -> None:
        from deepspeed.moe.layer import MoE

        super().__init__()
        self.first, self.head = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)
        self.moe = MoE(16, torch.nn.Linear(16, 16), num_experts=4, ep_size=size, k=1, use_rts=False, drop_tokens=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.moe(self.first(x))[0])
        return result


class _Layers(torch.nn.Module):
    """A column parallel and a row parallel layer; ``down_proj`` is the row parallel one."""

    def __init__(self) -> None:
        super().__init__()
        self.up_proj, self.down_proj = torch.nn.Linear(16, 18), torch.nn.Linear(18, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down_proj(torch.tanh(self.up_proj(x)))
        return result


class _Distances(torch.optim.Optimizer):
    """As Prodigy does, it takes a step size (``d``) from sums over the weights that it sees: a rank's part of them."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "d": 1e-2, "d_sum": torch.tensor(0.0), "k": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] += 1
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    state.setdefault("step", 0)
                    state.setdefault("exp_avg", torch.zeros_like(param)).lerp_(param.grad, 0.1)
                    state["step"] += 1
                    param.add_(state["exp_avg"], alpha=-group["lr"] * group["d"])
                    group["d_sum"] = group["d_sum"] + param.abs().sum()
            group["d"] = 1e-2 * float(1 + group["d_sum"])


class _Counting(_Distances):
    """As MADGRAD does, it keeps one counter for all parameters, in ``state["k"]``, and its steps depend on it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.state.setdefault("k", torch.tensor([0]))
        self.state["k"] += 1
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    moment = self.state[param].setdefault("exp_avg", torch.zeros_like(param)).lerp_(param.grad, 0.1)
                    param.add_(moment, alpha=-group["lr"] / float(self.state["k"]))


class _OwnCounter(_Distances):
    """As wrappers of optimizers do, it keeps a counter of its own, which is in its state dict beside the rest."""

    k = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.k += 1
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.add_(param.grad, alpha=-group["lr"] / self.k)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "k": self.k}

    def load_state_dict(self, state_dict: Any) -> None:
        self.k = state_dict["k"]
        super().load_state_dict(state_dict)


_OPTIMIZERS = {"values by rank": _Distances, "a common counter": _Counting, "a counter of its own": _OwnCounter}


def build(run: Run, *, installed: bool, seed: int = 1, lr: float = 1e-2) -> Any:
    import deepspeed

    import zeroelastic

    if installed:
        zeroelastic.install()
    if run.precision == "fp16":
        allow_fp16_on_cpu()
    torch.manual_seed(seed)
    config: dict[str, Any] = {
        "train_batch_size": 12,
        "bf16": {"enabled": run.precision == "bf16"},
        "fp16": {"enabled": run.precision == "fp16"},
        "zero_allow_untested_optimizer": True,
        "optimizer": {"type": "Adam", "params": {"lr": lr, "torch_adam": True}},
        "zero_optimization": {"stage": run.stage, "elastic_checkpoint": run.elastic},
    }
    if run.kind == "AutoTP":
        specs = [{"patterns": [rf".*{name}\.weight$"], "partition_type": kind} for name, kind in _SPECS.items()]
        rules = {"use_default_specs": False, "layer_specs": specs}
        config["tensor_parallel"] = {"autotp_size": run.size, "partition_config": rules}
    model = _OwnExperts(run.size) if run.kind == "MoE" else _Layers()
    for name, module in model.named_modules():
        if name.rpartition(".")[0].endswith("deepspeed_experts"):
            module.register_buffer("seen", torch.ones(3))
    options: dict[str, Any] = {"model_parameters": list(model.parameters())}
    if run.kind in _OPTIMIZERS:
        options = {"optimizer": _OPTIMIZERS[run.kind](model.parameters())}
        del config["optimizer"]
    with without_maps():
        return deepspeed.initialize(model=model, config=config, **options)[0]


_SPECS = {"up_proj": "column", "down_proj": "row"}


def take_step(engine: Any, run: Run, step: int) -> None:
    tp = run.size if run.kind == "AutoTP" else 1  # which share a batch
    shares = dist.get_world_size() // tp
    x = torch.randn(12, 4, 16, generator=torch.Generator().manual_seed(step))
    part = x.to(next(engine.module.parameters()).dtype).chunk(shares)[dist.get_rank() // tp]
    engine.backward(engine(part).float().pow(2).mean())
    engine.step()


def weights(engine: Any) -> dict[str, str]:
    """A hash of each 16-bit weight of this rank; of each expert by its number in the model."""
    return {name: hashlib.sha256(t.float().numpy().tobytes()).hexdigest() for name, t in _tensors(engine.module)}


def _tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    import deepspeed
    from deepspeed.utils import groups

    with deepspeed.zero.GatheredParameters([p for p in module.parameters() if hasattr(p, "ds_id")]):
        for name, param in module.named_parameters():
            whole, group = param.detach().clone(), getattr(param, "group_name", "")
            if ".deepspeed_experts." in name:
                before, _, rest = name.partition(".deepspeed_experts.")
                number, _, rest = rest.partition(".")
                experts: Any = module.get_submodule(before)
                first = groups._get_expert_parallel_rank(group) * len(experts.deepspeed_experts)
                yield f"{before}.{first + int(number)}.{rest}", whole
            else:
                yield name, whole


def save(run: Run, directory: str, *, installed: bool = True) -> Seen:
    engine = build(run, installed=installed)
    take_step(engine, run, 0)
    take_step(engine, run, 1)
    engine.save_checkpoint(directory, tag="t")
    saved = weights(engine)
    take_step(engine, run, 2)
    return Seen(saved, weights(engine))


def load(run: Run, directory: str, *, installed: bool, **flags: Any) -> Seen:
    """``flags`` of a load of weights only make the step one that changes no weight."""
    engine = build(run, installed=installed, seed=2, lr=0.0 if flags else 1e-2)
    before = weights(engine)
    try:
        assert engine.load_checkpoint(directory, tag="t", **flags)[0] is not None
    except Exception as error:
        assert weights(engine) == before, "a load that was refused changed the weights"
        return Seen({}, {}, (type(error).__name__, str(error)))
    loaded = weights(engine)
    take_step(engine, run, 2)
    return Seen(loaded, weights(engine))


def error_of_load(run: Run, directory: str, *, installed: bool) -> str:
    """The class of what a load raises."""
    engine = build(run, installed=installed, seed=2)
    try:
        engine.load_checkpoint(directory, tag="t")
    except Exception as error:
        return type(error).__name__
    return "nothing"


class Case(NamedTuple):
    """A run, the one that it is loaded into at another size, on how many ranks, and what the refusal names."""

    run: Run
    other: Run
    ranks: int
    named: str


EXPERTS = "was saved with expert parallel size {}, and the run has {}"
CASES = {
    "MoE, stage 2": Case(Run("MoE", 2), Run("MoE", 1), 2, EXPERTS.format(2, 1)),
    "MoE, stage 1": Case(Run("MoE", 1, 1), Run("MoE", 2, 1), 2, EXPERTS.format(1, 2)),
    "MoE, more ranks": Case(Run("MoE", 1), Run("MoE", 1), 3, "was saved with data parallel size 2, and the run has 3"),
    "AutoTP, stage 2": Case(
        Run("AutoTP", 1), Run("AutoTP", 2), 2, "was saved with tensor parallel size 1, and the run has 2"
    ),
    "AutoTP, stage 1": Case(
        Run("AutoTP", 2, 1), Run("AutoTP", 2, 1), 4, "was saved with data parallel size 1, and the run has 2"
    ),
    "values by rank, stage 3": Case(
        Run("values by rank", 1, 3), Run("values by rank", 1, 3), 3, "'d' of optimizer group 0 is "
    ),
    "a common counter, stage 3": Case(
        Run("a common counter", 1, 3), Run("a common counter", 1, 3), 3, "the optimizer keeps 'k' beside the state of"
    ),
    "a common counter, stage 2": Case(
        Run("a common counter", 1), Run("a common counter", 1), 3, "the optimizer keeps 'k' beside the state of"
    ),
    "a counter of its own, stage 3": Case(
        Run("a counter of its own", 1, 3), Run("a counter of its own", 1, 3), 3, "the optimizer keeps 'k' beside the"
    ),
    "a counter of its own, stage 2": Case(
        Run("a counter of its own", 1), Run("a counter of its own", 1), 3, "the optimizer keeps 'k' beside the state of"
    ),
    "values by rank, stage 2": Case(
        Run("values by rank", 1), Run("values by rank", 1), 3, "'d' of optimizer group 0 is "
    ),
}


def check_damage(directory: str, expert: Path) -> None:
    """A file of an expert that is damaged, or missing, makes the checkpoint invalid; it is put back."""
    data = expert.read_bytes()
    flip(expert)
    assert {problem.file for problem in verify(directory).problems} == {expert.name}
    expert.unlink()
    report = verify(directory)
    assert [problem.sentence for problem in report.problems] == [
        f"{expert.name}: is missing. The checkpoint is incomplete."
    ]
    for quick in (False, True):
        assert latest(directory, quick=quick).tag is None
    expert.write_bytes(data)


@pytest.mark.parametrize("name", with_swept(CASES, {"a common counter, stage 2", "a counter of its own, stage 3"}))
def test_left_to_deepspeed(rank_pool: RankPool, tmp_path: Path, name: str) -> None:
    case = CASES[name]
    directory = str(tmp_path / "run")
    saved = rank_pool.run(save, 2, case.run, directory)
    for installed in (False, True):
        assert rank_pool.run(load, 2, case.run, directory, installed=installed) == saved, installed
    refused = rank_pool.run(load, case.ranks, case.other, directory, installed=True)
    assert len({seen.error for seen in refused}) == 1
    assert refused[0].error is not None
    kind, text = refused[0].error
    assert kind == "UnsupportedError" and case.named in text, refused[0].error

    if case.run == Run("AutoTP", 1):  # which is a run like any other until it is sliced
        return
    if case.run.kind != "MoE":
        with pytest.raises(UnsupportedError):
            reshard(directory, tmp_path / "resharded", world_size=3)
    if case.run.kind == "AutoTP":
        return
    if case.run.kind == "MoE":
        assert any(".deepspeed_experts.0.seen" in text for text in export(directory, tmp_path / "export").left_out)
    report = verify(directory)
    assert report.valid and not report.problems, report.problems
    assert bool(report.unsupported) == (report.content_root is None) == (case.run.kind in _OPTIMIZERS)
    assert report.num_files == len(list((tmp_path / "run" / "t").iterdir()))
    for expert in sorted((tmp_path / "run" / "t").glob("layer_*"))[:2]:
        check_damage(directory, expert)
    for quick in (False, True):
        found = latest(directory, quick=quick)
        assert found.tag is not None and found.tag.name == "t"
    if case.run.kind == "values by rank":
        # what the refusal advises
        whole = {name: hash for seen in saved for name, hash in seen.loaded.items()}
        for seen in rank_pool.run(load, case.ranks, case.other, directory, installed=True, load_optimizer_states=False):
            assert seen.error is None, seen.error
            assert seen.loaded.items() <= whole.items() and seen.stepped == seen.loaded


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.quick), "fp16", "bf16"])
def test_experts_without_zero(rank_pool: RankPool, tmp_path: Path, precision: str) -> None:
    """DeepSpeed's optimizers of stage 0 know nothing of ZeRO's files."""
    run, directory = Run("MoE", 2, 0, precision=precision), str(tmp_path)
    saved = rank_pool.run(save, 2, run, directory)
    for installed in (False, True):
        assert rank_pool.run(load, 2, run, directory, installed=installed) == saved, installed


@pytest.mark.parametrize(
    "run", [Run("MoE", 2), Run("AutoTP", 2, 1), Run("values by rank", 1), Run("a common counter", 1)], ids=str
)
def test_a_save_under_the_elastic_flag_resumes_at_its_size(rank_pool: RankPool, tmp_path: Path, run: Run) -> None:
    """With zeroelastic and without it, with the flag and without it. DeepSpeed alone saves what it cannot load."""
    elastic = run._replace(elastic=True)
    saved = rank_pool.run(save, 2, elastic, str(tmp_path))
    for then, installed in ((run, False), (elastic, False), (elastic, True)):
        assert rank_pool.run(load, 2, then, str(tmp_path), installed=installed) == saved, (then, installed)


def test_values_by_rank_under_the_elastic_flag_are_named_once(rank_pool: RankPool, tmp_path: Path) -> None:
    said, silent = rank_pool.run(warnings_of_two_saves, 2, Run("values by rank", 1, elastic=True), str(tmp_path))
    assert silent == [] and len(said) == 1, said
    assert "saved by DeepSpeed alone; no commit record is written: 'd' of optimizer group 0 is " in said[0]
    assert said[0].endswith('The files are rigid in spite of "format": "elastic".')


def warnings_of_two_saves(run: Run, directory: str) -> list[str]:
    engine = build(run, installed=True)
    take_step(engine, run, 0)
    said = logged("", logging.WARNING)
    for tag in ("one", "two"):
        engine.save_checkpoint(directory, tag=tag)
    return said


def test_what_deepspeed_saved_in_its_own_elastic_form_is_loaded_as_by_deepspeed(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    run = Run("MoE", 2, elastic=True)
    rank_pool.run(save, 2, run, str(tmp_path), installed=False)
    for installed in (False, True):
        assert rank_pool.run(error_of_load, 2, run, str(tmp_path), installed=installed) == ["AssertionError"] * 2


def warnings_of_a_save_after_a_failed_load(directory: str) -> list[str]:
    engine, said = build_engine(Job(stage=0, options={})), logged("", logging.WARNING)
    engine.save_checkpoint(directory, tag="good")
    next(Path(directory, "good").glob("*model_states.pt")).write_bytes(b"damaged")
    assert raised(partial(engine.load_checkpoint, directory, tag="good"))[0]
    engine.save_checkpoint(directory, tag="bad")
    return said


def test_a_save_after_a_load_that_failed_is_warned_of(rank_pool: RankPool, tmp_path: Path) -> None:
    (line,) = rank_pool.run(warnings_of_a_save_after_a_failed_load, 1, str(tmp_path))[0]
    assert line.startswith(f"{tmp_path}: DeepSpeed saves the engine although a load of it failed")


def test_a_file_that_only_some_ranks_lack_ends_the_load_on_all(rank_pool: RankPool, tmp_path: Path) -> None:
    """The rank without it would raise alone, and the others wait for it in a collective."""
    run = Run("MoE", 2)
    rank_pool.run(save, 2, run, str(tmp_path))
    gone = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    (tmp_path / "t" / gone).unlink()
    errors = {seen.error for seen in rank_pool.run(load, 2, run, str(tmp_path), installed=True, timeout=60)}
    assert len(errors) == 1
    kind, text = errors.pop() or ("", "")
    assert kind == "MissingFileError" and gone in text
