"""Runs with experts and tensor parallelism: tiny models at any topology, and a gather of their logical state.

A job trains the same model on the same global batch at every data, tensor and expert parallel size. The logical state
is gathered without the code that saves and loads: every rank's part by ``gather_state``, from DeepSpeed's own buffers;
then slices put together by hand, by the unsharded shapes that the model had before DeepSpeed sliced it and by the
numbers that experts have in the model. Functions run on ranks, so they are at module level.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from training import LOSS_RTOL as LOSS_RTOL
from training import shorten_tensors_in_text

from zeroelastic.testing import gather_state

MODELS = ("llama", "qwen3", "neox", "mixtral")
"""Models of transformers, which AutoTP slices."""

PRELOADED = (
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.gpt_neox.modeling_gpt_neox",
    "transformers.models.mixtral.modeling_mixtral",
    "topologies",
)
"""For ``RankPool(preload=...)``: importing them takes a rank seconds."""

BATCH = 12
VOCABULARY = 40
EXPERTS = 4


@dataclass(frozen=True)
class TopologyJob:
    """How a run is configured; picklable.

    ``model`` is one of ``MODELS``, "autoep" (experts that DeepSpeed distributes) or "moe" (DeepSpeed's own layer). The
    data parallel size is the number of ranks over ``tp``. ``frozen`` freezes the embedding and a layer without its
    experts, ``frozen_experts`` some weights of experts; with ``adapters`` everything but LoRA adapters is frozen.
    Layers are 16 times ``width`` wide.
    """

    model: str = "llama"
    tp: int = 1
    ep: int = 1
    stage: int = 3
    precision: str = "fp32"
    elastic: bool = True
    offload: bool = False
    frozen: bool = False
    frozen_experts: bool = False
    adapters: bool = False
    lr: float = 1e-2
    seed: int = 1
    installed: bool = True
    width: int = 1
    zero: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)

    def other(self, **changes: Any) -> TopologyJob:
        """A run of the same model with other weights and another learning rate, to be overwritten by a load."""
        return replace(self, **{"lr": self.lr * 7, "seed": self.seed + 1, **changes})


class Built(NamedTuple):
    """What the logical gather knows of a model: unsharded tensors before DeepSpeed changed it."""

    job: TopologyJob
    weights: dict[str, torch.Tensor]


class Lora(torch.nn.Module):
    """A linear layer that stays as it is, and two small ones that are trained."""

    def __init__(self, base: torch.nn.Linear, rank: int = 3) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = torch.nn.Linear(base.in_features, rank, bias=False)
        self.lora_B = torch.nn.Linear(rank, base.out_features, bias=False)
        torch.nn.init.normal_(self.lora_B.weight, std=0.1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.base_layer(hidden) + self.lora_B(self.lora_A(hidden))
        return result


class _FusedExperts(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        hidden, inner = 16 * width, 24 * width
        self.gate_up_proj = torch.nn.Parameter(torch.randn(EXPERTS, 2 * inner, hidden) / hidden**0.5)
        self.down_proj = torch.nn.Parameter(torch.randn(EXPERTS, hidden, inner) / hidden**0.5)


class _ExpertBlock(torch.nn.Module):
    """A router and fused experts, which AutoEP replaces by a layer of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(16 * width, EXPERTS, bias=False)
        self.experts, self.top_k = _FusedExperts(width), 2


class _MixtralConfig:
    model_type, num_local_experts, num_experts_per_tok = "mixtral", EXPERTS, 2

    def __init__(self, width: int) -> None:
        self.hidden_size, self.intermediate_size = 16 * width, 24 * width


class _AutoEP(torch.nn.Module):
    """The parts of Mixtral that AutoEP looks for: its own class does not run under AutoEP (transformers 5.23)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.config = _MixtralConfig(width)
        self.model = torch.nn.Module()
        layers = [torch.nn.Module() for _ in range(2)]
        for layer in layers:
            layer.mlp = _ExpertBlock(width)
        self.model.layers = torch.nn.ModuleList(layers)
        self.model.embed_tokens = torch.nn.Embedding(VOCABULARY, 16 * width)
        self.head = torch.nn.Linear(16 * width, VOCABULARY)
        self.register_buffer("batches_seen", torch.zeros(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.batches_seen += torch.tensor([1.0, 0.25], dtype=self.batches_seen.dtype)
        parts: Any = self.model
        hidden = parts.embed_tokens(tokens)
        for layer in parts.layers:
            out = layer.mlp(hidden)
            hidden = hidden + (out[0] if isinstance(out, tuple) else out)
        return _loss(self.head(hidden), tokens)


class _Expert(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(16 * width, 25 * width), torch.nn.Linear(25 * width, 16 * width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(torch.relu(self.up(hidden)))
        return result


class _NativeMoE(torch.nn.Module):
    """A layer of DeepSpeed's own experts, each of which has weights by its number in the model."""

    def __init__(self, ep: int, width: int) -> None:
        from deepspeed.moe.layer import MoE

        super().__init__()
        hidden = 16 * width
        self.embedding = torch.nn.Embedding(VOCABULARY, hidden)
        self.moe = MoE(hidden, _Expert(width), EXPERTS, ep_size=ep, k=1, use_rts=False, drop_tokens=False)
        self.head = torch.nn.Linear(hidden, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        return _loss(self.head(hidden + self.moe(hidden)[0]), tokens)


def _loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten())


def _transformers_model(name: str, width: int) -> torch.nn.Module:
    import transformers

    common = {
        "hidden_size": 16 * width,
        "intermediate_size": 24 * width,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 16,
        "attn_implementation": "eager",
        "use_cache": False,
    }
    grouped = {"num_key_value_heads": 4, "num_attention_heads": 8, "head_dim": 4 * width, "attention_bias": True}
    own: dict[str, dict[str, Any]] = {
        "llama": {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
        "qwen3": grouped,
        "neox": {"attention_dropout": 0.0, "hidden_dropout": 0.0},
        "mixtral": {"num_key_value_heads": 4, "num_local_experts": EXPERTS, "router_aux_loss_coef": 0.0},
    }
    kinds = {"llama": "Llama", "qwen3": "Qwen3", "neox": "GPTNeoX", "mixtral": "Mixtral"}
    config = getattr(transformers, f"{kinds[name]}Config")(**{**common, **own[name]})
    model: torch.nn.Module = getattr(transformers, f"{kinds[name]}ForCausalLM")(config)
    return model


def build_model(job: TopologyJob, *, ep: int) -> torch.nn.Module:
    """The model with weights that depend on the seed alone: not on the rank, nor on the expert parallel size."""
    torch.manual_seed(job.seed)
    if job.model == "moe":
        model: torch.nn.Module = _NativeMoE(ep, job.width)
    else:
        model = _AutoEP(job.width) if job.model == "autoep" else _transformers_model(job.model, job.width)
    if job.adapters:
        _add_adapters(model)
    numbers = _expert_numbers(model, job, ep)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.is_floating_point() and "inv_freq" not in name:
                place = numbers.get(name, name).encode()
                seed = int.from_bytes(hashlib.sha256(place).digest()[:4], "big") + job.seed
                noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed))
                tensor.add_(0.1 * noise.to(tensor.dtype))
    chosen = [_FROZEN] * job.frozen + [_FROZEN_EXPERTS] * job.frozen_experts
    for name, param in model.named_parameters():
        if any(pattern.search(name) for pattern in chosen):
            param.requires_grad = False
    return model


