"""The training job of the end-to-end tests: a small model that has everything that makes resharding hard.

Two optimizer groups, an embedding tied to the head, frozen parameters, a buffer, parameters of 1 and 3 elements (fewer
than ranks), parameters small enough to be persistent. Batches are a function of the step alone, so the global batch is
the same at every world size. Functions run on ranks, so they are at module level and take plain values.
"""

from __future__ import annotations

import hashlib
import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from optimizers import OTHER_OPTIMIZERS

GLOBAL_BATCH = 120  # divisible by 1, 2, 3, 4, 5, 6 and 8
VOCABULARY = 50

LOSS_RTOL = {"fp32": 2e-5, "bf16": 4e-3, "fp16": 2e-3}
"""Stated tolerance of losses after a resume: gradients are summed in another order at another world size, in the
training dtype. fp32 rounds at 6e-8, fp16 at 5e-4, bf16 at 4e-3; losses average many such errors."""


@dataclass(frozen=True)
class Job:
    """How a run is configured; picklable."""

    optimizer: str = "adamw"
    precision: str = "bf16"
    elastic: bool = True
    sub_group_size: int = 200
    groups: int = 2
    frozen: bool = True
    lr: float = 1e-2
    batch: int = GLOBAL_BATCH
    micro: int | None = None
    zero: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=lambda: {"verify": True})
    stage: int = 3
    installed: bool = True
    extra: str = ""
    perturb: float = 0.0
    tables: tuple[int, ...] = ()
    """Rows (of 16) of further embeddings, large enough to leave memory."""
    frozen_table: int = 0
    backup: bool = False
    """Partial offload with a GPU's part: DeepSpeed's backup optimizer steps it, here on the CPU."""

    def other(self, **changes: Any) -> Job:
        """A run of the same model that was built with everything else different, to be overwritten by a load."""
        different = {"sub_group_size": self.sub_group_size // 2 + 31, "lr": self.lr * 7, "perturb": 0.5}
        return replace(self, **{**different, **changes})


@dataclass(frozen=True)
class Outcome:
    """What a run saw: its state (fingerprints), what DeepSpeed gathers, the losses that follow, and the report."""

    state: dict[str, Any]
    gathered: dict[str, str]
    losses: list[float]
    report: Any = None
    client_state: Any = None
    steps: Any = None


class TinyModel(torch.nn.Module):
    def __init__(self, frozen: bool, extra: str, tables: tuple[int, ...] = (), frozen_table: int = 0) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, 16)
        self.up = torch.nn.Linear(16, 33)
        self.norm = torch.nn.LayerNorm(33)
        self.down = torch.nn.Linear(33, 16)
        self.head = torch.nn.Linear(16, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = torch.nn.Parameter(torch.ones(1))
        self.three = torch.nn.Parameter(torch.linspace(-0.1, 0.1, 3))
        self.adapter = torch.nn.Linear(16, 7)
        for param in self.adapter.parameters():
            param.requires_grad = not frozen
        self.register_buffer("batches_seen", torch.zeros(2))
        if extra:
            self.add_module(extra, torch.nn.Linear(16, 16))
        self.extra_name = extra
        self.tables = torch.nn.ModuleList(torch.nn.Embedding(rows, 16) for rows in tables)
        if frozen_table:
            self.frozen_table = torch.nn.Embedding(frozen_table, 16)
            self.frozen_table.weight.requires_grad = False

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.batches_seen += self.batches_seen.new_tensor([1.0, 0.25])
        hidden = self.down(torch.tanh(self.norm(self.up(self.embedding(tokens))))) * self.scale + self.three.sum()
        hidden = hidden + 0.01 * self.adapter(hidden).sum(-1, keepdim=True)
        if self.extra_name:
            hidden = hidden + getattr(self, self.extra_name)(hidden)
        for table in self.tables:
            hidden = hidden + 0.1 * table(tokens * (table.num_embeddings // VOCABULARY))
        if hasattr(self, "frozen_table"):
            hidden = hidden + 0.1 * self.frozen_table(tokens)
        logits = self.head(hidden).float()
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def build_model(job: Job) -> TinyModel:
    torch.manual_seed(1234)
    model = TinyModel(job.frozen, job.extra, job.tables, job.frozen_table)
    if job.perturb:
        with torch.no_grad():
            for tensor in [*model.parameters(), *model.buffers()]:
                tensor.add_(job.perturb)
    return model


def build_optimizer(job: Job, model: torch.nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    if job.groups == 1:
        groups = [{"params": trained, "lr": job.lr}]
    else:
        decay = [p for p in trained if p.ndim > 1]
        no_decay = [p for p in trained if p.ndim <= 1]
        groups = [
            {"params": decay, "weight_decay": 0.1, "lr": job.lr},
            {"params": no_decay, "weight_decay": 0.0, "lr": job.lr / 3},
        ]
        if job.groups == 3:  # a group of which nothing is trained
            groups.append({"params": [p for p in model.parameters() if not p.requires_grad], "lr": job.lr / 5})
    if job.optimizer == "cpu_adam":
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam(groups)
    if job.optimizer in OTHER_OPTIMIZERS:
        return OTHER_OPTIMIZERS[job.optimizer](groups)
    make = {
        "adamw": lambda: torch.optim.AdamW(groups, betas=(0.8, 0.95)),
        "adam": lambda: torch.optim.Adam(groups, betas=(0.8, 0.95)),
        "amsgrad": lambda: torch.optim.AdamW(groups, amsgrad=True),
        "sgd": lambda: torch.optim.SGD(groups, momentum=0.9),
        "plain_sgd": lambda: torch.optim.SGD(groups),
        "rmsprop": lambda: torch.optim.RMSprop(groups, momentum=0.5, centered=True),
        "adagrad": lambda: torch.optim.Adagrad(groups),
    }
    return make[job.optimizer]()


def ds_config(job: Job) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_batch_size": job.batch,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "stage": job.stage,
            "elastic_checkpoint": job.elastic,
            "sub_group_size": job.sub_group_size,
            "stage3_param_persistence_threshold": 40,
            **job.zero,
        },
        "zeroelastic": job.options,
        **job.config,
    }
    if job.micro is not None:
        config["train_micro_batch_size_per_gpu"] = job.micro
    if job.stage != 3:
        flag = {"elastic_checkpoint": job.elastic} if job.installed else {}  # DeepSpeed cannot load its own with it
        config["zero_optimization"] = {"stage": job.stage, **flag, **job.zero}
        if not job.installed:
            del config["zeroelastic"]
    if job.precision == "bf16":
        config["bf16"] = {"enabled": True, **config.get("bf16", {})}
    elif job.precision == "fp16":
        config["fp16"] = {"enabled": True, "loss_scale": 0, "initial_scale_power": 8, **config.get("fp16", {})}
    return config


def build_engine(job: Job, config: dict[str, Any] | None = None) -> Any:
    import deepspeed

    if job.installed:
        import zeroelastic

        zeroelastic.install()
    if job.precision == "fp16":
        allow_fp16_on_cpu()
    wait_for_every_gather()
    model = build_model(job)
    optimizer = build_optimizer(job, model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 8))
    config = ds_config(job) if config is None else config
    shorten_tensors_in_text()
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, lr_scheduler=schedule)
    if job.backup:
        use_backup_optimizer(engine.optimizer)
    return engine


