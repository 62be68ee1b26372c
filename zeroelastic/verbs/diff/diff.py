"""``zeroelastic.diff``: how two checkpoints differ, whatever the number of ranks and the format of each.

found = compare_checkpoints(open_state(open_checkpoint(a)), open_state(open_checkpoint(b)))
found.equal, found.tensors, found.state
"""

from __future__ import annotations

import fnmatch
import hashlib
import os
import re
from collections import Counter
from collections.abc import Mapping

from pydantic import Field

from zeroelastic.byte_sizes import size_option
from zeroelastic.checkpoint.module_names import module_names
from zeroelastic.checkpoint.one_save import one_save
from zeroelastic.checkpoint.open import open_checkpoint
from zeroelastic.checkpoint.optimizer_file import FP32, FROZEN, ParamGroup
from zeroelastic.checkpoint.saved_state import SavedState, open_state
from zeroelastic.checkpoint.topology import expert_sizes
from zeroelastic.errors import UsageError, brief, shown, with_remedy
from zeroelastic.executors.tables import ProgressFunction
from zeroelastic.runs.locate import find_source
from zeroelastic.torch_file.header import DType, Stub, TensorRef, TorchFile, read_torch_file
from zeroelastic.verbs.diff.tensors import ComparedTensor, compare_buffers, compare_tensors, comparison_nbytes
from zeroelastic.verbs.model_tensors import read_buffer, stored_tensor
from zeroelastic.verbs.options import Progress, no_progress
from zeroelastic.verbs.report import Part, Report, Sides

LEAST_MEMORY = 16 << 20
WEIGHTS = (FP32, FROZEN)
"""The state keys of the weights of the model."""


_EXPERT_GROUP = re.compile(r"ep_size_\d+")
"""The name of an optimizer group of experts (deepspeed.moe.utils, 0.19.8)."""
_MAX_VALUES = 100_000
_MAX_LEVELS = 50
_NO_LIMIT = 1 << 62
_MAX_SHOWN = 120
_OF_THE_SAVE = {
    "buffer_names",
    "dp_world_size",
    "checkpoint_parallel_dimensions",
    "ds_autoep_layers",
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
    "universal_checkpoint_info",
}
"""Keys of a model states file that are compared elsewhere, or that say how it was saved."""


class Difference(Part):
    """Something beside tensors that the sides have differently: what it is, and how each has it; None: not at all."""

    what: str
    a: str | None
    b: str | None


class ParamAndKey(Part):
    """A tensor by its parameter and state key."""

    param: str
    key: str


class DiffReport(Report):
    """All differences of two checkpoints.

    ``tensors`` are those that both sides have and that differ; ``only_a`` and ``only_b`` are on one side alone.
    ``state`` are differences of what a resumed run would feel: hyper-parameters, counters, scalars, loss scale, client
    state. ``saving`` are those of how it was saved, which do not make two checkpoints differ. ``equal_tensors`` are
    not in the document.
    """

    weights_equal: bool
    a: str
    b: str
    content_root: Sides[str | None]
    num_tensors: int
    num_equal: int
    bytes_read: int
    tensors: tuple[ComparedTensor, ...]
    only_a: tuple[ParamAndKey, ...]
    only_b: tuple[ParamAndKey, ...]
    state: tuple[Difference, ...]
    saving: tuple[Difference, ...]
    equal_tensors: tuple[ComparedTensor, ...] = Field(default=(), exclude=True)

    @property
    def equal(self) -> bool:
        """Whether a run that resumes from one side is the run that resumes from the other."""
        return self.ok

    @property
    def differing(self) -> tuple[ComparedTensor, ...]:
        """The tensors that differ."""
        return self.tensors

    @property
    def weights(self) -> tuple[ComparedTensor, ...]:
        """The compared tensors that are weights of the model: master weights and frozen parameters."""
        return tuple(tensor for tensor in (*self.tensors, *self.equal_tensors) if tensor.key in WEIGHTS)


@with_remedy()
def diff(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    params: str | None = None,
    max_memory: int | str = "256MiB",
    progress: Progress = no_progress,
) -> DiffReport:
    """Compare two checkpoints: every tensor bit for bit, hyper-parameters, counters, client state.

    They may have been saved by different numbers of ranks and in different formats; neither makes them differ.
    ``params`` limits the comparison to parameters whose names match a glob. Raises UsageError where there is no
    checkpoint, CheckpointError for one that is damaged, UnsupportedError, UnreadableError.

    Example::

        import zeroelastic
        report = zeroelastic.diff("ckpt/global_step2", "ckpt/global_step4", params="*.norm.weight")
        print(report.equal, [tensor.param for tensor in report.differing])
    """
    memory = size_option(max_memory, "--max-memory", minimum=LEAST_MEMORY)
    sources = find_source(a), find_source(b)
    with one_save(*(source.tag_dir for source in sources)):
        left, right = (open_state(open_checkpoint(source.tag_dir), resizable=False) for source in sources)
        with progress("diff", comparison_nbytes(left, right, params=params)) as advance:
            return compare_checkpoints(left, right, params=params, max_memory=memory, progress=advance)


