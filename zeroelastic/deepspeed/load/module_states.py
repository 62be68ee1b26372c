"""The module states file of a load, which DeepSpeed's load reads once, without parameters.

DeepSpeed takes the module's own entries, counters, and the states of the lr scheduler, random-LTD and the data sampler
from it (``DeepSpeedEngine._load_checkpoint``, 0.19.8). A missing entry, or one of another kind, would end a load in the
middle, so it is checked before (``compare``). ``StatesFile`` is the file as ``torch.load`` reads it: without the bytes
of parameters, which the load fills itself.
"""

from __future__ import annotations

import io
import os
import pickle
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from operator import attrgetter
from typing import IO, Any, cast

import numpy as np
import torch
from deepspeed.runtime.fp16 import loss_scaler as ds_loss_scaler
from deepspeed.runtime.zero.config import ZeroStageEnum

from zeroelastic.checkpoint.model_states import client_state_keys
from zeroelastic.checkpoint.param_changes import GroupMatch
from zeroelastic.checkpoint.tag_files import SAVE_ID
from zeroelastic.core.digest import ByteArray
from zeroelastic.core.slices import Int64Array
from zeroelastic.deepspeed.client_state import loading_sampler, without_missing
from zeroelastic.deepspeed.engine import Engine
from zeroelastic.deepspeed.engine_state import begin_change, state_of
from zeroelastic.deepspeed.load.load_plan import LoadPlan
from zeroelastic.deepspeed.load.notes import LoadNotes
from zeroelastic.deepspeed.patching import patched
from zeroelastic.errors import CheckpointError, ConfigError, UnreadableError, UnsafePickleError
from zeroelastic.io.storage import read_range
from zeroelastic.torch_file.safe_unpickler import split_global

_FRAGMENTS = "frozen_param_fragments"


def load_module(engine: Engine, load_plan: LoadPlan, path: str, notes: LoadNotes) -> tuple[Any, Any]:
    """DeepSpeed's own part: module, counters, scheduler and client state, out of the file at ``path``."""
    request = load_plan.request
    begin_change(engine)
    reader = _ModelStatesReader(engine, load_plan, path)
    with (
        patched(engine, checkpoint_engine=reader, has_moe_layers=False),
        patched(state_of(engine), module_paths=reader.paths),
        recorded_keys(engine.module, notes, forgive=request.options.on_mismatch == "initialize"),
        loading_sampler(engine),
    ):
        # load_optimizer_states=False would merge the full model on every rank
        flags = {**request.flags(), "load_optimizer_states": True}
        loaded, state = engine._load_checkpoint(request.load_dir, str(request.tag), **flags)
    if loaded is None:
        raise CheckpointError(f"{load_plan.model.path}: DeepSpeed did not load it.")
    if not request.load_optimizer_states:
        state.setdefault("optimizer", None)
    if not load_plan.checkpoint.whole_model:  # else rank 0 saved these for all ranks
        of_caller = client_state_keys(cast(Mapping[object, object], state))
        users = {*of_caller} - {"zeroelastic"}  # the position in the data, the same on all
        kept = {"buffers": bool(engine._get_buffer_names()), "client state": bool(users)}
        notes.kept_by_rank = " and ".join(what for what, is_there in kept.items() if is_there)
    notes.texts += _buffer_casts(engine, load_plan)
    return str(load_plan.model.path), state


def _experts(engine: Engine) -> dict[str, torch.Tensor]:
    """Return the entries of the module's state that DeepSpeed keeps in files of experts."""
    if not engine.has_moe_layers:
        return {}
    state = engine.module.state_dict()
    return {name: state[name] for name in state.keys() - engine._get_non_moe_state_dict(dict(state)).keys()}