_FROZEN_EXPERTS = re.compile(r"layers\.1\.mlp\.experts\.|deepspeed_experts\.\d+\.up")
_FROZEN = re.compile(r"embed|layers\.1\.(.*_proj|.*dense.*|mlp\.gate)\.")
"""Not norms of queries and keys: DeepSpeed cannot slice a model in which they are frozen (0.19.8)."""


def _add_adapters(model: torch.nn.Module) -> None:
    model.requires_grad_(False)
    for path, module in list(model.named_modules()):
        if isinstance(module, torch.nn.Linear) and re.search(r"(q|k|v|o|gate|up|down)_proj$", path):
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, Lora(module))


def _expert_rank(job: TopologyJob, rank: int, ep: int) -> int:
    """Which of ``ep`` parts of the experts a rank has."""
    data_first = job.config.get("use_data_before_expert_parallelism")
    return rank // (dist.get_world_size() // ep) if data_first else rank % ep


def _expert_numbers(model: torch.nn.Module, job: TopologyJob, ep: int) -> dict[str, str]:
    """The name that each parameter of DeepSpeed's own experts has in the model, by its name on this rank."""
    first = _expert_rank(job, dist.get_rank(), ep) * (EXPERTS // ep)
    names = [name for name, _ in model.named_parameters() if ".deepspeed_experts." in name]
    return {name: _renumbered(name, first) for name in names}


def _renumbered(name: str, first: int) -> str:
    before, marker, rest = name.partition(".deepspeed_experts.")
    number, dot, rest = rest.partition(".")
    return f"{before}{marker}{first + int(number)}{dot}{rest}"


COLUMN = r"(^|.*\.)(q|k|v|gate|up)_proj(\.base_layer|\.lora_B)?\.(weight|bias)$"
ROW = r"(^|.*\.)(o|down)_proj(\.base_layer|\.lora_A)?\.weight$"


def ds_config(job: TopologyJob) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": job.stage, **job.zero}
    if job.installed:
        zero["elastic_checkpoint"] = job.elastic
    if job.stage == 3:
        zero = {"stage3_param_persistence_threshold": 40, "sub_group_size": 700, **zero}
    if job.offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    config: dict[str, Any] = {
        "train_batch_size": BATCH,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
        **job.config,
    }
    if job.installed:
        config["zeroelastic"] = {"verify": True, **config.get("zeroelastic", {})}
    if job.precision == "bf16":
        config["bf16"] = {"enabled": True}
    if job.model == "autoep":
        config["expert_parallel"] = {"enabled": True, "autoep_size": job.ep, "preset_model": "mixtral"}
        options = {"lr": job.lr, "betas": [0.8, 0.95], "weight_decay": 0.1, "torch_adam": True}
        config["optimizer"] = {"type": "AdamW", "params": options}
    if job.tp > 1:
        config["tensor_parallel"] = {"autotp_size": job.tp}
        if job.model == "mixtral" or job.adapters:  # DeepSpeed refuses Mixtral's own plan ('moe_tp_experts')
            specs = [{"patterns": [COLUMN], "partition_type": "column"}, {"patterns": [ROW], "partition_type": "row"}]
            config["tensor_parallel"]["partition_config"] = {"use_default_specs": False, "layer_specs": specs}
    return config


def _optimizer(job: TopologyJob, model: torch.nn.Module) -> torch.optim.Optimizer:
    """Two groups, of weights and of everything with one dimension; with DeepSpeed's experts, one more of each."""
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    trained = [param for param in model.parameters() if param.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1, "lr": job.lr, "name": "decay"},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0, "lr": job.lr / 3, "name": "no decay"},
    ]
    groups = [group for group in groups if group["params"]]
    if job.model == "moe":
        groups = split_params_into_different_moe_groups_for_optimizer(groups)
    return torch.optim.AdamW(groups, betas=(0.8, 0.95))


