"""``python examples/checkpoints/sample.py ckpt``: checkpoints to try the command line on, made without a training job.

They are what a ZeRO-3 run of a small language model under bf16 and AdamW saves: two optimizer groups, tied
embeddings, a buffer, a frozen parameter, a scheduler and client state. The values are made up, from the step and the
parameter's name, so the same tag holds the same state at every world size. One rank's files are written as stock
DeepSpeed writes them, and resharded.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from zeroelastic.checkpoint.commit_record import RECORD_NAME
from zeroelastic.core.layout import Param
from zeroelastic.verbs.reshard.reshard import reshard

STATES = ("exp_avg", "exp_avg_sq")
TIED, EMBEDDING, FROZEN_NAME, BUFFER = (
    "lm_head.weight",
    "model.embed_tokens.weight",
    "model.scale",
    "model.rotary.inv_freq",
)

_VOCABULARY = 250
_BATCH = 24
_WEIGHT_DECAY = (0.1, 0.0)


def sample_params(hidden: int, layers: int) -> tuple[tuple[Param, ...], tuple[Param, ...]]:
    """The two optimizer groups of the model: matrices, which decay, and vectors, which do not."""
    matrices, vectors = [Param(EMBEDDING, (_VOCABULARY, hidden))], []
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        matrices += [Param(f"{prefix}.self_attn.{name}_proj.weight", (hidden, hidden)) for name in "qkvo"]
        matrices += [Param(f"{prefix}.mlp.up_proj.weight", (4 * hidden, hidden))]
        matrices += [Param(f"{prefix}.mlp.down_proj.weight", (hidden, 4 * hidden))]
        vectors += [Param(f"{prefix}.{name}_norm.weight", (hidden,)) for name in ("input", "post_attention")]
    return tuple(matrices), (*vectors, Param("model.norm.weight", (hidden,)))


def sample_values(param: Param, key: str, step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The flat tensor that the tag of a step has for a parameter under "fp32", "frozen" or a key of ``STATES``."""
    generator = np.random.default_rng([step, zlib.crc32(f"{key} {param.name}".encode())])
    values = torch.from_numpy(generator.standard_normal(param.numel, dtype=np.float32))
    return (values.square() if key == "exp_avg_sq" else values).to(dtype)


def write_sample(
    root: Path,
    *,
    world_size: int = 4,
    steps: Sequence[int] = (2, 4),
    hidden: int = 24,
    layers: int = 2,
    format: Literal["elastic", "rigid"] = "elastic",
    record: bool = True,
    sub_group_size: int = 4000,
) -> None:
    """Write one tag for each step into ``root``, and ``latest``. What is there already is overwritten.

    ``record`` False leaves out the commit record, as in a tag that stock DeepSpeed saved.

        write_sample(Path("ckpt"), world_size=3, steps=[10])
    """
    root.mkdir(parents=True, exist_ok=True)
    for step in steps:
        tag = f"global_step{step}"
        with tempfile.TemporaryDirectory(dir=root) as directory:
            whole, parts = Path(directory, "whole"), Path(directory, "parts")
            _write_one_rank(whole / tag, step, hidden, layers, format, sub_group_size)
            (whole / "latest").write_text(tag)
            reshard(whole, parts, world_size=world_size, format=format, sub_group_size=sub_group_size)
            if not record:
                (parts / tag / RECORD_NAME).unlink()
            shutil.rmtree(root / tag, ignore_errors=True)
            (parts / tag).rename(root / tag)
        (root / "latest").write_text(tag)


def _write_one_rank(tag_dir: Path, step: int, hidden: int, layers: int, format: str, sub_group_size: int) -> None:
    """Write what stock DeepSpeed saves at stage 3 on one rank."""
    groups = sample_params(hidden, layers)
    frozen = Param(FROZEN_NAME, (hidden,))
    flats = {
        key: [torch.cat([sample_values(param, key, step) for param in group]) for group in groups]
        for key in ("fp32", *STATES)
    }
    adam = {"betas": (0.9, 0.95), "eps": 1e-8, "amsgrad": False}
    optimizer_state: dict[str, Any] = {
        "zero_stage": 3,
        "loss_scaler": None,
        "dynamic_loss_scale": False,
        "overflow": False,
        "partition_count": 1,
        "fp32_flat_groups": [flat.requires_grad_() for flat in flats["fp32"]],
        "optimizer_state_dict": {
            "state": {
                g: {"step": torch.tensor(float(step)), **{key: flats[key][g] for key in STATES}}
                for g in range(len(groups))
            },
            "param_groups": [
                {"lr": 3e-4, "weight_decay": decay, **adam, "params": [g]} for g, decay in enumerate(_WEIGHT_DECAY)
            ],
        },
    }
    partitioned = [*(param.name for group in groups for param in group), FROZEN_NAME, TIED]
    module = OrderedDict((name, torch.empty(0, dtype=torch.bfloat16)) for name in partitioned)
    module[BUFFER] = 1.0 / 10000 ** (torch.arange(0, hidden, 2).float() / hidden)
    model_states: dict[str, Any] = {
        "module": module,
        "buffer_names": [BUFFER],
        "param_shapes": [OrderedDict((p.name, torch.Size(p.shape)) for p in group) for group in groups],
        "frozen_param_shapes": OrderedDict([(FROZEN_NAME, torch.Size(frozen.shape))]),
        "frozen_param_fragments": OrderedDict([(FROZEN_NAME, sample_values(frozen, "frozen", step, torch.bfloat16))]),
        "shared_params": {TIED: EMBEDDING},
        "lr_scheduler": {"last_batch_iteration": step},
        "skipped_steps": 0,
        "global_steps": step,
        "global_samples": _BATCH * step,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "epoch": 0,
        "best_loss": 2.5,
    }
    zero = {"stage": 3, "sub_group_size": sub_group_size, "elastic_checkpoint": format == "elastic"}
    config = {"train_batch_size": _BATCH, "bf16": {"enabled": True}, "zero_optimization": zero}
    both = {"ds_config": config, "ds_version": "0.19.8"}
    tag_dir.mkdir(parents=True)
    torch.save(
        {"optimizer_state_dict": optimizer_state, **both}, tag_dir / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    )
    torch.save(model_states | both, tag_dir / "zero_pp_rank_0_mp_rank_00_model_states.pt")


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line and write the sample."""
    parser = argparse.ArgumentParser(prog="python examples/checkpoints/sample.py", description=__doc__)
    parser.add_argument("root", type=Path, help="directory to write the tags and latest into")
    parser.add_argument("--ranks", dest="world_size", type=int, default=4, help="world size of the save (4)")
    parser.add_argument("--steps", type=int, nargs="+", default=[2, 4], help="one tag for each (2 4)")
    chosen = vars(parser.parse_args(arguments))
    write_sample(chosen.pop("root"), **chosen)


if __name__ == "__main__":
    main()
