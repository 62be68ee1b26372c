"""Contradictions between the files of one tag, each as a sentence; None where there is none.

A load, ``open_checkpoint`` and ``open_state`` stop at the first, because nothing is loaded then; ``inspect`` and
``verify`` list all (``checker``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence

from zeroelastic.checkpoint.commit_record import OVERWRITTEN, RECORD_NAME
from zeroelastic.checkpoint.inventory import Inventory
from zeroelastic.checkpoint.model_states import ModuleHeader
from zeroelastic.checkpoint.optimizer_file import OptimizerHeader, configured_batch
from zeroelastic.checkpoint.tag_files import WHOLE_MODEL_FILE
from zeroelastic.core.digest import ParamContent
from zeroelastic.core.layout import Layout
from zeroelastic.errors import CheckpointError, UnsupportedError, buffer_kind, counted, some
from zeroelastic.io.paths import FilePath
from zeroelastic.torch_file.header import paused_collector

MIXED = "Files of two saves are mixed in this directory."

_Facts = Mapping[int, Mapping[str, Hashable]]


def other_save(shard: OptimizerHeader, save_id: str | None, model_name: str | None) -> str | None:
    """Whether an optimizer file is of another ZeRO stage than a model states file, or of another save than a record.

    ``save_id`` is that of the record, ``model_name`` the name of that model states file.
    """
    if model_name is not None and (WHOLE_MODEL_FILE.match(model_name) is None) != (shard.stage == 3):
        return f"{shard.path}: was saved with ZeRO stage {shard.stage}, {model_name} with another one. {MIXED}"
    if save_id is None or shard.save_id in (None, save_id):
        return None
    return f"{shard.path}: belongs to save {str(shard.save_id)[:8]}, the commit record to {save_id[:8]}. {MIXED}"


def not_committed(shard: OptimizerHeader, saved: Inventory) -> str | None:
    """Whether an optimizer file is of an elastic save, and the commit record of that save is not there."""
    if saved.is_recorded or shard.format != "elastic":
        return None
    return (
        f"{shard.path.parent}: {RECORD_NAME} is missing. An elastic save writes it last; without it the save does "
        "not count as complete. Copy it from where the tag was saved."
    )


def other_models(model: ModuleHeader, shard: OptimizerHeader, saved: Inventory) -> str | None:
    """Whether module states and an optimizer file are of two saves.

    The ids of their saves decide where both have one. Without ids and without a record, the optimizer's steps are
    compared with the counted ones. A difference alone is no proof: the optimizer of a run that left its state out of a
    load (``load_optimizer_states=False``) has fewer, and a job may set counters. With it, either the learning rates
    have to be others than the scheduler's, or the optimizer has to have more steps than counters that agree.
    """
    if model.save_id is not None and shard.save_id is not None:
        if model.save_id == shard.save_id:
            return None
        return f"{model.path}: belongs to save {model.save_id[:8]}, {shard.path} to {shard.save_id[:8]}. {MIXED}"
    said = unequal_steps(model, shard)
    if saved.is_recorded or said is None:
        return None
    scheduled, used = _learning_rates(model, shard)
    if scheduled != used:
        return f"{said}; their learning rates are {scheduled} and {used}. {MIXED}"
    total, samples = model.global_steps, model.values.get("global_samples")
    is_counted = total > 0 and samples == total * (configured_batch(shard.ds_config, model.world_size) or 0)
    is_constant = all(rate == group.options.get("initial_lr") for rate, group in zip(used, shard.groups, strict=False))
    return f"{said}. {MIXED}" if _steps(shard) > total and is_counted and is_constant else None


def unequal_steps(model: ModuleHeader, shard: OptimizerHeader) -> str | None:
    """A clause about an optimizer that has not stepped as often as module states count; None if that is not known."""
    steps, skipped = _steps(shard), model.values.get("skipped_steps")
    skipped = skipped if type(skipped) is int else 0
    if steps in (-1, model.global_steps - skipped):
        return None
    less = f", of which {skipped} skipped" if skipped else ""
    return f"{model.path} counts {counted(model.global_steps, 'step')}{less}, and {shard.path} {steps}"


def steps_agree(model: ModuleHeader, shard: OptimizerHeader) -> bool:
    """Whether an optimizer has stepped as often as module states count, which may be not at all."""
    return _steps(shard) >= 0 and unequal_steps(model, shard) is None


def _steps(shard: OptimizerHeader) -> int:
    """How often the optimizer has stepped the parameters that it has stepped most often; -1 if it does not count.

    Schedule-free optimizers and others count in their groups, as ``k``.
    """
    found = [scalars["step"].value for scalars in shard.scalars if "step" in scalars]
    counts: list[object] = [*found, *(group.options.get("k") for group in shard.groups)]
    return max((int(n) for n in counts if isinstance(n, (int, float)) and n == n // 1), default=-1)


def _learning_rates(model: ModuleHeader, shard: OptimizerHeader) -> tuple[list[float], list[float]]:
    """Return the scheduler's last learning rates and the optimizer groups' in six digits; none where one lacks them."""
    schedule = model.values.get("lr_scheduler")
    scheduled = schedule.get("_last_lr") if isinstance(schedule, Mapping) else None
    used = [group.options.get("lr") for group in shard.groups]
    rates = [*scheduled, *used] if isinstance(scheduled, (list, tuple)) and len(scheduled) == len(used) else [None]
    numbers = [float(f"{rate:.6g}") for rate in rates if isinstance(rate, (int, float))]
    return ([], []) if len(numbers) < len(rates) else (numbers[: len(used)], numbers[len(used) :])


def steps_note(model: ModuleHeader, shard: OptimizerHeader, saved: Inventory) -> str | None:
    """A sentence about steps that differ and are no proof of two saves; some optimizers do not count the first step."""
    said = unequal_steps(model, shard)
    if said is None or saved.is_recorded or model.save_id is not None or _steps(shard) + 1 == model.global_steps:
        return None
    return (
        f"{said}: an earlier load left the optimizer's state out, the job has set counters, or files of two "
        "saves are mixed: these files do not say which"
    )


def other_step(model: ModuleHeader, saved: Inventory) -> str | None:
    """The sentence about module states of another step than the record's; None where they are of the same save.

    The zip directory that the record states for the file proves that: client state may have set the step.
    """
    if saved.global_steps in (None, model.global_steps):
        return None
    if saved.recorded_directories.get(model.path.name) == model.directory:
        return None
    return (
        f"{model.path}: was saved at step {model.global_steps}, the commit record at step {saved.global_steps}. {MIXED}"
    )


def other_directory(path: FilePath) -> str:
    """The sentence about a file whose zip directory is not the one that the commit record states."""
    return (
        f"{path}: its zip directory (the sizes and checksums of its contents) is not the one in "
        f"{RECORD_NAME}. One of the two is damaged, altered or from another save. {OVERWRITTEN}"
    )


def mixed_pair(model: ModuleHeader, shard: OptimizerHeader, saved: Inventory) -> str | None:
    """Whether module states and an optimizer file are of two saves, by their trained parameters or ``other_models``."""
    return _other_trained_params(model, shard) or other_models(model, shard, saved)


def _other_trained_params(model: ModuleHeader, shard: OptimizerHeader) -> str | None:
    """Whether a model states file lists other trained parameters than an optimizer file has.

    Those of slices are compared with the maps of slices when an optimizer file is opened.
    """
    if shard.layout.slices is not None:
        return None
    # Tuples, which are hashed faster than parameters.
    listed = {(param.name, param.shape) for sub_group in model.sub_groups for param in sub_group if param.numel > 0}
    if listed == {(param.name, param.shape) for param in shard.layout.params if param.numel > 0}:
        return None
    return f"{model.path} and {shard.path} differ in the trained parameters. {MIXED}"


def check_frozen(model: ModuleHeader, layout: Layout) -> None:
    """Raise CheckpointError for model states that list other frozen parameters than the layout of their rank."""
    if model.frozen.params != layout.params:
        raise CheckpointError(f"{model.path}: lists other frozen parameters than its neighbours. {MIXED}")


def check_same_save(
    shards: Mapping[int, OptimizerHeader], head: OptimizerHeader, saved: Inventory, *, resizable: bool = True
) -> None:
    """Raise CheckpointError when shards differ in something that all shards of one save share.

    Where there is a commit record, ranks were compared when it was saved. ``resizable`` as of ``open_state``.
    """
    facts, by_rank = _compared_facts(shards, head, saved)
    ours = shard_facts(head)
    for rank, theirs in facts.items():
        for what in theirs:
            if theirs[what] != ours[what]:
                raise CheckpointError(_differ(shards[rank].path, head.path, [what]))
    if by_rank is not None and resizable:
        raise UnsupportedError(f"{head.path.parent}: {by_rank}")


def mixed_shards(
    shards: Mapping[int, OptimizerHeader], saved: Inventory, fits: Callable[[OptimizerHeader], bool]
) -> tuple[dict[int, str], str | None]:
    """By rank a sentence about each shard of another save than most, and that of ``values_by_rank``.

    Where there is a record, and shards differ, most are those that it ``fits``, if any.
    """
    if not shards:
        return {}, None
    facts, by_rank = _compared_facts(shards, next(iter(shards.values())), saved)
    fitting = facts
    if saved.is_recorded and len({tuple(fact.values()) for fact in facts.values()}) > 1:
        known: dict[tuple[str, ...], bool] = {}
        for rank, fact in facts.items():
            said = tuple(fact.values())
            if said not in known:
                known[said] = fits(shards[rank])
        fitting = {rank: fact for rank, fact in facts.items() if known[tuple(fact.values())]} or facts
    return _other_than_most(shards, facts, fitting), by_rank


def mixed_models(models: Mapping[int, ModuleHeader], tensor_size: int) -> dict[int, str]:
    """By rank a sentence about module states of another save than most.

    Tensor parallel ranks, which have parameters of other shapes, are compared each by itself.
    """
    facts = {rank: model_facts(model) for rank, model in models.items()}
    mixed: dict[int, str] = {}
    if tensor_size > 1:
        common = {rank: {what: fact[what] for what in OF_THE_SAVE} for rank, fact in facts.items()}
        mixed = _other_than_most(models, common, common)
    for tensor_rank in range(tensor_size):
        own = {rank: facts[rank] for rank in models if rank not in mixed and rank % tensor_size == tensor_rank}
        mixed |= _other_than_most(models, own, own)
    return mixed


def _other_than_most(
    headers: Mapping[int, OptimizerHeader | ModuleHeader], facts: _Facts, fitting: _Facts
) -> dict[int, str]:
    """By rank a sentence about each header whose facts differ from the largest group's among ``fitting``."""
    counts = Counter(tuple(fact.values()) for fact in fitting.values())
    keep = max(fitting, key=lambda rank: counts[tuple(fitting[rank].values())], default=None)
    if keep is None:
        return {}
    ours, other = facts[keep], headers[keep].path
    return {
        rank: _differ(headers[rank].path, other, [name for name, value in fact.items() if value != ours[name]])
        for rank, fact in facts.items()
        if fact != ours
    }