def build(job: TopologyJob) -> Any:
    """An engine of the job on this rank."""
    import deepspeed

    import zeroelastic

    if job.installed:
        zeroelastic.install()
    model = build_model(job, ep=job.ep)
    weights = {name: param.detach().clone() for name, param in build_model(job, ep=1).named_parameters()}
    options: dict[str, Any] = {"model_parameters": [param for param in model.parameters() if param.requires_grad]}
    if job.model != "autoep":  # for which DeepSpeed makes the groups, and so the optimizer
        options = {"optimizer": _optimizer(job, model)}
    shorten_tensors_in_text()
    engine, *_ = deepspeed.initialize(model=model, config=ds_config(job), **options)
    engine.built = Built(
        job, {name: tensor for old, whole in weights.items() for name, tensor in as_run(job, old, whole)}
    )
    return engine


def as_run(job: TopologyJob, name: str, tensor: torch.Tensor) -> Iterable[tuple[str, torch.Tensor]]:
    """The tensors that AutoEP makes of a router and of fused experts; others as they are."""
    base, _, last = name.rpartition(".mlp.")
    if job.model != "autoep" or not base:
        yield name, tensor
    elif last == "gate.weight":
        yield f"{base}.mlp.router.gate.weight", tensor
    elif last == "experts.gate_up_proj":
        yield f"{base}.mlp.experts.w1", tensor[:, : 24 * job.width]
        yield f"{base}.mlp.experts.w3", tensor[:, 24 * job.width :]
    else:
        yield f"{base}.mlp.experts.w2", tensor