def compare_checkpoints(
    left: SavedState,
    right: SavedState,
    *,
    params: str | None = None,
    max_memory: int = 256 << 20,
    progress: ProgressFunction | None = None,
) -> DiffReport:
    """Compare all tensors and all other state of two checkpoints.

    ``params``, a pattern such as ``"*.bias"``, chooses parameters by name: then nothing but these is compared, their
    scalars included. ``progress`` is given the bytes done since it was last called; there are ``comparison_nbytes``.
    Raises UsageError where the pattern fits no parameter, CheckpointError for files that cannot be read.

    Example::

        compare_checkpoints(before, after, params="*.norm.weight").equal
    """
    found = compare_tensors(left, right, params, max_memory=max_memory, progress=progress)
    if found is None:
        raise UsageError(
            f"{params!r} fits no parameter of {left.checkpoint.tag_dir} or {right.checkpoint.tag_dir}. Give a glob of "
            "their names, or a part of them; `zeroelastic inspect --params` lists them."
        )
    parts = [found]
    state = _scalar_differences(left, right, params)
    if params is None:
        files = tuple(read_torch_file(side.models[0].path, foreign="inert") for side in (left, right))
        parts.append(compare_buffers(left, right, (files[0], files[1])))
        state += _value_differences(_state_values(left, files[0]), _state_values(right, files[1]))
    tensors = [tensor for part in parts for tensor in part.tensors]
    differing = tuple(tensor for tensor in tensors if not tensor.equal)
    only_a = tuple(ParamAndKey(param=param, key=key) for part in parts for param, key in part.only_left)
    only_b = tuple(ParamAndKey(param=param, key=key) for part in parts for param, key in part.only_right)
    return DiffReport(
        ok=not (differing or only_a or only_b or state),
        weights_equal=not {*WEIGHTS} & {*(tensor.key for tensor in differing), *(one.key for one in only_a + only_b)},
        a=str(left.checkpoint.tag_dir),
        b=str(right.checkpoint.tag_dir),
        content_root=Sides(a=_recorded_root(left), b=_recorded_root(right)),
        num_tensors=len(tensors),
        num_equal=len(tensors) - len(differing),
        bytes_read=comparison_nbytes(left, right, params=params),
        tensors=differing,
        only_a=only_a,
        only_b=only_b,
        state=tuple(state),
        saving=tuple(_value_differences(_saving_values(left), _saving_values(right))),
        equal_tensors=tuple(tensor for tensor in tensors if tensor.equal),
    )


def _recorded_root(state: SavedState) -> str | None:
    record = state.checkpoint.record
    return None if record is None else record.content_root


def _scalar_differences(left: SavedState, right: SavedState, params: str | None) -> list[Difference]:
    """Replicated values such as ``step``; what is the same difference for many parameters is said once."""
    tables = [
        {
            (param.name, key): value.canonical()
            for part in state.parts
            for p, param in enumerate(part.params)
            if params is None or fnmatch.fnmatchcase(param.name, params)
            for key, value in part.scalars[p].items()
        }
        for state in (left, right)
    ]
    names = [{param.name for part in state.parts for param in part.params} for state in (left, right)]
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
    for number, group in enumerate(_logical_groups(state)):
        values |= {f"group {number}: {key}": repr(value) for key, value in group.options.items()}
        values |= {f"group of {name}": str(number) for name in group.params}
    if (scaler := state.head.scaler) is not None:
        values["loss scaler"] = scaler.class_name.rpartition(".")[2]
        values |= {"loss scaler: dynamic": repr(scaler.dynamic), "loss scaler: overflow": repr(scaler.overflow)}
        values |= {f"loss scaler: {key}": _text(value) for key, value in scaler.attributes.items()}
    root = file.root
    if isinstance(root, dict):
        module = root.get("module")
        entries = module if isinstance(module, Mapping) else {}
        extra = module_names(root, entries, {}, is_whole=True).extra_states
        objects = {name: entries[name] for name in extra if not isinstance(entries[name], TensorRef)}
        leaves = _Leaves(file)
        for key, value in (*sorted(objects.items()), *root.items()):
            if key not in _OF_THE_SAVE:
                leaves.add(value, brief(str(key)))
        values |= leaves.texts
    return values


