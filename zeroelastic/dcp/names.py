"""Which entries of a DCP directory are the model, which are the optimizer, and what else is there.

The optimizer's entries are ``PREFIX.state.PARAM.KEY`` and ``PREFIX.param_groups.``, as torch's
``get_optimizer_state_dict`` has them: nested, ``param_groups.NUMBER.OPTION`` with ``params``, or flattened,
``param_groups.PARAM.OPTION``. The prefix is what the state dict calls the optimizer, such as "optim" or, in
accelerate's folders, "optimizer". The model's prefix is what stands before the names of the optimizer's parameters.
Names are the module's without wrappers: the parts of torch.compile (``_orig_mod``), of FSDP and of activation
checkpointing are left out, as torch leaves them out.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from zeroelastic.checkpoint.optimizer_file import (
    FP32,
    OF_THE_PARAMS,
    OptionValue,
    ParamGroup,
    read_group,
    read_option,
    read_scalar,
)
from zeroelastic.core.digest import ScalarValue
from zeroelastic.dcp.chunks import ChunkArchives, StateKeys
from zeroelastic.dcp.metadata import ChunkedTensor, DcpMetadata, StoredBytes
from zeroelastic.errors import CheckpointError, UnsupportedError, brief, some

NATIVE = "zeroelastic"
"""The key under which a converted checkpoint keeps what torch has no place for: JSON."""

_WRAPPERS = frozenset(["_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"])
_STATE, _GROUPS, _MODULE = "state.", "param_groups", "module."
_SCHEDULER = re.compile(r"(?:.*\.)?(?:lr_)?schedulers?\.(?P<name>[^.]+)")
_MAX_DEPTH = 4
_STEPS = re.compile(r"(?:.*\.)?(?:global_)?steps?")


@dataclass(frozen=True, slots=True)
class NamedState:
    """The entries of a DCP directory by the names of the module's parameters.

    ``trained[name]`` are the weight, under "fp32", and the tensors of the optimizer's state; ``scalars`` its other
    values. ``others`` are the rest of the model's tensors: frozen parameters, buffers, and further names of tied
    parameters. ``groups`` list trained parameters alone. ``scheduler`` is the state of a scheduler; ``rest`` are the
    keys of all that belongs to none of these. ``native`` is what a conversion left under ``NATIVE``.
    """

    trained: Mapping[str, StateKeys]
    scalars: Mapping[str, Mapping[str, ScalarValue]]
    others: Mapping[str, ChunkedTensor]
    groups: tuple[ParamGroup, ...]
    scheduler: Mapping[str, object]
    steps: int | None
    rest: tuple[str, ...]
    native: str | None


def clean_name(name: str) -> str:
    """A parameter's name without the wrappers of torch.compile, FSDP and activation checkpointing."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def named_state(found: DcpMetadata, archives: ChunkArchives) -> NamedState:
    """Sort the entries of a directory by kind. Raises CheckpointError, UnsupportedError for other entries.

    Example::

        with ChunkArchives() as archives:
            named_state(read_metadata(folder), archives).groups[0].options["lr"]
    """
    at = str(found.folder)
    keys = [*found.tensors, *found.objects]
    optimizer = _optimizer_prefix(found, at)
    reader = _Optimizer(found, archives, optimizer)
    groups, listed = reader.groups()
    states = reader.state_names(frozenset(listed))
    names = [*dict.fromkeys([*states, *listed])] if not states else [*states]
    if not names:
        raise UnsupportedError(f"{at}: the optimizer has no parameters. Save it after a step, so that it has state.")
    model = _model_prefix(names, [key for key in found.tensors if not key.startswith(optimizer)], at)
    weights = {
        clean_name(key.removeprefix(model)): tensor
        for key, tensor in found.tensors.items()
        if key.startswith(model) and not key.startswith(optimizer)
    }
    inner = _MODULE if all(name.startswith(_MODULE) for name in (*names, *weights)) else ""
    trained: dict[str, StateKeys] = {}
    scalars: dict[str, Mapping[str, ScalarValue]] = {}
    for name in names:
        tensors, values = reader.state(name, weights[name])
        trained[name.removeprefix(inner)] = {FP32: weights[name], **tensors}
        scalars[name.removeprefix(inner)] = values
    own = [
        ParamGroup(group.options, tuple(name.removeprefix(inner) for name in group.params if name in weights))
        for group in groups
    ]
    members = [name for group in own for name in group.params if name in trained]
    if sorted(members) != sorted(trained):
        lost = sorted(trained.keys() - set(members))
        raise CheckpointError(
            f"{at}: the optimizer's groups list {some(lost) if lost else 'a parameter twice'} wrongly."
        )
    rest = [
        key for key in keys if not key.startswith(optimizer) and not (key.startswith(model) and key in found.tensors)
    ]
    scheduler, steps, native, unknown = _beside(rest, found, archives)
    return NamedState(
        trained,
        scalars,
        {name.removeprefix(inner): tensor for name, tensor in weights.items() if name not in names},
        tuple(ParamGroup(group.options, tuple(n for n in group.params if n in trained)) for group in own),
        scheduler,
        steps,
        tuple(unknown),
        native,
    )


