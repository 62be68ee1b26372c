"""A lean save leaves out of its tag what other files have: frozen weights, and 16-bit weights that the masters give.

``share_weights`` sees to it, before DeepSpeed writes, that the frozen weights are in shared files of the run
(``checkpoint.shared_files``). What is there already is found by content: the digests of all frozen weights are made
at every save, and compared with those that the files state. ``LeanStates`` then takes the weights out of the module
states that DeepSpeed hands to its checkpoint engine, and puts in where they are.

What is left out has an empty tensor in its place, so that DeepSpeed alone fails on such a tag: shapes differ.
``zero_to_fp32.py`` compares none at stage 2, and none of buffers, and would pass empty tensors on: the frozen fragments
have no entries there, and a buffer has None in its place.
"""

from __future__ import annotations

import copy
import logging
import os
import stat
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zeroelastic.checkpoint.optimizer_file import FROZEN
from zeroelastic.checkpoint.shared_files import (
    SHARED_NAME,
    SharedFile,
    digest_of,
    frozen_folder,
    frozen_folder_beside,
    metadata_of,
    read_shared_head,
    shared_name,
)
from zeroelastic.checkpoint.shared_weights import BUFFER, SHARED_KEY, SharedTensor, SharedWeights
from zeroelastic.deepspeed.engine import Engine
from zeroelastic.deepspeed.engine_state import state_of
from zeroelastic.deepspeed.live.digests import LivePiece, LiveStreams, digest_pieces, sum_over_ranks
from zeroelastic.deepspeed.live.live_optimizer import LiveOptimizer
from zeroelastic.deepspeed.options import Options
from zeroelastic.deepspeed.save import recovery_script
from zeroelastic.deepspeed.save.base_model import BaseModel
from zeroelastic.deepspeed.save.directory import Directory
from zeroelastic.deepspeed.save.shared_file import NewFile, write_shared_file
from zeroelastic.deepspeed.storage_rules import saves_nothing
from zeroelastic.distributed.collective import (
    all_gather,
    all_gather_alike,
    all_or_raise,
    broadcast_or_raise,
    collective_device,
)
from zeroelastic.errors import CheckpointError, MissingFileError, UnreadableError, UnsupportedError
from zeroelastic.io.paths import FilePath, absolute
from zeroelastic.io.remote import retrying
from zeroelastic.io.storage import list_directory
from zeroelastic.runs.names import CHECKPOINT_FOLDER
from zeroelastic.runs.shared_folder import put_back
from zeroelastic.torch_file.safetensors import DTYPE_NAMES, Head, check_name, lay_out

logger = logging.getLogger(__name__)

MIN_BUFFER_BYTES = 64 << 10
"""Smaller buffers stay in the tag: they cost nothing, and those that training changes are mostly small."""

_FRAGMENTS = "frozen_param_fragments"
_SCRIPTS = ("zero_to_fp32.py", "zero_to_torch.py")


@dataclass
class KnownFiles:
    """What this process knows of shared files: the headers by path, and the buffers that were seen to change.

    ``buffers`` are the digests of shared buffers at the last save, by name. ``base`` is the model that ``"frozen"``
    names.
    """

    heads: dict[FilePath, tuple[Head, dict[str, int]]] = field(default_factory=dict)
    buffers: dict[str, int] = field(default_factory=dict)
    changing: set[str] = field(default_factory=set)
    base: BaseModel | None = None


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A tensor that is to be in a shared file, by its content; ``digest`` is that of the whole tensor."""

    dtype: str
    shape: tuple[int, ...]
    digest: int

    @property
    def content(self) -> tuple[str, tuple[int, ...], int]:
        """As ``digest_of`` takes it."""
        return self.dtype, self.shape, self.digest


_Places = dict[str, tuple[SharedFile, int]]
"""Where tensors are, by name: the file, and the first byte there."""


def refuse_lean(live: LiveOptimizer) -> None:
    """Raise UnsupportedError for a run whose frozen weights cannot be shared."""
    if live.sharing.place[1].size > 1:
        raise UnsupportedError(
            'lean saves do not cover tensor parallelism, where each rank has slices of its own. Leave "lean" out.'
        )
    if live.sharing.has_slices:
        raise UnsupportedError(
            "lean saves do not cover mixture-of-experts layers, where each rank has experts of its own. Leave "
            '"lean" out.'
        )
    for p, param in enumerate(live.frozen.params):
        check_name(param.name)
        dtype = dtype_name(live.frozen_tensor(p))
        if dtype not in DTYPE_NAMES:
            raise UnsupportedError(
                f"frozen parameter {param.name} is {dtype}, which safetensors files do not hold, and lean saves put "
                'frozen weights there. Leave "lean" out.'
            )


def place_of(destination: Directory, tag: str) -> tuple[Path, str]:
    """The folder of the run's shared files, and the way to it from the tag directory."""
    run = destination.place
    steps = len(tag.split("/"))
    for _ in range(steps):
        run = run.parent
    if not CHECKPOINT_FOLDER.fullmatch(run.name):
        return Path(str(frozen_folder(run))), "../" * steps + frozen_folder(run).name
    # a framework's folder of one checkpoint, beside those of the others
    framework, run = run.name, run.parent
    if run.name == "checkpoints" and framework.startswith("checkpoint_"):
        return Path(str(frozen_folder_beside(run))), "../" * (steps + 2) + frozen_folder_beside(run).name
    return Path(str(frozen_folder(run))), "../" * (steps + 1) + frozen_folder(run).name