def _differ(path: FilePath, other: FilePath, what: Iterable[str]) -> str:
    return f"{path} and {other} differ in {', '.join(what)}. {MIXED}"


def _compared_facts(
    shards: Mapping[int, OptimizerHeader], head: OptimizerHeader, saved: Inventory
) -> tuple[dict[int, dict[str, str]], str | None]:
    """By rank the facts that have to be those of ``head``, and the sentence of ``values_by_rank`` in place of others.

    Equal texts, which may be long, are kept once.
    """
    ours = shard_facts(head)
    facts: dict[int, dict[str, str]] = {}
    for rank, shard in shards.items():
        theirs = ours if shard is head else shard_facts(shard)
        facts[rank] = {what: text if theirs[what] == text else theirs[what] for what, text in ours.items()}
    differ = {what for fact in facts.values() for what in VALUE_FACTS if fact[what] != ours[what]}
    by_rank = values_by_rank(shards.values(), head) if differ and only_values(differ, saved) else None
    if by_rank is not None:
        facts = {rank: {what: fact[what] for what in fact if what not in VALUE_FACTS} for rank, fact in facts.items()}
    return facts, by_rank


def only_values(different: Collection[str], saved: Inventory) -> bool:
    """Whether files differ in nothing but numbers that an optimizer may have computed from a rank's own part.

    Where there is a commit record, the ranks were compared when it was saved.
    """
    return not saved.is_recorded and VALUE_FACTS.issuperset(different)


