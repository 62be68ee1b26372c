"""Where each rank finds the shared files of a lean tag, and which ranks see them.

They are beside the tag, or where a base model is, which ``"frozen"`` names: so a rank may see the tag and not them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch.distributed as dist

from zeroelastic.checkpoint.model_states import ModelStates
from zeroelastic.checkpoint.open import Listing
from zeroelastic.checkpoint.shared_files import SharedFile, check_shared_files
from zeroelastic.checkpoint.tag_files import is_rank_file
from zeroelastic.deepspeed.node_local.visibility import FileVisibility, stat_assigned_files
from zeroelastic.distributed.collective import all_gather_alike, all_or_raise
from zeroelastic.distributed.multicast import Request, multicast
from zeroelastic.io.paths import FilePath, RemotePath
from zeroelastic.io.storage import file_size, read_range
from zeroelastic.runs.shared_folder import put_back_missing


@dataclass(frozen=True, slots=True)
class SharedPlaces:
    """The shared files of a tag, by the ``path`` that its record states: where each is, and the ranks that see it.

    ``paths`` are this rank's; of a file that only other ranks see, where it would be.
    """

    tag_dir: FilePath
    paths: Mapping[str, FilePath]
    readers_of: Mapping[str, tuple[int, ...]]

    def at(self, file: SharedFile) -> FilePath:
        """Where a file is, or would be."""
        return self.paths.get(file.path) or file.at(self.tag_dir)

    @property
    def unseen(self) -> tuple[str, ...]:
        """The names of the files that this rank does not see."""
        return tuple(self.paths[path].name for path, ranks in self.readers_of.items() if dist.get_rank() not in ranks)

    def applied(self, model: ModelStates) -> ModelStates:
        """The model states with frozen parameters where this rank finds them."""
        if model.shared is None:
            return model
        return replace(model, frozen_extents=model.shared.frozen(self.tag_dir, self.at)[1])


def find_shared_files(files: Sequence[SharedFile], tag_dir: FilePath) -> SharedPlaces:
    """Look for the shared files of a tag; one rank asks for what is behind a URL. Collective.

    Raises on every rank what ``check_shared_files`` raises of a file that no rank sees.
    """

    def look() -> list[bool]:
        put_back_missing(files, tag_dir)
        paths = [file.at(tag_dir) for file in files]
        return [
            file_size(path) == file.nbytes if dist.get_rank() == 0 or not isinstance(path, RemotePath) else True
            for file, path in zip(files, paths, strict=True)
        ]

    seen = all_gather_alike(all_or_raise(look))
    paths = {file.path: file.at(tag_dir) for file in files}
    readers_of: dict[str, tuple[int, ...]] = {}
    for i, (name, path) in enumerate(paths.items()):
        ranks = tuple(rank for rank, found in enumerate(seen) if found[i])
        readers_of[name] = () if isinstance(path, RemotePath) and 0 not in ranks else ranks
    all_or_raise(lambda: check_shared_files([file for file in files if not readers_of[file.path]], tag_dir))
    return SharedPlaces(tag_dir, paths, readers_of)


def with_shared(found: Listing | FileVisibility, places: SharedPlaces) -> Listing | FileVisibility:
    """What the ranks see of a tag, with its shared files. Collective.

    Where ranks that see one directory do not all see the shared files, each file of the tag has all ranks as readers.
    """
    num_ranks = dist.get_world_size()
    partial = {rank for ranks in places.readers_of.values() for rank in range(num_ranks) if rank not in ranks}
    if isinstance(found, Listing):
        if not partial:
            return found
        listing, everyone = found, tuple(range(num_ranks))
        listing = all_or_raise(lambda: stat_assigned_files(places.tag_dir, listing))
        readers_of = {name: everyone for name in listing.names if is_rank_file(name)}
        found = FileVisibility(places.tag_dir, dist.get_rank(), listing.sizes, readers_of, listing)
    names = {path: places.paths[path].name for path in places.paths}
    return replace(
        found,
        readers_of={**found.readers_of, **{names[path]: ranks for path, ranks in places.readers_of.items()}},
        shared={names[path]: place for path, place in places.paths.items()},
        listing=replace(found.listing, remote_files=found.listing.remote_files.union(places.unseen)),
        partial_ranks=tuple(sorted(partial.union(found.partial_ranks))),
    )


def read_shared_buffers(
    visibility: FileVisibility | None, places: SharedPlaces | None, model: ModelStates
) -> Mapping[str, bytes | bytearray]:
    """The bytes of the buffers that a lean save has in shared files, by name: all ranks need all of them. Collective.

    A rank that sees a file on a disk reads it there; of a store each buffer is read by one rank, which sends it.
    """
    if model.shared is None or places is None or not model.shared.buffers:
        return {}
    shared, rank = model.shared, dist.get_rank()

    def read(names: Iterable[str]) -> dict[str, bytes]:
        found = {}
        for name in names:
            tensor = shared.buffers[name]
            found[name] = read_range(places.at(shared.files[tensor.file]), tensor.offset, tensor.place.nbytes)
        return found

    if visibility is None:
        return all_or_raise(lambda: read(shared.buffers))
    requests = []
    for number, (name, tensor) in enumerate(shared.buffers.items()):
        path = places.at(shared.files[tensor.file])
        readers = places.readers_of.get(shared.files[tensor.file].path) or tuple(range(dist.get_world_size()))
        sees_disk = rank in readers and not isinstance(path, RemotePath)
        requests.append(Request(rank if sees_disk else readers[number % len(readers)], name))
    return multicast(requests, read).content
