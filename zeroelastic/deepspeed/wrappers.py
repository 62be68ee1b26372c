"""The replacements of the wrapped DeepSpeed methods: each takes the original method, then the method's arguments.

The replacement of a method is the function of the same name.
"""

from __future__ import annotations

import copy
import functools
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib import metadata
from typing import Any

import torch.distributed as dist

from zeroelastic._version import __version__
from zeroelastic.activation import VARIABLE, is_active
from zeroelastic.compiled_ops import compiled_ops, left_locks
from zeroelastic.deepspeed.engine import Engine, agree_on_options, options_of, ordinary_tensors, saves_elastic
from zeroelastic.deepspeed.engine_state import engine_of, link, state_of
from zeroelastic.deepspeed.live.kinds import covered_live, kind_of, param_names, read_live, why_left_to_deepspeed
from zeroelastic.deepspeed.live.optimizers import common_state
from zeroelastic.deepspeed.load.load import load
from zeroelastic.deepspeed.options import LoadRequest, warn_of_slow_verification
from zeroelastic.deepspeed.patching import patched, wrap_frameworks
from zeroelastic.deepspeed.save.background import (
    drop_pending,
    finish_pending,
    forget_background,
    refuse_background,
    wants_background,
)
from zeroelastic.deepspeed.save.checks import refuse_unwritable
from zeroelastic.deepspeed.save.save_checkpoint import save_checkpoint as save_checkpoint
from zeroelastic.deepspeed.save.shard_writer import elastic_state_dict
from zeroelastic.distributed.collective import all_or_raise
from zeroelastic.distributed.partners import announce, require_partners
from zeroelastic.errors import UnsupportedError, counted, with_remedy

logger = logging.getLogger(__name__)

Method = Callable[..., Any]


@contextmanager
def loading_strictly(engine: Engine, strict: bool) -> Iterator[None]:
    """While it lasts, loads are strict if ``strict``, whatever the configuration says, and as it says otherwise."""
    with patched(state_of(engine), strict=strict):
        yield


def _configure_zero_optimizer(original: Method, self: Engine, optimizer: Any) -> Any:
    """Validate our options and refuse what elastic saving cannot cover, while the engine is being built."""
    if not self.zero_optimization():  # pipelines with a BF16_Optimizer
        return original(self, optimizer)
    announce()
    made = original(self, optimizer)
    link(made, self)
    if (kind := kind_of(made)) is not None:
        state_of(self).fresh_common_state = copy.deepcopy(common_state(made.optimizer))
        require_partners(wait=not kind.per_param)  # what makes the optimizer of stage 3 has a barrier of DeepSpeed's
        agree_on_options(self)
        wrap_frameworks()
        if dist.get_rank() == 0:
            _say_active()
            warn_of_slow_verification(options_of(self))
        if wants_background(self):
            all_or_raise(lambda: refuse_background(self))
        if saves_elastic(self) and kind.has_elastic_form:
            all_or_raise(lambda: covered_live(self, made))
            refuse_unwritable(self)
    elif (what := why_left_to_deepspeed(made)) is not None:
        elastic = saves_elastic(self)  # on every rank: an option may be wrong
        if dist.get_rank() == 0:
            _say_left_to_deepspeed(what, elastic=elastic, uploads=options_of(self).upload is not None)
    return made


_configure_bf16_optimizer = _configure_zero_optimizer
"""What makes the ``BF16_Optimizer`` of stage 1."""


@functools.cache
def _say_active() -> None:
    """Tell once that an environment variable has installed zeroelastic: nothing in the script says so."""
    if is_active():
        versions = f"zeroelastic {__version__}, DeepSpeed {metadata.version('deepspeed')}"
        logger.info("%s", f"active by {VARIABLE}=1 on {counted(dist.get_world_size(), 'rank')}: {versions}")


def _say_left_to_deepspeed(what: str, *, elastic: bool, uploads: bool) -> None:
    """Log why DeepSpeed saves and loads this run itself, and which wishes about its saves have no effect."""
    without = '; saves are rigid in spite of "format": "elastic"' if elastic else ""
    logger.info("%s", f"saves and loads of this run are left to DeepSpeed, at this ZeRO stage: {what}{without}")
    if uploads:
        logger.warning('"upload" has no effect: the saves of this run are left to DeepSpeed')


