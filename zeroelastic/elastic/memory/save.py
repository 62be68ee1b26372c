"""A save into the memory of the nodes: an ordinary save, of which each node has a directory, and copies for others.

Its snapshot lies in files of shared memory, which become those of the tag by hard links. A tag of the run is the only
one that is complete but for the moment in which the next one replaces it.

A node is the ranks that share one memory. The nodes form a ring, in which each keeps the copy of the one before
(``Placement``); neighbours are in different racks as far as that is possible, so that a copy is never on the same node,
and seldom in the same rack. The copies follow from the files of all ranks and the placement alone, so that two ranks
agree on the transfers between them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import torch

from zeroelastic.checkpoint.tag_files import WHOLE_MODEL_FILE
from zeroelastic.core.digest import ByteArray
from zeroelastic.deepspeed.engine import Engine, options_of
from zeroelastic.deepspeed.engine_state import LastSave, last_save_of
from zeroelastic.deepspeed.live.digests import live_streams
from zeroelastic.deepspeed.live.replicated import replicated_facts, require_equal, token_of
from zeroelastic.deepspeed.save.barrier import SaveBarrier
from zeroelastic.deepspeed.save.commit import PendingCommit, Written
from zeroelastic.deepspeed.save.directory import SaveDirectory
from zeroelastic.deepspeed.save.save import Save
from zeroelastic.deepspeed.save.shard_writer import Snapshot, write_local_files
from zeroelastic.distributed.collective import all_gather_mostly_equal, all_gather_or_raise, all_or_raise, current_group
from zeroelastic.distributed.exchange import Transfer, run_transfers
from zeroelastic.elastic.memory.memory_file import Slot
from zeroelastic.elastic.memory.place import RunPlace
from zeroelastic.errors import SaveError
from zeroelastic.torch_file.image import FileImage
from zeroelastic.torch_file.zip_directory import read_directory

T = TypeVar("T")

Nodes = tuple[tuple[int, ...], ...]
"""The ranks of each node, ascending; the nodes by their first rank."""


class GroupBarrier(SaveBarrier):
    """The barriers of a save whose ranks meet in collectives of a process group that no other save has.

    A rank that is lost makes the collectives of the others fail. ``given_up`` says whether this rank has given the save
    up.
    """

    def __init__(self, given_up: Callable[[], bool]) -> None:
        self._given_up = given_up

    def all_or_raise(self, action: Callable[[], T], stage: str) -> T:
        def act() -> T:
            try:
                return action()
            except OSError as error:
                raise SaveError(f"{error.filename or 'shared memory'}: {error.strerror}") from error

        return all_or_raise(act)

    def is_given_up(self) -> bool:
        return self._given_up()

    @contextmanager
    def attribute_failures(self) -> Iterator[None]:
        yield


class MemoryDirectory(SaveDirectory):
    """The directory of this node that has the tags of a run in memory, of which the files of ``slot`` become one.

    ``leaders`` are the first ranks of the nodes, by rank. ``images`` are this rank's own files, when they are complete,
    and ``kept`` the names of those that it keeps for others.
    """

    def __init__(self, run: RunPlace, slot: Slot, tag: str, save_id: str, leaders: tuple[int, ...]) -> None:
        super().__init__(run.complete, tag, save_id, leaders, save_latest=False, fsync=False)
        self.run, self.slot = run, slot
        self.images: dict[str, torch.Tensor] = {}
        self.kept: tuple[str, ...] = ()

    def begin(self) -> None:
        """Make the hidden directory; each rank of the node does."""
        self.staging_dir.mkdir(mode=0o700, exist_ok=True)

    def write_snapshot(self, snapshot: Snapshot) -> None:
        """Complete the files in memory, and put them in the place of those with their pickled part."""

        def put(image: FileImage) -> None:
            path = Path(image.path)
            path.unlink()
            self.slot.link(path)
            self.images[path.name] = torch.from_numpy(image.data)

        snapshot.write(put)

    def _read_back(self, save: PendingCommit) -> Written:
        """Put the copies for others into the directory, and list this rank's files, which are not read back."""
        for name in self.kept:
            self.slot.link(self.staging_dir / name)
        self.slot.trim()
        found = {name: image.numpy() for name, image in self.images.items()}
        sizes = {name: len(data) for name, data in found.items()}
        directories = {name: _directory_digest(data) for name, data in found.items()}
        return Written(sizes, directories, own_weights=save.own_weights)

    def _check_sizes(self, written: Sequence[Written]) -> None:
        """Check nothing: the ranks of a node see one memory."""

    def _publish(self, barrier: SaveBarrier) -> None:
        if barrier.is_given_up():  # the training loop waits no more, and may have changed what was being copied
            raise SaveError("it was given up")
        if self.is_leader:
            for entry in os.scandir(self.staging_dir):
                os.chmod(entry.path, 0o600)
        super()._publish(barrier)


def _directory_digest(image: ByteArray) -> str:
    return read_directory(lambda at, nbytes: image[at : at + nbytes].tobytes(), len(image)).digest


