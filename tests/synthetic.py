"""Checkpoints written by hand: as DeepSpeed's stage 3 and zeroelastic write them, and DCP directories of any chunks.

    truth = write_checkpoint(tag_dir, world_size=3, groups=[[Param("w", (5, 4))], [Param("b", (5,))]])
    assert gather(open_checkpoint(tag_dir)) == truth

``Truth`` maps parameter -> state key -> (dtype, bytes of the full, unpartitioned tensor). Cut in plain loops, without
the arithmetic of zeroelastic.core.layout. Padding is NaN or 255, so that whoever reads it is found out.
"""

from __future__ import annotations

import hashlib
import inspect
import io
import math
import pickle
import re
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from saved_files import record_of

from zeroelastic.checkpoint.commit_record import (
    RECORD_NAME,
    RECORD_VERSION,
    CommitRecord,
    SavedWith,
    param_records,
    params_digest,
    record_text,
)
from zeroelastic.checkpoint.open import Checkpoint
from zeroelastic.checkpoint.saved_state import TensorSet
from zeroelastic.core.digest import ParamContent, ScalarValue, content_root, digest_range, stream_seed
from zeroelastic.core.layout import Param, pack_sub_groups
from zeroelastic.executors.dispatch import CopyTable, read_segments
from zeroelastic.io.paths import FilePath
from zeroelastic.io.storage import read_range
from zeroelastic.torch_file.header import DTYPE_BYTES

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

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


Box = Sequence[tuple[int, int]]
"""The beginning and the size of a chunk in each dimension."""