VALUE_FACTS = frozenset(("hyper-parameters", "step and other scalars"))
"""The facts of a shard that are numbers of an optimizer, which differ between ranks where they follow from its part."""

_SET_ALIKE = frozenset(
    ("step", "lr", "initial_lr", "betas", "momentum", "base_momentum", "max_momentum", "weight_decay")
)
"""Numbers that every rank counts or that a scheduler sets: where they differ, ranks are of two saves."""

Values = Mapping[str, tuple[str, object]]
"""The numbers of an optimizer: by a description, their key and the value."""


def values_by_rank(shards: Iterable[OptimizerHeader], head: OptimizerHeader) -> str | None:
    """The sentence about a save whose ranks differ in numbers that an optimizer computes from a rank's own part.

    None where the ranks are of two saves: where they differ in a counter, in what a scheduler sets, or in anything that
    is no fraction.
    """
    return values_sentence([(shard.rank, shard_values(shard)) for shard in (head, *shards)])


def values_sentence(tables: Sequence[tuple[int, Values]]) -> str | None:
    """Return the sentence of ``values_by_rank``, given the saved rank of each file and its ``shard_values``."""
    first, ours = tables[0]
    named: dict[str, str] = {}
    for rank, theirs in tables[1:]:
        if theirs.keys() != ours.keys():
            return None
        for what, (key, value) in ours.items():
            other = theirs[what][1]
            if repr(other) == repr(value):
                continue
            if key in _SET_ALIKE or not (isinstance(value, float) and isinstance(other, float)):
                return None
            named.setdefault(what, f"{what} is {value:.6g} on rank {first} and {other:.6g} on rank {rank}")
    if not named:
        return None
    return (
        f"{some(named.values(), 4, separator='; ')}. The optimizer computes such values from a rank's own part of the "
        "weights: the run resumes at the world size that saved, through DeepSpeed alone, and at another one takes the "
        "weights only (load_optimizer_states=False, `zeroelastic export`)."
    )


