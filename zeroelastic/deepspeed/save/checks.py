"""The checks before a save: the ranks agree on it, and a load would take what it writes.

One is for modules that changed after ``deepspeed.initialize``, so that a load would not give what they compute.
DeepSpeed's optimizer has the parameters of ``deepspeed.initialize``, and files name them as they were then. A save of
another name for the same parameter is right, as after ``torch.compile``. It is wrong where the base weights have
adapters of PEFT merged into them, which the optimizer still has, and where another parameter has the name of one.
Source: ``BaseTunerLayer`` and ``merge_and_unload`` (peft 0.19).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from deepspeed.io import fast_file_writer
from torch.nn import Parameter

from zeroelastic.checkpoint.commit_record import params_digest, read_record
from zeroelastic.deepspeed.client_state import checked_client_state, saved_step
from zeroelastic.deepspeed.engine import Engine, merged_layers
from zeroelastic.deepspeed.engine_state import refuse_to_save, state_of
from zeroelastic.deepspeed.live.digests import copies_that_differ
from zeroelastic.deepspeed.live.kinds import covered_live, listed_by_optimizer, trained_params
from zeroelastic.deepspeed.live.live_optimizer import LiveOptimizer
from zeroelastic.deepspeed.live.replicated import replicated_facts, require_equal, token_of
from zeroelastic.deepspeed.options import SaveRequest
from zeroelastic.deepspeed.save.commit import as_save_error
from zeroelastic.distributed.collective import all_gather_of_or_raise, all_or_raise
from zeroelastic.errors import (
    CheckpointError,
    SaveError,
    UnreadableError,
    UnsupportedError,
    UsageError,
    counted,
    printable,
    some,
)
from zeroelastic.io.paths import FilePath
from zeroelastic.runs.names import why_not_saved

logger = logging.getLogger(__name__)

_BASE = "base_layer"
"""The part of a name that PEFT puts between a module and its own parameters, where an adapter is on the module."""


def refuse_unwritable(engine: Engine) -> None:
    """Raise UnsupportedError for a ``checkpoint`` block of the configuration whose files could not be loaded again."""
    config: Mapping[str, Any] = engine._config.checkpoint_config
    writer: Mapping[str, Any] | None = config.get("writer")
    no_fast_writer = str(fast_file_writer.UtilsBuilder.__name__) == "NotImplementedBuilder"
    problem = None
    if not config.get("checkpoint_serialization", True):
        problem = (
            '"checkpoint_serialization": false writes torch.save\'s old format without a zip archive, whose payload '
            "cannot be addressed. Leave it out"
        )
    elif writer is not None and writer["type"] == "MOCK":
        problem = 'the checkpoint writer "mock" writes nothing. Use "python" or "fast"'
    elif writer is not None and writer["type"] == "FAST" and no_fast_writer:
        problem = (
            'the checkpoint writer "fast" needs DeepSpeed\'s op "utils", which it does not have for this accelerator. '
            'Use "type": "python"'
        )
    elif writer is not None and writer["decoupled"]:
        problem = (
            'a decoupled checkpoint writer writes after save_checkpoint has returned. Use "decoupled": false, with '
            '"async_save": true in the "zeroelastic" block for saves in the background'
        )
    if problem is not None:
        raise UnsupportedError(
            f'elastic checkpoints do not cover this: {problem}, or save with "format": "rigid" and resume at the '
            "saved world size."
        )


def refuse_experts_on_nodes(engine: Engine, live: LiveOptimizer) -> None:
    """Raise UnsupportedError for a run whose nodes keep their own files, and whose experts each have one file."""
    if live.params_in_expert_files and engine.use_node_local_storage():
        raise UnsupportedError(
            '"use_node_local_storage" does not go with mixture-of-experts layers at ZeRO stages 1 and 2: DeepSpeed '
            "writes the file of the module and of each expert on one node only, and reads them on every node. Save to "
            "a directory that all nodes share."
        )


def refuse_to_exclude_experts(live: LiveOptimizer) -> None:
    """Raise UnsupportedError for frozen experts that are to be left out: DeepSpeed writes their files all the same."""
    names = [param.name for members in live.local_params(live.frozen) for param in members]
    experts = [name for name in names if name in live.params_in_expert_files]
    if experts:
        raise UnsupportedError(
            'a save without frozen weights ("frozen": "exclude", exclude_frozen_parameters) does not go with frozen '
            f"experts, as {experts[0]}, at ZeRO stages 1 and 2: DeepSpeed writes the files of experts all the same. "
            "Save with them."
        )


def prepare(engine: Engine, request: SaveRequest, *, elastic: bool) -> tuple[LiveOptimizer, dict[str, Any]]:
    """Return the live state of this rank, read once for the whole save, and the client state to save. Collective.

    Raises UnsupportedError or UsageError, the same on all ranks, where the save can get no commit record.
    """

    def look() -> tuple[LiveOptimizer, dict[str, Any], dict[str, str]]:
        with as_save_error(request.tag_dir):
            problem = why_not_saved(request.directory, request.tag)
        if problem is not None:
            raise UsageError(
                f"{request.directory}: nothing can be saved under the tag {printable(request.tag)}: {problem}. Nothing "
                "was written; pass another tag."
            )
        if dist.get_rank() == 0:
            _warn_of_other_params(engine, request.tag_dir)
        refuse_to_save(engine, request.tag_dir)
        live = covered_live(engine, engine.optimizer)
        refuse_changed_module(engine, live, request.tag_dir, with_frozen=request.excluded_by != "argument")
        refuse_unwritable(engine)
        refuse_experts_on_nodes(engine, live)
        if request.excludes_frozen:
            refuse_to_exclude_experts(live)
        facts = replicated_facts(live)
        with listed_by_optimizer(engine, live.trained):
            client_state = checked_client_state(engine, request.client_state)
        return live, client_state, facts | {"the step to save": str(saved_step(engine, client_state))}

    (live, client_state, facts), outcomes = all_gather_of_or_raise(
        look, lambda found: (token_of(found[2], found[0].tp.rank), request.named)
    )
    require_equal(facts, [token for token, _ in outcomes])
    if live.topology.tensor_size > 1:
        live = _with_copies(engine, live, request.tag_dir)
    lost = None if elastic else live.lost_in_stock_files()
    if lost is not None:
        raise UnsupportedError(f'DeepSpeed\'s own files lack {lost}. Save with "format": "elastic" to have all of it.')
    places = sorted({named for _, named in outcomes})
    if len(places) > 1:
        raise UsageError(
            f"the ranks save to different places ({', '.join(places[:3])}{' ...' if len(places) > 3 else ''}). A "
            "checkpoint has one tag and one directory, which all ranks share: pass the same on every rank."
        )
    return live, client_state


def _with_copies(engine: Engine, live: LiveOptimizer, tag_dir: Path) -> LiveOptimizer:
    """Return the live state of a run whose tensor parallel ranks should have equal copies of some values. Collective.

    Where copies differ, no other size of tensor parallelism has a place for all of them: each tensor parallel rank is
    then saved as its own run. Raises UnsupportedError at stages 1 and 2, where only DeepSpeed saves these.
    """
    differing = copies_that_differ(live)
    if not differing:
        return live
    named = some([f"{name}: {key}" for name, key in differing])
    why = f"the copies that tensor parallel ranks have of the same values differ ({named})"
    if not live.per_param:
        raise UnsupportedError(f"{why}.")
    if dist.get_rank() == 0:
        logger.warning(
            "%s: %s. The checkpoint resumes at this tensor parallel size only. Dropout and other random numbers in a "
            "layer that is copied have to be the same on all ranks that share a batch.",
            *(tag_dir, why),
        )
    return all_or_raise(lambda: covered_live(engine, engine.optimizer, opaque=True))


def _warn_of_other_params(engine: Engine, tag_dir: Path) -> None:
    """Warn that a save replaces a checkpoint with other trained parameters, which may be another engine's."""
    try:
        record = read_record(tag_dir)
    except (CheckpointError, UnreadableError):
        return
    if record is not None and record.trained_params not in (None, params_digest(trained_params(engine) or ())):
        logger.warning(
            "%s: this save replaces a checkpoint whose trained parameters are not those of the engine. If another "
            "engine saves under this tag, give each engine a directory of its own.",
            tag_dir,
        )


