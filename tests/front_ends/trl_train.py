"""SFT and DPO with TRL, as TRL's own scripts do it: no line of it knows of zeroelastic."""

from __future__ import annotations

import sys

from datasets import load_dataset
from transformers import AutoTokenizer, HfArgumentParser
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

kind, data, model = sys.argv[1:4]
config_class, trainer_class = {"sft": (SFTConfig, SFTTrainer), "dpo": (DPOConfig, DPOTrainer)}[kind]
(args,) = HfArgumentParser(config_class).parse_args_into_dataclasses(sys.argv[4:])
columns = {"sft": ["text"], "dpo": ["prompt", "chosen", "rejected"]}[kind]
trainer = trainer_class(
    model=model,
    args=args,
    train_dataset=load_dataset("json", data_files=data, split="train").select_columns(columns),
    processing_class=AutoTokenizer.from_pretrained(model),
)
trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
