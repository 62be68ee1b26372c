"""The elastic optimizer state dict of a rank, as a save writes it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from zeroelastic.checkpoint.elastic_table import elastic_table
from zeroelastic.core.digest import combine
from zeroelastic.deepspeed.live.digests import LocalDigests
from zeroelastic.deepspeed.live.live_optimizer import LiveOptimizer
from zeroelastic.deepspeed.live.optimizers import class_path


def elastic_state_dict(
    live: LiveOptimizer,
    *,
    save_id: str,
    train_batch_size: int,
    alias: bool,
    share_storage: bool = True,
    digests: torch.Tensor | None = None,
) -> dict[str, Any]:
    """The optimizer's state in the elastic format (docs/concepts/format.md); its tensors are views of the live ones.

    ``alias`` adds the stock nested ``optimizer_state_dict`` over the same storages, which makes the file loadable by
    stock DeepSpeed. Without ``share_storage`` (an engine that writes every tensor on its own) lean tensors are
    contiguous clones and there is no alias. ``digests`` (see ``digest_sums``) go into the file so that damage can be
    traced to it. Padding of the live buffers is set to zero, here and on disk.
    """
    live.zero_padding()
    state = live.state_dict()
    nested = state.pop("optimizer_state_dict")
    owned = live.layout.owned(live.rank)[1]
    base: list[dict[str, Any]] = []
    for i in range(live.layout.num_sub_groups):
        members = np.flatnonzero(live.layout.sub_group == i).tolist()
        tensors, scalars = live.split_state(i)
        entry: dict[str, Any] = {}
        for key, value in live.state(i).items():
            if key in tensors:
                lean = [
                    tensors[key][int(live.layout.offset[p]) : int(live.layout.offset[p] + owned[p])] for p in members
                ]
                entry[key] = lean if share_storage else [tensor.clone() for tensor in lean]
            else:
                assert key in scalars
                entry[key] = value
        base.append(entry)
    rest: dict[str, object] = {
        "param_groups": [
            {**{key: value for key, value in group.items() if key != "params"}, "params": list(names)}
            for group, names in zip(live.base.param_groups, live.groups, strict=True)
        ],
        "optimizer": class_path(live.base),
    }
    if live.grad_scaler is not None:
        rest["grad_scaler"] = live.grad_scaler.state_dict()
    if live.tp.size > 1:
        rest |= {"tp_rank": live.tp.rank, "tp_size": live.tp.size}
    if digests is not None:
        rest["digests"] = digests
    state["base_optimizer_state"] = base
    state["zeroelastic"] = elastic_table(
        live.layout, live.rank, save_id=save_id, train_batch_size=train_batch_size, rest=rest
    )
    if alias and share_storage:
        state["optimizer_state_dict"] = nested
    return state


def digest_sums(live: LiveOptimizer, digests: LocalDigests) -> torch.Tensor:
    """The sum over state keys of each trained parameter's partial digests: int64, shape ``(num_params,)``."""
    sums = dict.fromkeys((param.name for param in live.layout.params), 0)
    for (name, _), digest in zip(digests.streams, digests.partial, strict=True):
        if name in sums:
            sums[name] = combine(sums[name], digest)
    return torch.from_numpy(np.array(list(sums.values()), dtype=np.uint64).view(np.int64))