def refuse_changed_module(engine: Engine, live: LiveOptimizer, where: FilePath | str, *, with_frozen: bool) -> None:
    """Raise SaveError where a load of the save would not give what the module computes.

    Without frozen weights, ``with_frozen``, merged adapters are no problem: the script loads them into its base model.
    Warns once of parameters that the optimizer has and the module has no more. No collective.
    """
    now: dict[Parameter, str] = {param: name for name, param in engine.module.named_parameters()}
    known, gone = engine.param_names, _gone(engine, live, now)
    replaced = sorted(gone.keys() & {name for param, name in now.items() if param not in known})
    if replaced:
        raise SaveError(
            f"{where}: {some(replaced)} of the module was replaced after deepspeed.initialize: the optimizer trains "
            "and would save the parameter of then, and not the one that the module computes with. Nothing was written. "
            "Build the whole model before deepspeed.initialize, or copy the values into the parameters that are there."
        )
    if with_frozen and (merged := merged_weights(engine, live)) is not None:
        raise SaveError(f"{where}: {merged}")
    state = state_of(engine)
    if gone and not state.warned_of_gone_params and engine.global_rank == 0:
        logger.warning(
            "%s: %s of the optimizer %s no longer in the module: %s. The checkpoint has them all the same. A run that "
            "loads it needs them in its model at deepspeed.initialize.",
            *(where, counted(len(gone), "parameter"), "is" if len(gone) == 1 else "are", some(sorted(gone))),
        )
    state.warned_of_gone_params = state.warned_of_gone_params or bool(gone)