class _ModelStatesReader:
    """The checkpoint engine of a load: DeepSpeed reads the chosen module states once, without payload of parameters.

    Frozen parameters are filled from their parts; where the file has the whole module (saved at stages 1 and 2), or the
    run keeps it whole, weights are made from the master weights. In their place DeepSpeed finds the run's own tensors,
    and so it does in place of experts, which it would else read from files of their own (``load_moe_state_dict``). The
    file is another tensor parallel rank's where the sizes differ; to DeepSpeed it is one of as many as the run has.

    With ``weights_only_load``, only objects of torch's allow-list, DeepSpeed's own classes and ``allow_globals`` are
    made. All else is the original engine's. Raises ConfigError for a class that cannot be imported.
    """

    def __init__(self, engine: Engine, load_plan: LoadPlan, path: str) -> None:
        live, options = load_plan.live, load_plan.request.options
        self._engine, self._original, self._scheduler = engine, engine.checkpoint_engine, engine.lr_scheduler
        self._load_plan, self._path, self._tp_size = load_plan, path, engine.mp_world_size
        self.paths = (path,) * self._tp_size  # DeepSpeed wants one for each tensor parallel rank
        self._loaded: dict[str, Any] | None = None
        self._safe: list[Any] | None = None
        if options.weights_only_load:
            of_deepspeed = (ZeroStageEnum, ds_loss_scaler.LossScaler, ds_loss_scaler.DynamicLossScaler)
            self._safe = [*of_deepspeed, (_enum_member, "builtins.getattr"), *map(_imported, options.allow_globals)]
        named = dict(engine.module.named_parameters(remove_duplicate=False))
        self._own = named if load_plan.checkpoint.whole_model or not live.per_param else {}
        self._excluded = {  # which the state lacks, and the run keeps
            name: param for name, param in named.items() if load_plan.keeps_frozen and param not in live.trained
        }
        self._experts = _experts(engine)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def load(self, path: str, map_location: Any = None) -> Any:
        """DeepSpeed's loader asks twice for the same file; the second time it gets the first result."""
        if os.fspath(path) not in self.paths:
            return self._original.load(path, map_location=map_location)
        if self._loaded is None:  # of its tensor parallel peers' files it looks at what is in this rank's own, too
            self._loaded = self._read()
        return dict(self._loaded)

    def _read(self) -> dict[str, Any]:
        path = self._load_plan.model.path
        if self._load_plan.reads_model:
            read_range(path, 0, 1)  # refuses what is no file, and links that lead elsewhere
        try:
            with StatesFile(self._path, self._load_plan.model.params_alone) as file:
                state = without_missing(self._engine, self._unpickle(file))
                state.pop(SAVE_ID, None)  # else it is client state
                state[_FRAGMENTS] = None  # DeepSpeed then leaves frozen parameters to us
                module = state.get("module")
                names = self._own.keys() & module.keys() if isinstance(module, dict) else set()
                if isinstance(module, dict):
                    module.update(dict.fromkeys(names))
                    file.fill(tensor for tensor in module.values() if isinstance(tensor, torch.Tensor))
        except OSError as error:
            raise UnreadableError(f"{path}: cannot be read: {error.strerror or error}.") from error
        except EOFError as error:
            raise CheckpointError(f"{path}: {error}.") from None
        schedule, diff = state.get("lr_scheduler"), self._load_plan.diff
        if self._scheduler is not None and isinstance(schedule, Mapping) and not diff.same_groups:
            state["lr_scheduler"] = rearranged(schedule, self._scheduler.state_dict(), diff.groups)
        if isinstance(module, dict):
            own = {**{name: self._own[name] for name in names}, **self._excluded}
            module.update({name: param.data for name, param in own.items()})
        if self._experts:
            state["module"].update(self._experts)
        state["mp_world_size"] = self._tp_size
        return state

    def _unpickle(self, file: StatesFile) -> dict[str, Any]:
        path = self._load_plan.model.path
        try:
            with torch.serialization.safe_globals(self._safe or []):
                state = torch.load(cast(IO[bytes], file), map_location="cpu", weights_only=self._safe is not None)
        except MemoryError:
            raise
        except Exception as error:  # a damaged file makes the unpickler raise anything
            if file.error is not None:
                raise file.error from None
            if self._safe is not None and isinstance(error, pickle.UnpicklingError):
                named = re.search(r"(?:GLOBAL |but got <class ')([\w.]+)", str(error))  # else torch's own sentence
                why, name = (f"it names {named[1]}.", named[1]) if named else (str(error), "package.module.Class")
                raise UnsafePickleError(
                    f'{path}: refused by "weights_only_load": {why} To allow what you trust all the same, name it '
                    f'in "allow_globals": ["{name}"] in the "zeroelastic" block.'
                ) from None
            raise CheckpointError(f"{path}: {error}") from error
        if not isinstance(state, dict):
            raise CheckpointError(f"{path}: is not a DeepSpeed model states file.")
        return state


def _enum_member(owner: Any, name: str) -> ZeroStageEnum:
    """Stand in for ``getattr`` in a pickle: Python 3.11.2 and its neighbours pickle members of enumerations by name."""
    if owner is not ZeroStageEnum or name not in ZeroStageEnum.__members__:
        raise pickle.UnpicklingError(f"getattr of {owner!r} is not on the allow-list.")
    return ZeroStageEnum[name]


def _imported(name: str) -> Any:
    module, qualname = split_global(name)
    try:
        return attrgetter(qualname)(import_module(module))
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f'"zeroelastic": allow_globals names {name}, which cannot be imported: {error}. Correct the name, or '
            "leave it out."
        ) from None


@contextmanager
def recorded_keys(module: Any, notes: LoadNotes, *, forgive: bool) -> Iterator[None]:
    """Within this context, note the entries that ``module.load_state_dict`` finds missing and unknown.

    ``forgive`` then strikes them off before a strict load raises. Tensors of other shapes are an error all the same.
    """

    def record(_: object, found: Any) -> None:
        notes.missing += found.missing_keys
        notes.unexpected += found.unexpected_keys
        if forgive:
            found.missing_keys.clear()
            found.unexpected_keys.clear()

    handle = module.register_load_state_dict_post_hook(record)
    try:
        yield
    finally:
        handle.remove()


