"""The parts of a commit: the files read back, the sizes that each rank wrote, and the commit record.

The files of a rank are read back by the readers of a load, headers alone, and compared with the run that saved them. A
save that a load of the same run would refuse is not committed.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import deepspeed
import torch
import torch.distributed as dist

from zeroelastic._version import __version__
from zeroelastic.checkpoint.commit_record import (
    RECORD_VERSION,
    CheckpointFormat,
    CommitRecord,
    SavedWith,
    param_records,
    params_digest,
)
from zeroelastic.checkpoint.saved_layout import saved_maps
from zeroelastic.checkpoint.saved_state import contents_of, frozen_part, trained_part
from zeroelastic.checkpoint.topology import numbered_expert
from zeroelastic.core.digest import ParamContent, content_root
from zeroelastic.core.layout import Param
from zeroelastic.deepspeed.engine import Engine
from zeroelastic.deepspeed.engine_state import LastSave
from zeroelastic.deepspeed.live.live_optimizer import LiveOptimizer
from zeroelastic.deepspeed.options import SaveRequest
from zeroelastic.distributed.collective import all_gather, maximum
from zeroelastic.errors import CheckpointError, SaveError, UnreadableError
from zeroelastic.io.paths import FilePath
from zeroelastic.torch_file.header import read_torch_file
from zeroelastic.torch_file.safe_unpickler import allow_globals


def new_save_id() -> str:
    """An identity for one save, which every file of it has: 32 hexadecimal digits."""
    return secrets.token_hex(16)


@dataclass(frozen=True, slots=True)
class PendingCommit:
    """A save that was handed to its writer: all that the commit record says but the sizes of the files.

    ``file_names`` are the names of this rank's module states and optimizer file, ``expert_files`` of files of
    experts that it has written. The two have to say its place, the step, and the parameters as ``live`` has them.
    ``allow_globals`` are the names in the run's options. ``follows`` are the saves on the disk that one in memory
    follows. ``contents`` are of the state at the moment of the save, over all ranks; ``trained`` names the trained
    parameters among them. ``own_weights``: this rank has weights of the model that are not its master weights, cast.
    """

    request: SaveRequest
    live: LiveOptimizer
    save_id: str
    checkpoint_format: CheckpointFormat
    allow_globals: tuple[str, ...]
    global_steps: int
    train_batch_size: int
    file_names: tuple[str, str]
    expert_files: tuple[str, ...]
    last_save: LastSave
    lost_micro_batches: int
    own_weights: bool
    follows: tuple[str, ...] = ()
    contents: tuple[ParamContent, ...] = ()
    trained: frozenset[str] = frozenset()

    @property
    def frozen(self) -> list[Param]:
        """The frozen parameters that are in the model states files, in this rank's part of the run."""
        if self.request.excludes_frozen:
            return []
        params = chain(*self.live.local_params(self.live.frozen))
        return [param for param in params if param.name not in self.live.params_in_expert_files]


class Written(NamedTuple):
    """A rank's files: sizes and zip directories' digests by name, and why only DeepSpeed reads them.

    ``own_weights`` is that of the rank's ``PendingCommit``.
    """

    sizes: dict[str, int]
    directories: dict[str, str]
    unreadable: str | None = None
    own_weights: bool = False


def gather_written(own: Written, last_save: LastSave) -> tuple[float, list[Written]]:
    """Return the time of the commit, and the ``Written`` of every rank, by rank. Collective.

    The time is in seconds since 1970, later than the ``last_save`` of any rank; rank 0's clock counts.
    """
    not_before = last_save.next_time(time.time() if dist.get_rank() == 0 else 0.0)
    return maximum([round(not_before * 1e6)])[0] / 1e6, all_gather(own)


def record_of(save: PendingCommit, written: Sequence[Written], committed_at: float) -> CommitRecord:
    """The record of a save, of what each rank has written, as this rank states it."""
    # At stages 1 and 2 every node has a file of the whole module, under one name: its record states its own.
    own_last = [*written, written[dist.get_rank()]]
    return CommitRecord(
        format_version=RECORD_VERSION,
        checkpoint_format=save.checkpoint_format,
        save_id=save.save_id,
        tag=save.request.tag,
        world_size=save.live.sharing.topology.data_size,
        tp_size=save.live.sharing.place[1].size,
        global_steps=save.global_steps,
        train_batch_size=save.train_batch_size,
        lost_micro_batches=save.lost_micro_batches,
        committed_at=committed_at,
        follows=save.follows,
        trained_params=params_digest(
            content.param for content in save.contents if content.tp_rank == 0 and content.param.name in save.trained
        ),
        versions=SavedWith(zeroelastic=__version__, deepspeed=deepspeed.__version__, torch=str(torch.__version__)),
        files={name: size for each in own_last for name, size in sorted(each.sizes.items())},
        directories={name: digest for each in own_last for name, digest in sorted(each.directories.items())},
        params=param_records(save.contents, save.trained),
        content_root=content_root(save.contents),
        excluded_by=save.request.excluded_by,
        own_weights=any(each.own_weights for each in written),
    )