def shard_values(shard: OptimizerHeader) -> Values:
    """The hyper-parameters and the replicated state of a rank's optimizer."""
    found: dict[str, tuple[str, object]] = {}
    for g, (group, params) in enumerate(zip(shard.groups, shard.common_params.groups, strict=True)):
        found[f"the parameters of optimizer group {g}"] = ("params", params)
        found |= {f"{key!r} of optimizer group {g}": (key, value) for key, value in group.options.items()}
    for i, scalars in enumerate(shard.scalars):
        found |= {
            f"state {key!r} of {buffer_kind(shard.stage)} {i}": (key, value.value) for key, value in scalars.items()
        }
    return found


def shard_facts(shard: OptimizerHeader) -> dict[str, str]:
    """Return the facts that are the same in every shard of one save."""
    common = shard.common_params
    return {
        "format": shard.format,
        "save id": str(shard.save_id),
        "parameters": repr(common.params),
        "sub-groups": repr(common.sub_group_numel),
        "hyper-parameters": repr(
            [(sorted(group.options.items()), params) for group, params in zip(shard.groups, common.groups, strict=True)]
        ),
        "optimizer state keys": repr(shard.tensor_keys),
        "step and other scalars": repr([sorted((k, v.canonical()) for k, v in s.items()) for s in shard.scalars]),
        "loss scale": repr((shard.scaler, shard.grad_scaler)),
        "optimizer": repr(shard.optimizer),
        "dtypes": repr([(key, sorted(extents.dtype.items())) for key, extents in sorted(shard.extents.items())]),
    }


@paused_collector()
def check_same_models(models: Sequence[ModuleHeader], head: OptimizerHeader, saved: Inventory) -> None:
    """Raise CheckpointError when module states differ in something that all of one save share."""
    first = models[0]
    mixed = other_step(first, saved) or mixed_pair(first, head, saved)
    if mixed is not None:
        raise CheckpointError(mixed)
    facts = [model_facts(model) for model in models]
    first_of: dict[int, int] = {}  # by tensor parallel rank
    for number, model in enumerate(models):
        peer = first_of.setdefault(model.rank % model.tensor_size, number)
        for what, fact in facts[number].items():
            other = 0 if what in OF_THE_SAVE else peer
            if facts[other][what] != fact:
                raise CheckpointError(_differ(model.path, models[other].path, [what]))


OF_THE_SAVE = ("the step", "the save id")


def model_facts(model: ModuleHeader) -> dict[str, Hashable]:
    """Return the facts that module states of one tensor parallel rank share; all of one save share ``OF_THE_SAVE``."""
    return {
        "the step": model.global_steps,
        "the save id": model.save_id,
        "parameters": model.sub_groups,
        "frozen parameters": model.frozen.params if model.names_frozen else None,
        "the dtypes of frozen parameters": tuple(sorted(model.frozen_extents.dtype.items())),
    }


def param_differences(want: Mapping[str, ParamContent], contents: Iterable[ParamContent]) -> list[tuple[str, str]]:
    """(parameter, clause) for every way in which two parameter tables disagree, digests aside."""
    have = {content.param.name: content for content in contents}
    found = [(name, f"they do not hold {name}") for name in want if name not in have]
    found += [(name, f"it does not have {name}") for name in have if name not in want]
    for name, content in want.items():
        if (other := have.get(name)) is not None:
            ours, theirs = _said(content), _said(other)
            found += [
                (name, f"the {what} of {name} are {theirs[what]} there and {ours[what]} in the record")
                for what in ours
                if ours[what] != theirs[what]
            ]
    return found


def _said(content: ParamContent) -> dict[str, object]:
    return {
        "shape": list(content.param.shape),
        "state keys and dtypes": {key: dtype for key, (dtype, _) in sorted(content.tensors.items())},
        "scalars": {key: value.canonical() for key, value in sorted(content.scalars.items())},
    }