@dataclass(eq=False, kw_only=True)
class MemorySave(Save):
    """A save of which ``capture`` copies the state, in place of ``write``, without a collective.

    ``tied`` is ``engine._get_shared_params()`` of rank 0.
    """

    destination: MemoryDirectory
    placement: Placement
    tied: Mapping[str, str]

    def capture(self, engine: Engine, saved: LastSave) -> None:
        """Copy the state of this rank, which may change when this returns. Raises SaveError where memory is lacking.

        ``saved`` are the saves of these: the tag follows those of the engine on the disk.
        """
        node, live, followed = self.destination, self.live, last_save_of(engine)
        self.facts = replicated_facts(live)
        streams = live_streams(live, with_frozen=True)
        self.shard = Snapshot(engine.checkpoint_engine, live, streams, options_of(engine), node.slot)
        write_local_files(
            engine,
            live,
            self.shard,
            directory=node.staging_dir,
            save_id=self.save_id,
            client_state=self.request.client_state,
            writes_module=node.is_leader,
            tied=self.tied,
        )
        self.shard.complete()
        follows = tuple(dict.fromkeys(found for found in (followed.save_id, followed.begun) if found is not None))
        self.pending = replace(self._pending_commit(engine, ()), last_save=saved, follows=follows)

    def add_contents(self) -> None:
        """Also compare what has to be the same on all ranks, and send copies of the files to other nodes."""
        super().add_contents()
        require_equal(self.facts, all_gather_mostly_equal(token_of(self.facts)))
        self._copy()

    def remove_old(self) -> tuple[str, ...]:
        """Remove the other tags of the run."""
        self.destination.run.remove_tags(but=self.request.tag)
        return ()

    def commit(self) -> None:
        super().commit()
        self.barrier.all_or_raise(lambda: None, "end")  # only now may the files of the tag before be written to

    def _copy(self) -> None:
        """Send this rank's files to the ranks that keep them, and receive what this rank keeps for others."""
        node = self.destination
        own = {name: data for name, data in sorted(node.images.items()) if WHOLE_MODEL_FILE.match(name) is None}

        def files() -> dict[str, int]:
            missing = [name for name in self.pending.file_names if not (name in own or WHOLE_MODEL_FILE.match(name))]
            if missing:
                raise SaveError(f"{missing[0]} was written by torch alone, whose files are not copied to other nodes.")
            return {name: len(data) for name, data in own.items()}

        _, sizes = all_gather_or_raise(files)
        keepers, owners = self.placement.keepers(node.rank), self.placement.kept(node.rank)

        def take() -> dict[str, torch.Tensor]:
            return {name: node.slot.take(nbytes) for owner in owners for name, nbytes in sizes[owner].items()}

        kept = self.barrier.all_or_raise(take, "write")
        node.kept = tuple(kept)
        transfers = [Transfer(node.rank, keeper, own[name]) for keeper in keepers for name in sizes[node.rank]]
        transfers += [Transfer(owner, node.rank, kept[name]) for owner in owners for name in sizes[owner]]
        group = current_group()
        assert group is not None, "a checkpoint in memory is completed over a group of its own"
        run_transfers(transfers, group)


def nodes_of(names: Sequence[str]) -> Nodes:
    """The nodes, from the name of each rank's node, by rank."""
    ranks: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        ranks.setdefault(name, []).append(rank)
    return tuple(tuple(members) for members in ranks.values())


def ring(racks: Sequence[str]) -> tuple[int, ...]:
    """Return the nodes in an order in which neighbours are in different racks, where the racks allow it.

    ``racks`` are by node. The nodes of the largest rack come first and are dealt out with the gap between them that the
    number of nodes allows (the arrangement of "no two equal neighbours" by counting).
    """
    by_rack: dict[str, list[int]] = {}
    for node, rack in enumerate(racks):
        by_rack.setdefault(rack, []).append(node)
    largest_first = sorted(by_rack.items(), key=lambda item: (-len(item[1]), item[0]))
    dealt = [node for _, members in largest_first for node in members]
    places = [*range(0, len(racks), 2), *range(1, len(racks), 2)]
    order = [0] * len(racks)
    for place, node in zip(places, dealt, strict=True):
        order[place] = node
    return tuple(order)


@dataclass(frozen=True)
class Placement:
    """Which other nodes have a copy of the files of each rank; ``copies`` counts them. ``racks`` are by node."""

    nodes: Nodes
    racks: tuple[str, ...]
    copies: int

    @cached_property
    def node_of(self) -> tuple[int, ...]:
        found = {rank: node for node, members in enumerate(self.nodes) for rank in members}
        return tuple(found[rank] for rank in range(len(found)))

    @cached_property
    def order(self) -> tuple[int, ...]:
        return ring(self.racks)

    @property
    def num_copies(self) -> int:
        """How many copies there are: no two on one node, and none on the rank's own."""
        return min(self.copies, len(self.nodes) - 1)

    def keepers(self, rank: int) -> tuple[int, ...]:
        """The ranks, on other nodes, that keep a copy of this rank's files."""
        node = self.node_of[rank]
        at, index = self._place_of[node], self.nodes[node].index(rank)
        nodes = (self.nodes[self.order[(at + step) % len(self.order)]] for step in range(1, self.num_copies + 1))
        return tuple(members[index % len(members)] for members in nodes)

    def kept(self, rank: int) -> tuple[int, ...]:
        """The ranks of whose files this rank keeps a copy, ascending."""
        at = self._place_of[self.node_of[rank]]
        before = {self.order[(at - step) % len(self.order)] for step in range(1, self.num_copies + 1)}
        return tuple(sorted(other for node in before for other in self.nodes[node] if rank in self.keepers(other)))

    @cached_property
    def _place_of(self) -> dict[int, int]:
        """The place of each node in the ring."""
        return {node: place for place, node in enumerate(self.order)}