def share_weights(
    engine: Engine,
    live: LiveOptimizer,
    streams: LiveStreams,
    destination: Directory,
    *,
    tag: str,
    save_id: str,
    options: Options,
) -> tuple[SharedWeights, list[int | None]]:
    """Have all frozen weights in shared files, and say where. Collective; raises the same error on every rank.

    Also returns the partial digests of those pieces of ``streams`` that were made for it. Raises SaveError,
    UnsupportedError.
    """
    state = state_of(engine)
    known = state.shared_files = state.shared_files if isinstance(state.shared_files, KnownFiles) else KnownFiles()
    frozen = [i for i, piece in enumerate(streams.pieces) if piece.key == FROZEN]
    partial = all_or_raise(lambda: digest_pieces([streams.pieces[i] for i in frozen]))
    totals = sum_over_ranks(partial, device=collective_device(), group=live.dp_group)
    params = {
        param.name: _Wanted(dtype_name(streams.pieces[i].tensor), param.shape, total)
        for i, param, total in zip(frozen, live.frozen.params, totals, strict=True)
    }
    names, tensors = _frozen_buffers(engine, known)
    buffers = {name: wanted for name, (wanted, _) in tensors.items()}
    wanted = {**params, **buffers}
    folder, way = place_of(destination, tag)
    with retrying(options.retries):
        found = _find_in_base(wanted, buffers, known, destination, options)
        others = {name: want for name, want in wanted.items() if name not in found}
        found |= _find(folder, way, others, known, destination)
        if missing := {name: want for name, want in wanted.items() if name not in found}:
            pieces = [streams.pieces[i] for i in frozen if streams.pieces[i].param in missing]
            if dist.get_rank() == 0:
                pieces += [LivePiece(name, BUFFER, t, 0) for name, (_, t) in tensors.items() if name in missing]
            digest = digest_of({name: want.content for name, want in missing.items()})
            shapes = [(name, want.dtype, want.shape) for name, want in missing.items()]
            metadata = metadata_of({name: want.digest for name, want in missing.items()})
            header, head = lay_out(shared_name(digest), shapes, metadata)
            new = NewFile(destination.tag_dir, folder / shared_name(digest), header, head, pieces)
            write_shared_file(new, destination, save_id, options)
            file = SharedFile(path=f"{way}/{shared_name(digest)}", nbytes=head.nbytes, digest=digest)
            found |= {name: (file, place.offset) for name, place in head.tensors.items()}
    number = {file: i for i, file in enumerate(dict.fromkeys(file for file, _ in found.values()))}
    at = {name: SharedTensor(number[file], offset, *wanted[name].content) for name, (file, offset) in found.items()}
    shared = SharedWeights(
        tuple(number),
        {name: at[name] for name in params},
        {name: at[name] for name in buffers},
        frozenset(names | buffers.keys()),
    )
    learned: list[int | None] = [None] * len(streams.pieces)
    for i, digest_of_piece in zip(frozen, partial, strict=True):
        learned[i] = digest_of_piece
    return shared, learned


