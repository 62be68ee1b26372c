"""The shared files of a tag, compared with what the tag says of them: size and header. No payload is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from zeroelastic.checkpoint.commit_record import RECORD_NAME, CommitRecord
from zeroelastic.checkpoint.contradictions import other_shared_files
from zeroelastic.checkpoint.model_states import ModelStates
from zeroelastic.checkpoint.optimizer_file import FROZEN
from zeroelastic.checkpoint.shared_files import SharedFile, check_shared_size, read_shared_head, shared_name
from zeroelastic.checkpoint.shared_weights import SharedTensor, SharedWeights
from zeroelastic.errors import CheckpointError, counted, some
from zeroelastic.io.paths import FilePath
from zeroelastic.io.storage import file_size
from zeroelastic.torch_file.safetensors import TensorPlace, read_head


class SharedStream(NamedTuple):
    """A tensor in a shared file, whichever tags take it from there: the file, its name, its state key, its place."""

    path: FilePath
    name: str
    key: str
    place: TensorPlace


@dataclass(frozen=True, slots=True)
class CheckedShared:
    """A shared file of a tag: what the tag says of it, where it is, and its size there, None where it is missing.

    ``tensors`` are those that the tag takes from it, by name and state key, where a header says so. ``problem`` is the
    sentence about what is wrong with the file; without one, its payload can be read.
    """

    file: SharedFile
    path: FilePath
    size: int | None
    tensors: Mapping[tuple[str, str], SharedTensor] = field(default_factory=dict)
    problem: str | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that the tag takes from the file."""
        return sum(tensor.place.nbytes for tensor in self.tensors.values())

    def streams(self) -> Iterator[tuple[SharedStream, SharedTensor]]:
        """The tensors that have elements, in the order in which the file has them."""
        for (name, key), tensor in sorted(self.tensors.items(), key=lambda item: item[1].offset):
            if tensor.place.nbytes:
                yield SharedStream(self.path, name, key, tensor.place), tensor


def check_shared(
    tag_dir: FilePath, weights: SharedWeights | None, record: CommitRecord | None
) -> tuple[CheckedShared, ...]:
    """Check the shared files of a tag: sizes, and where ``weights`` says what is in them, headers.

    Without ``weights`` they are those that the record lists. Raises UnreadableError.
    """
    if weights is not None:
        return tuple(_checked(file, tag_dir, weights.in_file(i)) for i, file in enumerate(weights.files))
    return tuple(_checked(file, tag_dir, {}) for file in (() if record is None else record.shared))


def _checked(file: SharedFile, tag_dir: FilePath, tensors: Mapping[tuple[str, str], SharedTensor]) -> CheckedShared:
    path = file.at(tag_dir)
    size = file_size(path)
    problem = None
    try:
        check_shared_size(path, size, file, tag_dir)
        if tensors:
            problem = _of_header(path, file, tensors)
    except CheckpointError as error:
        problem = str(error)
    return CheckedShared(file, path, size, tensors, problem)


def _of_header(path: FilePath, file: SharedFile, tensors: Mapping[tuple[str, str], SharedTensor]) -> str | None:
    """How the header of a file contradicts the tag. Raises CheckpointError for a header that cannot be understood."""
    if file.is_of_run:
        if path.name != shared_name(file.digest):
            return f"{path}: the tag says that its digest is {file.digest[:12]}..., which is not that of its name."
        head, digests = read_shared_head(path)
        wrong = [
            name
            for (name, _), tensor in tensors.items()
            if (head.tensors.get(name), digests.get(name)) != (tensor.place, tensor.digest)
        ]
    else:  # of a base model, which calls its tensors as it likes and states no digests
        places = {*read_head(path).tensors.values()}
        wrong = [name for (name, _), tensor in tensors.items() if tensor.place not in places]
    if not wrong:
        return None
    which = f"{counted(len(wrong), 'tensor')}: {some(wrong)}"
    return (
        f"{path}: its header contradicts the tag in the place, dtype, shape or digest of {which}. It is damaged, or "
        "another file."
    )


def record_contradictions(model: ModelStates, record: CommitRecord) -> Iterator[tuple[str, str | None]]:
    """Where a model states file and the record differ in what is shared: a sentence, and the parameter if it is one."""
    if (mixed := other_shared_files(model, record)) is not None:
        yield mixed, None
    params = {} if model.shared is None else model.shared.params
    for content in record.contents() if params else ():
        name = content.param.name
        ours, theirs = params.get(name), content.tensors.get(FROZEN)
        if ours is not None and theirs is not None and ours.digest != theirs[1]:
            what = f"says that the digest of {name} is {ours.digest:016x}, {RECORD_NAME} that it is {theirs[1]:016x}"
            yield f"{model.path}: {what}. One of the two is damaged.", name