def rows(shape: Sequence[int], world_size: int) -> list[Box]:
    """The chunks of FSDP2, empty ones included: dimension 0 as ``torch.chunk`` cuts it."""
    count = -(-shape[0] // world_size)
    begins = [min(rank * count, shape[0]) for rank in range(world_size)]
    sizes = [min(count, shape[0] - begin) for begin in begins]
    return [[(begin, size), *((0, n) for n in shape[1:])] for begin, size in zip(begins, sizes, strict=True)]


def grid(shape: Sequence[int], over: Sequence[int]) -> list[Box]:
    """The chunks of a mesh of as many dimensions as ``over`` has: FSDP2 over tensor parallelism."""
    boxes: list[Box] = [[]]
    for size, parts in zip(shape, over, strict=True):
        along = [chunk[0] for chunk in rows([size], parts) if chunk[0][1]]
        boxes = [[*box, piece] for box in boxes for piece in along]
    return boxes


def write_dcp(
    folder: Path,
    tensors: Mapping[str, tuple[torch.Tensor, Sequence[Box]]],
    objects: Mapping[str, Any] | None = None,
    *,
    change: Callable[[Metadata], object] = lambda metadata: None,
) -> Metadata:
    """Write a DCP directory: every tensor in its chunks, those of one number in a file of their own."""
    from torch.distributed.checkpoint import metadata as dcp  # takes seconds to import
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    folder.mkdir(parents=True)
    files: dict[str, io.BytesIO] = {}
    described: dict[str, Any] = {}
    stored: dict[MetadataIndex, Any] = {}

    def store(index: MetadataIndex, name: str, value: Any) -> None:
        buffer = io.BytesIO()
        torch.save(value, buffer)
        file = files.setdefault(name, io.BytesIO())
        stored[index] = _StorageInfo(name, file.tell(), len(buffer.getvalue()))
        file.write(buffer.getvalue())

    for key, (tensor, boxes) in tensors.items():
        chunks = [
            dcp.ChunkStorageMetadata(torch.Size([begin for begin, _ in box]), torch.Size([size for _, size in box]))
            for box in boxes
        ]
        described[key] = dcp.TensorStorageMetadata(
            dcp.TensorProperties.create_from_tensor(tensor.detach()), tensor.shape, chunks
        )
        for rank, (box, chunk) in enumerate(zip(boxes, chunks, strict=True)):
            piece = tensor[tuple(slice(begin, begin + size) for begin, size in box)] if box else tensor
            store(dcp.MetadataIndex(key, chunk.offsets, rank), f"__{rank}_0.distcp", piece.clone().contiguous())
    for key, value in (objects or {}).items():
        described[key] = dcp.BytesStorageMetadata()
        store(dcp.MetadataIndex(key), "__0_0.distcp", value)
    for name, file in files.items():
        (folder / name).write_bytes(file.getvalue())
    metadata = dcp.Metadata(described, storage_data=stored, storage_meta=dcp.StorageMeta(folder))
    change(metadata)
    write_table(folder, metadata)
    return metadata


def write_table(folder: Path, metadata: object) -> None:
    """Replace the table of a DCP directory."""
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def job_state(
    shapes: Mapping[str, Sequence[int]],
    cut: Callable[[Sequence[int]], Sequence[Box]],
    *,
    model: str = "model.",
    optim: str = "optim.",
    dtype: torch.dtype = torch.float32,
) -> tuple[dict[str, tuple[torch.Tensor, Sequence[Box]]], dict[str, Any]]:
    """What a job with AdamW saves, nested: tensors with their chunks, and objects."""
    generator = torch.Generator().manual_seed(7)
    tensors: dict[str, tuple[torch.Tensor, Sequence[Box]]] = {}
    for name, shape in shapes.items():
        boxes = cut(shape) if shape else [[]]
        tensors[f"{model}{name}"] = torch.randn(tuple(shape), generator=generator).to(dtype), boxes
        for key in ("exp_avg", "exp_avg_sq"):
            tensors[f"{optim}state.{name}.{key}"] = torch.randn(tuple(shape), generator=generator).to(dtype), boxes
        tensors[f"{optim}state.{name}.step"] = torch.tensor(5.0), [[]]
    group = {"lr": 0.25, "betas": (0.9, 0.95), "weight_decay": 0.5, "params": list(shapes)}
    return tensors, {f"{optim}param_groups.0.{key}": value for key, value in group.items()}


def load_alone(state: dict[str, Any], folder: Path) -> None:
    """torch's own load in this process alone, which torch 2.6 does where there are no process groups."""
    import torch.distributed.checkpoint as dcp

    alone = {"no_dist": True} if "no_dist" in inspect.signature(dcp.load).parameters else {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is (disabled|unavailable)")
        dcp.load(state, checkpoint_id=folder, **alone)


def whole_tensor(part: TensorSet, number: int, key: str) -> bytes:
    """A tensor of 32 bits, put together from where its parts lie."""
    rows = part.tensor_rows(number, key)
    data = np.zeros(part.params[number].numel * 4, dtype=np.uint8)
    table = CopyTable(rows.file, rows.file_offset, rows.target, rows.target_offset * 4, rows.nbytes)
    read_segments(table, rows.paths, [data])
    return data.tobytes()


def read_dcp(folder: Path) -> dict[str, object]:
    """What is in a directory, loaded into empty tensors of the shapes and dtypes that its table states."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    table = FileSystemReader(folder).read_metadata().state_dict_metadata
    state: dict[str, object] = {
        key: torch.empty(found.size, dtype=found.properties.dtype) if isinstance(found, TensorStorageMetadata) else None
        for key, found in table.items()
    }
    load_alone(state, folder)
    return state


FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def buffers() -> dict[str, torch.Tensor]:
    """Every kind of buffer that a module may have."""
    made = {str(dtype): torch.linspace(-3, 3e4, 11, dtype=torch.float64).to(dtype) for dtype in FLOATS}
    made |= {
        "count": torch.tensor(7),
        "causal": torch.tensor([[True, False, True], [False, False, True]]),
        "bytes": torch.arange(5, dtype=torch.uint8),
        "transposed": torch.arange(12, dtype=torch.float32).view(3, 4).t(),
        "narrow half": torch.arange(24, dtype=torch.bfloat16).view(4, 6)[1:3, ::2],
        "expanded": torch.tensor([1.5, -2.5]).expand(3, 2),
        "nothing": torch.empty(0, 4),
    }
    return made


TIES = {"head": "w", "head again": "head", "lookup": "embedding", "counter": "count"}


def add_to_model(tag_dir: Path, world_size: int, ties: dict[str, str] | None = None) -> None:
    """Buffers and tied names, as DeepSpeed writes them: the ties in rank 0's file only."""
    for rank in range(world_size):

        def change(data: dict[str, Any], rank: int = rank) -> None:
            data["module"].update(buffers())
            data["buffer_names"] = list(buffers())
            data["shared_params"] = (TIES if ties is None else ties) if rank == 0 else {}

        edit(tag_dir / model_name(rank), change)


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.dtype == right.dtype and left.shape == right.shape and raw(left) == raw(right)


def plain(value: Any) -> Any:
    """A value of a file such that == compares it, tensors by their bits, shapes and requires_grad."""
    if isinstance(value, torch.Tensor):
        return ("tensor", str(value.dtype), tuple(value.shape), value.requires_grad, raw(value))
    if isinstance(value, dict):
        return (type(value).__name__, [(key, plain(item)) for key, item in value.items()])
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, [plain(item) for item in value])
    return (type(value).__name__, plain(vars(value))) if hasattr(value, "cur_scale") else value


def filled(dtype: str, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """A tensor of arbitrary bits; of bool, of its two values; of wide floats, of numbers whose squares they hold."""
    generator = torch.Generator().manual_seed(seed)
    if dtype in ("float32", "float64", "complex64", "complex128"):
        return torch.randn(shape, generator=generator, dtype=getattr(torch, dtype))
    nbytes = math.prod(shape) * getattr(torch, dtype).itemsize
    bits = torch.randint(0, 2 if dtype == "bool" else 256, (nbytes,), generator=generator, dtype=torch.uint8)
    return bits.view(getattr(torch, dtype)).view(shape)


def _is_saved(dtype: str) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            torch.save(filled(dtype, (3,)), io.BytesIO())
        except (KeyError, RuntimeError, NotImplementedError):
            return False
    return True


SAVED_DTYPES = tuple(
    dtype
    for dtype in sorted({str(d).removeprefix("torch.") for d in vars(torch).values() if isinstance(d, torch.dtype)})
    if not dtype.startswith("q") and _is_saved(dtype)
)
"""Every dtype whose tensors torch.save writes, but for the quantized ones, whose tensors have scales too."""