def initialize(
    model: torch.nn.Module,
    zero: dict[str, Any],
    *,
    optimizer: torch.optim.Optimizer | None = None,
    installed: bool = True,
    **config: Any,
) -> Any:
    """An engine of a model of a test's own, by default with AdamW over what it trains."""
    import deepspeed

    import zeroelastic

    if installed:
        zeroelastic.install()
    if optimizer is None:
        optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)
    config |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False, "zero_optimization": zero}
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def shorten_tensors_in_text() -> None:
    """Stage 3 formats every parameter for a line that it does not print, a sixth of what it costs to make an engine."""
    torch.set_printoptions(threshold=0, edgeitems=1)


def use_backup_optimizer(optimizer: Any) -> None:
    """Give the backup optimizer its part. DeepSpeed tells the two parts by the name of the device, which on a machine
    without a GPU is "cpu" for both; another name of the same device has everything else run as it does on a GPU."""
    devices = optimizer.subgroup_to_device
    for i in range(int((1 - optimizer.partial_offload) * len(devices))):
        devices[i] = "cpu:0"


def allow_fp16_on_cpu() -> None:
    """DeepSpeed wants fp16 instructions; torch computes fp16 on any CPU, slowly, which is enough here."""
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    if not accelerator.is_fp16_supported():
        type(accelerator).is_fp16_supported = lambda self: True