def state_dict(original: Method, self: Any) -> Any:
    """The elastic state dict under ``"format": "elastic"``, the stock one otherwise."""
    engine = engine_of(self)
    if engine is None or not saves_elastic(engine):
        return original(self)
    live = read_live(self, param_names(engine))
    return elastic_state_dict(live, save_id="", train_batch_size=engine.train_batch_size(), alias=False)


def load_state_dict(original: Method, self: Any, state_dict_list: Any, *args: Any, **kwargs: Any) -> Any:
    """DeepSpeed's own, which cannot read elastic state dicts, nor most of another size: these are refused by name."""
    states = [state for state in state_dict_list or () if isinstance(state, Mapping)]
    if any("zeroelastic" in state and "optimizer_state_dict" not in state for state in states):
        raise UnsupportedError(
            "optimizer.load_state_dict() was given elastic state dicts, which are for the files of a checkpoint. Use "
            'engine.save_checkpoint() and engine.load_checkpoint(), or state dicts with "format": "rigid".'
        )
    saved, current = states[0].get("partition_count") if states else None, self.partition_count
    # DeepSpeed joins those that it makes at stages 1 and 2 with elastic_checkpoint, whose state is a list
    are_joined = states and isinstance(states[0].get("base_optimizer_state"), list)
    if saved not in (None, current) and not (are_joined and len(states) >= dist.get_world_size()):
        before, now = (max(count) if isinstance(count, list) else count for count in (saved, current))
        raise UnsupportedError(
            f"optimizer.load_state_dict() was given the state dicts of {before} ranks, and this run has {now}: "
            "DeepSpeed gives each rank that of its number, so they load at their own size alone. Use "
            "engine.save_checkpoint() and engine.load_checkpoint(), which resume at any."
        )
    return original(self, state_dict_list, *args, **kwargs)


def _get_all_ckpt_names(original: Method, self: Engine, checkpoints_path: Any, tag: Any) -> Any:
    """The module states file that preflight chose, while a load of ours runs: new ranks have none of their own."""
    paths = state_of(self).module_paths
    return original(self, checkpoints_path, tag) if paths is None else list(paths)


def jit_load(original: Method, self: Any, *args: Any, **kwargs: Any) -> Any:
    """DeepSpeed's own; one rank of each node says before it that an op is compiled, and which lock holds that up."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        if self.name not in compiled_ops():
            logger.info("DeepSpeed compiles its op %s, once on this machine: that takes a minute or two", self.name)
        for lock, sentence in left_locks().items():
            if lock.parent.name == self.name:
                logger.warning("%s", sentence)
    return original(self, *args, **kwargs)


def save_16bit_model(original: Method, self: Engine, *args: Any, **kwargs: Any) -> Any:
    """DeepSpeed's own; a pending save is finished first."""
    finish_pending(self, before="save_16bit_model()")
    return original(self, *args, **kwargs)


def destroy(original: Method, self: Engine) -> None:
    """DeepSpeed's own, after a pending save is committed."""
    try:
        if dist.is_initialized():
            finish_pending(self, before="destroy()")
        else:
            drop_pending(self)
    finally:
        forget_background(self)
        original(self)


def __del__(original: Method, self: Engine) -> None:
    """DeepSpeed's own, which calls ``destroy``: a pending save is dropped before, because no other rank is here."""
    try:
        drop_pending(self)
    finally:
        original(self)


@with_remedy()
@ordinary_tensors()
def load_checkpoint(original: Method, self: Engine, load_dir: Any, *args: Any, **kwargs: Any) -> Any:
    """Load at any world size; the original loads what is not ours (stage 0, universal checkpoints)."""
    began = time.perf_counter()
    finish_pending(self, before="load_checkpoint()")  # it may be the one that is loaded
    request = LoadRequest(load_dir, *args, **kwargs)
    return load(self, request, partial(original, self), began=began)
