"""The files of a tag, as the ranks of a job see them together: names, sizes, who reads which, and what the record says.

What a commit record says is asked here, of tags that have none, too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TypeVar

from zeroelastic.checkpoint.commit_record import OVERWRITTEN, RECORD_NAME, CheckpointFormat, CommitRecord, read_record
from zeroelastic.checkpoint.tag_files import WHOLE_MODEL_FILE, TagListing, parse_rank_file, rank_files
from zeroelastic.core.digest import ParamContent
from zeroelastic.errors import CheckpointError, MissingFileError, UnsupportedError, counted, rank_list, some
from zeroelastic.io.paths import FilePath
from zeroelastic.io.storage import file_sizes
from zeroelastic.torch_file.header import read_torch_file

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Inventory:
    """The files of a tag: their ``names``, its commit ``record``, and which of the ranks read each file.

    ``sizes`` has the files that this rank has looked at for all: where many ranks share the work, few of them.
    ``world_size`` is what headers say where there is no record, if that is known. ``record_bytes`` is what this rank
    read of the record.

    ``over_nodes``: the ranks see different directories, and this is what any of them sees. ``readers_of`` has the ranks
    that read each file, ascending: on disks of nodes, those that see it; behind a URL, the one that reads its header
    for all. It is empty where every rank sees all files on a disk, and reads them itself. ``partial_ranks`` do not see
    all files. All is the same on every rank, but for ``rank``, for ``sizes`` and ``record_bytes``, and for files
    of the whole module on disks of nodes, of which each rank describes the one that it takes.
    """

    names: Collection[str]
    sizes: Mapping[str, int]
    record: CommitRecord | None
    world_size: int | None = None
    record_bytes: int = 0
    over_nodes: bool = False
    readers_of: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    rank: int = 0
    partial_ranks: tuple[int, ...] = ()

    @property
    def is_recorded(self) -> bool:
        """Whether there is a commit record."""
        return self.record is not None

    def _by_record(self, said: Callable[[CommitRecord], T], without: T) -> T:
        """Return what the record says; ``without`` one, this."""
        return without if self.record is None else said(self.record)

    @property
    def recorded_sizes(self) -> Mapping[str, int]:
        """The size of each file by the commit record; empty without one."""
        return self._by_record(lambda record: record.files, {})

    @property
    def recorded_directories(self) -> Mapping[str, str]:
        """The digest of each file's zip directory by the commit record; empty without one."""
        return self._by_record(lambda record: record.directories, {})

    @property
    def format(self) -> CheckpointFormat | None:
        """The format of the save that the record states; None without one."""
        return self._by_record(lambda record: record.checkpoint_format, None)

    @property
    def global_steps(self) -> int | None:
        """The step that the record states; None without one."""
        return self._by_record(lambda record: record.global_steps, None)

    @property
    def train_batch_size(self) -> int | None:
        """The global batch that the record states; None without one."""
        return self._by_record(lambda record: record.train_batch_size, None)

    @property
    def trained(self) -> frozenset[str]:
        """The names of the trained parameters in the record; none without one."""
        return self._by_record(lambda record: record.params.trained, frozenset())

    @property
    def save_id(self) -> str | None:
        """The id of the save; None without a record."""
        return self._by_record(lambda record: record.save_id, None)

    @property
    def content_root(self) -> str | None:
        """The content root that the record states; None without one."""
        return self._by_record(lambda record: record.content_root, None)

    @property
    def digests(self) -> Mapping[tuple[str, str], tuple[str, int]]:
        """The dtype and the digest of each tensor by parameter and state key; empty without a record."""
        return self._by_record(lambda record: record.params.digests, {})

    @property
    def own_weights(self) -> bool | None:
        """Whether the weights of the model were not the master weights, cast; None: that is not known."""
        return self._by_record(lambda record: record.own_weights, None)

    @property
    def lost_micro_batches(self) -> int:
        """How many accumulated micro batches the save lost; 0 where that is not known."""
        return self._by_record(lambda record: record.lost_micro_batches, 0)

    def contents(self) -> list[ParamContent]:
        """Return the recorded tensors of each parameter."""
        return self._by_record(lambda record: record.contents(), [])

    def excluded(self) -> list[ParamContent]:
        """Return the frozen parameters whose digests are recorded and whose weights are in no file."""
        return self._by_record(lambda record: record.excluded(), [])

    @property
    def excluded_by(self) -> str | None:
        """Why frozen weights are not in the files: "option" or "argument"; None where they are."""
        return self._by_record(lambda record: record.excluded_by, None)

    @property
    def excluded_how(self) -> str:
        """How the save was asked to leave frozen weights out."""
        return self._by_record(lambda record: record.excluded_how, "")

    @property
    def excluded_note(self) -> str | None:
        """A sentence on frozen weights that are in no file; None where there are none."""
        if not (excluded := self.excluded()):
            return None
        return (
            f"frozen weights are not in the checkpoint ({counted(len(excluded), 'parameter')}; {self.excluded_how}): a "
            "load compares those of the run with the digests in the commit record, which nothing else can check"
        )

    @property
    def tensor_size(self) -> int | None:
        """How many tensor parallel ranks saved; None where that is not known."""
        return self._by_record(lambda record: record.tp_size, None)

    @property
    def data_size(self) -> int | None:
        """How many data parallel ranks saved; None where that is not known."""
        return self._by_record(lambda record: record.world_size, self.world_size)

    @property
    def recorded_by_tensor_rank(self) -> bool:
        """Whether tensor parallel ranks, which do not say which slices they have, were recorded each by itself."""
        return self._by_record(lambda record: any(group.tp_rank for group in record.params.groups), False)

    @property
    def reads_payload(self) -> bool:
        """Whether this rank reads all payload that it needs itself."""
        return not self.over_nodes

    @property
    def reads_headers(self) -> bool:
        """Whether this rank reads all headers that it needs itself."""
        return not self.readers_of

    @property
    def remote_files(self) -> frozenset[str]:
        """The names of files that only other ranks read."""
        return frozenset(name for name in self.readers_of if not self.reads(name))

    def reads(self, name: str) -> bool:
        """Whether this rank reads a file, rather than having it from another rank."""
        readers = self.readers_of.get(name)
        return readers is None or self.rank in readers

    def reader(self, name: str, requester: int = 0) -> int:
        """The rank that reads a file for others; ``requester`` spreads requests over all ranks that see the file."""
        ranks, file = self.readers_of[name], parse_rank_file(name)
        return ranks[(requester + (file.rank if file is not None else 0)) % len(ranks)]

    def reads_for_all(self, name: str, *, shared: bool) -> bool:
        """Whether this rank is the one that reads a file for all; ``shared`` where every rank sees all files."""
        return self.reader(name) == self.rank if self.readers_of else shared

    def label(self, name: str) -> str:
        """A file's name, with the ranks that see it where other nodes have other files of that name."""
        return f"{name} (of {rank_list(self.readers_of[name])})" if self._is_of_node(name) else name

    @contextmanager
    def named_in_errors(self, path: FilePath) -> Iterator[None]:
        """Errors of reading a file say which it is, where the nodes have different ones under its name."""
        try:
            yield
        except CheckpointError as error:
            if not self._is_of_node(path.name):
                raise
            raise type(error)(f"{error} It is the {self.label(path.name)}.") from error

    def _is_of_node(self, name: str) -> bool:
        return self.over_nodes and WHOLE_MODEL_FILE.match(name) is not None


