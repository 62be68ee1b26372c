"""How each front end is started: its own command line, and what a user would put into its configuration.

Nothing here names zeroelastic: that comes from the environment alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
STEPS, SAVE_STEPS, MICRO = 12, 4, 3
"""Of a run; the micro batch is for 2 ranks and is never changed by hand."""


@dataclass(frozen=True)
class Run:
    """One run of a front end: where its model and data are, and which checkpoint it resumes."""

    task: Path
    out: Path
    stage: int
    ranks: int
    resume: Path | None = None


@dataclass(frozen=True)
class Command:
    """A program of the front end's environment (None: its Python), its arguments and environment variables."""

    program: str | None
    arguments: list[str]
    env: dict[str, str] = field(default_factory=dict)


def _torchrun(ranks: int) -> list[str]:
    address = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    return ["-m", "torch.distributed.run", "--nproc_per_node", str(ranks), *address]


def _options(values: dict[str, object]) -> list[str]:
    return [text for name, value in values.items() for text in (f"--{name}", str(value))]


def _trainer_arguments(run: Run) -> dict[str, object]:
    found: dict[str, object] = {
        "output_dir": run.out,
        "max_steps": STEPS,
        "save_steps": SAVE_STEPS,
        "logging_steps": 1,
        "per_device_train_batch_size": MICRO,
        "learning_rate": 1e-2,
        "report_to": "none",
        "use_cpu": "true",
        "bf16": "false",
    }
    return found | ({"resume_from_checkpoint": run.resume} if run.resume else {})


def trl(kind: str) -> Callable[[Run], Command]:
    def command(run: Run) -> Command:
        script = [str(HERE / "trl_train.py"), kind, str(run.task / f"{kind}.jsonl"), str(run.task / "model")]
        own = {"deepspeed": run.task / f"z{run.stage}.json", "disable_tqdm": "true", "max_length": 32}
        own |= {"gradient_checkpointing": "false"}
        return Command(None, [*_torchrun(run.ranks), *script, *_options(_trainer_arguments(run) | own)])

    return command


def llamafactory(run: Run) -> Command:
    columns = {"prompt": "instruction", "query": "input", "response": "output"}
    (run.task / "dataset_info.json").write_text(json.dumps({"tiny": {"file_name": "sft.jsonl", "columns": columns}}))
    config: dict[str, object] = {
        "model_name_or_path": run.task / "model",
        "stage": "sft",
        "do_train": "true",
        "finetuning_type": "full",
        "dataset": "tiny",
        "dataset_dir": run.task,
        "template": "empty",
        "cutoff_len": 32,
        "preprocessing_num_workers": 1,
        "overwrite_cache": "true",
        "disable_gradient_checkpointing": "true",
        "gradient_accumulation_steps": 1,
        "deepspeed": run.task / f"z{run.stage}.json",
        **_trainer_arguments(run),
    }
    path = run.out.with_suffix(".yaml")
    path.write_text("".join(f"{name}: {value}\n" for name, value in config.items()))
    return Command("llamafactory-cli", ["train", str(path)], {"FORCE_TORCHRUN": "1", "NPROC_PER_NODE": str(run.ranks)})


def ms_swift(run: Run) -> Command:
    own: dict[str, object] = {
        "model": run.task / "model",
        "model_type": "llama",
        "template": "dummy",
        "tuner_type": "full",
        "dataset": run.task / "sft-messages.jsonl",
        "split_dataset_ratio": 0,
        "dataset_num_proc": 1,
        "dataloader_num_workers": 0,
        "deepspeed": f"zero{run.stage}",
        "attn_impl": "eager",
        "gradient_accumulation_steps": 1,
        "gradient_checkpointing": "false",
        "add_version": "false",
        "max_length": 32,
    }
    rows = map(json.loads, (run.task / "sft.jsonl").read_text().splitlines())
    lines = [json.dumps({"messages": row["messages"]}) + "\n" for row in rows]
    (run.task / "sft-messages.jsonl").write_text("".join(lines))
    own = _trainer_arguments(run) | own | {"bf16": "true", "fp16": "false"}  # it would take fp16
    return Command("swift", ["sft", *_options(own)], {"NPROC_PER_NODE": str(run.ranks)})


def openrlhf(run: Run) -> Command:
    """Its batch is the global one; the micro batch has to be one that the ranks can share."""
    options: dict[str, object] = {
        "model.model_name_or_path": run.task / "model",
        "data.dataset": run.task / "openrlhf",
        "data.input_key": "instruction",
        "data.output_key": "output",
        "data.input_template": "{}",
        "data.max_len": 32,
        "data.max_samples": STEPS * MICRO * 2,
        "train.batch_size": MICRO * 2,
        "train.micro_batch_size": {2: 3, 3: 2, 1: 3}[run.ranks],
        "train.max_epochs": 1,
        "adam.lr": 1e-2,
        "ds.zero_stage": run.stage,
        "ds.attn_implementation": "eager",
        "ckpt.save_steps": SAVE_STEPS,
        "ckpt.path": run.out / "ckpt",
        "ckpt.output_dir": run.out / "model",
    }
    (run.task / "openrlhf").mkdir(exist_ok=True)
    (run.task / "openrlhf/train.jsonl").write_text((run.task / "sft.jsonl").read_text())
    arguments = [*_torchrun(run.ranks), "-m", "openrlhf.cli.train_sft", *_options(options)]
    return Command(None, arguments + (["--ckpt.load_enable"] if run.resume else []), {"FRONT_END_SHIM": "openrlhf"})


@dataclass(frozen=True)
class FrontEnd:
    """``environment`` is that of ``requirements``; ``saves`` names the checkpoint of a step in a run's directory."""

    environment: str
    command: Callable[[Run], Command]
    saves: str = "checkpoint-{}"


FRONT_ENDS = {
    "TRL SFT": FrontEnd("trl", trl("sft")),
    "TRL DPO": FrontEnd("trl", trl("dpo")),
    "LLaMA-Factory": FrontEnd("llamafactory", llamafactory),
    "ms-swift": FrontEnd("ms-swift", ms_swift),
    "OpenRLHF train_sft": FrontEnd("openrlhf", openrlhf, "ckpt/global_step{}"),
}
