"""The frozen weights that a base model has bit for bit (``"frozen"``), which a lean save refers to and does not copy.

A tensor is looked for by name, without what wrappers add to names, and its content decides: the digest of the file's
bytes, which the ranks make together. Files that were read once count as long as their size and time are as they were.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from zeroelastic.checkpoint.extents import digest_in_file
from zeroelastic.deepspeed.live.digests import sum_over_ranks
from zeroelastic.distributed.collective import all_or_raise, broadcast_or_raise, collective_device
from zeroelastic.errors import CheckpointError, MissingFileError, SaveError, UnreadableError, UsageError, counted, some
from zeroelastic.io.paths import FilePath, absolute, as_path
from zeroelastic.io.storage import file_size, list_directory, read_whole
from zeroelastic.torch_file.inert_objects import DTYPE_BYTES
from zeroelastic.torch_file.safetensors import Head, TensorPlace, read_head

logger = logging.getLogger(__name__)

Content = tuple[str, tuple[int, ...], int]
"""The dtype, the shape and the digest of a tensor."""

SUFFIX = ".safetensors"

_INDEX = "model.safetensors.index.json"
_MAX_INDEX_BYTES = 64 << 20
_WRAPPERS = ("module", "_orig_mod", "base_model.model", "base_layer")


class BaseTensor(NamedTuple):
    """A tensor of a base model: its file, the size of that in bytes, and where it is there."""

    path: FilePath
    file_bytes: int
    place: TensorPlace


@dataclass
class BaseModel:
    """What this process knows of the files at ``location``: the same on all ranks.

    ``versions`` are the size and time of change of each file when it was read. ``searched`` are the contents that were
    looked for, and ``tensors`` those that were found, by our names.
    """

    location: str
    versions: dict[FilePath, tuple[int, int]] = field(default_factory=dict)
    searched: dict[str, Content] = field(default_factory=dict)
    tensors: dict[str, BaseTensor] = field(default_factory=dict)

    def find(self, wanted: Mapping[str, Content], keys: Mapping[str, str], tag_dir: FilePath) -> dict[str, BaseTensor]:
        """Those of the wanted tensors that the base model has, digested under ``keys``. Collective.

        Raises SaveError on every rank where there is no such base model.
        """

        def look() -> tuple[dict[FilePath, tuple[int, int]], dict[str, BaseTensor]]:
            try:
                versions = {path: _version(path) for path in base_files(self.location)}
                known = self.searched if versions == self.versions else {}
                new = {name: content for name, content in wanted.items() if known.get(name) != content}
                return versions, match_by_name(new, {path: read_head(path) for path in versions} if new else {})
            except (CheckpointError, UnreadableError, UsageError) as error:
                raise SaveError(
                    f'{tag_dir}: "frozen" in the "zeroelastic" block is {self.location}: {error} Nothing was saved.'
                ) from error

        versions, candidates = broadcast_or_raise(look)
        if versions != self.versions:
            self.versions, self.searched, self.tensors = versions, {}, {}
        new = {name: content for name, content in wanted.items() if self.searched.get(name) != content}
        partial = all_or_raise(lambda: self._digests(candidates, keys, tag_dir))
        totals = sum_over_ranks(partial, device=collective_device()) if candidates else []
        for name in new:
            self.tensors.pop(name, None)
        for (name, tensor), total in zip(candidates.items(), totals, strict=True):
            if total == wanted[name][2]:
                self.tensors[name] = tensor
        self.searched.update(new)
        if dist.get_rank() == 0 and (missing := sorted(new.keys() - self.tensors.keys())):
            logger.warning(
                "%s: has not %s of %s that are frozen, bit for bit (%s). They are written beside the tags.",
                self.location,
                len(missing),
                counted(len(new), "tensor"),
                some(missing),
            )
        return {name: self.tensors[name] for name in wanted if name in self.tensors}

    def _digests(self, candidates: Mapping[str, BaseTensor], keys: Mapping[str, str], tag_dir: FilePath) -> list[int]:
        """The digests of this rank's share of each candidate. Raises SaveError."""
        try:
            return [_share_digest(tensor, name, keys[name]) for name, tensor in candidates.items()]
        except (CheckpointError, UnreadableError) as error:
            raise SaveError(
                f'{tag_dir}: "frozen" in the "zeroelastic" block is {self.location}, which rank {dist.get_rank()} '
                f"cannot read: {error} Nothing was saved."
            ) from error


