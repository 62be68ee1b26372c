"""Which parameters are trained, then and now: two sets of parameters compared, and what becomes of each.

Pure data in, pure data out. A save knows trained and frozen parameters and its optimizer groups, and so does a run.
What both have is restored; the rest is named, with what happens to it, or refused. Parameters go by name, of which a
tied weight has several: any of them will do.

A parameter without elements has nothing to restore: DeepSpeed lists it with the trained ones up to 0.19.7 and with the
frozen ones since, and it counts as restored wherever it is listed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import dropwhile

from zeroelastic.checkpoint.optimizer_file import ParamGroup
from zeroelastic.core.layout import Param
from zeroelastic.torch_file.header import paused_collector

_PEFT_PARTS = ("base_layer", "original_module")

_Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class ParamSet:
    """The parameters of a save or of a run, by name in the order of their layouts.

    Where frozen parameters were excluded from a save, ``has_frozen`` is False if it names them all the same, else
    ``names_frozen`` is False. ``tied`` has the further names of parameters, each with the one that is listed.
    """

    trained: tuple[Param, ...]
    frozen: tuple[Param, ...]
    has_frozen: bool = True
    names_frozen: bool = True
    tied: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GroupMatch:
    """Where a live optimizer group gets its hyper-parameters: from saved group ``source``, or None, its own.

    ``shared`` are all saved groups with which it shares restored parameters; more than one and no source means that
    they differ.
    """

    source: int | None
    shared: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ParamDiff:
    """The outcome of a load for every parameter. Invariant: each live one is in one of the lists, all but ``dropped``.

    ``restored``: trained then and now. ``frozen``: frozen then and now. ``unfrozen``: frozen then, trained now.
    ``newly_frozen``: trained then, frozen now. ``added_trained`` and ``added_frozen``: not in the save. ``excluded``:
    frozen now, and the save left frozen parameters out, so that the run keeps its own. ``dropped``: in the save, not in
    the model. ``relisted``: without elements, and listed as trained by one side only, which changes nothing.
    ``problems`` are sentences about everything that differs: among them ``reshaped`` about shapes, which nothing mends,
    ``frozen_problems`` about frozen parameters that the save lacks, which are part of the module's state alone, or that
    the model lacks and no file has, and ``moved`` about those that only one side trains. ``groups`` runs parallel to
    the live optimizer groups; ``dealt``: experts are in other groups than saved, which is no problem.
    """

    restored: tuple[str, ...]
    frozen: tuple[str, ...]
    unfrozen: tuple[str, ...]
    newly_frozen: tuple[str, ...]
    added_trained: tuple[str, ...]
    added_frozen: tuple[str, ...]
    excluded: tuple[str, ...]
    dropped: tuple[str, ...]
    relisted: tuple[str, ...]
    groups: tuple[GroupMatch, ...]
    problems: tuple[str, ...]
    group_problems: tuple[str, ...]
    reshaped: tuple[str, ...]
    frozen_problems: tuple[str, ...]
    moved: tuple[str, ...]
    dealt: bool = False

    @property
    def same_params(self) -> bool:
        """Whether the run has the parameters of the save, trained or frozen as then; excluded ones are left aside."""
        return not self.problems and not self.relisted

    def restores(self, *, weights_only: bool) -> bool:
        """Whether a load has anything to do: weights that are or were trained, or of weights only, any at all."""
        found = any((self.restored, self.unfrozen, self.newly_frozen, self.relisted, weights_only and self.frozen))
        return found or not (self.added_trained and self.dropped)

    @property
    def same_groups(self) -> bool:
        """Whether every live group is the saved group of the same number, and there are no others."""
        return (
            not self.group_problems and not self.dealt and all(match.source == g for g, match in enumerate(self.groups))
        )


def other_names(saved: ParamSet, live: ParamSet) -> dict[str, str]:
    """Return the saved name of each parameter of a run that the save lists under another name."""
    was, now = _listed(saved), _listed(live)
    aliases: dict[str, list[str]] = {}
    for alias, name in live.tied.items():
        aliases.setdefault(name, []).append(alias)
    found: dict[str, str] = {}
    for name in now.keys() - was.keys():
        names = [name, *aliases.get(name, ())]
        listed = [*names, *(saved.tied[other] for other in names if other in saved.tied)]
        known = next((other for other in listed if other in was and other not in now), None)
        if known is not None:
            found[name] = known
    return found


@paused_collector()
def compare(
    saved: ParamSet, live: ParamSet, saved_groups: Sequence[ParamGroup], live_groups: Sequence[Sequence[str]]
) -> ParamDiff:
    """Compare the parameters and optimizer groups of a save with a run's.

    Example::

        found = compare(ParamSet(saved, ()), ParamSet(live, ()), head.groups, [["a.weight"], ["a.bias"]])
        found.added_trained      # keep their initial values
    """
    was = _listed(saved)
    now = _listed(live)
    reshaped = [
        f"{kind} {name} has shape {list(was[name][1].shape)} in the checkpoint and {list(param.shape)} in the model"
        for name, (kind, param) in now.items()
        if name in was
        and was[name][1].shape != param.shape
        and (saved.has_frozen or (was[name][0], kind) != (_FROZEN, _FROZEN))
    ]
    found, missing, moved = _by_outcome(was, now, saved)
    found["dropped"] = [name for name in was if name not in now]
    unknown = {
        name: f"{was[name][0]} {name} {list(was[name][1].shape)} of the checkpoint "
        + (f"is tied to {live.tied[name]} in the model" if name in live.tied else "is not in the model")
        for name in found["dropped"]
    }
    in_no_file = [text for name, text in unknown.items() if was[name][0] == _FROZEN and not saved.has_frozen]
    group_problems = _compare_groups(saved_groups, live_groups)
    problems = [*missing[_TRAINED], *missing[_FROZEN], *unknown.values(), *moved, *reshaped]
    fits = not problems and not group_problems
    dealt = bool(group_problems) and any(map(_is_of_experts, saved_groups))  # a rank has more experts, or fewer
    if dealt:
        group_problems = _compare_dealt_groups(saved_groups, live_groups)
    return ParamDiff(
        **{what: tuple(names) for what, names in found.items()},
        groups=match_groups(saved_groups, live_groups, frozenset(found["restored"]), fits=fits),
        problems=tuple(problems),
        group_problems=tuple(group_problems),
        reshaped=tuple(reshaped),
        frozen_problems=(*missing[_FROZEN], *in_no_file),
        moved=tuple(moved),
        dealt=dealt,
    )


def _by_outcome(
    was: Mapping[str, _Listed], now: Mapping[str, _Listed], saved: ParamSet
) -> tuple[dict[str, list[str]], dict[str, list[str]], list[str]]:
    """Deal the parameters of a run to the outcomes; with them sentences on the missing, by kind, and the moved ones."""
    found: dict[str, list[str]] = {what: [] for what in _OUTCOMES}
    moved: list[str] = []
    missing: dict[str, list[str]] = {_TRAINED: [], _FROZEN: []}
    for name, (kind, param) in now.items():
        before = was[name][0] if name in was else None
        if before == _FROZEN and not saved.has_frozen and param.numel:
            found["excluded" if kind == _FROZEN else "added_trained"].append(name)
            if kind == _TRAINED:
                missing[kind].append(
                    f"parameter {name} {list(param.shape)} was frozen when the checkpoint was saved without frozen "
                    "weights, and is trained in the model"
                )
        elif before == kind:
            found["restored" if kind == _TRAINED else "frozen"].append(name)
        elif before is not None and param.numel == 0:
            found["relisted"].append(name)
        elif before is not None:
            found["unfrozen" if kind == _TRAINED else "newly_frozen"].append(name)
            moved.append(
                f"parameter {name} {list(param.shape)} was {_WORD[before]} when the checkpoint was saved and is "
                f"{_WORD[kind]} in the model"
            )
        elif kind == _FROZEN and not saved.names_frozen:
            found["excluded"].append(name)
        else:
            found["added_trained" if kind == _TRAINED else "added_frozen"].append(name)
            what = f"{kind} {name} {list(param.shape)} of the model"
            tied = saved.tied.get(name)
            missing[kind].append(
                f"{what} is not in the checkpoint"
                if tied is None
                else f"{what} was tied to {tied} when the checkpoint was saved, and has a weight of its own now"
            )
    return found, missing, moved


_OUTCOMES = (
    *("restored", "frozen", "unfrozen", "newly_frozen", "added_trained", "added_frozen", "excluded", "dropped"),
    "relisted",
)
"""The lists of ``ParamDiff`` in one of which each parameter is."""

_Listed = tuple[str, Param]

_TRAINED, _FROZEN = "parameter", "frozen parameter"
_WORD = {_TRAINED: "trained", _FROZEN: "frozen"}


def _listed(inventory: ParamSet) -> dict[str, _Listed]:
    """Every parameter by name: how it is listed, and itself."""
    trained = {param.name: (_TRAINED, param) for param in inventory.trained}
    return trained | {param.name: (_FROZEN, param) for param in inventory.frozen}


def _compare_groups(saved: Sequence[ParamGroup], live: Sequence[Sequence[str]]) -> list[str]:
    """Every way in which the optimizer groups differ by number, as sentences."""
    if len(saved) != len(live):
        return [f"the checkpoint has {len(saved)} optimizer groups and the run has {len(live)}"]
    saved_group = {name: g for g, group in enumerate(saved) for name in group.params}
    return [
        f"parameter {name} is in optimizer group {saved_group[name]} of the checkpoint and in group {g} of the run"
        for g, names in enumerate(live)
        for name in names
        if saved_group.get(name, g) != g
    ]


def _is_of_experts(group: ParamGroup) -> bool:
    """Whether a saved group is one of experts of DeepSpeed's MoE layers."""
    return group.options.get("moe") is True