class _WaitedGathers:
    """``deepspeed.comm``, but gathers are complete when they return."""

    def __init__(self, comm: Any) -> None:
        self.comm = comm

    def __getattr__(self, name: str) -> Any:
        return getattr(self.comm, name)

    def all_gather_into_tensor(self, *args: Any, **kwargs: Any) -> Any:
        handle = self.comm.all_gather_into_tensor(*args, **kwargs)
        if handle is not None:
            handle.wait()
        return handle


def wait_for_every_gather() -> None:
    """``Init._allgather_params_coalesced`` of older versions waits for its last gather only, which on gloo says
    nothing about the ones before: persistent parameters were now and then read before they had arrived."""
    import deepspeed
    from deepspeed.runtime.zero import partition_parameters

    if "for handle in launch_handles" not in inspect.getsource(partition_parameters.Init._allgather_params_coalesced):
        partition_parameters.dist = _WaitedGathers(deepspeed.comm)


def train_step(engine: Any, step: int) -> float:
    """One optimizer step on the global batch of ``step``; returns the loss over the global batch."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCABULARY, (GLOBAL_BATCH, 5), generator=generator)
    per_rank = GLOBAL_BATCH // dist.get_world_size()
    mine = tokens[dist.get_rank() * per_rank : (dist.get_rank() + 1) * per_rank].to(engine.device)
    total = torch.zeros((), dtype=torch.float64, device=engine.device)
    steps = engine.gradient_accumulation_steps()
    for part in mine.chunk(steps):
        loss = engine(part, part.roll(1, 1))
        engine.backward(loss)
        engine.step()
        total += loss.detach().double() / steps
    dist.all_reduce(total)
    return float(total / dist.get_world_size())


def look(engine: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """The gathered state, and what DeepSpeed's own accessors gather, both as fingerprints."""
    from zeroelastic.testing import fingerprint, gather_state

    state = gather_state(engine)
    return fingerprint(state), gathered(engine, state)


def gathered(engine: Any, state: Mapping[str, Any] | None = None) -> dict[str, str]:
    """Master weights and optimizer state of every trained parameter, hashed by their bits.

    At stage 3 DeepSpeed's own accessors gather them. At stages 1 and 2 these are wrong under ``round_robin_gradients``,
    so there they are cut out of the ``state`` that ``gather_state`` gathers.
    """
    if engine.zero_optimization_stage() == 0:
        return gathered_at_stage_0(engine)
    if hasattr(engine.optimizer, "fp32_partitioned_groups_flat"):
        return gathered_by_deepspeed(engine)
    if state is None:
        from zeroelastic.testing import gather_state

        state = gather_state(engine)
    found: dict[str, str] = {}
    for place, value in state.items():
        kind, _, rest = place.partition("/")
        if kind in ("master", "state"):
            found[f"{rest}/fp32" if kind == "master" else rest] = _hashed(value)
    return found


