"""``zeroelastic.diff``: how two checkpoints differ, whatever the number of ranks and the format of each.

Tensors are compared by the digests of the commit records, and by their bytes where there are none. What differs is
read: its largest difference, and how many elements differ.
"""

from __future__ import annotations

import fnmatch
import hashlib
import os
from functools import cached_property
from typing import Any

import numpy as np

from zeroelastic.checkpoint.module_names import module_names
from zeroelastic.checkpoint.open import open_committed
from zeroelastic.checkpoint.optimizer_file import FP32, FROZEN
from zeroelastic.checkpoint.saved_state import SavedState, open_state
from zeroelastic.checkpoint.tag_files import SAVE_ID, one_save
from zeroelastic.core.digest import ByteArray, ScalarValue
from zeroelastic.errors import UsageError, brief, shown, with_remedy
from zeroelastic.runs.locate import find_source
from zeroelastic.torch_file.header import DType, Stub, TensorRef, TorchFile, read_torch_file
from zeroelastic.torch_file.tree import Global, pairs_of
from zeroelastic.verbs.interface import Advance, Number, Part, Progress, Report, Sides, no_progress
from zeroelastic.verbs.model_tensors import ModelTensor, PartTensor, model_groups, part_tensors, stored_tensor
from zeroelastic.verbs.reading import Reading
from zeroelastic.verbs.tensor import bits_of, values_of

WEIGHTS = (FP32, FROZEN)
"""The state keys of the weights of the model."""

_BUFFER = "buffer"
_WINDOW = 16 << 20
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
    SAVE_ID,
}
"""Keys of a model states file that are compared elsewhere, or that say how it was saved."""

_Name = tuple[str, str]  # the parameter or buffer, and the state key


class Difference(Part):
    """Something beside tensors that the sides have differently: what it is, and how each has it; None: not at all."""

    what: str
    a: str | None
    b: str | None


class ParamAndKey(Part):
    """A tensor by its parameter and state key."""

    param: str
    key: str


class ComparedTensor(Part):
    """One tensor that both sides have and that differs. What follows ``shape`` is None where dtypes or shapes differ.

    ``index`` is where the largest difference is, ``a`` and ``b`` what the sides have there (the values of both parts
    of a complex number are apart, in one more dimension), and ``max_abs`` how far these are apart: infinite where one
    is infinite or no number.
    """

    param: str
    key: str
    dtype: Sides[str]
    shape: Sides[list[int]]
    num_elements: int | None = None
    num_different: int | None = None
    max_abs: Number | None = None
    index: list[int] | None = None
    a: Number | None = None
    b: Number | None = None


class DiffReport(Report):
    """All differences of two checkpoints.

    ``tensors`` are those that both sides have and that differ; ``only_a`` and ``only_b`` are on one side alone.
    ``state`` are differences of what a resumed run would feel: hyper-parameters, counters, scalars, loss scale, client
    state. ``num_by_digest`` of the ``num_tensors`` that both sides have are equal by their recorded digests: their
    files were not read.
    """

    weights_equal: bool
    a: str
    b: str
    content_root: Sides[str | None]
    num_tensors: int
    num_equal: int
    num_by_digest: int
    bytes_read: int
    tensors: tuple[ComparedTensor, ...]
    only_a: tuple[ParamAndKey, ...]
    only_b: tuple[ParamAndKey, ...]
    state: tuple[Difference, ...]

    @property
    def equal(self) -> bool:
        """Return whether a run that resumes from one side is the run that resumes from the other."""
        return self.ok


@with_remedy()
def diff(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    params: str | None = None,
    progress: Progress = no_progress,
) -> DiffReport:
    """Compare two checkpoints: every tensor, hyper-parameters, counters, client state.

    They may have been saved by different numbers of ranks and in different formats; neither makes them differ. Tensors
    are compared by their recorded digests, and bit for bit where one side has none. ``params`` limits the comparison to
    parameters whose names match a glob: then nothing but these is compared, their scalars included. Raises UsageError
    where there is no checkpoint and no such parameter, CheckpointError where what is read is damaged (what has equal
    digests is not read: ``verify`` reads everything), UnsupportedError, UnreadableError.

    Example::

        import zeroelastic
        report = zeroelastic.diff("ckpt/global_step2", "ckpt/global_step4", params="*.norm.weight")
        for tensor in report.tensors:
            print(tensor.param, tensor.key, tensor.max_abs, tensor.index, tensor.a, tensor.b)
    """
    sources = find_source(a), find_source(b)
    with one_save(*(source.tag_dir for source in sources)):
        left, right = (open_state(open_committed(source.tag_dir), resizable=False) for source in sources)
        sides = _Side(left, params), _Side(right, params)
        if params is not None and not any(side.forms for side in sides):
            raise UsageError(
                f"{params!r} matches no parameter of {left.checkpoint.tag_dir} or {right.checkpoint.tag_dir}. Give a "
                "glob, or a part of a name; `zeroelastic inspect --params` lists them."
            )
        return _compare(*sides, params, progress)


