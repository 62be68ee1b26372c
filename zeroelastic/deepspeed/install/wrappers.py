"""What the wrapped DeepSpeed methods do: each replacement takes the original method, then what that takes.

The replacement of a method is the function of the same name.
"""

from __future__ import annotations

import copy
import functools
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import metadata
from typing import Any

import torch.distributed as dist

from zeroelastic._version import __version__
from zeroelastic.activation import VARIABLE, is_active
from zeroelastic.deepspeed.engine import Engine, agree_on_options, options_of, saves_elastic
from zeroelastic.deepspeed.engine_state import engine_of, link, note_load, state_of
from zeroelastic.deepspeed.install.seams import wrap_frameworks
from zeroelastic.deepspeed.live.kinds import covered_live, kind_of, param_names, read_live, why_left_to_deepspeed
from zeroelastic.deepspeed.live.optimizers import common_state
from zeroelastic.deepspeed.load import from_state_dicts
from zeroelastic.deepspeed.load.load import load
from zeroelastic.deepspeed.options import LoadRequest, warn_of_slow_verification
from zeroelastic.deepspeed.patching import patched
from zeroelastic.deepspeed.save.background import forget_background, refuse_background, wants_background
from zeroelastic.deepspeed.save.pending import drop_pending, finish_pending, pending_of
from zeroelastic.deepspeed.save.save import save_checkpoint as save_checkpoint
from zeroelastic.deepspeed.save.shard_writer import elastic_state_dict
from zeroelastic.deepspeed.storage_rules import refuse_unwritable
from zeroelastic.distributed.collective import all_or_raise
from zeroelastic.distributed.partners import announce, require_partners
from zeroelastic.errors import counted, with_remedy

logger = logging.getLogger(__name__)

Method = Callable[..., Any]


@contextmanager
def loading_strictly(engine: Engine, strict: bool) -> Iterator[None]:
    """While it lasts, loads are strict if ``strict``, whatever the configuration says, and as it says otherwise."""
    with patched(state_of(engine), strict_batch=strict):
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
        if saves_elastic(self) and kind.per_param:
            refuse_unwritable(self, all_or_raise(lambda: covered_live(self, made)))
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
    without = '; saves are rigid in spite of "elastic_checkpoint"' if elastic else ""
    logger.info("%s", f"saves and loads of this run are left to DeepSpeed, at this ZeRO stage: {what}{without}")
    if uploads:
        logger.warning('"upload" has no effect: the saves of this run are left to DeepSpeed')


def state_dict(original: Method, self: Any) -> Any:
    """The elastic state dict under ``"elastic_checkpoint": true``, the stock one otherwise."""
    engine = engine_of(self)
    if engine is None or not saves_elastic(engine):
        return original(self)
    live = read_live(self, param_names(engine))
    return elastic_state_dict(live, save_id="", train_batch_size=engine.train_batch_size(), alias=False)


@with_remedy()
def load_state_dict(original: Method, self: Any, state_dict_list: Any, *args: Any, **kwargs: Any) -> Any:
    """Elastic state dicts, one per saved rank, at any world size; stock ones go to the original."""
    if not from_state_dicts.is_elastic(state_dict_list):
        return original(self, state_dict_list, *args, **kwargs)
    engine = engine_of(self)
    names = param_names(engine) if engine is not None else self.param_names
    flags = dict(zip(("load_optimizer_states", "load_from_fp32_weights"), args, strict=False)) | kwargs
    return from_state_dicts.load_state_dicts(
        engine, read_live(self, names), state_dict_list, optimizer_states=bool(flags.get("load_optimizer_states", True))
    )


def _get_all_ckpt_names(original: Method, self: Engine, checkpoints_path: Any, tag: Any) -> Any:
    """The module states file that preflight chose, while a load of ours runs: new ranks have none of their own."""
    paths = state_of(self).module_paths
    return original(self, checkpoints_path, tag) if paths is None else list(paths)


def _commit_decoupled_checkpoint(original: Method, self: Engine) -> Any:
    """What DeepSpeed does before an optimizer step; for a save of ours, its record and ``latest`` too."""
    return finish_pending(self) if pending_of(self) is not None else original(self)


def save_16bit_model(original: Method, self: Engine, *args: Any, **kwargs: Any) -> Any:
    """DeepSpeed's own; a pending save is committed first, which it would make a decoupled engine forget."""
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
def load_checkpoint(original: Method, self: Engine, load_dir: Any, *args: Any, **kwargs: Any) -> Any:
    """A load at any world size; what is not ours (stage 0, universal checkpoints) goes to the original."""
    began = time.perf_counter()
    finish_pending(self, before="load_checkpoint()")  # a decoupled engine may still be writing what a load fills
    request = LoadRequest(load_dir, *args, **kwargs)
    return load(self, request, partial(original, self), partial(note_load, self), began=began)