_BY_GROUP = frozenset(("base_lrs", "_last_lr", "min_lrs", "max_lrs", "lr_lambdas", "base_momentums", "max_momentums"))
"""Lists of torch's schedulers with one entry per optimizer group (torch 2.6 to 2.13); DeepSpeed's own keep none."""


def rearranged(saved: Mapping[str, Any], own: Mapping[str, Any], groups: Sequence[GroupMatch]) -> dict[str, Any]:
    """Return a scheduler's saved state with its lists by group in the order of the live groups.

    A group without a saved one keeps the entries of ``own``, the state of the run's scheduler. Schedulers within
    schedulers are followed. The arguments are not changed.
    """
    state = dict(saved)
    for key, values in saved.items():
        theirs = own.get(key)
        if key in _BY_GROUP and isinstance(values, (list, tuple)) and isinstance(theirs, (list, tuple)):
            state[key] = [
                values[match.source] if match.source is not None and match.source < len(values) else theirs[g]
                for g, match in enumerate(groups)
                if g < len(theirs)
            ]
        elif key == "_schedulers" and isinstance(values, list) and isinstance(theirs, list):
            state[key] = [
                rearranged(inner, mine, groups) if isinstance(inner, Mapping) and isinstance(mine, Mapping) else inner
                for inner, mine in zip(values, theirs, strict=False)
            ]
    return state


def _buffer_casts(engine: Engine, load_plan: LoadPlan) -> list[str]:
    """Return a note on each kind of buffer that was cast; ``custom_load_fn`` may do with them what it likes."""
    buffers = dict(engine.module.named_buffers()) if load_plan.request.custom_load_fn is None else {}
    own = {name: str(buffer.dtype).removeprefix("torch.") for name, buffer in buffers.items()}
    forms = ((name, form) for name, form in load_plan.model.others.items() if name in own and form)
    casts = {(form[0], own[name]) for name, form in forms if form[0] != own[name]}
    return [f"buffers: cast from {saved} to {live}" for saved, live in sorted(casts)]


class StatesFile(io.RawIOBase):
    """An open file of which the ranges ``left_out`` are not read: in a buffer, their bytes stay as they were.

    ``left_out`` are (offset, nbytes), ascending, with shape ``(num_ranges, 2)``. ``error`` is what ended a read: for
    torch's reader, which is C++, the file ends there. It is no mapping: DeepSpeed's own save writes a file again in its
    place, and a mapped page that has been cut off ends the process with SIGBUS.
    """

    def __init__(self, path: str, left_out: Int64Array) -> None:
        """Raises OSError."""
        super().__init__()
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115 - closed with this one
        self._size, self._at = os.fstat(self._file.fileno()).st_size, 0
        self._begin, self._end = left_out[:, 0], np.maximum.accumulate(left_out.sum(axis=1))
        self._unread: list[tuple[int, int, int]] = []  # (address, offset in the file, nbytes)
        self.error: BaseException | None = None

    def close(self) -> None:
        self._file.close()
        super().close()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Return how many bytes of the buffer now stand for the file's: 0 at its end, and where a read failed."""
        into = np.frombuffer(buffer, dtype=np.uint8)
        nbytes = max(0, min(len(into), self._size - self._at))
        try:
            self._read(into[:nbytes])
        except BaseException as error:
            self.error = error
            return 0
        self._at += nbytes
        return nbytes

    def _read(self, into: ByteArray) -> None:
        at, end = self._at, self._at + len(into)
        for i in range(int(np.searchsorted(self._end, at, side="right")), len(self._begin)):
            begin, stop = max(at, int(self._begin[i])), min(end, int(self._end[i]))
            if begin >= end:
                break
            self._read_all(into[at - self._at : begin - self._at], at)
            self._unread.append((into.ctypes.data + begin - self._at, begin, stop - begin))
            at = stop
        self._read_all(into[at - self._at :], at)

    def _read_all(self, into: ByteArray, offset: int) -> None:
        done = 0
        while done < len(into):
            count = os.preadv(self._file.fileno(), [into[done:].data], offset + done)
            if count == 0:
                raise EOFError(f"it ends at byte {offset + done}, where it had {self._size} when it was opened")
            done += count

    def fill(self, tensors: Iterable[torch.Tensor]) -> None:
        """Read what was left out of these tensors' storages. Raises OSError, EOFError."""
        storages = {one.untyped_storage().data_ptr(): one.untyped_storage() for one in tensors}
        begins = sorted(storages)
        for address, offset, nbytes in self._unread:
            at = bisect_right(begins, address) - 1
            first = address - begins[at] if at >= 0 else 0
            if at >= 0 and first + nbytes <= storages[begins[at]].nbytes():
                data = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storages[begins[at]]).numpy()
                self._read_all(data[first : first + nbytes], offset)
