"""What a checkpoint of FSDP2 has no place for, kept beside it as JSON, so that the way back loses nothing.

A conversion to FSDP2 writes it under the key ``zeroelastic`` of the model's DCP directory, which torch does not read;
the way back takes it. A job of FSDP2 that saves again does not write it: what it then says is no longer there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from zeroelastic.checkpoint.model_states import COUNTERS
from zeroelastic.checkpoint.optimizer_file import OptionValue, ParamGroup
from zeroelastic.checkpoint.saved_state import SavedPart
from zeroelastic.core.digest import ScalarValue

NOTES_VERSION = 1


@dataclass(frozen=True, slots=True)
class NativeNotes:
    """The facts of a ZeRO checkpoint that FSDP2 has no place for.

    ``options`` are the hyper-parameters of each group as the ZeRO run had them; ``kinds`` the type of each value of the
    optimizer's state that is no tensor, such as "pyint" for ``step``, where all parameters have the same.
    ``scheduler`` is the state of a scheduler that torch does not have.
    """

    counters: Mapping[str, int] = field(default_factory=dict)
    config: Mapping[str, object] | None = None
    stage: int | None = None
    options: tuple[Mapping[str, OptionValue], ...] = ()
    kinds: Mapping[str, str] = field(default_factory=dict)
    scheduler: Mapping[str, object] | None = None

    def document(self, *, buffers: Sequence[str], tied: Mapping[str, str]) -> dict[str, object]:
        """The JSON object. ``buffers`` and ``tied`` say which of the model's tensors are no parameters of their own."""
        return {
            "format_version": NOTES_VERSION,
            "counters": dict(self.counters),
            "ds_config": None if self.config is None else dict(self.config),
            "stage": self.stage,
            "options": [dict(options) for options in self.options],
            "kinds": dict(self.kinds),
            "lr_scheduler": None if self.scheduler is None else dict(self.scheduler),
            "buffers": list(buffers),
            "tied": dict(tied),
        }


def read_notes(found: Mapping[str, object]) -> NativeNotes:
    """The notes of a JSON object; what is not as ``document`` writes it counts as not there."""
    counters, config, stage, options, kinds, scheduler = map(
        found.get, ("counters", "ds_config", "stage", "options", "kinds", "lr_scheduler")
    )
    if found.get("format_version") != NOTES_VERSION:
        return NativeNotes()
    return NativeNotes(
        counters={
            key: value
            for key in COUNTERS
            if isinstance(counters, dict) and type(value := counters.get(key)) is int and 0 <= value < 1 << 62
        },
        config=config if isinstance(config, dict) else None,
        stage=stage if type(stage) is int and 1 <= stage <= 3 else None,
        options=tuple(_options(group) for group in options if isinstance(group, dict))
        if isinstance(options, list)
        else (),
        kinds={str(key): str(kind) for key, kind in kinds.items()} if isinstance(kinds, dict) else {},
        scheduler=scheduler if isinstance(scheduler, dict) else None,
    )


def _options(group: Mapping[object, object]) -> dict[str, OptionValue]:
    """The options of a group, of which JSON has lists in place of tuples."""
    return {str(key): _option(value) for key, value in group.items()}


def _option(value: object) -> OptionValue:
    if isinstance(value, list):
        return tuple(_option(item) for item in value)
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def kinds_of_scalars(part: SavedPart) -> dict[str, str]:
    """The type of each value that all parameters keep in one type."""
    kinds: dict[str, set[str]] = {}
    for scalars in part.scalars:
        for key, value in scalars.items():
            kinds.setdefault(key, set()).add(value.kind)
    return {key: found.pop() for key, found in kinds.items() if len(found) == 1}


def with_kind(value: ScalarValue, kind: str | None) -> ScalarValue:
    """The same number in another type; as it is where the type does not hold it."""
    if kind is None or value.value is None:
        return value
    made = ScalarValue(kind, int(value.value) if kind in _INTEGERS else float(value.value))
    return made if made.number() == value.number() else value


_INTEGERS = frozenset(["pyint", "int64", "int32", "int16", "int8", "uint8"])


def with_native_options(groups: Sequence[ParamGroup], notes: NativeNotes) -> tuple[ParamGroup, ...]:
    """The groups with the options that the ZeRO run had, in the values of now; as they are where it had others."""
    if len(notes.options) != len(groups):
        return tuple(groups)
    return tuple(
        ParamGroup({key: group.options.get(key, value) for key, value in own.items()}, group.params)
        for group, own in zip(groups, notes.options, strict=True)
    )