class _Side:
    """One of the two checkpoints: tensors, recorded digests, and the reading of the files.

    ``forms`` are dtype and shape of the ``tensors`` and of frozen weights that are in no file, only in the record.
    """

    def __init__(self, state: SavedState, params: str | None) -> None:
        self.state, self.reading = state, Reading(state.checkpoint)
        pattern = "*" if params is None else params
        places = [(place, one) for part in state.parts for one in part_tensors(part) if (place := one.source)]
        self.tensors: dict[_Name, ModelTensor] = {
            (place.name, place.key): one
            for place, one in places
            if isinstance(place, PartTensor) and fnmatch.fnmatchcase(place.name, pattern)
        }
        if params is None:
            self.tensors |= {(tensor.name, _BUFFER): tensor for tensor in _buffers(self.model, state)}
        saved = state.checkpoint.inventory
        excluded = [one for one in saved.excluded() if fnmatch.fnmatchcase(one.param.name, pattern)]
        self.forms = {name: (tensor.dtype, tensor.shape) for name, tensor in self.tensors.items()}
        self.forms |= {(one.param.name, FROZEN): (one.tensors[FROZEN][0], one.param.shape) for one in excluded}
        self.digests, self.root = saved.digests, saved.content_root

    @cached_property
    def model(self) -> TorchFile:
        """The first model states file."""
        return read_torch_file(self.state.models[0].path, foreign="inert")


def _compare(left: _Side, right: _Side, params: str | None, progress: Progress) -> DiffReport:
    in_files, recorded = left.tensors.keys() & right.tensors.keys(), left.digests.keys() & right.digests.keys()
    common = [name for name in left.forms if name in right.forms and (name in in_files or name in recorded)]
    by_digest = {name for name in common if name in recorded and left.digests[name] == right.digests[name]}
    unequal = [name for name in common if name not in by_digest]
    read = {name for name in unequal if name in in_files and left.forms[name] == right.forms[name]}
    nbytes = sum(left.tensors[name].nbytes for name in read)  # of each side
    differing: list[ComparedTensor] = []
    with progress("diff", nbytes) as advance:
        for name in unequal:
            values = _differences(left, right, name, advance) if name in read else {}
            if values is not None:
                (dtype, shape), (other_dtype, other_shape) = left.forms[name], right.forms[name]
                dtypes, shapes = Sides(a=dtype, b=other_dtype), Sides(a=[*shape], b=[*other_shape])
                differing.append(ComparedTensor(param=name[0], key=name[1], dtype=dtypes, shape=shapes, **values))
    left.reading.end()
    right.reading.end()
    both = set(common)
    only = [
        tuple(ParamAndKey(param=param, key=key) for param, key in one.forms if (param, key) not in both)
        for one in (left, right)
    ]
    state = _scalar_differences(left.state, right.state, params)
    if params is None:
        ours, theirs = _state_values(left.state), _state_values(right.state)
        state += [
            Difference(what=what, a=ours.get(what), b=theirs.get(what))
            for what in dict.fromkeys((*ours, *theirs))
            if ours.get(what) != theirs.get(what)
        ]
        state += _object_differences(left, right)
    changed = {*(tensor.key for tensor in differing), *(one.key for one in (*only[0], *only[1]))}
    return DiffReport(
        ok=not (differing or only[0] or only[1] or state),
        weights_equal=not changed & {*WEIGHTS},
        a=str(left.state.checkpoint.tag_dir),
        b=str(right.state.checkpoint.tag_dir),
        content_root=Sides(a=left.root, b=right.root),
        num_tensors=len(common),
        num_equal=len(common) - len(differing),
        num_by_digest=len(by_digest),
        bytes_read=2 * nbytes,
        tensors=tuple(differing),
        only_a=only[0],
        only_b=only[1],
        state=tuple(state),
    )


