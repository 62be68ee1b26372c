"""``python -m zeroelastic.testing.sample ckpt``: checkpoints to try the command line on, made without a training job.

They are what a ZeRO-3 run of a small language model under bf16 and AdamW saves: two optimizer groups, tied
embeddings, a buffer, a frozen parameter, a scheduler and client state. The values are made up, from the step and the
parameter's name, so the same tag holds the same state at every world size.
"""

from __future__ import annotations

import argparse
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from zeroelastic._version import __version__
from zeroelastic.digest import ParamContent, ScalarValue, combine, content_root, stream_seed
from zeroelastic.executors import digest_range
from zeroelastic.layout import Layout, Param, layout_from_sub_groups, pack_sub_groups
from zeroelastic.record import (
    RECORD_NAME,
    RECORD_VERSION,
    CommitRecord,
    Versions,
    param_records,
    record_text,
    write_atomically,
)
from zeroelastic.shard import ELASTIC_VERSION
from zeroelastic.torchfile import directory_digest

STATES = ("exp_avg", "exp_avg_sq")
TIED, EMBEDDING, FROZEN_NAME, BUFFER = (
    "lm_head.weight",
    "model.embed_tokens.weight",
    "model.scale",
    "model.rotary.inv_freq",
)

_DEEPSPEED = "0.19.8"
_VOCABULARY = 250
_OPTIONS = ({"lr": 3e-4, "weight_decay": 0.1}, {"lr": 3e-4, "weight_decay": 0.0})


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
    """Write one tag for each step into ``root``, and ``latest``. What is there already is overwritten."""
    for step in steps:
        _write_tag(root / f"global_step{step}", world_size, step, hidden, layers, format, record, sub_group_size)
        (root / "latest").write_text(f"global_step{step}")


def _values(param: Param, key: str, step: int, dtype: torch.dtype) -> torch.Tensor:
    generator = np.random.default_rng([step, zlib.crc32(f"{key} {param.name}".encode())])
    values = torch.from_numpy(generator.standard_normal(param.numel, dtype=np.float32))
    return (values.square() if key == "exp_avg_sq" else values).to(dtype)


def _part(full: torch.Tensor, world_size: int, rank: int) -> torch.Tensor:
    """One rank's part of a flattened parameter, padded with zeros."""
    part = -(-full.numel() // world_size)
    padded = torch.zeros(part, dtype=full.dtype)
    piece = full[rank * part : (rank + 1) * part]
    padded[: len(piece)] = piece
    return padded


def _write_tag(
    tag_dir: Path, world_size: int, step: int, hidden: int, layers: int, format: str, record: bool, sub_group_size: int
) -> None:
    tag_dir.mkdir(parents=True, exist_ok=True)
    groups = sample_params(hidden, layers)
    sub_groups = pack_sub_groups(groups, world_size=world_size, sub_group_size=sub_group_size)
    layout = layout_from_sub_groups(sub_groups, world_size)
    frozen = Param(FROZEN_NAME, (hidden,))
    save_id = f"{zlib.crc32(str((step, world_size, hidden, layers)).encode()):032x}"
    config = {
        "train_batch_size": 24,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": sub_group_size,
            "elastic_checkpoint": format == "elastic",
        },
    }
    files: dict[str, int] = {}
    sums: dict[tuple[str, str], int] = {}
    for rank in range(world_size):
        flats = {
            key: [
                torch.cat([_part(_values(p, key, step, torch.float32), world_size, rank) for p in members])
                for members in sub_groups
            ]
            for key in ("fp32", *STATES)
        }
        digests = _digest(layout, rank, flats, sums)
        state = _optimizer_state(groups, layout, rank, flats, digests, step, save_id, elastic=format == "elastic")
        fragment = _part(_values(frozen, "frozen", step, torch.bfloat16), world_size, rank)
        names = (
            f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
            f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt",
        )
        torch.save({"optimizer_state_dict": state, "ds_config": config, "ds_version": _DEEPSPEED}, tag_dir / names[0])
        torch.save(_model_states(sub_groups, frozen, fragment, rank, world_size, step, config), tag_dir / names[1])
        files |= {name: (tag_dir / name).stat().st_size for name in names}
    (tag_dir / RECORD_NAME).unlink(missing_ok=True)
    if not record:
        return
    whole = _values(frozen, "frozen", step, torch.bfloat16).view(torch.uint8).numpy()
    scalar = {"step": ScalarValue("float32", float(step))}
    contents = [
        ParamContent(p, {key: ("float32", sums[p.name, key]) for key in ("fp32", *STATES)}, scalar)
        for p in layout.params
    ]
    digest = digest_range(whole, 2, seed=stream_seed(frozen.name, "frozen"), start=0)
    contents.append(ParamContent(frozen, {"frozen": ("bfloat16", digest)}, {}))
    made = CommitRecord(
        format_version=RECORD_VERSION,
        checkpoint_format="elastic" if format == "elastic" else "rigid",
        save_id=save_id,
        tag=tag_dir.name,
        world_size=world_size,
        global_steps=step,
        train_batch_size=24,
        versions=Versions(zeroelastic=__version__, deepspeed=_DEEPSPEED, torch=str(torch.__version__)),
        files=files,
        directories={name: directory_digest(tag_dir / name) or "" for name in files},
        params=param_records(contents, frozenset(param.name for param in layout.params)),
        content_root=content_root(contents),
    )
    write_atomically(tag_dir / RECORD_NAME, record_text(made))


