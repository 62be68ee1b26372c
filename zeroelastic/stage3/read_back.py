"""A rank's files read back before a save is committed: by the readers of a load, against the run that saved them.

Headers alone are read. A save that a load of the same run would refuse is not committed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from zeroelastic.checkpoint import TensorParallel, model_states_of
from zeroelastic.digest import ParamContent
from zeroelastic.errors import CheckpointError
from zeroelastic.layout import Layout, Param
from zeroelastic.record import CheckpointFormat
from zeroelastic.safepickle import allow_globals
from zeroelastic.shard import open_shard
from zeroelastic.stage3.live import LiveState
from zeroelastic.state import frozen_part, trained_part
from zeroelastic.torchfile import read_torch_file

_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Expected:
    """What the two files of a rank have to say: its place, the step, and the parameters as they were when it saved.

    ``frozen`` are None where they are excluded from the save. ``allow_globals`` are those of the run's options.
    """

    rank: int
    tp: TensorParallel
    global_steps: int
    layout: Layout
    groups: tuple[tuple[str, ...], ...]
    frozen: tuple[Param, ...] | None
    allow_globals: tuple[str, ...]


def expected_of(live: LiveState, *, global_steps: int, with_frozen: bool, allow_globals: Sequence[str]) -> Expected:
    """What a save of a live state has to say."""
    frozen = live.frozen.params if with_frozen else None
    return Expected(live.rank, live.tp, global_steps, live.layout, live.groups, frozen, tuple(allow_globals))


def read_back(
    model_path: Path,
    optim_path: Path,
    expected: Expected,
    *,
    format: CheckpointFormat,
    save_id: str,
    contents: Iterable[ParamContent],
) -> dict[str, str]:
    """The digest of the zip directory of each of a rank's files, by name.

    ``contents`` are what the commit record is going to say. Raises CheckpointError or UnsupportedError for a file that
    a load does not read, CheckpointError for one that does not say what is ``expected``.
    """
    size, tp = expected.layout.world_size, expected.tp
    with allow_globals(expected.allow_globals):
        model = model_states_of(
            read_torch_file(model_path, foreign="inert"), expected.rank, world_size=size, tp=tp if tp.size > 1 else None
        )
        shard = open_shard(optim_path, expected.rank, world_size=size, rigid_params=model.sub_groups, tp_rank=tp.rank)
    layout = expected.layout
    sub_groups = [
        [param for param, i in zip(layout.params, layout.sub_group.tolist(), strict=True) if i == number]
        for number in range(layout.num_sub_groups)
    ]
    parts = [trained_part({shard.rank: shard}, shard)]
    if (frozen := frozen_part({model.rank: model})) is not None:
        parts.append(frozen)
    found = {
        param.name: (param.shape, dict(part.dtypes[p]), {k: v.canonical() for k, v in part.scalars[p].items()})
        for part in parts
        for p, param in enumerate(part.layout.params)
    }
    want = {
        content.param.name: (
            content.param.shape,
            {key: dtype for key, (dtype, _) in content.tensors.items()},
            {key: value.canonical() for key, value in content.scalars.items()},
        )
        for content in contents
        if content.tp_rank == tp.rank
    }
    for path, facts in (
        (
            model_path,
            {
                "the step": (model.global_steps, expected.global_steps),
                "the trained parameters": ([list(table) for table in model.sub_groups], sub_groups),
                "the frozen parameters": (
                    _by_name(None if model.frozen is None else model.frozen.params),
                    _by_name(expected.frozen),
                ),
            },
        ),
        (
            optim_path,
            {
                "the format": (shard.format, format),
                "the save id": (shard.save_id, save_id if format == "elastic" else None),
                "the trained parameters": (list(shard.layout.params), list(layout.params)),
                "the optimizer groups": ([group.params for group in shard.groups], list(expected.groups)),
                "the state of parameters": _differing(found, want),
            },
        ),
    ):
        for what, (got, wanted) in facts.items():
            if got != wanted:
                raise CheckpointError(f"{path}: {what} read back as {_brief(got)}; the run has {_brief(wanted)}.")
    return {model_path.name: model.directory, optim_path.name: shard.directory}


def _by_name(params: Iterable[Param] | None) -> list[Param] | None:
    return None if params is None else sorted(params, key=lambda param: param.name)


def _differing(found: Mapping[str, object], want: Mapping[str, object]) -> tuple[object, object]:
    """The entries in which two tables differ, of either."""
    names = [name for name in dict.fromkeys([*want, *found]) if found.get(name) != want.get(name)]
    return {name: found.get(name) for name in names}, {name: want.get(name) for name in names}


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 400 else f"{text[:400]}..."