def _compare_dealt_groups(saved: Sequence[ParamGroup], live: Sequence[Sequence[str]]) -> list[str]:
    """``_compare_groups`` where experts go by the hyper-parameters of their groups, and the other groups by number.

    DeepSpeed cuts groups of experts at a number of elements that a rank has
    (``split_params_into_different_moe_groups_for_optimizer``, 0.19.8).
    """
    group_of = {name: group for group in saved if _is_of_experts(group) for name in group.params}
    are_experts = [bool(names) and group_of.keys() >= {*names} for names in live]
    problems = _compare_groups(
        [group for group in saved if not _is_of_experts(group)],
        [names for names, is_of_experts in zip(live, are_experts, strict=True) if not is_of_experts],
    )
    for g, names in enumerate(live):
        options = [_options(group_of[name]) for name in names] if are_experts[g] else []
        if any(other != options[0] for other in options):
            problems.append(
                f"optimizer group {g} of the run has experts of saved groups that differ in hyper-parameters"
            )
    return problems


_WRAPPERS = {
    "_orig_mod": "torch.compile(model). Give deepspeed.initialize the model itself, and compile it in place with "
    "model.compile() or engine.compile(), which leave the names as they are",
    "module": "a wrapper such as DistributedDataParallel. Give deepspeed.initialize its .module, the model inside",
}
"""Parts of a parameter's name that come from a wrapper: the wrapper, and what to do."""


