"""A Hugging Face Trainer job for the rank pool: a tiny Llama, samples that say which they are, and what a run saw.

Functions run on ranks, so they are at module level and take plain values. Nothing is downloaded.
"""

from __future__ import annotations

import hashlib
import json
import logging
import random
import shutil
import sys
import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from places import ROOT
from saved_files import logged
from training import allow_fp16_on_cpu, raised, save_slowly

GLOBAL_BATCH = 12  # divisible by 1, 2, 3 and 4
SAMPLES = 43  # three whole batches, and seven samples
VOCABULARY = 64
WORDS = torch.randint(0, VOCABULARY, (SAMPLES, 9), generator=torch.Generator().manual_seed(0))

EXAMPLES = ROOT / "examples/huggingface"


def example_config(name: str) -> dict[str, Any]:
    """A configuration of the example, without its options of zeroelastic."""
    return {**json.loads((EXAMPLES / name).read_text()), "zeroelastic": {}}


CONFIGS = {3: example_config("ds.json"), 2: example_config("ds_z2.json")}
"""By ZeRO stage."""
CONFIGS[1] = {**CONFIGS[2], "zero_optimization": {**CONFIGS[2]["zero_optimization"], "stage": 1}}

OFFLOADED = {"offload_optimizer": {"device": "cpu", "pin_memory": True}}


@dataclass(frozen=True)
class TrainerJob:
    """How one run is configured; picklable. ``stop_at`` ends the run there, as somebody's scheduler would.

    ``zero`` and ``config`` are added to the example's configuration of the ZeRO stage. Not ``elastic``, it is a script
    that calls ``zeroelastic.install()`` alone, and not ``installed``, one without zeroelastic.
    """

    directory: str
    stage: int = 3
    precision: str = "bf16"
    elastic: bool = True
    installed: bool = True
    lora: bool = False
    stop_at: int | None = None
    resume: Any = None
    args: dict[str, Any] = field(default_factory=dict)
    zero: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    dropout: float = 0.0
    iterable: bool = False
    model_seed: int = 7
    slow_saves: bool = False
    """A save in the background is written a second later."""

    def at(self, **changes: Any) -> TrainerJob:
        return replace(self, **changes)


@dataclass(frozen=True)
class Seen:
    """What one rank saw of a run, by step: samples of all ranks, log, generators, and the state at saves and resume."""

    first_step: int
    samples: dict[int, list[int]]
    losses: dict[int, float]
    rates: dict[int, float]
    generators: dict[int, str]
    saved: dict[int, Any]
    resumed: Any
    report: Any
    max_steps: int
    num_groups: int
    optimizer: str
    final: Any
    micro_steps: int
    weights_file: dict[str, Any]
    complete: list[list[int]] = field(default_factory=list)
    said: list[str] = field(default_factory=list)


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
    """This rank's generators of Python, numpy and torch, as a hash."""
    numpy_state = np.random.get_state()
    assert isinstance(numpy_state, tuple)
    states = (repr(random.getstate()), numpy_state[1].tobytes(), torch.get_rng_state().numpy().tobytes())
    return hashlib.sha256(repr(states).encode()).hexdigest()


def run_trainer(job: TrainerJob) -> Seen:
    """Build a Trainer as a script does, train, and tell what was seen. Collective."""
    import transformers
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

    import zeroelastic
    from zeroelastic.integrations.transformers import batch_args
    from zeroelastic.testing import fingerprint, gather_state

    transformers.utils.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    if job.precision == "fp16":
        allow_fp16_on_cpu()
    config = {**CONFIGS[job.stage], **job.config}
    config["zero_optimization"] = {**config["zero_optimization"], **job.zero}
    config["zeroelastic"] = {"format": "elastic", **config["zeroelastic"]}
    args = TrainingArguments(
        **{
            "output_dir": job.directory,
            **batch_args(global_batch=GLOBAL_BATCH, max_per_device=3),
            "use_cpu": True,
            job.precision: True,
            "deepspeed": json.loads(json.dumps(config)),
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
    torch.manual_seed(job.model_seed)
    model = LlamaForCausalLM(config)
    if job.lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=3, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))

    if job.slow_saves:
        save_slowly()
    said = logged("", logging.WARNING)
    complete: list[list[int]] = []
    mine: dict[int, list[int]] = {}
    seen: dict[str, Any] = {"micro": 0, "generators": {}, "saved": {}, "report": None, "resumed": None, "first": 0}

    class Watch(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen["first"] = state.global_step
            seen["report"] = getattr(trainer.model_wrapped, "zeroelastic_report", None)
            seen["resumed"] = fingerprint(gather_state(trainer.model_wrapped))

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen["generators"][state.global_step] = generators()
            mine[state.global_step] = []

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == job.stop_at:
                control.should_training_stop = True

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            complete.append(complete_steps(job.directory))
            seen["saved"][state.global_step] = fingerprint(gather_state(trainer.model_wrapped))

    class WatchedTrainer(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *rest: Any, **kwargs: Any) -> Any:
            seen["micro"] += 1
            mine[self.state.global_step] += inputs.pop("index").tolist()
            return super().compute_loss(model, inputs, *rest, **kwargs)

        def prediction_step(self, model: Any, inputs: Any, *rest: Any, **kwargs: Any) -> Any:
            inputs.pop("index")
            with torch.no_grad():
                return super().compute_loss(model, inputs).detach(), None, None

    if job.installed and not job.elastic:
        zeroelastic.install()
    trainer = WatchedTrainer(
        model=model,
        args=args,
        train_dataset=WordStream() if job.iterable else Words(),
        eval_dataset=Words(),
        data_collator=collate,
        callbacks=[],
    )
    if job.installed and job.elastic:
        from zeroelastic.integrations.transformers import elastic

        assert elastic(trainer) is trainer
    trainer.add_callback(Watch())
    trainer.train(resume_from_checkpoint=job.resume)
    engine = trainer.model_wrapped
    shared: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shared, mine)
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    return Seen(
        first_step=seen["first"],
        samples={step: sorted(index for rank in shared for index in rank[step]) for step in mine},
        losses={entry["step"]: entry["loss"] for entry in log},
        rates={entry["step"]: entry["learning_rate"] for entry in log},
        generators=seen["generators"],
        saved=seen["saved"],
        resumed=seen["resumed"],
        report=seen["report"],
        max_steps=trainer.state.max_steps,
        num_groups=len(engine.optimizer.param_groups),
        optimizer=type(engine.optimizer.optimizer).__name__,
        final=fingerprint(gather_state(engine)),
        micro_steps=seen["micro"],
        weights_file=weights_file(Path(job.directory) / f"checkpoint-{trainer.state.global_step}"),
        complete=complete,
        said=said,
    )


