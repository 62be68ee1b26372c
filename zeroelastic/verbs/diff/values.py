"""What two checkpoints hold beside tensors, as texts: hyper-parameters, counters, scalars, loss scale, client state."""

from __future__ import annotations

import fnmatch
import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping

from zeroelastic.checkpoint.optimizer_file import ParamGroup, ScalerState
from zeroelastic.checkpoint.saved_state import SavedState
from zeroelastic.errors import brief, shown
from zeroelastic.torch_file.header import DTYPE_BYTES, DType, Stub, TensorRef, TorchFile
from zeroelastic.verbs.report import Part

_MAX_VALUES = 100_000
_MAX_LEVELS = 50
_SMALL_BYTES = 1 << 20
_MAX_SHOWN = 120
_OF_THE_SAVE = {
    "buffer_names",
    "dp_world_size",
    "ds_config",
    "ds_version",
    "frozen_param_fragments",
    "frozen_param_shapes",
    "global_steps",
    "module",
    "mp_world_size",
    "optimizer",
    "param_shapes",
    "shared_params",
}
"""Keys of a model states file that are compared elsewhere, or that say how it was saved."""


class Difference(Part):
    """Something beside tensors that the sides have differently: what it is, and how each has it; None: not at all."""

    what: str
    a: str | None
    b: str | None


def state_differences(
    left: SavedState, right: SavedState, left_file: TorchFile, right_file: TorchFile
) -> list[Difference]:
    """Differences that a resumed run would notice, scalars aside; the files are rank 0's model states."""
    return _value_differences(_state_values(left, left_file), _state_values(right, right_file))


def saving_differences(left: SavedState, right: SavedState) -> list[Difference]:
    """Differences in how the two were saved."""
    return _value_differences(_saving_values(left), _saving_values(right))


def scalar_differences(left: SavedState, right: SavedState, params: str | None) -> list[Difference]:
    """Replicated values such as ``step``; what is the same difference for many parameters is said once."""
    tables = [
        {
            (param.name, key): value.canonical()
            for part in state.parts
            for p, param in enumerate(part.layout.params)
            if params is None or fnmatch.fnmatchcase(param.name, params)
            for key, value in part.scalars[p].items()
        }
        for state in (left, right)
    ]
    names = [{param.name for part in state.parts for param in part.layout.params} for state in (left, right)]
    kinds: Counter[tuple[str, str | None, str | None]] = Counter()
    example: dict[tuple[str, str | None, str | None], str] = {}
    for name, key in dict.fromkeys((*tables[0], *tables[1])):
        values = tables[0].get((name, key)), tables[1].get((name, key))
        if values[0] != values[1] and name in names[0] and name in names[1]:
            kind = (key, *values)
            kinds[kind] += 1
            example.setdefault(kind, name)
    return [
        Difference(
            what=f"{kind[0]} of {example[kind]}" + (f" and {count - 1} more parameters" if count > 1 else ""),
            a=_shown_scalar(kind[1]),
            b=_shown_scalar(kind[2]),
        )
        for kind, count in kinds.items()
    ]


def _shown_scalar(text: str | None) -> str | None:
    """A scalar's canonical text for people: floats in decimals, the kind behind it."""
    if text is None:
        return None
    kind, _, value = text.partition(":")
    if "0x" in value:
        value = repr(float.fromhex(value))
    return value if kind.startswith("py") or kind == "none" else f"{value} ({kind})"


def _state_values(state: SavedState, file: TorchFile) -> dict[str, str]:
    """Everything that a resumed run would feel, beside tensors and scalars, as text by what it is."""
    values = {"step": repr(state.models[0].global_steps)}
    for g, group in enumerate(state.head.groups):
        values |= _group_values(g, group)
    values |= _scaler_values(state.head.scaler)
    root = file.root
    if isinstance(root, dict):
        for key, value in root.items():
            if key not in _OF_THE_SAVE:
                for what, text in _flattened(value, brief(str(key)), file):
                    values[what] = text
                    if len(values) >= _MAX_VALUES:
                        return values
    return values


def _group_values(number: int, group: ParamGroup) -> dict[str, str]:
    values = {f"group {number}: {key}": repr(value) for key, value in group.options.items()}
    for name in group.params:
        values[f"group of {name}"] = str(number)
    return values


def _scaler_values(scaler: ScalerState | None) -> dict[str, str]:
    if scaler is None:
        return {}
    values = {f"loss scaler: {key}": _text(value) for key, value in scaler.attributes.items()}
    return {
        "loss scaler": scaler.class_name.rpartition(".")[2],
        "loss scaler: dynamic": repr(scaler.dynamic),
        "loss scaler: overflow": repr(scaler.overflow),
        **values,
    }


def _saving_values(state: SavedState) -> dict[str, str]:
    """How a checkpoint was saved."""
    checkpoint, head = state.checkpoint, state.head
    values = {
        "world size": str(checkpoint.world_size),
        "format": head.format,
        "ZeRO stage": str(head.stage),
        "sub-groups": str(head.layout.num_sub_groups),
        "commit record": "yes" if checkpoint.record is not None else "no",
    }
    if head.save_id is not None:
        values["save id"] = head.save_id
    batch = head.ds_config.get("train_batch_size")
    if isinstance(batch, int):
        values["global batch"] = str(batch)
    if checkpoint.record is not None:
        for name, version in checkpoint.record.versions.model_dump().items():
            values[f"version of {name}"] = str(version)
    return values


def _flattened(value: object, what: str, file: TorchFile, levels: int = _MAX_LEVELS) -> Iterator[tuple[str, str]]:
    """The leaves of containers as (what, text); what holds itself is not followed for ever."""
    if levels == 0:
        yield what, "nested deeper than is looked at"
    elif isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _flattened(item, f"{what}.{brief(key) if type(key) is str else shown(key)}", file, levels - 1)
    elif isinstance(value, (list, tuple)) and value:
        for i, item in enumerate(value):
            yield from _flattened(item, f"{what}[{i}]", file, levels - 1)
    elif isinstance(value, TensorRef):
        yield what, _tensor_text(value, file)
    elif isinstance(value, Stub):
        yield what, f"a {value.module}.{value.qualname}"
        yield from _flattened(value.attributes or None, f"{what}.", file, levels - 1)
        yield from _flattened([*value.args, *value.items] or None, f"{what}.", file, levels - 1)
    else:
        yield what, _text(value)


def _tensor_text(ref: TensorRef, file: TorchFile) -> str:
    """A small tensor of client state: dtype, shape, and its bytes or what stands for them."""
    text = f"{ref.dtype}{list(ref.shape)}"
    if not ref.is_contiguous or ref.numel * DTYPE_BYTES[ref.dtype] > _SMALL_BYTES:
        return text
    return f"{text} {_shortened(file.read(ref).tobytes().hex())}"


def _text(value: object) -> str:
    return value.name if isinstance(value, DType) else _shortened(repr(value))


def _shortened(text: str) -> str:
    """One text per distinct value, too long to show or not."""
    if len(text) <= _MAX_SHOWN:
        return text
    return f"{text[: _MAX_SHOWN // 2]}... ({hashlib.sha256(text.encode()).hexdigest()[:12]})"


def _value_differences(left: Mapping[str, str], right: Mapping[str, str]) -> list[Difference]:
    return [
        Difference(what=what, a=left.get(what), b=right.get(what))
        for what in dict.fromkeys((*left, *right))
        if left.get(what) != right.get(what)
    ]
