"""``zeroelastic.inspect``: what a checkpoint is, from its headers, and what is wrong with it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase

from zeroelastic.checkpoint.checker import Headers, check_headers
from zeroelastic.checkpoint.commit_record import RECORD_NAME
from zeroelastic.checkpoint.model_states import client_state_keys
from zeroelastic.checkpoint.module_names import module_names, places_of
from zeroelastic.checkpoint.one_save import one_save, saved_again, was_saved_again
from zeroelastic.checkpoint.optimizer_file import FP32, OptimizerHeader, ParamGroup, configured_sub_group_size
from zeroelastic.checkpoint.saved_state import frozen_part, trained_part
from zeroelastic.checkpoint.tag_files import (
    OFFLINE_TENSOR_PARALLEL,
    SWAP_FOLDER,
    WHOLE_MODEL_FILE,
    is_temporary,
    list_tag,
)
from zeroelastic.checkpoint.tag_headers import TagHeaders
from zeroelastic.core.layout import Layout, Param
from zeroelastic.errors import CheckpointError, UnreadableError, UnsupportedError, counted, finding, some, with_remedy
from zeroelastic.io.paths import absolute, as_path
from zeroelastic.io.storage import file_sizes
from zeroelastic.runs.locate import UNIVERSAL, Source, find_source
from zeroelastic.runs.names import holds_checkpoint
from zeroelastic.runs.tag_directory import open_tag
from zeroelastic.torch_file.header import DTYPE_BYTES, DType, TensorRef
from zeroelastic.torch_file.tree import pairs_of
from zeroelastic.verbs.inspect.report import (
    Buffer,
    Group,
    InspectedParam,
    InspectReport,
    LossScaler,
    ParamKind,
    Record,
    SavedLayout,
    Scalar,
    StateKey,
    TagFiles,
    Totals,
    Versions,
)
from zeroelastic.verbs.inspect.tensor import inspect_tensor
from zeroelastic.verbs.inspect.topology import inspected_topology

_NAMED = 6


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
    return found if tensor is None else found.model_copy(update={"tensor": inspect_tensor(src, tensor, tag=tag)})


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

    Example::

        inspect_source(find_source("ckpt")).world_size
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
    listing = checked.listing
    problems = _problems(checked)
    unsupported = checked.unsupported
    if listing.tp_size > 1 and checked.topology.tensor_size == 1:
        ranks = f"was saved with {listing.tp_size} tensor parallel ranks, of which the first is shown."
        others = [sentence for sentence in unsupported if OFFLINE_TENSOR_PARALLEL not in sentence]
        unsupported = [*others, f"{checked.tag_dir}: {ranks} {OFFLINE_TENSOR_PARALLEL}"]
    damaged = any(problem.file == RECORD_NAME for problem in checked.problems)
    params = list(_params(checked))
    whole = model is not None and WHOLE_MODEL_FILE.match(model.path.name) is not None
    params += _tied(root, params, is_whole=whole)
    num, numel = Counter[ParamKind](), Counter[ParamKind]()
    for param in params:
        num[param.kind] += 1
        numel[param.kind] += param.numel
    sizes = [param.bytes for param in params if param.bytes is not None]
    buffers = _buffers(root)
    known, entries = {buffer.name for buffer in buffers}, pairs_of(root.get("module")).items()
    dtypes = Counter(ref.dtype for name, ref in entries if name not in known and isinstance(ref, TensorRef))
    own_config = root.get("ds_config")
    config = shard.ds_config if shard is not None else own_config if isinstance(own_config, dict) else None
    batches = (
        *(found.train_batch_size for found in (shard, record) if found is not None),
        *(found.get("train_batch_size") for found in (own_config, config) if isinstance(found, Mapping)),
    )
    tp_size = _integer(root, "mp_world_size")
    trained = checked.parts[0] if checked.shards and checked.parts else None
    has_slices = shard is not None and shard.layout.slices is not None
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
        stage=0 if checked.is_stage_0 else None if shard is None else shard.stage,
        world_size=None if checked.stated_world_size is None else checked.world_size,
        tp_size=listing.tp_size if tp_size is None else tp_size,
        step=_integer(root, "global_steps")
        if checked.is_stage_0
        else next((found.global_steps for found in (record, model) if found is not None), None),
        skipped_steps=_integer(root, "skipped_steps"),
        samples=_integer(root, "global_samples"),
        save_id=next((found.save_id for found in (shard, record) if found is not None and found.save_id), None),
        versions=_versions(checked),
        model_dtype=max(dtypes, key=lambda dtype: (dtypes[dtype], dtype)) if dtypes else None,
        master_dtype=", ".join(sorted({*shard.extents[FP32].dtype.values()})) or None if shard is not None else None,
        train_batch_size=next((batch for batch in batches if type(batch) is int and batch), None),
        sub_group_size=configured_sub_group_size(config)
        if config is not None and not listing.files.whole_model
        else None,
        num_sub_groups=None if shard is None else shard.layout.num_sub_groups,
        layout=None
        if shard is None or has_slices
        else SavedLayout(
            split="param" if shard.stage == 3 else "group", sub_group_numel=shard.layout.sub_group_numel.tolist()
        ),
        record=Record(
            state="present" if record is not None else "damaged" if damaged else "absent",
            content_root=checked.saved.content_root,
        ),
        totals=Totals(
            params=num["trained"] + num["frozen"],
            numel=numel["trained"] + numel["frozen"],
            trained_params=num["trained"],
            trained_numel=numel["trained"],
            frozen_params=num["frozen"],
            frozen_numel=numel["frozen"],
            tied_params=num["tied"],
            state_bytes=sum(sizes) if params and len(sizes) == len(params) else None,
            files=len(listing.sizes),
            disk_bytes=sum(listing.sizes.values()),
        ),
        topology=None if trained is None else inspected_topology(trained, checked.topology, root),
        state=_state(params),
        scalars=_scalars(shard),
        groups=_groups(checked),
        loss_scaler=_loss_scaler(shard),
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
        headers_read=1 if checked.is_stage_0 else checked.num_opened,
    )


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


def _versions(checked: TagHeaders) -> Versions:
    saved = Versions() if checked.record is None else Versions(**checked.record.versions.model_dump())
    version = checked.root.get("ds_version")
    return saved.model_copy(update={"deepspeed": version}) if isinstance(version, str) else saved


def _buffers(root: Mapping[object, object]) -> list[Buffer]:
    module, names = root.get("module"), root.get("buffer_names")
    if not isinstance(module, Mapping) or not isinstance(names, (list, tuple, set)):
        return []
    found = [(name, module.get(name)) for name in names if isinstance(name, str)]
    return [
        Buffer(name=name, shape=list(tensor.shape), dtype=tensor.dtype)
        for name, tensor in found
        if isinstance(tensor, TensorRef)
    ]


def _over_ranks(checked: TagHeaders, shard: OptimizerHeader) -> tuple[Layout, tuple[ParamGroup, ...]]:
    """The layout of the trained parameters and the optimizer's groups, where ranks have slices those of all ranks."""
    sliced = checked.sliced
    return (shard.layout, shard.groups) if sliced is None else (sliced.layout, sliced.groups(shard))


