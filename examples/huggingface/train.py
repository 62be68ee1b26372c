"""Fine-tune with the Hugging Face Trainer and ZeRO, plainly or with LoRA, on whatever number of ranks there is.

An ordinary Trainer script. Two things in it serve resuming at another world size, each marked "elastic". The model is a
tiny Llama made from a configuration and the text is this file's own, so nothing is downloaded.

    torchrun --nproc_per_node 4 examples/huggingface/train.py --output-dir out --stop-at 6
    torchrun --nproc_per_node 3 examples/huggingface/train.py --output-dir out

Set `DS_ACCELERATOR=cpu OMP_NUM_THREADS=1` to train without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

from zeroelastic.integrations.transformers import batch_args, elastic

HERE = Path(__file__).parent
BLOCK = 32


class Text(torch.utils.data.Dataset):
    """This file, byte by byte, in blocks."""

    def __init__(self) -> None:
        text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()
        self.blocks = text[: len(text) // BLOCK * BLOCK].view(-1, BLOCK)

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.blocks[index], "labels": self.blocks[index]}


class StopAt(TrainerCallback):
    """Save and end the run at a step, as a lost machine or a scheduler would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            control.should_save = control.should_training_stop = True


def build_model(lora: bool):
    set_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=BLOCK, **sizes))
    if lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description="Fine-tune a tiny Llama; goes on from the newest checkpoint.")
    parser.add_argument("--output-dir", required=True)
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--max-steps", type=int, default=10)
    parser.add_argument("--stop-at", type=int, default=-1)
    parser.add_argument("--deepspeed", default="ds.json", help="ds.json (ZeRO-3) or ds_z2.json (ZeRO-2)")
    parser.add_argument("--metrics", help="write the log and the resume report to this file")
    options = parser.parse_args()

    args = TrainingArguments(
        output_dir=options.output_dir,
        **batch_args(global_batch=24, max_per_device=4),  # elastic: the same global batch on any number of ranks
        deepspeed=str(HERE / options.deepspeed),
        bf16=True,
        use_cpu=not torch.cuda.is_available(),
        learning_rate=1e-3,
        weight_decay=0.1,
        warmup_steps=2,
        max_steps=options.max_steps,
        save_strategy="no",
        logging_steps=1,
        report_to=[],
    )
    trainer = Trainer(
        model=build_model(options.lora), args=args, train_dataset=Text(), callbacks=[StopAt(options.stop_at)]
    )
    elastic(trainer)  # elastic: state, place in the data and generators go on at any world size
    last = get_last_checkpoint(options.output_dir) if os.path.isdir(options.output_dir) else None
    trainer.train(resume_from_checkpoint=last)

    report = getattr(trainer.model_wrapped, "zeroelastic_report", None)
    if trainer.is_world_process_zero():
        if report is not None:
            print(report.text())
        if options.metrics:
            log = [entry for entry in trainer.state.log_history if "loss" in entry]
            Path(options.metrics).write_text(json.dumps({"log": log, "report": report and report.to_dict()}))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