def _optimizer_prefix(found: DcpMetadata, at: str) -> str:
    """Return the text before ``state.`` and ``param_groups`` in the optimizer's keys."""
    prefixes: dict[str, bool] = {}  # and whether it is that of values, which a model does not have
    for key in (*found.tensors, *found.objects):
        if (match := re.search(rf"(?<![^.]){_GROUPS}(?=\.|$)", key)) is not None:
            prefix = key[: match.start()]
            prefixes[prefix] = prefixes.get(prefix, False) or key in found.objects
    if not prefixes:
        raise UnsupportedError(
            f"{at}: holds no optimizer: no key has param_groups. Save it with torch's get_optimizer_state_dict beside "
            "the model; weights alone are loaded by from_pretrained or torch."
        )
    if len(prefixes) > 1:  # a parameter may have this name, too: the model has it, and the state of the optimizer
        begins = re.compile(rf"(?<![^.]){_STATE}")
        own = {
            prefix: True
            for prefix, has_values in prefixes.items()
            if has_values and not any(prefix[: match.start()] in prefixes for match in begins.finditer(prefix))
        }
        prefixes = own or prefixes
    if len(prefixes) > 1:
        raise UnsupportedError(
            f"{at}: holds {len(prefixes)} optimizers ({some(sorted(prefixes))}); a ZeRO checkpoint has one."
        )
    return next(iter(prefixes))


def _model_prefix(names: Iterable[str], keys: Iterable[str], at: str) -> str:
    """Return the text before the names of parameters in the model's keys."""
    cleaned = {clean_name(key) for key in keys}
    common: set[str] | None = None
    for name in names:
        prefixes = {key.removesuffix(name) for key in cleaned if key == name or key.endswith(f".{name}")}
        common = prefixes if common is None else common & prefixes
        if not common:
            raise UnsupportedError(
                f"{at}: the optimizer has state of {brief(name)}, of which there is no weight. Save the model "
                "beside the optimizer, both with torch.distributed.checkpoint.state_dict."
            )
    assert common, "there are names"
    if len(common) > 1:
        models = {prefix for prefix in common if prefix.split(".")[-2:-1] == ["model"]}
        common = models or common
    if len(common) > 1:
        raise UnsupportedError(f"{at}: holds several models ({some(sorted(common))}); a ZeRO checkpoint has one.")
    return common.pop()