def _buffers(file: TorchFile, state: SavedState) -> list[ModelTensor]:
    """Return the tensors of the module but parameters, which are empty there at stage 3, and whole at 1 and 2."""
    module = pairs_of(pairs_of(file.root).get("module"))
    names = state.models[0].others if state.checkpoint.whole_model else module
    tensors = {str(key): value for key, value in module.items() if key in names and isinstance(value, TensorRef)}
    tensors = {name: ref for name, ref in tensors.items() if ref.numel}
    file.locate(ref.storage.key for ref in tensors.values())
    return [stored_tensor(name, ref, file) for name, ref in tensors.items()]


def _differences(left: _Side, right: _Side, name: _Name, advance: Advance) -> dict[str, Any] | None:
    """Read a tensor of both sides, and return the values of ``ComparedTensor``; None where it does not differ."""
    a, b = left.tensors[name], right.tensors[name]
    num_different, numel, largest = 0, 0, (-1.0, 0, 0.0, 0.0)
    for ours, theirs in zip(left.reading.windows(a, _WINDOW), right.reading.windows(b, _WINDOW), strict=True):
        count, worst = compare_bytes(ours, theirs, a.dtype)
        num_different += count
        if worst is not None and worst[0] > largest[0]:
            largest = (worst[0], numel + worst[1], worst[2], worst[3])
        numel += len(bits_of(ours, a.dtype))
        advance(len(ours))
    if not num_different:
        return None
    index = np.unravel_index(largest[1], a.shape if numel == a.numel else (*a.shape, 2))  # 2: a complex number
    values = {"num_elements": numel, "num_different": num_different, "max_abs": largest[0]}
    return values | {"index": [int(i) for i in index], "a": largest[2], "b": largest[3]}


def compare_bytes(left: ByteArray, right: ByteArray, dtype: str) -> tuple[int, tuple[float, int, float, float] | None]:
    """Count the elements whose bits differ, and return the largest difference: by how much, where, and both values.

    A finite number and an infinity or NaN are infinitely far apart; so are two of these.
    """
    a, b = bits_of(left, dtype), bits_of(right, dtype)
    unequal = np.flatnonzero(a != b)
    if not len(unequal):
        return 0, None
    with np.errstate(all="ignore"):
        x, y = values_of(a[unequal], dtype), values_of(b[unequal], dtype)
        apart = np.abs(x - y)
    apart[~np.isfinite(apart)] = np.inf
    worst = int(apart.argmax())
    return len(unequal), (float(apart[worst]), int(unequal[worst]), float(x[worst]), float(y[worst]))


def _scalar_differences(left: SavedState, right: SavedState, params: str | None) -> list[Difference]:
    """Compare scalars such as ``step``; a difference that many parameters have is listed once."""
    ours, theirs = (
        {param.name: scalars for part in state.parts for param, scalars in zip(part.params, part.scalars, strict=True)}
        for state in (left, right)
    )
    found: dict[tuple[str, str | None, str | None], list[str]] = {}
    for name in ours:
        if name in theirs and (params is None or fnmatch.fnmatchcase(name, params)):
            for key in dict.fromkeys((*ours[name], *theirs[name])):
                a, b = ours[name].get(key), theirs[name].get(key)
                if (a and a.canonical()) != (b and b.canonical()):
                    found.setdefault((key, _shown_scalar(a), _shown_scalar(b)), []).append(name)
    return [
        Difference(what=f"{key} of {first}" + (f" and {len(more)} more parameters" if more else ""), a=a, b=b)
        for (key, a, b), (first, *more) in found.items()
    ]


def _shown_scalar(scalar: ScalarValue | None) -> str | None:
    """Return a scalar for people, with the kind of one that is a tensor."""
    if scalar is None:
        return None
    text = repr(scalar.value)
    return text if scalar.kind.startswith("py") or scalar.kind == "none" else f"{text} ({scalar.kind})"