def wrapper_advice(saved: Iterable[str], live: Iterable[str]) -> str | None:
    """A clause about names that differ because one side was wrapped, and what to do; None where that is not so."""
    names = {"the checkpoint": {*saved}, "the model": {*live}}
    shared = len(set.intersection(*names.values()))
    for part, advice in _WRAPPERS.items():
        bare = [{_without(name, part) for name in found} for found in names.values()]
        if len(set.intersection(*bare)) <= shared:
            continue
        having = [side for side, found in names.items() if any(_without(name, part) != name for name in found)]
        return f'names of {" and of ".join(having)} have "{part}." from {advice}; there is no option to rename them'
    return None


def _without(name: str, part: str) -> str:
    """A name without the parts that wrappers add: in front, or for ``_orig_mod`` anywhere."""
    parts = name.split(".")
    if part == "module":
        return ".".join(dropwhile(lambda one: one == part, parts))
    return ".".join(one for one in parts if one != part)


def match_groups(
    saved: Sequence[ParamGroup], live: Sequence[Sequence[str]], restored: frozenset[str], *, fits: bool
) -> tuple[GroupMatch, ...]:
    """The saved group of each live group: the group of the restored parameters, if they agree on hyper-parameters.

    Groups that hold nothing restored keep their own hyper-parameters, except that a group of which nothing was trained
    and nothing is goes by number while there are as many groups as there were. Where everything ``fits``, all do.
    """
    if fits:
        return tuple(GroupMatch(g, (g,)) for g in range(len(live)))
    saved_group = {name: g for g, group in enumerate(saved) for name in group.params}
    found: list[GroupMatch] = []
    for g, names in enumerate(live):
        shared = tuple(sorted({saved_group[name] for name in names if name in restored and name in saved_group}))
        if not shared and not names and len(saved) == len(live) and not saved[g].params:
            shared = (g,)
        alike = bool(shared) and all(_options(saved[s]) == _options(saved[shared[0]]) for s in shared)
        found.append(GroupMatch(shared[0] if alike else None, shared))
    return tuple(found)


