"""Where each rank finds the shared files of a lean tag, and which ranks see them.

They are beside the tag, or where a base model is, which ``"frozen"`` names: so a rank may see the tag and not them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch.distributed as dist

from zeroelastic.checkpoint.model_states import ModelStates
from zeroelastic.checkpoint.open import Listing
from zeroelastic.checkpoint.shared_files import SharedFile, check_shared_files
from zeroelastic.checkpoint.tag_files import is_rank_file
from zeroelastic.deepspeed.node_local.visibility import FileVisibility, stat_assigned_files
from zeroelastic.distributed.collective import all_gather_alike, all_or_raise
from zeroelastic.distributed.multicast import Request, multicast
from zeroelastic.errors import CheckpointError, MissingFileError
from zeroelastic.io.paths import FilePath, RemotePath, absolute, as_path
from zeroelastic.io.storage import file_size, read_exactly
from zeroelastic.runs.shared_folder import put_back_missing
from zeroelastic.torch_file.safetensors import read_head


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

    def is_asked(self, file: SharedFile) -> bool:
        """Whether this rank looks into a file: one that it sees on a disk, and rank 0 into what is behind a URL."""
        ranks = self.readers_of.get(file.path, ())
        return dist.get_rank() in (ranks[:1] if isinstance(self.at(file), RemotePath) else ranks)

    @property
    def unseen(self) -> tuple[str, ...]:
        """The names of the files that this rank does not see."""
        return tuple(self.paths[path].name for path, ranks in self.readers_of.items() if dist.get_rank() not in ranks)

    def applied(self, model: ModelStates) -> ModelStates:
        """The model states with frozen parameters where this rank finds them.

        Raises CheckpointError where a file that is not where the tag says has other tensors.
        """
        if model.shared is None:
            return model
        for number, file in enumerate(model.shared.files):
            path = self.at(file)
            if path == file.at(self.tag_dir) or not self.is_asked(file):
                continue
            there = {*read_head(path).tensors.values()}
            tables = (model.shared.params, model.shared.buffers)
            if any(one.file == number and one.place not in there for table in tables for one in table.values()):
                raise CheckpointError(
                    f"{path}: has other tensors than {file.path}, from which the checkpoint {self.tag_dir} takes its "
                    'frozen weights. Name the directory of the same model in "frozen".'
                )
        return replace(model, frozen_extents=model.shared.frozen(self.tag_dir, self.at)[1])


def find_shared_files(files: Sequence[SharedFile], tag_dir: FilePath, base: str | None = None) -> SharedPlaces:
    """Look for the shared files of a tag; one rank asks for what is behind a URL. Collective.

    A file that is not of the run may be at ``base``, a base model, instead. Raises on every rank what
    ``check_shared_files`` raises of a file that no rank sees.
    """
    rank, num_ranks = dist.get_rank(), dist.get_world_size()

    def places_of(file: SharedFile) -> Iterator[FilePath]:
        yield file.at(tag_dir)
        if base is not None and not file.is_of_run:
            folder = as_path(absolute(base))
            yield folder if folder.name == file.name else folder / file.name

    def sees(path: FilePath, nbytes: int) -> bool:
        return (rank == 0 or isinstance(path, Path)) and file_size(path) == nbytes

    def look() -> list[FilePath | None]:
        put_back_missing(files, tag_dir)
        return [next((path for path in places_of(file) if sees(path, file.nbytes)), None) for file in files]

    found = all_gather_alike(all_or_raise(look))
    paths: dict[str, FilePath] = {}
    readers_of: dict[str, tuple[int, ...]] = {}
    for i, file in enumerate(files):
        by_rank = [own[i] for own in found]
        if isinstance(by_rank[0], RemotePath):  # which all ranks see
            by_rank = [path or by_rank[0] for path in by_rank]
        paths[file.path] = by_rank[rank] or file.at(tag_dir)
        readers_of[file.path] = tuple(other for other in range(num_ranks) if by_rank[other] is not None)
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
    if found.in_store:
        all_or_raise(lambda: _refuse_unseen(places))
    return replace(
        found,
        readers_of={**found.readers_of, **{names[path]: ranks for path, ranks in places.readers_of.items()}},
        shared={names[path]: place for path, place in places.paths.items()},
        listing=replace(found.listing, remote_files=found.listing.remote_files.union(places.unseen)),
        partial_ranks=tuple(sorted(partial.union(found.partial_ranks))),
    )


def _refuse_unseen(places: SharedPlaces) -> None:
    """What is in a store is read by each rank itself, and so is what the tag takes from disks of nodes."""
    if places.unseen:
        raise MissingFileError(
            f"{places.tag_dir}: takes frozen weights from {', '.join(places.unseen)}, which the node of rank "
            f"{dist.get_rank()} does not have. Put the base model on every node, or name a directory that all nodes "
            'see in "frozen" in the "zeroelastic" block.',
            remedy="",
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
            found[name] = read_exactly(places.at(shared.files[tensor.file]), tensor.offset, tensor.place.nbytes)
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
