"""Synthetic checkpoints: files as DeepSpeed's stage 3 and zeroelastic write them, for any world size and parameters.

    truth = write_checkpoint(tag_dir, world_size=3, groups=[[Param("w", (5, 4))], [Param("b", (5,))]])
    assert gather(open_checkpoint(tag_dir)) == truth

``Truth`` maps parameter -> state key -> (dtype, bytes of the full, unpartitioned tensor). Cut in plain loops, without
the arithmetic of zeroelastic.core.layout. Padding is NaN or 255, so that whoever reads it is found out.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from saved_files import record_of

from zeroelastic.checkpoint.commit_record import RECORD_NAME, RECORD_VERSION, CommitRecord, SavedWith, record_text
from zeroelastic.checkpoint.open import Checkpoint
from zeroelastic.checkpoint.param_table import param_records, params_digest
from zeroelastic.core.digest import ParamContent, ScalarValue, content_root, digest_range, stream_seed
from zeroelastic.core.layout import Param, pack_sub_groups
from zeroelastic.io.paths import FilePath
from zeroelastic.io.storage import read_range
from zeroelastic.torch_file.header import DTYPE_BYTES

Truth = dict[str, dict[str, tuple[str, bytes]]]

ADAM = {"exp_avg": torch.float32, "exp_avg_sq": torch.float32}
SAVE_ID = "0123456789abcdef" * 2
GROUPS = ((Param("w", (5, 4)), Param("v", (7,))), (Param("b", (3,)), Param("gain", (1,)), Param("scale", ())))
FROZEN_PARAMS = (Param("embedding", (3, 3)), Param("mask", (1,)))


def raw(tensor: torch.Tensor) -> bytes:
    """The bytes of a contiguous tensor."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def dtype_name(dtype: torch.dtype) -> str:
    """ "bfloat16" for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def optim_name(rank: int, prefix: str = "bf16_") -> str:
    """DeepSpeed's name of one rank's optimizer file."""
    return f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def model_name(rank: int) -> str:
    """DeepSpeed's name of one rank's model states file."""
    return f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"


def cut(full: torch.Tensor, world_size: int, rank: int, *, pad: bool) -> torch.Tensor:
    """One rank's part of a flattened parameter, with or without its padding."""
    part = -(-full.numel() // world_size)
    piece = full[rank * part : (rank + 1) * part]
    if not pad:
        return piece
    filler = float("nan") if full.is_floating_point() else 255
    return torch.cat([piece, torch.full((part - len(piece),), filler, dtype=full.dtype)])


def write_checkpoint(
    tag_dir: Path,
    *,
    world_size: int,
    groups: Sequence[Sequence[Param]] = GROUPS,
    frozen: Sequence[Param] | None = FROZEN_PARAMS,
    format: str = "elastic",
    states: Mapping[str, torch.dtype] = ADAM,
    master: torch.dtype = torch.float32,
    step: object = None,
    sub_group_size: int | None = 10,
    prefix: str = "bf16_",
    record: bool = False,
    alias: bool = True,
    save_id: str = SAVE_ID,
    global_steps: int = 3,
    options: Sequence[Mapping[str, object]] | None = None,
    loss_scaler: object = None,
    seed: int = 0,
) -> Truth:
    """Write every file of one save and return what it holds.

    ``step`` defaults to a 0-dim tensor as torch's optimizers keep it. ``frozen`` None leaves frozen parameters out, as
    ``exclude_frozen_parameters`` does. ``alias`` adds the stock nested state to elastic files. ``record`` adds the
    commit record.
    """
    tag_dir.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)

    def fill(param: Param, dtype: torch.dtype) -> torch.Tensor:
        if dtype.is_floating_point:
            return torch.randn(param.numel, generator=generator).to(dtype)
        return torch.randint(0, 200, (param.numel,), generator=generator).to(dtype)

    trained = [param for group in groups for param in group if param.numel > 0]
    full = {p.name: {"fp32": fill(p, master), **{k: fill(p, d) for k, d in states.items()}} for p in trained}
    frozen_full = {param.name: fill(param, torch.bfloat16) for param in frozen or ()}
    sub_groups = pack_sub_groups(groups, world_size=world_size, sub_group_size=sub_group_size)
    group_of = {param.name: g for g, group in enumerate(groups) for param in group}
    hyper = options or [{"lr": 0.1 / (g + 1), "betas": (0.9, 0.95), "weight_decay": 0.0} for g in range(len(groups))]
    step = torch.tensor(float(global_steps)) if step is None else step
    files: list[str] = []
    for rank in range(world_size):
        flats = {
            key: [torch.cat([cut(full[p.name][key], world_size, rank, pad=True) for p in sub]) for sub in sub_groups]
            for key in ("fp32", *states)
        }
        nested = {
            "state": {i: {"step": step, **{key: flats[key][i] for key in states}} for i in range(len(sub_groups))},
            "param_groups": [
                {**hyper[g], "params": [i for i, sub in enumerate(sub_groups) if group_of[sub[0].name] == g]}
                for g in range(len(groups))
            ],
        }
        state: dict[str, Any] = {
            "zero_stage": 3,
            "loss_scaler": loss_scaler,
            "dynamic_loss_scale": False,
            "overflow": False,
            "partition_count": world_size,
            "fp32_flat_groups": [flat.requires_grad_(flat.is_floating_point()) for flat in flats["fp32"]],
        }
        if format == "elastic":
            base, tables = [], []
            for i, sub in enumerate(sub_groups):
                bounds, offset = [], 0
                for param in sub:
                    part = -(-param.numel // world_size)
                    real = len(cut(full[param.name]["fp32"], world_size, rank, pad=False))
                    bounds.append((offset, real))
                    offset += part
                base.append(
                    {"step": step, **{key: [flats[key][i][o : o + n] for o, n in bounds] for key in states}}
                )  # fmt: skip
                tables.append(
                    {
                        "names": [param.name for param in sub],
                        "shapes": [param.shape for param in sub],
                        "offsets": [min(rank * -(-p.numel // world_size), p.numel) for p in sub],
                        "numels": [real for _, real in bounds],
                    }
                )
            state["base_optimizer_state"] = base
            state["zeroelastic"] = {
                "format_version": 1,
                "save_id": save_id,
                "world_size": world_size,
                "rank": rank,
                "train_batch_size": 2 * world_size,
                "sub_groups": tables,
                "param_groups": [
                    {**hyper[g], "params": [param.name for param in group if param.numel > 0]}
                    for g, group in enumerate(groups)
                ],
            }
        if format == "rigid" or alias:
            state["optimizer_state_dict"] = nested
        config = {"train_batch_size": 2 * world_size}
        torch.save(
            {"optimizer_state_dict": state, "ds_config": config, "ds_version": "0.19.8"},
            tag_dir / optim_name(rank, prefix),
        )
        torch.save(
            {
                "module": OrderedDict((param.name, torch.empty(0, dtype=torch.bfloat16)) for param in trained),
                "buffer_names": [],
                "optimizer": None,
                "param_shapes": [OrderedDict((p.name, torch.Size(p.shape)) for p in sub) for sub in sub_groups],
                "frozen_param_shapes": None
                if frozen is None
                else OrderedDict((p.name, torch.Size(p.shape)) for p in frozen),
                "frozen_param_fragments": None
                if frozen is None
                else OrderedDict((p.name, cut(frozen_full[p.name], world_size, rank, pad=True)) for p in frozen),
                "global_steps": global_steps,
                "dp_world_size": world_size,
                "mp_world_size": 1,
                "ds_config": config,
                "ds_version": "0.19.8",
            },
            tag_dir / model_name(rank),
        )
        files += [optim_name(rank, prefix), model_name(rank)]
    truth: Truth = {
        name: {key: (dtype_name(t.dtype), raw(t)) for key, t in tensors.items()} for name, tensors in full.items()
    } | {name: {"frozen": (dtype_name(tensor.dtype), raw(tensor))} for name, tensor in frozen_full.items()}
    if record:
        scalar = ScalarValue("float32", float(global_steps)) if torch.is_tensor(step) else ScalarValue("pyint", step)
        contents = contents_of(truth, [*trained, *(frozen or ())], {"step": scalar})
        write_record(tag_dir, files, contents, format, save_id, world_size, global_steps, frozenset(full))
    return truth


def contents_of(truth: Truth, params: Sequence[Param], scalars: Mapping[str, ScalarValue]) -> list[ParamContent]:
    """The digests of a truth."""
    return [
        ParamContent(
            param,
            {
                key: (
                    dtype,
                    digest_range(
                        np.frombuffer(data, np.uint8), DTYPE_BYTES[dtype], seed=stream_seed(param.name, key), start=0
                    ),
                )
                for key, (dtype, data) in truth[param.name].items()
            },
            {} if "frozen" in truth[param.name] else scalars,
        )
        for param in params
    ]


def write_record(
    tag_dir: Path,
    files: Sequence[str],
    contents: Sequence[ParamContent],
    format: str,
    save_id: str,
    world_size: int,
    global_steps: int,
    trainable: frozenset[str],
) -> None:
    """Write the commit record of files that lie in ``tag_dir``."""
    record = CommitRecord(
        format_version=RECORD_VERSION,
        checkpoint_format=format,
        save_id=save_id,
        tag=tag_dir.name,
        world_size=world_size,
        global_steps=global_steps,
        train_batch_size=2 * world_size,
        trained_params=params_digest(c.param for c in contents if c.param.name in trainable),
        versions=SavedWith(zeroelastic="0", deepspeed="0.19.8", torch=torch.__version__),
        files={name: (tag_dir / name).stat().st_size for name in files},
        params=param_records(contents, trainable),
        content_root=content_root(contents),
    )
    (tag_dir / RECORD_NAME).write_bytes(record_text(record))


def write_history(root: Path, commits: Sequence[tuple[str, int]]) -> None:
    """Tags as a run commits them, 10 seconds apart: (name, step)."""
    began = time.time() - 10 * len(commits)
    for i, (name, step) in enumerate(commits):
        save_id, path = hashlib.md5(name.encode()).hexdigest(), root / name / RECORD_NAME
        write_checkpoint(root / name, world_size=1, global_steps=step, record=True, save_id=save_id)
        record = record_of(root / name)
        path.write_bytes(record_text(record.model_copy(update={"committed_at": began + 10 * i})))
    (root / "latest").write_text(commits[-1][0])


def sealed(record: str) -> str:
    """The text of an edited commit record with the checksum of what it says now."""
    rest = re.sub(r',\s*"checksum"\s*:\s*"[^"]*"', "", record).rstrip()
    assert rest.endswith("}")
    body = rest[:-1].rstrip()
    return f'{body},\n "checksum": "{hashlib.sha256(body.encode()).hexdigest()}"\n}}\n'


def believe_sizes(tag_dir: Path) -> None:
    """Let the commit record of a tag state the sizes that its files have."""
    record = record_of(tag_dir)
    sizes = {name: (tag_dir / name).stat().st_size for name in record.files}
    (tag_dir / RECORD_NAME).write_bytes(record_text(record.model_copy(update={"files": sizes})))


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Load a file, let ``change`` edit its dictionary in place, and write it back."""
    data = torch.load(path, weights_only=False)
    change(data)
    torch.save(data, path)


def edit_optim(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """``edit`` one level down, in ``optimizer_state_dict``."""
    edit(path, lambda data: change(data["optimizer_state_dict"]))


def gather(checkpoint: Checkpoint) -> Truth:
    """Every full tensor of a checkpoint, put together from the extents of every rank's files."""
    found: dict[str, dict[str, tuple[str, list[bytes]]]] = {}

    def read(path: FilePath, offset: int, nbytes: int) -> bytes:
        data = read_range(path, offset, nbytes)
        assert len(data) == nbytes
        return data

    def add(name: str, key: str, dtype: str, data: bytes) -> None:
        have = found.setdefault(name, {}).setdefault(key, (dtype, []))
        assert have[0] == dtype
        have[1].append(data)

    for rank in range(checkpoint.world_size):
        model = checkpoint.model_states(rank)
        shard = checkpoint.shard(rank)
        for p, param in enumerate(shard.layout.params):
            length = int(shard.layout.owned(rank)[1][p])
            sub_group = int(shard.layout.sub_group[p])
            for key in shard.tensor_keys[sub_group]:
                extents = shard.extents[key]
                dtype = extents.dtype[sub_group]
                assert extents.offset[p] >= 0
                nbytes = length * DTYPE_BYTES[dtype]
                add(param.name, key, dtype, read(extents.path, int(extents.offset[p]), nbytes))
        for p, param in enumerate(model.frozen.params):
            dtype = model.frozen_extents.dtype[p]
            nbytes = int(model.frozen.owned(rank)[1][p]) * DTYPE_BYTES[dtype]
            data = read(model.path, int(model.frozen_extents.offset[p]), nbytes) if param.numel else b""
            add(param.name, "frozen", dtype, data)
    return {
        name: {key: (dtype, b"".join(parts)) for key, (dtype, parts) in tensors.items()}
        for name, tensors in found.items()
    }


def make_tag(root: Path, world_size: int, **options: Any) -> Truth:
    """The tag "tag" and ``latest`` under ``root``; its configuration says the sub_group_size that it was cut with."""
    truth = write_checkpoint(root / "tag", world_size=world_size, **options)
    size = options.get("sub_group_size", 10)
    for path in (root / "tag").glob("*optim_states.pt"):
        edit(
            path, lambda data: data["ds_config"].update(zero_optimization={"stage": 3, "sub_group_size": size or 10**9})
        )
    if options.get("record"):
        believe_sizes(root / "tag")
    (root / "latest").write_text("tag")
    return truth
