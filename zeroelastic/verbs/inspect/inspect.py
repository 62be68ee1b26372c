"""``zeroelastic.inspect``: describe a checkpoint from its headers, with the problems in them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from fnmatch import fnmatchcase

import numpy as np

from zeroelastic.checkpoint.checker import Headers, check_headers
from zeroelastic.checkpoint.commit_record import RECORD_NAME
from zeroelastic.checkpoint.model_states import client_state_keys
from zeroelastic.checkpoint.optimizer_file import FP32, configured_sub_group_size
from zeroelastic.checkpoint.tag_files import (
    OFFLINE_TENSOR_PARALLEL,
    SWAP_FOLDER,
    is_temporary,
    list_tag,
    one_save,
    saved_again,
    was_saved_again,
)
from zeroelastic.checkpoint.tag_headers import TagHeaders
from zeroelastic.errors import CheckpointError, UnreadableError, UnsupportedError, counted, finding, some, with_remedy
from zeroelastic.io.paths import absolute, as_path
from zeroelastic.io.storage import file_sizes
from zeroelastic.runs.locate import UNIVERSAL, Source, find_source
from zeroelastic.runs.names import holds_checkpoint
from zeroelastic.runs.tag_directory import open_tag
from zeroelastic.verbs.inspect import contents
from zeroelastic.verbs.inspect.report import InspectedRecord, InspectedTensor, InspectReport, StoredTensor, TagFiles
from zeroelastic.verbs.interface import Number
from zeroelastic.verbs.tensor import TensorHandle, bits_of, values_of
from zeroelastic.verbs.view import CheckpointView
from zeroelastic.verbs.view import open as open_view

_NAMED = 6
_FIRST = 4


@with_remedy()
def inspect(
    src: str | os.PathLike[str],
    *,
    tag: str | None = None,
    params: str | None = None,
    tensor: str | None = None,
    all_ranks: bool = False,
) -> InspectReport:
    """Say what a checkpoint is: who saved it, what it holds, and what is missing or wrong.

    Reads the commit record and the headers of one rank, or of ``all_ranks``; no weights. ``params`` chooses the
    parameters of the report by a glob, or by a part of their names. ``tensor`` names a parameter or buffer of which
    every byte is read: where it lies, statistics and the first values. A damaged checkpoint is described as far as
    possible, with ``problems``. Raises UsageError where there is no checkpoint, UnknownTensorError, UnsupportedError,
    UnreadableError.

    Example::

        import zeroelastic
        report = zeroelastic.inspect("ckpt", params="norm")
        print(report.world_size, report.step, [param.name for param in report.params])
    """
    found = _look(os.fspath(src), tag, all_ranks)
    if params is not None:
        pattern = params if any(sign in params for sign in "*?[") else f"*{params}*"
        found = found.model_copy(update={"params": [one for one in found.params if fnmatchcase(one.name, pattern)]})
    return found if tensor is None else found.model_copy(update={"tensor": _inspected_tensor(src, tensor, tag=tag)})


def _look(src: str, tag: str | None, all_ranks: bool) -> InspectReport:
    try:
        return inspect_source(find_source(src, tag=tag), all_ranks=all_ranks)
    except CheckpointError as error:
        path = as_path(absolute(src))
        if tag is None and holds_checkpoint(path):  # a damaged file beside a tag does not make the tag invalid
            source = Source(path.parent, path.name, open_tag(path), None, "deepspeed")
            found = inspect_source(source, all_ranks=all_ranks)
            return found.model_copy(update={"notes": [*found.notes, finding(error)]})
        return InspectReport(
            ok=False,
            problems=[finding(error)],
            remedy=error.remedy or CheckpointError.remedy,
            path=str(path),
            tag=tag or "",
        )


def inspect_source(source: Source, *, all_ranks: bool = False) -> InspectReport:
    """Describe a checkpoint; a damaged one as far as its files can be read.

    ``all_ranks`` opens every rank's headers and reports contradictions between them. Raises UnreadableError where the
    directory or a file cannot be read, SavedAgainError where it was saved again meanwhile, UnsupportedError for
    Universal checkpoints. One of ZeRO stage 0 is described without its parameters, which its optimizer does not name.
    """
    with one_save(source.tag_dir):
        listing = list_tag(source.tag_dir)
        if listing.is_universal:
            raise UnsupportedError(
                f"{listing.directory}: is {UNIVERSAL}. zeroelastic reads the checkpoint that it was made from."
            )
        headers: Headers = "all" if all_ranks else "first"
        checked = check_headers(source.tag_dir, headers=headers, listing=listing, first_tp=True)
        found = _report(source, checked)
    if found.problems and was_saved_again(source.tag_dir):
        raise saved_again(source.tag_dir)
    return found


def _report(source: Source, checked: TagHeaders) -> InspectReport:
    record, model, shard, root = checked.record, checked.first_model, checked.first_shard, checked.root
    listing, stage_0 = checked.listing, checked.is_stage_0
    problems, unsupported = _problems(checked), _unsupported(checked)
    params, buffers = contents.inspected_params(checked), contents.inspected_buffers(root)
    headers = [found for found in (record, model) if found is not None]
    tp_size = _integer(root, "mp_world_size")
    trained = checked.parts[0] if checked.shards and checked.parts else None
    return InspectReport(
        ok=not problems and not unsupported,
        problems=problems,
        remedy=CheckpointError.remedy if problems else None,
        unsupported=unsupported,
        notes=_notes(source, checked),
        path=str(source.tag_dir),
        tag=source.tag,
        latest=source.latest,
        framework=source.framework,
        format=shard.format if shard is not None else checked.format,
        stage=0 if stage_0 else None if shard is None else shard.stage,
        world_size=None if checked.stated_world_size is None else checked.world_size,
        tp_size=listing.tp_size if tp_size is None else tp_size,
        step=_integer(root, "global_steps") if stage_0 else next((found.global_steps for found in headers), None),
        skipped_steps=_integer(root, "skipped_steps"),
        samples=_integer(root, "global_samples"),
        save_id=next((found.save_id for found in (shard, record) if found is not None and found.save_id), None),
        versions=contents.saved_by(checked),
        model_dtype=contents.model_dtype(root, buffers),
        master_dtype=None if shard is None else ", ".join(sorted({*shard.extents[FP32].dtype.values()})) or None,
        train_batch_size=_batch_size(checked),
        sub_group_size=_sub_group_size(checked),
        num_sub_groups=None if shard is None else shard.layout.num_sub_groups,
        layout=contents.saved_layout(shard),
        record=_record(checked),
        totals=contents.totals(params, listing),
        topology=None if trained is None else contents.inspected_topology(trained, checked.topology, root),
        state=contents.state_keys(params),
        scalars=contents.different_scalars(shard),
        groups=contents.inspected_groups(checked),
        loss_scaler=contents.loss_scaler(shard),
        params=params,
        buffers=buffers,
        scheduler=root.get("lr_scheduler") is not None if root else None,
        client_state=list(client_state_keys(root)) if root else None,
        files=TagFiles(
            num_missing=checked.num_missing,
            missing=list(checked.missing_files),
            stale=list(checked.stale_files),
            odd=list(listing.unknown_files),
            leftovers=list(listing.temporaries),
            folders=list(listing.folders),
        ),
        headers_read=1 if stage_0 else checked.num_opened,
    )


def _unsupported(checked: TagHeaders) -> list[str]:
    """Why zeroelastic does not load it; of several tensor parallel ranks that do not say their slices, one is shown."""
    size = checked.listing.tp_size
    if size == 1 or checked.topology.tensor_size > 1:
        return checked.unsupported
    others = [sentence for sentence in checked.unsupported if OFFLINE_TENSOR_PARALLEL not in sentence]
    ranks = f"was saved with {size} tensor parallel ranks, of which the first is shown."
    return [*others, f"{checked.tag_dir}: {ranks} {OFFLINE_TENSOR_PARALLEL}"]


def _record(checked: TagHeaders) -> InspectedRecord:
    if checked.saved.is_recorded:
        return InspectedRecord(state="present", content_root=checked.saved.content_root)
    damaged = any(problem.file == RECORD_NAME for problem in checked.problems)
    return InspectedRecord(state="damaged" if damaged else "absent")


def _config(checked: TagHeaders) -> Mapping[str, object] | None:
    """The saved DeepSpeed configuration, of an optimizer file or else of one of module states."""
    found = checked.root.get("ds_config")
    if checked.first_shard is not None:
        return checked.first_shard.ds_config
    return found if isinstance(found, dict) else None


def _batch_size(checked: TagHeaders) -> int | None:
    stated = [found.train_batch_size for found in (checked.first_shard, checked.record) if found is not None]
    configs = (checked.root.get("ds_config"), _config(checked))
    configured = [found.get("train_batch_size") for found in configs if isinstance(found, Mapping)]
    return next((batch for batch in (*stated, *configured) if type(batch) is int and batch), None)


def _sub_group_size(checked: TagHeaders) -> int | None:
    config = _config(checked)
    return None if config is None or checked.listing.files.whole_model else configured_sub_group_size(config)


def _integer(root: Mapping[object, object], key: str) -> int | None:
    value = root.get(key)
    return value if type(value) is int else None


def _problems(checked: TagHeaders) -> list[str]:
    """Return the problems: missing files, and parameters that contradict the record, as one sentence each."""
    directory = checked.tag_dir
    gone = {*checked.missing}
    found = [problem for problem in checked.problems if problem not in gone]
    found += checked.other_directories({problem.file for problem in checked.problems})
    of_params = [problem.sentence for problem in found if problem.param is not None]
    problems = [problem.sentence for problem in found if problem.param is None] + of_params[:_NAMED]
    if len(of_params) > _NAMED:
        problems.append(f"{directory}: {len(of_params) - _NAMED} more parameters contradict the commit record.")
    if checked.stated_world_size is None:
        problems.append(f"{directory}: no file tells how many ranks saved it. The checkpoint is incomplete.")
    if num_missing := checked.num_missing:
        missing = some(checked.missing_files, count=num_missing)
        problems.append(
            f"{directory}: {num_missing} of the files of {counted(checked.world_size, 'rank')} "
            f"{'is' if num_missing == 1 else 'are'} missing: {missing}. The checkpoint is incomplete, or its files are "
            "on other nodes (use_node_local_storage)."
        )
    elif checked.missing:
        names = some(problem.file for problem in checked.missing)
        problems.append(f"{directory}: files that its commit record names are missing: {names}.")
    return problems


def _notes(source: Source, checked: TagHeaders) -> list[str]:
    listing, record, root = checked.listing, checked.record, checked.root
    notes: list[str] = []
    if source.latest not in (None, source.tag):
        notes.append(f"latest names {source.latest}, not this tag")
    if listing.temporaries:
        notes.append(f"a save left temporary files, or is under way: {some(listing.temporaries)}")
    if SWAP_FOLDER in listing.folders:
        notes.append(f"{SWAP_FOLDER} holds DeepSpeed's raw copies of state on NVMe, which no other world size can use")
    above: list[str] = []
    with suppress(CheckpointError, UnreadableError):
        above = [name for name in file_sizes(source.root) if is_temporary(name)]
    if above:
        notes.append(f"there are temporary files beside the tags: {some(sorted(above))}")
    if record is not None and record.tag != source.tag and not record.tag.endswith(f"/{source.tag}"):
        notes.append(f"was saved under the tag {record.tag}")  # the source is no part of it
    version = root.get("ds_version")
    if record is not None and isinstance(version, str) and version != record.versions.deepspeed:
        notes.append(f"the model states file was written by DeepSpeed {version}")
    if checked.stale_files:
        notes.append(f"files of ranks that this save does not have are left over: {some(checked.stale_files)}")
    if note := checked.saved.excluded_note:
        notes.append(note)
    elif checked.first_model is not None and not checked.first_model.names_frozen:
        notes.append("frozen parameters, if there are any, were left out of this save (exclude_frozen_parameters)")
    return notes


def _inspected_tensor(src: str | os.PathLike[str], name: str, *, tag: str | None = None) -> InspectedTensor:
    """Read a tensor and its optimizer state, each byte once, and describe them.

    Raises UnknownTensorError with the nearest names, and what ``zeroelastic.open`` raises.
    """
    with open_view(src, tag=tag) as ck:
        weight = ck[name]
        state = {} if weight.kind == "buffer" else ck.optimizer(name)
        key = FP32 if weight.kind == "trained" else weight.kind
        handles = {key: weight} | {key: it for key, it in state.items() if isinstance(it, TensorHandle)}
        return InspectedTensor(
            name=name,
            kind=weight.kind,
            shape=list(weight.shape),
            tied_to=None if weight.name == name else weight.name,
            stored=[
                _stored(ck, name, key, handle, None if handle is weight else key) for key, handle in handles.items()
            ],
            scalars={key: value for key, value in state.items() if not isinstance(value, TensorHandle)},
        )


def _stored(ck: CheckpointView, name: str, key: str, handle: TensorHandle, state_key: str | None) -> StoredTensor:
    lowest, highest, total, num_finite, nans = np.inf, -np.inf, 0.0, 0, 0
    first: list[Number] = []
    for data in handle.windows():
        values = values_of(bits_of(data, handle.dtype), handle.dtype)
        finite = values[np.isfinite(values)]
        lowest = min(lowest, float(finite.min(initial=np.inf)))
        highest = max(highest, float(finite.max(initial=-np.inf)))
        total, num_finite = total + float(finite.sum()), num_finite + len(finite)
        nans += int(np.count_nonzero(np.isnan(values)))
        first = first or values[:_FIRST].tolist()
    return StoredTensor(
        key=key,
        dtype=handle.dtype,
        bytes=handle.nbytes,
        min=lowest if num_finite else None,
        max=highest if num_finite else None,
        mean=total / num_finite if num_finite else None,
        nans=nans,
        first=first,
        places=list(ck.places(name, key=state_key)),
    )