def gathered_by_deepspeed(engine: Any) -> dict[str, str]:
    """safe_get_full_fp32_param and safe_get_full_optimizer_state of every trained parameter, hashed by their bits."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    found: dict[str, str] = {}
    optimizer = engine.optimizer
    lists = ("fp16_groups", "bit16_groups", "bf16_groups")  # stage 3, DeepSpeedZeroOptimizer, BF16_Optimizer
    for i, members in enumerate(next(getattr(optimizer, name) for name in lists if hasattr(optimizer, name))):
        flat = flat_buffers(optimizer)[i]
        state = optimizer.optimizer.state.get(flat, {})
        keys = [key for key, value in state.items() if torch.is_tensor(value) and value.shape == flat.shape]
        keys = [key for key in keys if not key.endswith("_offload_buffer")]  # second copies, of offload_states()
        for param in members:
            name = engine.param_names[param]
            values = {"fp32": safe_get_full_fp32_param(param)}
            values |= {key: safe_get_full_optimizer_state(param, key) for key in keys}
            for key, value in values.items():
                shape = tuple(getattr(param, "ds_shape", param.shape))
                assert value is not None and tuple(value.shape) == shape, (name, key)
                assert value.numel() > 0
                found[f"{name}/{key}"] = _hashed(value)
    return found


def _hashed(value: torch.Tensor) -> str:
    raw = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return f"{value.dtype}:{hashlib.sha256(raw).hexdigest()}"


def flat_buffers(optimizer: Any) -> Sequence[torch.Tensor]:
    """This rank's flat master weights, by sub-group at stage 3, by optimizer group at stages 1 and 2."""
    lists = ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition")
    return next(getattr(optimizer, name) for name in lists if hasattr(optimizer, name))


def sub_group_steps(engine: Any) -> tuple[list[Any], int]:
    """``step`` of every sub-group, and how many distinct objects hold them."""
    optimizer = engine.optimizer
    steps = [optimizer.optimizer.state.get(flat, {}).get("step") for flat in flat_buffers(optimizer)]
    tensors = [step for step in steps if torch.is_tensor(step)]
    return [float(s) if s is not None else None for s in steps], len({s.data_ptr() for s in tensors})


def train_and_save(job: Job, directory: str, before: int = 3, after: int = 2, **save: Any) -> Outcome:
    engine = build_engine(job)
    for step in range(before):
        train_step(engine, step)
    state, seen = look(engine)
    engine.save_checkpoint(directory, client_state={"note": "hello", "rank": dist.get_rank()}, **save)
    again, _ = look(engine)
    assert again == state, "saving changed the live state"
    losses = [train_step(engine, step) for step in range(before, before + after)]
    return Outcome(state, seen, losses)


def resume(job: Job, directory: str, before: int = 3, after: int = 2, **load: Any) -> Outcome:
    engine = build_engine(job)
    path, client_state = engine.load_checkpoint(directory, **load)
    assert path is not None
    state, seen = look(engine)
    steps = sub_group_steps(engine)
    losses = [train_step(engine, step) for step in range(before, before + after)]
    report = getattr(engine, "zeroelastic_report", None)
    return Outcome(state, seen, losses, report, client_state, steps)


def resume_and_save(job: Job, directory: str, target: str) -> str:
    """Load and save again at once; returns the new content root."""
    from saved_files import record_of

    engine = build_engine(job)
    engine.load_checkpoint(directory)
    engine.save_checkpoint(target)
    return record_of(next(Path(target).glob("global_step*"))).content_root


def save_slowly() -> None:
    """Have each save in the background written a second after it began."""
    from zeroelastic.deepspeed.save.save import Save

    commit = Save.commit

    def later(self: Any, *args: Any) -> None:
        time.sleep(1)
        commit(self, *args)

    patch.object(Save, "commit", later).start()


def raised(action: Callable[[], Any]) -> tuple[str, str]:
    """The type and the text of the error that an action raises on this rank; empty where it raises none."""
    try:
        action()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def of_all(results: Sequence[Any]) -> Any:
    """What every rank gave: they are all the same."""
    assert all(result == results[0] for result in results), results
    return results[0]


def attempt(job: Job, directory: str, **load: Any) -> tuple[str, str]:
    """The type and text of the error that a load raises on this rank, and that the weights were not touched."""
    return attempt_each(job, [directory], **load)[0]