def step(engine: Any, number: int) -> float:
    """One optimizer step on the global batch of ``number``; the loss over the global batch."""
    job: TopologyJob = engine.built.job
    tokens = torch.randint(0, VOCABULARY, (BATCH, 7), generator=torch.Generator().manual_seed(number))
    shares = dist.get_world_size() // job.tp
    part = tokens.chunk(shares)[dist.get_rank() // job.tp]
    loss = engine(input_ids=part, labels=part).loss if job.model in MODELS else engine(part)
    engine.backward(loss)
    engine.step()
    total = loss.detach().double()
    dist.all_reduce(total)
    return float(total / dist.get_world_size())


def train(engine: Any, first: int, count: int) -> list[float]:
    """The losses of some steps."""
    return [step(engine, number) for number in range(first, first + count)]


class Seen(NamedTuple):
    """A run's logical state after training or a load, as hashes, and the losses that follow."""

    state: dict[str, Any]
    losses: list[float]


def save_run(job: TopologyJob, directory: str) -> Seen:
    """Two steps, a save under the tag ``t``, and two more steps."""
    engine = build(job)
    train(engine, 0, 2)
    engine.save_checkpoint(directory, tag="t")
    return Seen(logical_hashes(engine), train(engine, 2, 2))


def load_run(job: TopologyJob, directory: str) -> Seen:
    """Load the tag ``t``, and the same two steps again."""
    engine = build(job)
    assert engine.load_checkpoint(directory, tag="t")[0] is not None
    return Seen(logical_hashes(engine), train(engine, 2, 2))


# The logical state


Local = dict[str, dict[str, Any]]
"""What a rank has of the slices that it shares: entries by the parameter's name on this rank."""


def logical_state(engine: Any) -> dict[str, Any]:
    """The whole state that training goes on from, the same on every rank and at every topology. Collective.

    Keys, where NAME is the name of a parameter in the model, and experts have the numbers that they have there:

        NAME/weight         the weight in the module; also of frozen parameters
        NAME/fp32           the master weight of a trained parameter, and NAME/exp_avg, ... a tensor of optimizer state
        NAME/step           a number of optimizer state, and NAME/group/lr, ... a hyper-parameter
        buffer/NAME         a persistent buffer
        engine/NAME         global_steps, global_samples, skipped_steps
    """
    built: Built = engine.built
    job = built.job
    # As one file: torch pickles each tensor of an object as a file of its own, which took a sixth of a save's test.
    file = io.BytesIO()
    torch.save(_local_state(engine), file)
    files = [b""] * dist.get_world_size()
    dist.all_gather_object(files, file.getvalue())
    ranks: list[Local] = [torch.load(io.BytesIO(one), weights_only=False) for one in files]
    state: dict[str, Any] = {}
    for name in sorted({_global_name(job, rank, name) for rank, own in enumerate(ranks) for name in own}):
        holders = [
            (rank, entries)
            for rank, own in enumerate(ranks)
            for local, entries in own.items()
            if _global_name(job, rank, local) == name
        ]
        keys = dict.fromkeys(key for _, entries in holders for key in entries)
        for key in keys:
            parts = {rank: entries[key] for rank, entries in holders}
            shape = built.weights[name].shape if name in built.weights else None
            state[f"{name}/{key}"] = _joined(job, name, key, parts, shape)
    for name in ("global_steps", "global_samples", "skipped_steps"):
        state[f"engine/{name}"] = getattr(engine, name)
    return state


def logical_hashes(engine: Any) -> dict[str, Any]:
    """``logical_state`` with a hash of dtype, shape and bits for each tensor."""
    return {key: hashed(value) for key, value in logical_state(engine).items()}


def hashed(value: Any) -> Any:
    """A hash of a tensor; other values as they are."""
    if not torch.is_tensor(value):
        return value
    raw = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(raw).hexdigest()}"