def _logical_groups(state: SavedState) -> list[ParamGroup]:
    """The optimizer groups; groups of experts without what follows from the expert parallel size.

    That is their name, ``ep_size_4``, and where DeepSpeed cuts a group that is large on a rank.
    """
    groups: list[ParamGroup] = []
    experts: dict[str, int] = {}
    for group in state.groups:
        name = group.options.get("name")
        if isinstance(name, str) and _EXPERT_GROUP.match(name):
            options = {key: value for key, value in group.options.items() if key != "name"}
            number = experts.setdefault(repr(sorted(options.items())), len(groups))
            members = groups.pop(number).params if number < len(groups) else ()
            groups.insert(number, ParamGroup(options, (*members, *group.params)))
        else:
            groups.append(group)
    return groups


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
    if (topology := checkpoint.topology).tensor_size > 1:
        values["tensor parallel size"] = str(topology.tensor_size)
    if sizes := expert_sizes(checkpoint.layout, topology):
        values["expert parallel size"] = ", ".join(map(str, sizes))
    if head.save_id is not None:
        values["save id"] = head.save_id
    batch = head.ds_config.get("train_batch_size")
    if isinstance(batch, int):
        values["global batch"] = str(batch)
    if checkpoint.record is not None:
        for name, version in checkpoint.record.versions.model_dump().items():
            values[f"version of {name}"] = str(version)
    return values


class _Leaves:
    """The leaves of objects of a file, each as text by where it is; what is not shown is in a digest.

    Equal objects have equal texts, whatever the numbers of their storages; other objects have other texts.
    """

    def __init__(self, file: TorchFile) -> None:
        self.texts: dict[str, str] = {}
        self._file = file
        self._digests: dict[int, tuple[str, object]] = {}  # with the object, whose number nothing else gets meanwhile
        self._open: set[int] = set()

    def add(self, value: object, what: str, levels: int = _MAX_LEVELS) -> None:
        """Add the leaves of an object that is called ``what``."""
        parts = _parts(value)
        if not parts:
            self._put(what, self._leaf(value))
            return
        if levels == 0 or len(self.texts) >= _MAX_VALUES or id(value) in self._open:
            self._put(what, f"{type(value).__name__}, digest {self._digest(value)[:12]}")
            return
        if isinstance(value, Stub):
            self._put(what, self._leaf(value))
        self._open.add(id(value))
        for name, part in parts:
            self.add(part, what + name, levels - 1)
        self._open.remove(id(value))

    def _put(self, what: str, text: str) -> None:
        while what in self.texts:  # names are shortened
            what += "'"
        self.texts[what] = text

    def _digest(self, value: object) -> str:
        """Of all that an object holds; each object is looked at once."""
        parts = _parts(value)
        if not parts:
            return self._leaf(value)
        if id(value) in self._digests:
            return self._digests[id(value)][0]
        self._digests[id(value)] = "itself", value
        texts = [(name, self._digest(part)) for name, part in parts]
        if isinstance(value, dict):
            texts.sort()
        own = self._leaf(value) if isinstance(value, Stub) else type(value).__name__
        digest = hashlib.sha256(repr((own, texts)).encode(errors="surrogatepass")).hexdigest()
        self._digests[id(value)] = digest, value
        return digest

    def _leaf(self, value: object) -> str:
        if isinstance(value, TensorRef):
            tensor = stored_tensor("", value, self._file)
            raw = read_buffer(tensor, limit=_NO_LIMIT).tobytes()
            text = raw.hex() if 2 * len(raw) <= _MAX_SHOWN else f"digest {hashlib.sha256(raw).hexdigest()[:12]}"
            return f"{value.dtype}{list(value.shape)} {text}"
        if isinstance(value, Stub):
            return f"a {value.module}.{value.qualname}"
        if isinstance(value, type) and issubclass(value, Stub):
            return f"{value.module}.{value.qualname}"
        return value.name if isinstance(value, DType) else _text(value)


def _parts(value: object) -> list[tuple[str, object]]:
    """What an object holds, with what each part adds to its name; nothing for a leaf."""
    if isinstance(value, dict):
        return [(f".{brief(key) if type(key) is str else shown(key)}", item) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return [(f"[{i}]", item) for i, item in enumerate(value)]
    if isinstance(value, Stub):
        named = [(f"..{name}", item) for name, item in value.attributes.items()]
        return [*named, *((f".[{i}]", item) for i, item in enumerate((*value.args, *value.items)))]
    return []


def _text(value: object) -> str:
    if isinstance(value, (set, frozenset)) and value:  # in no order of its own
        return _shortened(f"{{{', '.join(sorted(map(repr, value)))}}}")
    return _shortened(repr(value))


def _shortened(text: str) -> str:
    """One text per distinct value, too long to show or not."""
    if len(text) <= _MAX_SHOWN:
        return text
    return f"{text[: _MAX_SHOWN // 2]}... ({hashlib.sha256(text.encode(errors='surrogatepass')).hexdigest()[:12]})"


def _value_differences(left: Mapping[str, str], right: Mapping[str, str]) -> list[Difference]:
    return [
        Difference(what=what, a=left.get(what), b=right.get(what))
        for what in dict.fromkeys((*left, *right))
        if left.get(what) != right.get(what)
    ]
