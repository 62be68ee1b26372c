"""Configurations whose state a resume restores bit for bit, by name: optimizers, precisions, communication buckets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from training import Job

CPU = {"offload_optimizer": {"device": "cpu"}}
IN_MEMORY = {"save_muon_momentum_buffer_in_memory": True}
MUON = {"reduce_scatter": False}


OPTIMIZERS = {
    "adam": (Job(optimizer="adam"), "torch `Adam`, `AdamW`, amsgrad"),
    "adamw": (Job(), "torch `Adam`, `AdamW`, amsgrad"),
    "amsgrad": (Job(optimizer="amsgrad"), "torch `Adam`, `AdamW`, amsgrad"),
    "sgd": (Job(optimizer="sgd"), "torch `SGD`, with and without momentum"),
    "plain_sgd": (Job(optimizer="plain_sgd"), "torch `SGD`, with and without momentum"),
    "rmsprop": (Job(optimizer="rmsprop"), "torch `RMSprop`"),
    "adagrad": (Job(optimizer="adagrad", groups=1), "torch `Adagrad`"),
    "adamax": (Job(optimizer="adamax"), "torch `Adamax`"),
    "nadam": (Job(optimizer="nadam"), "torch `NAdam`"),
    "radam": (Job(optimizer="radam"), "torch `RAdam`"),
    "adadelta": (Job(optimizer="adadelta"), "torch `Adadelta`"),
    "rprop": (Job(optimizer="rprop"), "torch `Rprop`, `ASGD`"),
    "asgd": (Job(optimizer="asgd"), "torch `Rprop`, `ASGD`"),
    "fused_adam": (Job(optimizer="fused_adam"), "DeepSpeed `FusedAdam`"),
    "cpu_adam": (Job(optimizer="cpu_adam"), "`DeepSpeedCPUAdam`"),
    "cpu_adam_offloaded": (Job(optimizer="cpu_adam", zero=CPU), "`DeepSpeedCPUAdam`"),
    "cpu_adagrad": (Job(optimizer="cpu_adagrad", zero=CPU), "`DeepSpeedCPUAdagrad`"),
    "cpu_lion": (Job(optimizer="cpu_lion", zero=CPU), "`DeepSpeedCPULion`"),
    "muon": (Job(optimizer="muon", zero=MUON), "Muon with its own Adam"),
    "muon_torch_adam": (Job(optimizer="muon_torch_adam", zero=MUON), "Muon with torch's Adam"),
    "muon_fused_adam": (Job(optimizer="muon_fused_adam", zero=MUON), "Muon with `FusedAdam`"),
    "muon_in_memory": (Job(optimizer="muon", zero=MUON | IN_MEMORY), "Muon, `save_muon_momentum_buffer_in_memory`"),
    "muon_offloaded": (Job(optimizer="muon", zero=MUON | CPU), "Muon, optimizer offloaded to the CPU"),
    "muon_offloaded_in_memory": (
        Job(optimizer="muon", zero=MUON | CPU | IN_MEMORY),
        "Muon, `save_muon_momentum_buffer_in_memory`",
    ),
    "lamb": (Job(optimizer="lamb"), "any other with state cut like the weights, and scalars"),
}


def masters(kind: str, **block: bool) -> Job:
    """16-bit master weights; DeepSpeed wants its own Adam on the CPU for them."""
    flags = {f"{kind}_master_weights_and_grads": True, **block}
    return Job(precision=kind, zero=CPU, config={kind: flags})


def autocast(dtype: str) -> Job:
    return Job(precision="fp32", config={"torch_autocast": {"enabled": True, "dtype": dtype}})


PRECISIONS = {
    "bf16": (Job(), "bf16"),
    "fp16_dynamic": (Job(precision="fp16"), "fp16, dynamic loss scale"),
    "fp16_static": (Job(precision="fp16", config={"fp16": {"loss_scale": 128}}), "fp16, static loss scale"),
    "fp32": (Job(precision="fp32"), "fp32"),
    "bf16_autocast": (autocast("bfloat16"), "torch autocast to bf16"),
    "fp16_autocast": (autocast("float16"), "torch autocast to fp16"),
    "bf16_masters": (replace(masters("bf16"), optimizer="cpu_adam"), "`bf16_master_weights_and_grads`"),
    "bf16_states": (
        replace(masters("bf16", bf16_optimizer_states=True), optimizer="cpu_adam_16"), "`bf16_optimizer_states`"
    ),
    "bf16_states_on_the_accelerator": (
        replace(masters("bf16", bf16_optimizer_states=True), zero={}), "`bf16_optimizer_states`"
    ),
    "fp16_masters": (replace(masters("fp16"), optimizer="cpu_adam"), "`fp16_master_weights_and_grads`"),
    "fp32_accumulation": (
        Job(config={"data_types": {"grad_accum_dtype": "fp32"}}, micro=2), "`data_types.grad_accum_dtype`"
    ),
}  # fmt: skip


BUCKETS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "overlap_comm": ({"overlap_comm": True}, {"overlap_comm": False}),
    "contiguous_gradients": ({"contiguous_gradients": True}, {"contiguous_gradients": False}),
    "buckets": (
        {"reduce_bucket_size": 100, "stage3_prefetch_bucket_size": 50, "stage3_max_live_parameters": 100},
        {"reduce_bucket_size": 10**7, "stage3_prefetch_bucket_size": 10**6, "stage3_max_reuse_distance": 0},
    ),
    "persistence": ({"stage3_param_persistence_threshold": 1000}, {"stage3_param_persistence_threshold": 0}),
    "reduce_scatter": ({"reduce_scatter": True}, {"reduce_scatter": False}),
}