def differences(expected: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """The keys that differ between two states, or states of hashes."""
    keys = dict.fromkeys([*expected, *found])
    return [key for key in keys if hashed(expected.get(key)) != hashed(found.get(key))]


def _global_name(job: TopologyJob, rank: int, name: str) -> str:
    if job.model != "moe" or ".deepspeed_experts." not in name:
        return name
    return _renumbered(name, _expert_rank(job, rank, job.ep) * (EXPERTS // job.ep))


def _joined(job: TopologyJob, name: str, key: str, parts: Mapping[int, Any], shape: torch.Size | None) -> Any:
    """The whole tensor of what the ranks have; a number, if all have the same."""
    first = next(iter(parts.values()))
    if not torch.is_tensor(first) or name.startswith("buffer/") or shape is None:
        assert all(hashed(part) == hashed(first) for part in parts.values()), f"ranks disagree on {name}/{key}"
        return first
    is_expert = job.model == "autoep" and ".experts." in name
    places: dict[int, torch.Tensor] = {}
    for rank, part in parts.items():
        place = _expert_rank(job, rank, job.ep) if is_expert else rank % job.tp
        assert hashed(places.setdefault(place, part)) == hashed(part), f"copies of {name}/{key} differ"
    ordered = [places[place] for place in sorted(places)]
    if all(part.shape == shape for part in ordered):
        assert len({hashed(part) for part in ordered}) == 1, f"copies of {name}/{key} differ"
        return first
    dims = [
        dim for dim, size in enumerate(shape) if sum(part.shape[dim] for part in ordered) == size != first.shape[dim]
    ]
    assert len(dims) == 1, (name, key, shape, [part.shape for part in ordered])
    whole = torch.cat(ordered, dims[0])
    assert whole.shape == shape, (name, key)
    return whole


def _local_state(engine: Any) -> Local:
    """What this rank has, joined over the ranks that share it. Collective over those."""
    state, found = gather_state(engine), Local()
    for key, value in state.items():
        kind, _, rest = key.partition("/")
        name, _, last = rest.rpartition("/")
        if kind in ("weight", "master"):
            found.setdefault(rest, {})["weight" if kind == "weight" else "fp32"] = value
        elif kind in ("state", "scalar"):
            found.setdefault(name, {})[last] = value
        elif kind == "buffer":
            found[key] = {"value": value}
    for index, group in enumerate(engine.optimizer.optimizer.param_groups):
        options = {f"group/{key}": group[key] for key in ("lr", "weight_decay", "betas", "eps")}
        for name in str(state[f"group/{index}/params"]).split():
            found[name].update(options)
    return found