def not_committed(tag_dir: Path, why: str) -> SaveError:
    """The error of a save that ends before its commit."""
    return SaveError(f"{tag_dir}: not committed: {why}. The tag is what it was before; `latest` is unchanged.")


@contextmanager
def as_save_error(tag_dir: FilePath) -> Iterator[None]:
    """Within this context, an error of the disk becomes the SaveError of a save that has not begun."""
    try:
        yield
    except SaveError:
        raise
    except UnreadableError as error:
        raise SaveError(f"{tag_dir}: cannot be written: {error} Nothing was saved.") from error
    except OSError as error:
        raise SaveError(
            f"{tag_dir}: cannot be written: {error.strerror} ({error.filename or tag_dir}). Nothing was saved, and "
            "`latest` is unchanged."
        ) from error


def written_files(engine: Engine, save_dir: Path, tag: str) -> tuple[str, str]:
    """Return the names that DeepSpeed gives the module states, of this rank or its node, and the optimizer file."""
    model, optim = engine._get_ckpt_name(str(save_dir), tag), engine._get_zero_ckpt_name(str(save_dir), tag)
    return Path(model).name, Path(optim).name


def read_back(directory: Path, save: PendingCommit) -> dict[str, str]:
    """Read a rank's files in ``directory`` back, and return the digest of each zip directory by name.

    Files of experts are opened alone: their weights are those of the optimizer files in 16 bits. Raises CheckpointError
    or UnsupportedError for a file that a load does not read, CheckpointError for one that contradicts the commit record
    to be written.
    """
    model_path, optim_path = (directory / name for name in save.file_names)
    live = save.live
    layout, sharing = live.layout, live.sharing
    with allow_globals(save.allow_globals):
        model_file = read_torch_file(model_path, foreign="inert")
        model, shard = sharing.open_files(model_file, optim_path, layout)
        experts = [read_torch_file(directory / name, foreign="inert") for name in save.expert_files]
    found = {content.param.name: _facts(content) for content in contents_of([trained_part({shard.rank: shard}, shard)])}
    for content in contents_of([frozen_part({model.rank: model})]):
        found[sharing.whole_name(content.param.name)] = sharing.whole_shape(content.param), *_facts(content)[1:]
    here = {param.name for param in layout.params} | {sharing.whole_name(param.name) for param in save.frozen}
    want = {
        content.param.name: _facts(content)
        for content in save.contents
        if content.tp_rank == sharing.tp.rank and content.param.name in here
    }
    of_model: dict[str, tuple[object, object]] = {
        "the step": (model.global_steps, save.global_steps),
        "the save id": (model.save_id, save.save_id),
        "the trained parameters": ([list(table) for table in model.sub_groups], live.local_params(layout)),
        "the frozen parameters": (_by_name(model.frozen.params), _by_name(save.frozen)),
    }
    if layout.slices is not None:  # the names of DeepSpeed's own experts are their maps
        own_maps = {name: one for name, one in sharing.maps.items() if numbered_expert(name) is None}
        found_maps = saved_maps(model_file.root, sharing.place[1].size, model_file.path).maps
        of_model["the maps of slices"] = _differing(found_maps, own_maps)
    of_optimizer = {
        "the format": (shard.format, save.checkpoint_format),
        "the save id": (shard.save_id, save.save_id),
        "the trained parameters": (list(shard.layout.params), list(layout.params)),
        "the optimizer groups": ([group.params for group in shard.groups], list(live.groups)),
        "the state of parameters": _differing(found, want),
    }
    for path, facts in ((model_path, of_model), (optim_path, of_optimizer)):
        for what, (got, wanted) in facts.items():
            if got != wanted:
                raise CheckpointError(f"{path}: {what} read back as {_brief(got)}; the run has {_brief(wanted)}.")
    directories = {file.path.name: file.directory for file in experts}
    return {model_path.name: model.directory, **directories, optim_path.name: shard.directory}


def _facts(content: ParamContent) -> tuple[object, ...]:
    """The shape, dtypes and scalars of a parameter."""
    dtypes = {key: dtype for key, (dtype, _) in content.tensors.items()}
    return content.param.shape, dtypes, {key: value.canonical() for key, value in content.scalars.items()}


def _by_name(params: Iterable[Param]) -> list[Param]:
    """Sort parameters: at stage 1 a file lists frozen ones neither when excluded nor when there are none."""
    return sorted(params, key=lambda param: param.name)


def _differing(found: Mapping[str, object], want: Mapping[str, object]) -> tuple[object, object]:
    """Return the entries in which two tables differ, of either."""
    names = [name for name in dict.fromkeys([*want, *found]) if found.get(name) != want.get(name)]
    return {name: found.get(name) for name in names}, {name: want.get(name) for name in names}


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 400 else f"{text[:400]}..."