def _frozen_buffers(
    engine: Engine, known: KnownFiles
) -> tuple[Collection[str], dict[str, tuple[_Wanted, torch.Tensor]]]:
    """The names of parameters in the module's state, and its other large tensors that are frozen. Collective.

    These are alike on all ranks. One that was shared and changed since is training's, and stays in the tags, and so do
    views of memory that is saved once.
    """
    params, own, tensors = all_or_raise(lambda: _large_buffers(engine))
    tables = all_gather_alike(own)
    alike = {name: wanted for name, wanted in own.items() if all(table.get(name) == wanted for table in tables)}
    known.changing |= {name for name, digest in known.buffers.items() if name in alike and alike[name].digest != digest}
    known.changing |= {name for name in known.buffers if name not in alike}
    found = {name: (wanted, tensors[name]) for name, wanted in alike.items() if name not in known.changing}
    known.buffers = {name: wanted.digest for name, (wanted, _) in found.items()}
    return params, found


def _large_buffers(engine: Engine) -> tuple[Collection[str], dict[str, _Wanted], dict[str, torch.Tensor]]:
    """The names of parameters in the module's state, and what it has beside them that is worth sharing, 1-D."""
    with torch.no_grad():
        module = engine.module_state_dict()
    params = {name for name, _ in engine.module.named_parameters(remove_duplicate=False)} & module.keys()
    strided = {
        name: value
        for name, value in module.items()
        if isinstance(value, torch.Tensor) and value.layout is torch.strided
    }
    memory = Counter(value.untyped_storage().data_ptr() for value in strided.values())
    tensors = {
        name: value.detach().view(-1)
        for name, value in strided.items()
        if name not in params
        and value.nbytes >= MIN_BUFFER_BYTES
        and value.is_contiguous()
        and not (value.is_conj() or value.is_neg())  # its memory holds other values
        and value.nbytes == value.untyped_storage().nbytes()
        and memory[value.untyped_storage().data_ptr()] == 1
        and dtype_name(value) in DTYPE_NAMES
    }
    digests = digest_pieces([LivePiece(name, BUFFER, tensor, 0) for name, tensor in tensors.items()])
    own = {
        name: _Wanted(dtype_name(tensor), tuple(module[name].shape), digest)
        for (name, tensor), digest in zip(tensors.items(), digests, strict=True)
    }
    return params, own, tensors


def _find_in_base(
    wanted: Mapping[str, _Wanted],
    buffers: Collection[str],
    known: KnownFiles,
    destination: Directory,
    options: Options,
) -> _Places:
    """The wanted tensors that files of the base model have. Collective."""
    if options.frozen is None:
        return {}
    location = absolute(options.frozen)
    if known.base is None or known.base.location != location:
        known.base = BaseModel(location)
    keys = {name: BUFFER if name in buffers else FROZEN for name in wanted}
    contents = {name: want.content for name, want in wanted.items()}
    found = known.base.find(contents, keys, destination.tag_dir)
    places: _Places = {}
    for path in sorted({tensor.path for tensor in found.values()}, key=str):
        here = {name: tensor for name, tensor in found.items() if tensor.path == path}
        digest = digest_of({name: contents[name] for name in here})
        file = SharedFile(path=str(path), nbytes=next(iter(here.values())).file_bytes, digest=digest)
        places |= {name: (file, tensor.place.offset) for name, tensor in here.items()}
    return places


def _find(
    folder: FilePath, way: str, wanted: Mapping[str, _Wanted], known: KnownFiles, destination: Directory
) -> _Places:
    """The wanted tensors that shared files of the folder have, to which ``way`` leads from the tag. Collective.

    Where each node has such a folder, files count that all of them have.
    """

    def look() -> dict[str, set[str]]:
        with saves_nothing(destination.tag_dir):
            return _look(folder, wanted, known) if destination.is_leader else {}

    has = all_or_raise(look)
    if any(destination.leaders):
        tables = all_gather(has if destination.is_leader else None)
        has = {name: names for name, names in has.items() if all(table is None or name in table for table in tables)}
    return broadcast_or_raise(lambda: _chosen(folder, way, has, known))