NO_FILES = Inventory((), {}, None)


def list_files(tag_dir: FilePath) -> Inventory:
    """List a tag directory and read its record. Raises as ``file_sizes`` and ``read_record``."""
    sizes = file_sizes(tag_dir)
    record = read_record(tag_dir)
    return Inventory(sizes, sizes, record, record_bytes=sizes.get(RECORD_NAME, 0))


def check_sizes(tag_dir: FilePath, inventory: Inventory) -> None:
    """Raise CheckpointError unless all files of the record are there, with its sizes where these are known."""
    want, sizes = inventory.recorded_sizes, inventory.sizes
    missing = [name for name in want if name not in inventory.names]
    other = [name for name, size in sizes.items() if name in want and size != want[name]]
    wrong = [
        f"{name} has {sizes[name]} bytes, not {want[name]}" if name in sizes else f"{name} is missing"
        for name in sorted([*missing, *other])
    ]
    if wrong:
        raise CheckpointError(
            f"{tag_dir}: contradicts its commit record: {some(wrong)}. Files are truncated, damaged or from another "
            f"save. {OVERWRITTEN}"
        )


def saved_sizes(tag_dir: FilePath) -> tuple[int, int]:
    """The data parallel and the tensor parallel size of a save, also of one whose layout is not covered.

    From the record, or else from one model states file. Raises MissingFileError, CheckpointError, UnsupportedError.
    """
    if (record := read_record(tag_dir)) is not None:
        return record.world_size, record.tp_size
    names = file_sizes(tag_dir)
    sizes = stated_sizes(tag_dir, names)
    if sizes is None:
        rank_files(tag_dir, names)  # raises the error for what this is
        raise MissingFileError(f"{tag_dir}: holds no zero_pp_rank_*_model_states.pt. The checkpoint is incomplete.")
    return sizes


def stated_sizes(tag_dir: FilePath, names: Iterable[str]) -> tuple[int, int] | None:
    """The data and the tensor parallel size by the first model states file; None where there is none.

    Raises CheckpointError.
    """
    models = [(file, name) for name in names if (file := parse_rank_file(name)) and file.kind != "optimizer"]
    if not models:
        return None
    path = tag_dir / min(models)[1]
    root = read_torch_file(path, foreign="inert").root
    sizes = (root.get("dp_world_size"), root.get("mp_world_size", 1)) if isinstance(root, dict) else (None, None)
    if type(sizes[0]) is not int or type(sizes[1]) is not int:
        raise CheckpointError(f"{path}: states no world size. It is not a ZeRO model states file.")
    return sizes[0], sizes[1]


def is_stage_0(listing: TagListing) -> bool:
    """Whether there are no optimizer files because the model states file has the optimizer. Opens that file."""
    return stage_0_root(listing) is not None


def stage_0_root(listing: TagListing) -> dict[object, object] | None:
    """The tree of the model states file of a save at ZeRO stage 0; None for any other save."""
    if not listing.files.whole_model or listing.files.optim or RECORD_NAME in listing.sizes:
        return None
    for name in listing.files.models.values():
        with suppress(CheckpointError, UnsupportedError):
            root = read_torch_file(listing.directory / name, foreign="inert").root
            if isinstance(root, dict) and isinstance(root.get("optimizer"), dict):
                return root
    return None