def _state_values(state: SavedState) -> dict[str, str]:
    """Return what a resumed run would feel of the optimizer and the counters, as text by what it is."""
    values = {"step": repr(state.models[0].global_steps)}
    for number, group in enumerate(model_groups(state)):
        values |= {f"group {number}: {key}": repr(value) for key, value in group.options.items()}
        values |= {f"group of {name}": str(number) for name in group.params}
    if (scaler := state.head.scaler) is not None:
        values["loss scaler"] = scaler.class_name.rpartition(".")[2]
        values |= {"loss scaler: dynamic": repr(scaler.dynamic), "loss scaler: overflow": repr(scaler.overflow)}
        values |= {f"loss scaler: {key}": _text(value) for key, value in scaler.attributes.items()}
    return values


def _object_differences(left: _Side, right: _Side) -> list[Difference]:
    """Compare the client state, the scheduler and what else is in two model states files, leaf by leaf.

    The parts of each pair of objects are looked at once: an object may hold itself, or be in many places.
    """
    found: list[Difference] = []
    seen: dict[tuple[int, int], tuple[object, object]] = {}  # with the objects, whose numbers nothing else gets then
    ours, theirs = _objects(left.model), _objects(right.model)
    work = [(key, ours.get(key, _ABSENT), theirs.get(key, _ABSENT)) for key in dict.fromkeys((*ours, *theirs))]
    while work:
        what, a, b = work.pop()
        parts = _parts(a), _parts(b)
        texts = _leaf(a, left), _leaf(b, right)
        if texts[0] != texts[1]:
            found.append(Difference(what=brief(what), a=texts[0], b=texts[1]))
        elif any(parts) and (id(a), id(b)) not in seen:
            seen[id(a), id(b)] = a, b
            names = dict.fromkeys((*parts[0], *parts[1]))
            work += [(what + name, parts[0].get(name, _ABSENT), parts[1].get(name, _ABSENT)) for name in names]
    return sorted(found, key=lambda one: one.what)


_ABSENT = object()


def _objects(file: TorchFile) -> dict[str, object]:
    """Return the objects of a model states file that are not compared elsewhere."""
    root = pairs_of(file.root)
    entries = pairs_of(root.get("module"))
    extra = module_names(root, entries, {}, is_whole=True).extra_states
    objects = {name: entries[name] for name in sorted(extra) if not isinstance(entries[name], TensorRef)}
    return objects | {str(key): value for key, value in root.items() if key not in _OF_THE_SAVE}


def _leaf(value: object, side: _Side) -> str | None:
    """Return an object as text, of a container what it is; None where there is nothing."""
    if value is _ABSENT:
        return None
    if isinstance(value, TensorRef):
        raw = side.reading.read(stored_tensor("", value, side.model), check=False).tobytes()
        text = raw.hex() if 2 * len(raw) <= _MAX_SHOWN else f"digest {hashlib.sha256(raw).hexdigest()[:12]}"
        return f"{value.dtype}{list(value.shape)} {text}"
    if isinstance(value, Stub):
        return f"a {value.module}.{value.qualname}"
    if isinstance(value, Global):
        return brief(".".join(value.path))
    if isinstance(value, (dict, list, tuple)) and value:
        return "a mapping" if isinstance(value, dict) else "a sequence"
    return value.name if isinstance(value, DType) else _text(value)


def _parts(value: object) -> dict[str, object]:
    """Return what an object holds, by what each part adds to its name; nothing for a leaf."""
    if isinstance(value, dict):
        return {f".{key if type(key) is str else shown(key)}": item for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return {f"[{i}]": item for i, item in enumerate(value)}
    if isinstance(value, Stub):
        named = {f"..{name}": item for name, item in value.attributes.items()}
        return named | {f".[{i}]": item for i, item in enumerate((*value.args, *value.items, *value.pairs))}
    return {}


def _text(value: object) -> str:
    if isinstance(value, (set, frozenset)) and value:  # in no order of its own
        return _shortened(f"{{{', '.join(sorted(map(repr, value)))}}}")
    return _shortened(repr(value))


def _shortened(text: str) -> str:
    """One text per distinct value, too long to show or not."""
    if len(text) <= _MAX_SHOWN:
        return text
    return f"{text[: _MAX_SHOWN // 2]}... ({hashlib.sha256(text.encode(errors='surrogatepass')).hexdigest()[:12]})"