def _look(folder: FilePath, wanted: Mapping[str, _Wanted], known: KnownFiles) -> dict[str, set[str]]:
    """The names of the wanted tensors that each shared file of a folder has, by the file's name.

    These files are touched, so that they do not look old to a removal, and those that a killed removal has set aside
    are put back first. A file that is damaged is not taken.
    """
    with suppress(OSError):  # of a folder that cannot be written: what is missing is written again
        put_back(folder)
    try:
        sizes = {name: size for name, size in list_directory(folder)[0].items() if SHARED_NAME.fullmatch(name)}
    except MissingFileError:
        return {}
    has: dict[str, set[str]] = {}
    for name, size in sizes.items():
        path = folder / name
        try:
            if path not in known.heads:
                known.heads[path] = read_shared_head(path)
            head, digests = known.heads[path]
        except (CheckpointError, UnreadableError) as error:
            logger.warning("%s: is not used: %s", path, error)
            continue
        names = {
            each
            for each, want in wanted.items()
            if each in head.tensors and (*head.tensors[each][:2], digests[each]) == want.content
        }
        if not names or head.nbytes != size:
            continue
        if isinstance(path, Path):
            try:
                with suppress(PermissionError):  # another user's
                    os.utime(path)
            except FileNotFoundError:  # removed meanwhile
                continue
        has[name] = names
    return has


def _chosen(folder: FilePath, way: str, has: Mapping[str, set[str]], known: KnownFiles) -> _Places:
    """Where each tensor is taken from: from few files."""
    found: _Places = {}
    left = dict(has)
    while left:
        name = max(left, key=lambda other: (len(left[other] - found.keys()), other))
        new = left.pop(name) - found.keys()
        if not new:
            break
        head, digests = known.heads[folder / name]
        digest = digest_of({n: (*at[:2], digests[n]) for n, at in head.tensors.items()})
        file = SharedFile(path=f"{way}/{name}", nbytes=head.nbytes, digest=digest)
        found |= {each: (file, head.tensors[each].offset) for each in new}
    return found


class LeanStates:
    """Takes the module states that DeepSpeed saves, and passes them on without what ``shared`` says is elsewhere."""

    def __init__(self, save: Callable[[Any, str], None], shared: SharedWeights, name: str) -> None:
        self._save, self._shared, self._name = save, shared, name

    def __call__(self, state_dict: Any, path: str) -> None:
        if Path(path).name == self._name:
            state_dict = {**state_dict, SHARED_KEY: self._shared.entry()}
            module, fragments = state_dict.get("module"), state_dict.get(_FRAGMENTS)
            if isinstance(fragments, dict):
                fragments = state_dict[_FRAGMENTS] = self._without_weights(fragments)
                for name in self._shared.params.keys() & fragments.keys() & (module or {}).keys():
                    if module[name].numel():  # whole in the module, as at stage 2
                        del fragments[name]
            if isinstance(module, dict):
                state_dict["module"] = self._without_weights(module)
        self._save(state_dict, path)

    def _without_weights(self, table: dict[str, Any]) -> dict[str, Any]:
        table = copy.copy(table)  # with the attributes of a module's state dict
        table.update(dict.fromkeys(self._shared.buffers.keys() & table.keys()))
        empty: dict[object, torch.Tensor] = {}  # one for all names of a tensor: ``ModuleNames`` finds ties by place
        for name in table.keys() & (self._shared.left_out | self._shared.params.keys()) - self._shared.buffers.keys():
            tensor = table[name]
            if tensor.untyped_storage().nbytes():  # at stage 3 none has elements
                place = tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape, tensor.dtype
                table[name] = empty.setdefault(place, torch.empty(0, dtype=tensor.dtype, device=tensor.device))
        return table


def copy_recovery_scripts(copy_own: Callable[[str], None], save_dir: str, *, lean: bool) -> None:
    """Put DeepSpeed's scripts into a run directory, by ``copy_own``; ours instead from the first lean save on."""
    paths = [Path(save_dir) / name for name in _SCRIPTS]
    own = Path(recovery_script.__file__).read_bytes()
    if not lean and not any(path.is_file() and path.read_bytes() == own for path in paths):
        copy_own(save_dir)
        return
    for path in paths:
        path.write_bytes(own)
        path.chmod(path.stat().st_mode | stat.S_IEXEC)


def dtype_name(tensor: torch.Tensor) -> str:
    """What files call the dtype of a tensor."""
    return str(tensor.dtype).removeprefix("torch.")