class _Optimizer:
    """Reads the optimizer's entries, which begin with a prefix."""

    def __init__(self, found: DcpMetadata, archives: ChunkArchives, prefix: str) -> None:
        self._found, self._archives, self._prefix = found, archives, prefix
        self._at = str(found.folder)
        self._state: dict[str, dict[str, str]] = {}

    def state_names(self, listed: Collection[str]) -> list[str]:
        """The parameters that have state; ``listed`` are the groups' names, for state keys that have a dot."""
        begin = self._prefix + _STATE
        for key in (*self._found.tensors, *self._found.objects):
            if key.startswith(begin):
                parts = key.removeprefix(begin).split(".")
                splits = [(".".join(parts[:-i]), ".".join(parts[-i:])) for i in range(1, min(len(parts), _MAX_DEPTH))]
                if not splits:
                    raise UnsupportedError(f"{self._at}: {brief(key)} is not the state of a parameter.")
                name, state_key = next((split for split in splits if clean_name(split[0]) in listed), splits[0])
                self._state.setdefault(clean_name(name), {})[state_key] = key
        if self._state and all(name.isdigit() for name in self._state):
            raise UnsupportedError(
                f"{self._at}: the optimizer's state is by the number of the parameter, as optimizer.state_dict() has "
                "it, which does not say whose it is. Save get_optimizer_state_dict(model, optimizer)."
            )
        return [*self._state]

    def state(self, name: str, weight: ChunkedTensor) -> tuple[dict[str, ChunkedTensor], dict[str, ScalarValue]]:
        """The tensors and the other values of a parameter's state."""
        tensors: dict[str, ChunkedTensor] = {}
        scalars: dict[str, ScalarValue] = {}
        for state_key, key in self._state.get(name, {}).items():
            tensor = self._found.tensors.get(key)
            if tensor is not None and tensor.shape == weight.shape and state_key != "step":
                tensors[state_key] = tensor
            elif tensor is None or tensor.shape == ():
                scalars[state_key] = self._scalar(key)
            else:
                raise UnsupportedError(
                    f"{self._at}: {state_key} of {brief(name)} has shape {tensor.shape}, the weight {weight.shape}: "
                    "ZeRO cuts state like the weight."
                )
        return tensors, scalars

    def groups(self) -> tuple[list[ParamGroup], list[str]]:
        """The optimizer's groups, and the names of all parameters that they list."""
        begin = f"{self._prefix}{_GROUPS}"
        if begin in self._found.objects:
            groups = self._listed(self._value(begin))
        elif f"{begin}.0.params" in self._found.objects:
            groups = self._nested(begin)
        else:
            groups = self._flattened(begin)
        return groups, [name for group in groups for name in group.params]

    def _listed(self, value: object) -> list[ParamGroup]:
        if not isinstance(value, list) or not all(isinstance(group, dict) for group in value):
            raise CheckpointError(f"{self._at}: {_GROUPS} is no list of groups. The checkpoint is damaged.")
        file = self._archives.open(self._found.objects[f"{self._prefix}{_GROUPS}"])
        return [
            read_group(file, group, f"optimizer group {g}", self._names(group.get("params")))
            for g, group in enumerate(value)
        ]

    def _nested(self, begin: str) -> list[ParamGroup]:
        groups: list[ParamGroup] = []
        while f"{begin}.{len(groups)}.params" in self._found.objects:
            own = re.compile(rf"{re.escape(begin)}\.{len(groups)}\.(?P<option>[^.]+)")
            keys = {match["option"]: key for key in self._keys if (match := own.fullmatch(key)) is not None}
            params = self._names(self._value(keys.pop("params")))
            options = {option: self._option(key) for option, key in keys.items() if option not in OF_THE_PARAMS}
            groups.append(ParamGroup(options, params))
        return groups

    def _flattened(self, begin: str) -> list[ParamGroup]:
        """Parameters with the same hyper-parameters are one group."""
        options: dict[str, dict[str, OptionValue]] = {}
        for key in self._keys:
            if key.startswith(f"{begin}."):
                name, _, option = key.removeprefix(f"{begin}.").rpartition(".")
                own = options.setdefault(clean_name(name), {})
                if option not in OF_THE_PARAMS:
                    own[option] = self._option(key)
        members: dict[str, list[str]] = {}
        for name, values in options.items():
            members.setdefault(repr(sorted(values.items())), []).append(name)
        return [ParamGroup(options[names[0]], tuple(names)) for names in members.values()]

    @property
    def _keys(self) -> tuple[str, ...]:
        return (*self._found.objects, *self._found.tensors)

    def _names(self, value: object) -> tuple[str, ...]:
        if not isinstance(value, (list, tuple)) or not all(isinstance(name, str) for name in value):
            raise UnsupportedError(
                f"{self._at}: an optimizer group lists its parameters by number, as optimizer.state_dict() does, which "
                "does not say which they are. Save get_optimizer_state_dict(model, optimizer)."
            )
        return tuple(map(clean_name, value))

    def _value(self, key: str) -> object:
        return self._archives.open(self._found.objects[key]).root

    def _option(self, key: str) -> OptionValue:
        file = self._archives.open(self._place(key))
        return read_option(file, file.root, key)

    def _scalar(self, key: str) -> ScalarValue:
        file = self._archives.open(self._place(key))
        return read_scalar(file, file.root, key)

    def _place(self, key: str) -> StoredBytes:
        """Where an object is, or a tensor of one element."""
        if key in self._found.objects:
            return self._found.objects[key]
        chunks = self._found.tensors[key].chunks
        if len(chunks) != 1:
            raise UnsupportedError(f"{self._at}: {brief(key)} is a tensor in {len(chunks)} chunks, not a number.")
        return chunks[0].place


def _beside(
    keys: Iterable[str], found: DcpMetadata, archives: ChunkArchives
) -> tuple[dict[str, object], int | None, str | None, list[str]]:
    """Sort keys that are neither model nor optimizer: a scheduler's state, steps, a conversion's notes, the rest."""
    scheduler: dict[str, object] = {}
    steps: set[int] = set()
    native: str | None = None
    unknown: list[str] = []
    for key in keys:
        value = archives.open(found.objects[key]).root if key in found.objects else None
        match = _SCHEDULER.fullmatch(key)
        if key == NATIVE and isinstance(value, str):
            native = value
        elif match is not None and key in found.objects and _is_plain(value):
            scheduler[match["name"]] = value
        elif _STEPS.fullmatch(key) and type(value) is int and 0 <= value < 1 << 62:
            steps.add(value)
        else:
            unknown.append(key)
    return scheduler, steps.pop() if len(steps) == 1 else None, native, unknown


def _is_plain(value: object, depth: int = 0) -> bool:
    if isinstance(value, (list, tuple)) and depth < _MAX_DEPTH:
        return all(_is_plain(item, depth + 1) for item in value)
    if isinstance(value, dict) and depth < _MAX_DEPTH:
        return all(isinstance(key, str) and _is_plain(item, depth + 1) for key, item in value.items())
    return value is None or isinstance(value, (bool, int, float, str))