def _gone(engine: Engine, live: LiveOptimizer, now: Mapping[Parameter, str]) -> dict[str, Parameter]:
    """Return the trained parameters that the module no longer has, by their names at ``deepspeed.initialize``."""
    known = engine.param_names
    return {known[param]: param for param in live.trained if param in known and param not in now}


def merged_weights(engine: Engine, live: LiveOptimizer) -> str | None:
    """Return a sentence where trained adapters are merged into frozen base weights; None where none are."""
    now: dict[Parameter, str] = {param: name for name, param in engine.module.named_parameters()}
    return _merged(live) or _unloaded(engine.param_names, now, live, _gone(engine, live, now))


def _merged(live: LiveOptimizer) -> str | None:
    """Return a sentence where frozen base weights have adapters merged into them, by ``merge_adapter``."""
    merged = [
        name
        for name, base in merged_layers(live.module).items()
        if any(param not in live.trained for param in base.parameters())
    ]
    if not merged:
        return None
    return (
        f"adapters are merged into the base weights of {some(merged)}. The save would have both, and a model that "
        "loads it would apply the adapters twice. Nothing was written. Call unmerge_adapter() before the save, and "
        "merge_adapter() after it; or leave out the frozen weights, with exclude_frozen_parameters=True."
    )


def _unloaded(
    known: Mapping[Parameter, str], now: Mapping[Parameter, str], live: LiveOptimizer, gone: Mapping[str, Parameter]
) -> str | None:
    """Return a sentence where adapters were taken off their modules, as by ``merge_and_unload``, and are still trained.

    ``known`` has the names of ``deepspeed.initialize``, ``now`` the present ones. Only frozen base weights count: of
    trained ones the optimizer has values without what was merged.
    """
    bare = {
        known[param].partition(f".{_BASE}.")[0]
        for param, name in now.items()
        if param in known and param not in live.trained and _depth(known[param]) > _depth(name)
    }
    modules = sorted(module for module in bare if any(name.startswith(f"{module}.") for name in gone))
    if not modules:
        return None
    return (
        f"the adapters of {some(modules)} are no longer in the module, as after merge_and_unload(), and the optimizer "
        "still has them. The save would have them and base weights into which they are merged, and a model that loads "
        "it would apply them twice. Nothing was written. Save before the adapters are merged, and write the merged "
        "model with its own save_pretrained()."
    )


def _depth(name: str) -> int:
    return name.split(".").count(_BASE)