def _groups(checked: TagHeaders) -> list[Group]:
    shard = checked.first_shard
    if shard is None:
        return []
    layout, groups = _over_ranks(checked, shard)
    numel = {param.name: param.numel for param in layout.whole_tensors}
    return [
        Group(
            options=dict(group.options),
            num_params=len(group.params),
            numel=sum(numel.get(name, 0) for name in group.params),
        )
        for group in groups
    ]


def _scalars(shard: OptimizerHeader | None) -> dict[str, list[Scalar]]:
    """The different values of each scalar."""
    found: dict[str, dict[str, Scalar]] = {}
    for scalars in shard.scalars if shard is not None else ():
        for key, value in scalars.items():
            found.setdefault(key, {}).setdefault(value.canonical(), Scalar(kind=value.kind, value=value.value))
    return {key: [*values.values()] for key, values in found.items()}


def _loss_scaler(shard: OptimizerHeader | None) -> LossScaler | None:
    if shard is None or shard.scaler is None:
        return None
    scaler = shard.scaler
    attributes = {key: value.name if isinstance(value, DType) else value for key, value in scaler.attributes.items()}
    return LossScaler(
        class_name=scaler.class_name, dynamic=scaler.dynamic, overflow=scaler.overflow, attributes=attributes
    )


def _state(params: Iterable[InspectedParam]) -> dict[str, StateKey]:
    sizes: dict[str, dict[str, list[int]]] = {}  # bytes of each parameter, by state key and dtype
    for param in params:
        for key, dtype in param.dtypes.items():
            sizes.setdefault(key, {}).setdefault(dtype, []).append(param.numel * DTYPE_BYTES[dtype])
    return {
        key: StateKey(
            dtypes=sorted(by_dtype), num_params=sum(map(len, by_dtype.values())), bytes=sum(map(sum, by_dtype.values()))
        )
        for key, by_dtype in sizes.items()
    }


