"""A tiny model and data for any front end, as files: ``python task.py DIR``. Nothing is downloaded.

Every sample begins with a word of its own (s0 to s99), so that the tokens of a batch tell which samples it has.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

SAMPLES = 100
FIRST_SAMPLE_TOKEN = 100
"""The token of s0; the words of samples follow each other."""
TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


def make(directory: Path) -> None:
    """Write ``model``, ``sft.jsonl``, ``dpo.jsonl`` and the DeepSpeed configurations ``z2.json`` and ``z3.json``."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    directory.mkdir(parents=True, exist_ok=True)
    words = ["<pad>", "<unk>", "<s>", "</s>", *(f"w{n}" for n in range(FIRST_SAMPLE_TOKEN - 4))]
    words += [f"s{n}" for n in range(SAMPLES)]
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        model_max_length=64,
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(directory / "model")
    torch.manual_seed(7)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(
        vocab_size=256, bos_token_id=2, eos_token_id=3, pad_token_id=0, max_position_embeddings=64, **sizes
    )
    LlamaForCausalLM(config).save_pretrained(directory / "model")

    chooser = random.Random(0)

    def words_of(count: int) -> str:
        return " ".join(f"w{chooser.randrange(96)}" for _ in range(count))

    with open(directory / "sft.jsonl", "w") as sft, open(directory / "dpo.jsonl", "w") as dpo:
        for n in range(SAMPLES):
            prompt, answer, other = f"s{n} {words_of(3)}", f"{words_of(6)} </s>", f"{words_of(6)} </s>"
            row = {"text": f"{prompt} {answer}", "instruction": prompt, "input": "", "output": answer}
            row |= {"messages": [_message("user", prompt), _message("assistant", answer)]}
            sft.write(json.dumps(row) + "\n")
            dpo.write(json.dumps({"prompt": prompt, "chosen": answer, "rejected": other}) + "\n")
    for stage in (2, 3):
        (directory / f"z{stage}.json").write_text(json.dumps(deepspeed_config(stage), indent=1))


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def deepspeed_config(stage: int) -> dict[str, object]:
    """As the front ends ship them: every batch setting "auto", no word of zeroelastic."""
    zero: dict[str, object] = {"stage": stage, "overlap_comm": False, "contiguous_gradients": True}
    if stage == 2:
        zero |= {"round_robin_gradients": True, "reduce_bucket_size": 5e8, "allgather_bucket_size": 5e8}
    return {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": "auto"},
        "zero_optimization": zero,
    }


if __name__ == "__main__":
    make(Path(sys.argv[1]))