def weights_file(checkpoint: Path) -> dict[str, Any]:
    """The fingerprints of what a checkpoint's model.safetensors holds; empty where there is none."""
    from safetensors.torch import load_file

    from zeroelastic.testing import fingerprint

    path = checkpoint / "model.safetensors"
    return fingerprint(load_file(path)) if path.exists() else {}


def attempt(job: TrainerJob) -> tuple[str, str]:
    """The type and text of the error that a run raises on this rank."""
    return raised(lambda: run_trainer(job))


def removals(job: TrainerJob, fail_at: int | None) -> tuple[list[tuple[int, list[int]]], list[str]]:
    """The checkpoints that a run removes, each with those that were complete then, and what was said.

    The save of step ``fail_at`` cannot be written to its end.
    """
    from zeroelastic.deepspeed.save.save import Save

    remove, commit = shutil.rmtree, Save.commit
    removed: list[tuple[int, list[int]]] = []

    def watched(path: Any, *args: Any, **kwargs: Any) -> None:
        if Path(path).name.startswith("checkpoint-"):
            removed.append((int(Path(path).name.removeprefix("checkpoint-")), complete_steps(job.directory)))
        remove(path, *args, **kwargs)

    def failing(self: Any, *args: Any) -> None:
        if self.destination.tag_dir.name == f"global_step{fail_at}":
            raise OSError("no space left on device")
        commit(self, *args)

    with patch.object(shutil, "rmtree", watched), patch.object(Save, "commit", failing):
        seen = run_trainer(job)
    return removed, seen.said


def saved_steps(directory: str) -> list[int]:
    return sorted(int(path.name.removeprefix("checkpoint-")) for path in Path(directory).glob("checkpoint-*"))


def complete_steps(directory: str) -> list[int]:
    """The steps whose checkpoints have a commit record."""
    return [
        step for step in saved_steps(directory) if any(Path(directory).glob(f"checkpoint-{step}/*/zeroelastic.json"))
    ]


def generators_of_a_new_rank(seed: int, step: int, rank: int) -> str:
    from zeroelastic.elastic.position import seed_generators

    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        seed_generators(f"transformers {seed} {step}", rank)
        return generators()
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])


def refusals(directory: str) -> dict[str, str]:
    """What elastic() and batch_args() say to each setting that they cannot do right."""
    preloaded = str("transformers.trainer" in sys.modules)
    from transformers import Trainer, TrainingArguments

    from zeroelastic import ZeroElasticError
    from zeroelastic.integrations.transformers import batch_args, elastic

    try:
        batch = str(batch_args(global_batch=24, max_per_device=4, world_size=5))
    except ZeroElasticError as error:
        batch = str(error)

    class Weighted(Trainer):
        def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
            return torch.utils.data.WeightedRandomSampler([1.0] * SAMPLES, SAMPLES)

    def refusal(kind: Any = Trainer, **settings: Any) -> str:
        common = {"output_dir": directory, "use_cpu": True, "report_to": [], "remove_unused_columns": False}
        trainer = kind(model=torch.nn.Linear(2, 2), args=TrainingArguments(**common, **settings), train_dataset=Words())
        try:
            elastic(trainer).get_train_dataloader()
            elastic(trainer)
        except ZeroElasticError as error:
            return str(error)
        return ""

    return {
        "preloaded": preloaded,
        "batch": batch,
        "group_by_length": refusal(train_sampling_strategy="group_by_length"),
        "batch_rebalance": refusal(train_sampling_strategy="batch_rebalance"),
        "auto_find_batch_size": refusal(auto_find_batch_size=True),
        "split_batches": refusal(accelerator_config={"split_batches": True}),
        "dispatch_batches": refusal(accelerator_config={"dispatch_batches": True}),
        "twice": refusal(),
        "sampler": refusal(Weighted),
        "too_few": refusal(per_device_train_batch_size=64, dataloader_drop_last=True),
    }