def _params(checked: TagHeaders) -> Iterator[InspectedParam]:
    """The trained and the frozen parameters, from headers or, where none tells them, from the commit record."""
    record, model, shard = checked.record, checked.first_model, checked.first_shard
    trained: list[tuple[Param, Mapping[str, str]]] = []
    frozen: list[tuple[Param, Mapping[str, str]]] = []
    groups: dict[str, int] = {}
    places: dict[str, tuple[int, int]] = {}
    if shard is not None:
        layout, saved = _over_ranks(checked, shard)
        part = trained_part({}, shard, layout)
        trained = list(zip(part.params, part.dtypes, strict=True))
        if checked.sliced is None:
            rows = zip(layout.params, layout.sub_group.tolist(), layout.in_buffer.tolist(), strict=True)
            places = {param.name: (sub_group, offset) for param, sub_group, offset in rows}
        groups = {name: number for number, group in enumerate(saved) for name in group.params}
    elif model is not None:
        trained = [(param, {}) for members in model.sub_groups for param in members]
    if model is not None:
        own = checked.parts[1:] if checked.shards else checked.parts
        part = own[0] if own and own[0].layout.slices is not None else frozen_part({model.rank: model})
        frozen = list(zip(part.params, part.dtypes, strict=True))
    elif record is not None:
        known, names = {param for param, _ in trained}, record.params.trained
        for content in record.contents():
            if content.param not in known:
                keys = {key: dtype for key, (dtype, _) in content.tensors.items()}
                (trained if content.param.name in names else frozen).append((content.param, keys))
    kinds: tuple[ParamKind, ParamKind] = ("trained", "frozen")
    for kind, found in zip(kinds, (trained, frozen), strict=True):
        for param, dtypes in found:
            sub_group, offset = places.get(param.name, (None, None))
            yield InspectedParam(
                name=param.name,
                kind=kind,
                shape=list(param.shape),
                numel=param.numel,
                bytes=param.numel * sum(DTYPE_BYTES[dtype] for dtype in dtypes.values()) if dtypes else None,
                group=groups.get(param.name),
                dtypes=dict(dtypes),
                sub_group=sub_group,
                offset=offset,
            )


def _tied(root: Mapping[object, object], params: Sequence[InspectedParam], *, is_whole: bool) -> list[InspectedParam]:
    """The further names of tied parameters."""
    shapes = {param.name: param.shape for param in params}
    entries = pairs_of(root.get("module"))
    shared = module_names(root, entries, places_of(entries), is_whole=is_whole).tied
    return [
        InspectedParam(
            name=name,
            kind="tied",
            shape=shapes.get(owner, []),
            numel=0,
            bytes=0,
            tied_to=owner,
        )
        for name, owner in shared.items()
        if name not in shapes
    ]
