"""A Hugging Face Trainer job for the rank pool: a tiny Llama, samples that say which they are, and what a run saw.

Functions run on ranks, so they are at module level and take plain values. Nothing is downloaded.
"""

from __future__ import annotations

import json
import random
import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

GLOBAL_BATCH = 12  # divisible by 1, 2, 3 and 4
SAMPLES = 43  # three whole batches, and seven samples
VOCABULARY = 64
WORDS = torch.randint(0, VOCABULARY, (SAMPLES, 9), generator=torch.Generator().manual_seed(0))

DS_CONFIG = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 3,
        "elastic_checkpoint": True,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_gather_16bit_weights_on_model_save": True,
    },
}


@dataclass(frozen=True)
class TrainerJob:
    """How one run is configured; picklable. ``stop_at`` ends the run there, as somebody's scheduler would."""

    directory: str
    elastic: bool = True
    lora: bool = False
    micro: int | None = None
    stop_at: int | None = None
    resume: Any = None
    args: dict[str, Any] = field(default_factory=dict)
    zero: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    dropout: float = 0.0
    iterable: bool = False

    def at(self, **changes: Any) -> TrainerJob:
        return replace(self, **changes)


@dataclass(frozen=True)
class Seen:
    """What one rank saw of a run: the samples of its steps, the log, the state at the resume and at the end."""

    samples: list[list[int]]
    log: list[dict[str, Any]]
    resumed: Any
    report: Any
    first_generators: str
    max_steps: int
    groups: list[dict[str, Any]]
    final: Any
    micro_steps: int
    warnings: list[str]


class Words(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": WORDS[index], "labels": WORDS[index], "index": index}


class WordStream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        return (Words()[index] for index in range(SAMPLES))

    def __len__(self) -> int:
        return SAMPLES


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    batch = {key: torch.stack([row[key] for row in rows]) for key in ("input_ids", "labels")}
    return {**batch, "index": torch.tensor([row["index"] for row in rows])}


def generators() -> str:
    return f"{random.getstate()[1][:3]} {np.random.get_state()[1][:3]} {torch.get_rng_state().sum()} {torch.initial_seed()}"


def run_trainer(job: TrainerJob) -> Seen:
    """Build a Trainer as a script does, train, and tell what was seen. Collective."""
    import transformers
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

    import zeroelastic
    from zeroelastic.integrations.batch import plan_batch
    from zeroelastic.testing import fingerprint, gather_state

    transformers.utils.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    plan = plan_batch(GLOBAL_BATCH, world_size=dist.get_world_size(), max_micro=job.micro or 3)
    zero = {**DS_CONFIG["zero_optimization"], **job.zero}
    args = TrainingArguments(
        **{
            "output_dir": job.directory,
            "per_device_train_batch_size": plan.micro,
            "gradient_accumulation_steps": plan.accumulation,
            "use_cpu": True,
            "bf16": True,
            "deepspeed": json.loads(json.dumps({**DS_CONFIG, **job.config, "zero_optimization": zero})),
            "num_train_epochs": 3,
            "learning_rate": 1e-2,
            "weight_decay": 0.1,
            "warmup_steps": 2,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
            "remove_unused_columns": False,
            **job.args,
        }
    )
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_dropout=job.dropout,
    )
    torch.manual_seed(7)
    model = LlamaForCausalLM(config)
    if job.lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=3, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))

    samples: list[list[int]] = []
    seen: dict[str, Any] = {"generators": "", "resumed": None, "micro": 0}

    class Watch(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen["report"] = getattr(trainer.model_wrapped, "zeroelastic_report", None)
            seen["resumed"] = fingerprint(gather_state(trainer.model_wrapped))

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen["generators"] = seen["generators"] or generators()
            samples.append([])

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == job.stop_at:
                control.should_training_stop = True
                control.should_save = True

    class WatchedTrainer(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *rest: Any, **kwargs: Any) -> Any:
            seen["micro"] += 1
            samples[-1] += inputs.pop("index").tolist()
            return super().compute_loss(model, inputs, *rest, **kwargs)

        def prediction_step(self, model: Any, inputs: Any, *rest: Any, **kwargs: Any) -> Any:
            inputs.pop("index")
            return super().prediction_step(model, inputs, *rest, **kwargs)

    if not job.elastic:
        zeroelastic.install()
    trainer = WatchedTrainer(
        model=model,
        args=args,
        train_dataset=WordStream() if job.iterable else Words(),
        eval_dataset=Words(),
        data_collator=collate,
        callbacks=[],
    )
    if job.elastic:
        from zeroelastic.integrations.transformers import elastic

        assert elastic(trainer) is trainer
    trainer.add_callback(Watch())
    trainer.train(resume_from_checkpoint=job.resume)
    engine = trainer.model_wrapped
    shared: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shared, samples)
    return Seen(
        samples=[sorted(index for rank in shared for index in rank[step]) for step in range(len(samples))],
        log=[entry for entry in trainer.state.log_history if "loss" in entry],
        resumed=seen["resumed"],
        report=seen["report"],
        first_generators=seen["generators"],
        max_steps=trainer.state.max_steps,
        groups=[{k: v for k, v in group.items() if k != "params"} for group in engine.optimizer.param_groups],
        final=fingerprint(gather_state(engine)),
        micro_steps=seen["micro"],
        warnings=[],
    )


def attempt(job: TrainerJob) -> tuple[str, str]:
    """The type and text of the error that a run raises on this rank."""
    try:
        run_trainer(job)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def saved_steps(directory: str) -> list[int]:
    return sorted(int(path.name.removeprefix("checkpoint-")) for path in Path(directory).glob("checkpoint-*"))
