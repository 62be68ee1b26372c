"""This rank's files of a checkpoint as DeepSpeed's save writes them, without a collective.

``DeepSpeedEngine.save_checkpoint`` (0.19.8) has barriers between its parts, and partitions and gathers persistent
parameters, which takes collectives of all ranks. What it writes does not need them: of a partitioned parameter a file
has an empty tensor, which is put there in the place of one that is whole at the moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime import engine as ds_engine

from zeroelastic.deepspeed.client_state import checked_client_state
from zeroelastic.deepspeed.engine import Engine
from zeroelastic.deepspeed.live.kinds import listed_by_optimizer
from zeroelastic.deepspeed.live.live_optimizer import LiveOptimizer
from zeroelastic.deepspeed.patching import patched
from zeroelastic.deepspeed.save.shard_writer import ShardWriter, elastic_state_dict


class _Writer:
    """Stands in for the checkpoint engine: passes on files by their names, and everything else to the original."""

    def __init__(self, original: Any, write: Callable[[Any, Path], None]) -> None:
        self._original, self._write = original, write

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def save(self, state_dict: Any, path: str) -> None:
        self._write(state_dict, Path(path))


def write_local_files(
    engine: Engine,
    live: LiveOptimizer,
    shard: ShardWriter,
    *,
    directory: Path,
    save_id: str,
    client_state: Mapping[str, Any],
    writes_module: bool,
    tied: Mapping[str, str],
) -> None:
    """Give what DeepSpeed would write into ``directory`` to ``shard.save``: the module states and the optimizer state.

    The optimizer state is in the elastic format at stage 3, and DeepSpeed's own at stages 1 and 2, whatever the
    configuration says. ``writes_module`` says whether this rank writes the file of the whole module of stages 1 and 2,
    ``tied`` is ``engine._get_shared_params()`` of rank 0. Raises UnsupportedError for a client state that no load
    takes, and what ``shard.save`` raises.
    """

    def write(state_dict: Any, path: Path) -> None:
        shard.save(state_dict, str(directory / path.name))

    def optimizer_state() -> dict[str, Any]:
        return elastic_state_dict(
            live,
            save_id=save_id,
            train_batch_size=engine.train_batch_size(),
            alias=True,
            share_storage=shard.shares_storage,
            digests=shard.table,
        )

    facts: dict[str, Any] = {"_copy_recovery_script": lambda save_path: None}
    if not live.per_param:
        facts |= {"save_non_zero_checkpoint": writes_module, "_get_shared_params": lambda: dict(tied)}
    with (
        patched(ds_engine, log_dist=lambda *args, **kwargs: None),  # a line at each step
        patched(engine, checkpoint_engine=_Writer(engine.checkpoint_engine, write), **facts),
        listed_by_optimizer(engine, live.trained),
        live.saving(engine, elastic=live.per_param, written=lambda: None),
        _without_whole_params(engine) if live.per_param else patched(engine),
        patched(engine.optimizer, **({"state_dict": optimizer_state} if live.per_param else {})),
    ):
        kept = checked_client_state(engine, client_state)
        engine._save_checkpoint(str(directory.parent), directory.name, client_state=kept)
        engine._save_zero_checkpoint(str(directory.parent), directory.name)


@contextmanager
def _without_whole_params(engine: Engine) -> Iterator[None]:
    """While it lasts, the module's state dict has an empty tensor for every partitioned parameter."""
    module_state_dict = engine.module_state_dict

    def placeholders(*args: Any, **kwargs: Any) -> dict[str, Any]:
        state = module_state_dict(*args, **kwargs)
        for name, param in engine.module.named_parameters(remove_duplicate=False):
            if name in state and hasattr(param, "ds_id"):
                state[name] = torch.empty(0, dtype=param.dtype, device=param.device)
        return state

    with patched(engine, module_state_dict=placeholders):
        yield