def _digest(
    layout: Layout, rank: int, flats: dict[str, list[torch.Tensor]], sums: dict[tuple[str, str], int]
) -> torch.Tensor:
    """Add this rank's partial digests to ``sums``; returns their sums over state keys, int64 by parameter."""
    start, length = layout.owned(rank)
    own = [0] * layout.num_params
    for p, param in enumerate(layout.params):
        for key in flats:
            flat = flats[key][int(layout.sub_group[p])]
            piece = flat[int(layout.offset[p]) : int(layout.offset[p] + length[p])]
            seed = stream_seed(param.name, key)
            partial = digest_range(piece.view(torch.uint8).numpy(), 4, seed=seed, start=int(start[p]))
            sums[param.name, key] = combine(sums.get((param.name, key), 0), partial)
            own[p] = combine(own[p], partial)
    return torch.from_numpy(np.array(own, dtype=np.uint64).view(np.int64))


def _optimizer_state(
    groups: Sequence[Sequence[Param]],
    layout: Layout,
    rank: int,
    flats: dict[str, list[torch.Tensor]],
    digests: torch.Tensor,
    step: int,
    save_id: str,
    *,
    elastic: bool,
) -> dict[str, Any]:
    start, length = layout.owned(rank)
    group_of = {param.name: g for g, group in enumerate(groups) for param in group}
    members = [np.flatnonzero(layout.sub_group == i).tolist() for i in range(layout.num_sub_groups)]
    owner = [group_of[layout.params[own[0]].name] for own in members]
    options = [{**option, "betas": (0.9, 0.95), "eps": 1e-8, "amsgrad": False} for option in _OPTIONS]
    steps = [torch.tensor(float(step)) for _ in members]
    state: dict[str, Any] = {
        "zero_stage": 3,
        "loss_scaler": None,
        "dynamic_loss_scale": False,
        "overflow": False,
        "partition_count": layout.world_size,
        "fp32_flat_groups": [flat.detach().requires_grad_() for flat in flats["fp32"]],
        "optimizer_state_dict": {
            "state": {i: {"step": steps[i], **{key: flats[key][i] for key in STATES}} for i in range(len(members))},
            "param_groups": [
                {**options[g], "params": [i for i in range(len(members)) if owner[i] == g]} for g in range(len(groups))
            ],
        },
    }
    if not elastic:
        return state
    state["base_optimizer_state"] = [
        {
            "step": steps[i],
            **{
                key: [flats[key][i][int(layout.offset[p]) : int(layout.offset[p] + length[p])] for p in own]
                for key in STATES
            },
        }
        for i, own in enumerate(members)
    ]
    state["zeroelastic"] = {
        "format_version": ELASTIC_VERSION,
        "save_id": save_id,
        "world_size": layout.world_size,
        "rank": rank,
        "train_batch_size": 24,
        "sub_groups": [
            {
                "names": [layout.params[p].name for p in own],
                "shapes": [layout.params[p].shape for p in own],
                "offsets": [int(start[p]) for p in own],
                "numels": [int(length[p]) for p in own],
            }
            for own in members
        ],
        "digests": digests,
        "param_groups": [{**options[g], "params": [param.name for param in group]} for g, group in enumerate(groups)],
    }
    return state


def _model_states(
    sub_groups: Sequence[Sequence[Param]],
    frozen: Param,
    fragment: torch.Tensor,
    rank: int,
    world_size: int,
    step: int,
    config: dict[str, Any],
) -> dict[str, Any]:
    names = [param.name for members in sub_groups for param in members]
    hidden = frozen.shape[0]
    module: OrderedDict[str, torch.Tensor] = OrderedDict(
        (name, torch.empty(0, dtype=torch.bfloat16)) for name in (*names, frozen.name, TIED)
    )
    module[BUFFER] = 1.0 / 10000 ** (torch.arange(0, hidden, 2).float() / hidden)
    return {
        "module": module,
        "buffer_names": [BUFFER],
        "optimizer": None,
        "param_shapes": [OrderedDict((p.name, torch.Size(p.shape)) for p in members) for members in sub_groups],
        "frozen_param_shapes": OrderedDict([(frozen.name, torch.Size(frozen.shape))]),
        "shared_params": {TIED: EMBEDDING} if rank == 0 else {},
        "frozen_param_fragments": OrderedDict([(frozen.name, fragment)]),
        "lr_scheduler": {"last_batch_iteration": step},
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": 0,
        "global_steps": step,
        "global_samples": 24 * step,
        "dp_world_size": world_size,
        "mp_world_size": 1,
        "ds_config": config,
        "ds_version": _DEEPSPEED,
        "epoch": 0,
        "best_loss": 2.5,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line and write the sample."""
    parser = argparse.ArgumentParser(prog="python -m zeroelastic.testing.sample", description=__doc__)
    parser.add_argument("root", type=Path, help="directory to write the tags and latest into")
    parser.add_argument("--ranks", type=int, default=4, help="world size of the save (4)")
    parser.add_argument("--steps", type=int, nargs="+", default=[2, 4], help="one tag for each (2 4)")
    parser.add_argument("--hidden", type=int, default=24, help="width of the model, an even number (24)")
    parser.add_argument("--layers", type=int, default=2, help="layers of the model (2)")
    parser.add_argument("--sub-group-size", type=int, default=4000, help="as in the DeepSpeed configuration (4000)")
    parser.add_argument("--format", choices=("elastic", "rigid"), default="elastic")
    parser.add_argument("--no-record", action="store_true", help="leave the commit record out")
    chosen = parser.parse_args(arguments)
    write_sample(
        chosen.root,
        world_size=chosen.ranks,
        steps=chosen.steps,
        hidden=chosen.hidden,
        layers=chosen.layers,
        format=chosen.format,
        record=not chosen.no_record,
        sub_group_size=chosen.sub_group_size,
    )


if __name__ == "__main__":
    main()
