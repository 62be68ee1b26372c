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

from zeroelastic._version import __version__
from zeroelastic.checkpoint.commit_record import RECORD_NAME, RECORD_VERSION, CommitRecord, Versions, record_text
from zeroelastic.checkpoint.optimizer_file import elastic_table
from zeroelastic.checkpoint.param_table import param_records, params_digest
from zeroelastic.core.digest import ParamContent, ScalarValue, combine, content_root, stream_seed
from zeroelastic.core.layout import Layout, Param, layout_from_sub_groups, pack_sub_groups, partition_numel
from zeroelastic.executors.dispatch import digest_range
from zeroelastic.extras import require_torch
from zeroelastic.io.atomic import write_atomically
from zeroelastic.torch_file.header import directory_digest

require_torch("zeroelastic.testing.sample")

import torch  # noqa: E402

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
        tag_dir = root / f"global_step{step}"
        tag_dir.mkdir(parents=True, exist_ok=True)
        (tag_dir / RECORD_NAME).unlink(missing_ok=True)
        made = _write_tag(tag_dir, world_size, step, hidden, layers, format, sub_group_size)
        if record:
            write_atomically(tag_dir / RECORD_NAME, record_text(made))
        (root / "latest").write_text(tag_dir.name)


def _values(param: Param, key: str, step: int, dtype: torch.dtype) -> torch.Tensor:
    generator = np.random.default_rng([step, zlib.crc32(f"{key} {param.name}".encode())])
    values = torch.from_numpy(generator.standard_normal(param.numel, dtype=np.float32))
    return (values.square() if key == "exp_avg_sq" else values).to(dtype)


def _part(full: torch.Tensor, world_size: int, rank: int) -> torch.Tensor:
    """One rank's part of a flattened parameter, padded with zeros."""
    part = partition_numel(full.numel(), world_size)
    padded = torch.zeros(part, dtype=full.dtype)
    piece = full[rank * part : (rank + 1) * part]
    padded[: len(piece)] = piece
    return padded


def _write_tag(
    tag_dir: Path,
    world_size: int,
    step: int,
    hidden: int,
    layers: int,
    format: Literal["elastic", "rigid"],
    sub_group_size: int,
) -> CommitRecord:
    """Write the files of every rank; returns the commit record of the tag."""
    groups = sample_params(hidden, layers)
    sub_groups = pack_sub_groups(groups, world_size=world_size, sub_group_size=sub_group_size)
    layout = layout_from_sub_groups(sub_groups, world_size)
    frozen = Param(FROZEN_NAME, (hidden,))
    save_id = f"{zlib.crc32(str((step, world_size, hidden, layers)).encode()):032x}"
    config = {
        "train_batch_size": 24,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "sub_group_size": sub_group_size, "elastic_checkpoint": format == "elastic"},
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
        state = _optimizer_state(groups, layout, flats, step)
        if format == "elastic":
            state |= _elastic_state(groups, layout, state, flats, rank, digests, save_id)
        fragment = _part(_values(frozen, "frozen", step, torch.bfloat16), world_size, rank)
        names = (
            f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
            f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt",
        )
        torch.save({"optimizer_state_dict": state, "ds_config": config, "ds_version": _DEEPSPEED}, tag_dir / names[0])
        torch.save(_model_states(sub_groups, frozen, fragment, rank, world_size, step, config), tag_dir / names[1])
        files |= {name: (tag_dir / name).stat().st_size for name in names}
    whole = _values(frozen, "frozen", step, torch.bfloat16).view(torch.uint8).numpy()
    scalar = {"step": ScalarValue("float32", float(step))}
    contents = [
        ParamContent(p, {key: ("float32", sums[p.name, key]) for key in ("fp32", *STATES)}, scalar)
        for p in layout.params
    ]
    digest = digest_range(whole, 2, seed=stream_seed(frozen.name, "frozen"), start=0)
    contents.append(ParamContent(frozen, {"frozen": ("bfloat16", digest)}, {}))
    return CommitRecord(
        format_version=RECORD_VERSION,
        checkpoint_format=format,
        save_id=save_id,
        tag=tag_dir.name,
        world_size=world_size,
        global_steps=step,
        train_batch_size=24,
        trained_params=params_digest(layout.params),
        versions=Versions(zeroelastic=__version__, deepspeed=_DEEPSPEED, torch=str(torch.__version__)),
        files=files,
        directories={name: directory_digest(tag_dir / name) or "" for name in files},
        params=param_records(contents, frozenset(param.name for param in layout.params)),
        content_root=content_root(contents),
    )


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