def _options(group: ParamGroup) -> Mapping[str, str]:
    """Hyper-parameters in a form that compares like their values do, NaN and the type of numbers included."""
    return {key: repr(value) for key, value in group.options.items()}


def renamed_base_weights(
    *, saved_frozen: _Shapes, live_frozen: _Shapes, saved: Iterable[str], live: Iterable[str]
) -> dict[str, str]:
    """Return the saved name of each frozen base weight that PEFT has renamed with an adapter put on or taken off.

    PEFT keeps the module itself as ``base_layer`` of an adapter's layer, and as ``original_module`` next to a trained
    copy: ``o_proj.weight`` is ``o_proj.base_layer.weight`` then (peft 0.19).

    ``saved`` and ``live`` are the names of all parameters. An adapter that was put on a module has its base weights in
    the save only if the module had no adapter then: base weights next to an adapter, without the part, have it
    merged into them.

    Example::

        renamed_base_weights(...)    # {"o_proj.base_layer.weight": "o_proj.weight"}
    """
    saved, live = {*saved}, {*live}
    found: dict[str, str] = {}
    for name, shape in live_frozen.items():
        if name in saved:
            continue
        for module, part, rest in _peft_splits(name):
            bare = f"{module}.{rest}"
            if saved_frozen.get(bare) != shape or bare in live:
                continue
            beside = [one.removeprefix(f"{module}.") for one in saved if one.startswith(f"{module}.")]
            if all(f"{module}.{part}.{one}" in live for one in beside):
                found[name] = bare
    taken_off = {
        f"{module}.{rest}": name for name in saved_frozen if name not in live for module, _, rest in _peft_splits(name)
    }
    for name, before in taken_off.items():
        if name not in saved and live_frozen.get(name) == saved_frozen[before]:
            found[name] = before
    return found


def _peft_splits(name: str) -> list[tuple[str, str, str]]:
    """The module before, the part itself, and the rest of a name, by each part of PEFT in it."""
    parts = name.split(".")
    return [
        (".".join(parts[:i]), parts[i], ".".join(parts[i + 1 :]))
        for i in range(1, len(parts) - 1)
        if parts[i] in _PEFT_PARTS
    ]