def attempt_each(job: Job, directories: Sequence[str], **load: Any) -> list[tuple[str, str]]:
    """``attempt`` with each directory, into one engine."""
    engine = build_engine(job)
    before, _ = look(engine)
    found = []
    for directory in directories:
        found.append(raised(partial(engine.load_checkpoint, directory, **load)))
        assert not found[-1][0] or look(engine)[0] == before, "a load that was refused changed the live state"
    return found


def stepped_params(engine: Any) -> Iterator[tuple[torch.nn.Parameter, int, dict[str, torch.Tensor], dict[str, Any]]]:
    """Each trained parameter, the number of its group, its tensors in its shape ("fp32" first), its scalars.

    Of an engine without ZeRO. DeepSpeed's own classes for 16 bits keep float32 copies of the weights, one by one
    (FP16_UnfusedOptimizer) or in a flat buffer for each group (FP16_Optimizer).
    """
    optimizer = engine.optimizer
    if hasattr(optimizer, "fp32_groups_flat"):  # FP16_Optimizer
        for number, (weights, flat) in enumerate(zip(optimizer.fp16_groups, optimizer.fp32_groups_flat, strict=True)):
            tensors, scalars = _split(flat, optimizer.optimizer.state[flat])
            begin = 0
            for weight in weights:
                own = {key: value[begin : begin + weight.numel()] for key, value in tensors.items()}
                yield weight, number, {key: value.view(weight.shape) for key, value in own.items()}, scalars
                begin += weight.numel()
            assert begin == flat.numel()
        return
    groups = [group["params"] for group in optimizer.param_groups]
    inner = getattr(optimizer, "optimizer", optimizer)
    for number, masters in enumerate(groups):
        weights = optimizer.fp16_groups[number] if hasattr(optimizer, "fp16_groups") else masters
        for weight, master in zip(weights, masters, strict=True):
            yield weight, number, *_split(master, inner.state.get(master, {}))


def _split(master: torch.Tensor, state: dict[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    tensors, scalars = {"fp32": master}, {}
    for key, value in state.items():
        if torch.is_tensor(value) and value.shape == master.shape:
            tensors[key] = value
        else:
            scalars[key] = value.item() if torch.is_tensor(value) else value
    return tensors, scalars


def gathered_at_stage_0(engine: Any) -> dict[str, str]:
    """As ``gathered``, for an engine without ZeRO, of which every rank has everything."""
    names = {param: name for name, param in engine.module.named_parameters()}
    found: dict[str, str] = {}
    for weight, _, tensors, _ in stepped_params(engine):
        for key, value in tensors.items():
            found[f"{names[weight]}/{key}"] = _hashed(value)
    return found


WIDE = 512


def build_wide(elastic: bool, frozen: bool, executor: str = "auto", stage: int = 3, width: int = WIDE) -> Any:
    """About 2 M parameters by default, so that headers hide nothing; with ``frozen``, half of them are not trained."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(width, width) for _ in range(8)] + [torch.nn.Linear(width, 3)]
    model = torch.nn.Sequential(*layers)
    if frozen:
        for layer in layers[:4]:
            for param in layer.parameters():
                param.requires_grad = False
    zero = {"stage": stage, "elastic_checkpoint": elastic, "sub_group_size": 300_000}
    options = {"io_engine": executor}
    return initialize(model, zero, train_batch_size=12, bf16={"enabled": True}, zeroelastic=options)


def save_wide(
    directory: str,
    elastic: bool,
    frozen: bool,
    stage: int = 3,
    width: int = WIDE,
    change: Callable[[Any], object] | None = None,
) -> None:
    """Save such an engine after a step; it is changed before."""
    engine = build_wide(elastic, frozen, stage=stage, width=width)
    if change is not None:
        change(engine)
    data = torch.ones(12 // dist.get_world_size(), width, dtype=torch.bfloat16)
    engine.backward(engine(data).float().pow(2).mean())
    engine.step()
    engine.save_checkpoint(directory)