_Flats = dict[str, list[torch.Tensor]]
"""The flat buffers of one rank by state key, one for each sub-group."""


def _members(layout: Layout) -> list[list[int]]:
    """The indices of the parameters in each sub-group."""
    return [np.flatnonzero(layout.sub_group == i).tolist() for i in range(layout.num_sub_groups)]


def _options(group: int) -> dict[str, object]:
    return {**_OPTIONS[group], "betas": (0.9, 0.95), "eps": 1e-8, "amsgrad": False}


def _optimizer_state(groups: Sequence[Sequence[Param]], layout: Layout, flats: _Flats, step: int) -> dict[str, Any]:
    """DeepSpeed's own state of one rank."""
    group_of = {param.name: g for g, group in enumerate(groups) for param in group}
    owner = [group_of[layout.params[own[0]].name] for own in _members(layout)]
    state = {
        i: {"step": torch.tensor(float(step)), **{key: flats[key][i] for key in STATES}} for i in range(len(owner))
    }
    return {
        "zero_stage": 3,
        "loss_scaler": None,
        "dynamic_loss_scale": False,
        "overflow": False,
        "partition_count": layout.world_size,
        "fp32_flat_groups": [flat.detach().requires_grad_() for flat in flats["fp32"]],
        "optimizer_state_dict": {
            "state": state,
            "param_groups": [
                {**_options(g), "params": [i for i, group in enumerate(owner) if group == g]}
                for g in range(len(groups))
            ],
        },
    }


def _elastic_state(
    groups: Sequence[Sequence[Param]],
    layout: Layout,
    state: dict[str, Any],
    flats: _Flats,
    rank: int,
    digests: torch.Tensor,
    save_id: str,
) -> dict[str, Any]:
    """What an elastic save has besides DeepSpeed's own ``state``."""
    _, length = layout.owned(rank)
    param_groups = [{**_options(g), "params": [param.name for param in group]} for g, group in enumerate(groups)]
    rest = {"digests": digests, "param_groups": param_groups}
    return {
        "base_optimizer_state": [
            {
                "step": state["optimizer_state_dict"]["state"][i]["step"],
                **{
                    key: [flats[key][i][int(layout.offset[p]) : int(layout.offset[p] + length[p])] for p in own]
                    for key in STATES
                },
            }
            for i, own in enumerate(_members(layout))
        ],
        "zeroelastic": elastic_table(layout, rank, save_id=save_id, train_batch_size=24, rest=rest),
    }


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
    parser.add_argument(
        "--ranks", dest="world_size", metavar="RANKS", type=int, default=4, help="world size of the save (4)"
    )
    parser.add_argument("--steps", type=int, nargs="+", default=[2, 4], help="one tag for each (2 4)")
    parser.add_argument("--hidden", type=int, default=24, help="width of the model, an even number (24)")
    parser.add_argument("--layers", type=int, default=2, help="layers of the model (2)")
    parser.add_argument("--sub-group-size", type=int, default=4000, help="as in the DeepSpeed configuration (4000)")
    parser.add_argument("--format", choices=("elastic", "rigid"), default="elastic")
    parser.add_argument("--no-record", dest="record", action="store_false", help="leave the commit record out")
    chosen = vars(parser.parse_args(arguments))
    write_sample(chosen.pop("root"), **chosen)


if __name__ == "__main__":
    main()