def base_files(location: str) -> list[FilePath]:
    """The safetensors files of a base model: those that its index lists, or all, or the one that is named.

    Raises MissingFileError, UnreadableError, CheckpointError.
    """
    place = as_path(absolute(location))
    if place.name.endswith(SUFFIX):
        return [place]
    names: Collection[str] = list_directory(place)[0]
    if _INDEX in names:
        try:
            found = json.loads(read_whole(place / _INDEX, limit=_MAX_INDEX_BYTES))["weight_map"].values()
            names = {str(name) for name in found}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise CheckpointError(f"{place / _INDEX}: is no index of safetensors files. It is damaged.") from None
    files = sorted(name for name in names if name.endswith(SUFFIX) and "/" not in name)
    if not files:
        raise MissingFileError(f"{place}: has no safetensors files.", remedy="Name the directory of a model.")
    return [place / name for name in files]


def match_by_name(wanted: Mapping[str, Content], heads: Mapping[FilePath, Head]) -> dict[str, BaseTensor]:
    """For each wanted tensor, the one that may be the same: of its dtype and shape, and by name.

    A name counts before the same without wrappers, and that before one that ends like it, if there is only one.
    """
    there = {
        name: BaseTensor(path, head.nbytes, place)
        for path, head in heads.items()
        for name, place in head.tensors.items()
    }
    bare: dict[str, list[str]] = {}
    endings: dict[tuple[object, ...], list[str]] = {}
    for name, tensor in there.items():
        bare.setdefault(_without_wrappers(name), []).append(name)
        endings.setdefault((name.rpartition(".")[2], *tensor.place[:2]), []).append(name)
    found: dict[str, BaseTensor] = {}
    for name, (dtype, shape, _) in wanted.items():
        own = _without_wrappers(name)
        alike = [other for other in endings.get((own.rpartition(".")[2], dtype, shape), ()) if _end_alike(own, other)]
        for choice in ([name], bare.get(own, []), alike):
            fits = [other for other in choice if other in there and there[other].place[:2] == (dtype, shape)]
            if len(fits) == 1:
                found[name] = there[fits[0]]
                break
    return found


def _without_wrappers(name: str) -> str:
    """A name without the parts that wrappers add, anywhere in it."""
    dotted = f".{name}."
    for part in _WRAPPERS:
        dotted = dotted.replace(f".{part}.", ".")
    return dotted.strip(".")


def _end_alike(own: str, other: str) -> bool:
    """Whether one name is the end of the other."""
    other = _without_wrappers(other)
    return own.endswith(f".{other}") or other.endswith(f".{own}")


def _version(path: FilePath) -> tuple[int, int]:
    """What tells whether a file is as it was: its size, and when it was last changed. Raises as ``file_size``."""
    size = file_size(path)
    if size is None:
        raise MissingFileError(f"{path}: no such file.", remedy="Name the directory of a model.")
    return size, os.stat(path).st_mtime_ns if isinstance(path, Path) else 0


def _share_digest(tensor: BaseTensor, name: str, key: str) -> int:
    """The digest of this rank's share of the elements of a tensor. Raises as ``digest_in_file``."""
    dtype, shape, offset = tensor.place
    begin, end = (
        math.prod(shape) * number // dist.get_world_size() for number in (dist.get_rank(), dist.get_rank() + 1)
    )
    at = offset + begin * DTYPE_BYTES[dtype]
    return digest_in_file(tensor.path, dtype, at, end - begin, name=name, key=key, start=begin)
