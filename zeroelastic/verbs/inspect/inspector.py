"""Describe a checkpoint from file names, sizes, the commit record and the headers of one rank.

Damaged and missing files are listed in ``problems``; everything else is still described. A checkpoint without problems
can be opened by ``open_checkpoint``, and the headers of its first rank can be read; other ranks' headers on request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, TypeVar

from zeroelastic.checkpoint.check import other_save, other_trained_params
from zeroelastic.checkpoint.commit_record import CommitRecord, read_record
from zeroelastic.checkpoint.marks import MARK_NAME, Quarantine, read_mark
from zeroelastic.checkpoint.model_states import (
    ModelStates,
    client_state_keys,
    model_states_of,
    open_model_states,
    other_step,
)
from zeroelastic.checkpoint.open import open_checkpoint
from zeroelastic.checkpoint.optimizer_file import FROZEN, ScalerState, Shard, configured_sub_group_size
from zeroelastic.checkpoint.optimizer_reader import open_shard
from zeroelastic.checkpoint.saved_state import check_same_save, open_state
from zeroelastic.checkpoint.tag_files import (
    OFFLINE_TENSOR_PARALLEL,
    SWAP_FOLDER,
    TagListing,
    TensorParallel,
    is_temporary,
)
from zeroelastic.core.digest import ScalarValue
from zeroelastic.core.layout import Param
from zeroelastic.errors import CheckpointError, UnreadableError, UnsupportedError, counted, some
from zeroelastic.io.paths import FilePath
from zeroelastic.io.storage import file_sizes
from zeroelastic.runs.locate import Source
from zeroelastic.torch_file.columns import NamedColumn
from zeroelastic.torch_file.header import DTYPE_BYTES, DType, TensorRef, read_torch_file
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
from zeroelastic.verbs.report import Format, Framework

_TRIES = 3
T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class Inspection:
    """What an inspector has found so far; ``report`` is made of it."""

    problems: list[str] = field(default_factory=list)
    unsupported: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    path: str
    tag: str
    framework: Framework = "deepspeed"
    latest: str | None = None
    format: Format | None = None
    stage: int | None = None
    world_size: int | None = None
    tp_size: int | None = None
    step: int | None = None
    skipped_steps: int | None = None
    samples: int | None = None
    save_id: str | None = None
    versions: dict[str, str | None] = field(
        default_factory=lambda: {"zeroelastic": None, "deepspeed": None, "torch": None}
    )
    model_dtype: str | None = None
    master_dtype: str | None = None
    train_batch_size: int | None = None
    sub_group_size: int | None = None
    num_sub_groups: int | None = None
    layout: SavedLayout | None = None
    state: dict[str, StateKey] = field(default_factory=dict)
    scalars: dict[str, tuple[ScalarValue, ...]] = field(default_factory=dict)
    groups: list[Group] = field(default_factory=list)
    scaler: ScalerState | None = None
    params: list[InspectedParam] = field(default_factory=list)
    buffers: list[Buffer] = field(default_factory=list)
    scheduler: bool | None = None
    client_state: tuple[str, ...] | None = None
    record: Literal["present", "absent", "damaged"] = "absent"
    content_root: str | None = None
    num_files: int = 0
    disk_bytes: int = 0
    num_missing: int = 0
    missing: tuple[str, ...] = ()
    stale: tuple[str, ...] = ()
    odd: tuple[str, ...] = ()
    leftovers: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    headers_read: int = 0
    quarantine: Quarantine | None = None
    remedy: str | None = None

    def report(self) -> InspectReport:
        """The report on what was found, with all parameters."""
        num, numel = Counter[ParamKind](), Counter[ParamKind]()
        for param in self.params:
            num[param.kind] += 1
            numel[param.kind] += param.numel
        sizes = [param.bytes for param in self.params]
        return InspectReport(
            ok=not self.problems and not self.unsupported,
            problems=self.problems,
            remedy=self.remedy or (CheckpointError.remedy if self.problems else None),
            unsupported=self.unsupported,
            notes=self.notes,
            path=self.path,
            tag=self.tag,
            latest=self.latest,
            framework=self.framework,
            format=self.format,
            stage=self.stage,
            world_size=self.world_size,
            tp_size=self.tp_size,
            step=self.step,
            skipped_steps=self.skipped_steps,
            samples=self.samples,
            save_id=self.save_id,
            versions=Versions(**self.versions),
            model_dtype=self.model_dtype,
            master_dtype=self.master_dtype,
            train_batch_size=self.train_batch_size,
            sub_group_size=self.sub_group_size,
            num_sub_groups=self.num_sub_groups,
            layout=self.layout,
            quarantine=self.quarantine,
            record=Record(state=self.record, content_root=self.content_root),
            totals=Totals(
                params=num["trained"] + num["frozen"],
                numel=numel["trained"] + numel["frozen"],
                trained_params=num["trained"],
                trained_numel=numel["trained"],
                frozen_params=num["frozen"],
                frozen_numel=numel["frozen"],
                tied_params=num["tied"],
                state_bytes=None if not sizes or None in sizes else sum(size for size in sizes if size is not None),
                files=self.num_files,
                disk_bytes=self.disk_bytes,
            ),
            state=self.state,
            scalars={
                key: [Scalar(kind=value.kind, value=value.value) for value in values]
                for key, values in self.scalars.items()
            },
            groups=self.groups,
            loss_scaler=None if self.scaler is None else _loss_scaler(self.scaler),
            params=self.params,
            buffers=self.buffers,
            scheduler=self.scheduler,
            client_state=None if self.client_state is None else list(self.client_state),
            files=TagFiles(
                num_missing=self.num_missing,
                missing=list(self.missing),
                stale=list(self.stale),
                odd=list(self.odd),
                leftovers=list(self.leftovers),
                folders=list(self.folders),
            ),
            headers_read=self.headers_read,
        )


def _loss_scaler(scaler: ScalerState) -> LossScaler:
    attributes = {key: value.name if isinstance(value, DType) else value for key, value in scaler.attributes.items()}
    return LossScaler(
        class_name=scaler.class_name, dynamic=scaler.dynamic, overflow=scaler.overflow, attributes=attributes
    )


class Inspector:
    """An inspection in progress: the files opened so far, and the result being filled."""

    def __init__(self, listing: TagListing, found: Inspection) -> None:
        self.listing, self.found = listing, found
        self.commit: CommitRecord | None = None
        self.model: ModelStates | None = None
        self.root: Mapping[object, object] = {}
        self.shard: Shard | None = None

    def attempt(self, function: Callable[[], T]) -> T | None:
        """The result of a function; None where it fails, and the error becomes a problem."""
        try:
            return function()
        except CheckpointError as error:
            self.problem(str(error))
        except UnsupportedError as error:
            if str(error) not in self.found.unsupported:
                self.found.unsupported.append(str(error))
        return None

    def problem(self, text: str) -> None:
        if text not in self.found.problems:
            self.found.problems.append(text)

    def path(self, name: str) -> FilePath:
        return self.listing.directory / name

    def files(self, source: Source) -> None:
        """Fill in what file names and sizes tell."""
        listing, found = self.listing, self.found
        found.num_files, found.disk_bytes = len(listing.sizes), sum(listing.sizes.values())
        found.tp_size = listing.tp_size
        found.odd, found.leftovers, found.folders = listing.unknown_files, listing.temporaries, listing.folders
        for name in listing.duplicates:
            self.problem(
                f"{self.path(name)}: belongs to a rank that another file belongs to. Files of two saves are mixed."
            )
        if source.latest not in (None, source.tag):
            found.notes.append(f"latest names {source.latest}, not this tag")
        if listing.temporaries:
            found.notes.append(f"a save left temporary files, or is under way: {some(listing.temporaries)}")
        found.quarantine = self.attempt(lambda: read_mark(listing.directory)) if MARK_NAME in listing.sizes else None
        if found.quarantine is not None:
            self.problem(f"{listing.directory}: {found.quarantine.sentence}")
        if SWAP_FOLDER in listing.folders:
            found.notes.append(
                f"{SWAP_FOLDER} holds DeepSpeed's raw copies of state on NVMe, which no other world size can use"
            )
        try:
            above = [name for name in file_sizes(source.root) if is_temporary(name)]
        except (CheckpointError, UnreadableError):
            above = []
        if above:
            found.notes.append(f"there are temporary files beside the tags: {some(sorted(above))}")

    def record(self) -> None:
        """Fill in what the commit record tells, and compare it with the files."""
        listing, found = self.listing, self.found
        before = len(found.problems)
        self.commit = self.attempt(lambda: read_record(listing.directory))
        if self.commit is None:
            found.record = "damaged" if len(found.problems) > before else "absent"
            return
        commit = self.commit
        found.record, found.content_root, found.save_id = "present", commit.content_root, commit.save_id
        found.format, found.world_size, found.step = commit.checkpoint_format, commit.world_size, commit.global_steps
        found.train_batch_size = commit.train_batch_size
        found.versions.update(
            zeroelastic=commit.versions.zeroelastic, deepspeed=commit.versions.deepspeed, torch=commit.versions.torch
        )
        if commit.tag != found.tag and not commit.tag.endswith(f"/{found.tag}"):  # seen from within a part of it
            found.notes.append(f"was saved under the tag {commit.tag}")
        wrong = [
            f"{name} has {listing.sizes[name]} bytes, not {want}"
            for name, want in sorted(commit.files.items())
            if name in listing.sizes and listing.sizes[name] != want
        ]
        gone = [name for name in sorted(commit.files) if name not in listing.sizes]
        if wrong:
            self.problem(
                f"{listing.directory}: contradicts its commit record: {some(wrong)}. Files are truncated, damaged or "
                "from another save."
            )
        if gone and not listing.missing(commit.world_size)[0]:  # which _list_missing reports
            self.problem(f"{listing.directory}: files that its commit record names are missing: {some(gone)}.")

    def headers(self) -> None:
        """Fill in what the headers of the first readable rank tell."""
        commit, found = self.commit, self.found
        self.model = self._first(self.listing.models, self._open_model)
        if self.model is not None:
            found.world_size = found.world_size or self.model.world_size
            found.step = self.model.global_steps if found.step is None else found.step
            if (mixed := other_step(self.model, commit)) is not None:
                self.problem(mixed)
        self._describe_module()
        self.shard = self._first(self.listing.optim, self._open_shard)
        if self.shard is not None:
            self._describe_shard(self.shard)
        self._list_missing()

    def _first(self, files: Mapping[tuple[int, int], str], open_header: Callable[[str, int], T]) -> T | None:
        """The header of the first rank whose file can be read, of a few."""
        header: T | None = None
        for rank, tp_rank in sorted(at for at in files if at[1] == 0)[:_TRIES]:
            if header is None and not self.found.unsupported:
                header = self.attempt(partial(open_header, files[rank, tp_rank], rank))
        return header

    def _open_model(self, name: str, rank: int) -> ModelStates:
        file = read_torch_file(self.path(name), foreign="inert", columns=True)
        self.found.headers_read += 1
        self.root = file.root if isinstance(file.root, dict) else {}
        world_size = None if self.commit is None else self.commit.world_size
        if world_size is not None and self.root.get("dp_world_size") != world_size:
            self.attempt(lambda: model_states_of(file, rank, world_size=world_size))
        saved = self.root.get("mp_world_size")
        tp = None  # another size is reported by _list_missing
        if saved == self.listing.tp_size > 1:
            tp = TensorParallel(0, self.listing.tp_size)
        return model_states_of(file, rank, world_size=None, tp=tp)

    def _open_shard(self, name: str, rank: int) -> Shard:
        path = self.path(name)
        world_size = self.found.world_size
        if world_size is None:  # neither a record nor a model states file gives it
            root = read_torch_file(path).root
            state = root.get("optimizer_state_dict") if isinstance(root, dict) else None
            count = state.get("partition_count") if isinstance(state, dict) else None
            world_size = count if type(count) is int and count > rank else self.listing.num_ranks
            self.found.world_size = world_size
        sub_groups = None if self.model is None else self.model.sub_groups
        shard = open_shard(path, rank, world_size=world_size, rigid_params=sub_groups)
        self.found.headers_read += 1
        return shard

    def _describe_module(self) -> None:
        """Fill in what the model states file tells beside the layout."""
        root, found = self.root, self.found
        if not root:
            return
        version = root.get("ds_version")
        if isinstance(version, str):
            if found.versions["deepspeed"] not in (None, version):
                found.notes.append(f"the model states file was written by DeepSpeed {version}")
            found.versions["deepspeed"] = version
        for key in ("skipped_steps", "global_samples"):
            value = root.get(key)
            if type(value) is int:
                setattr(found, {"global_samples": "samples"}.get(key, key), value)
        tp_size = root.get("mp_world_size")
        if type(tp_size) is int:
            found.tp_size = tp_size
        found.scheduler = root.get("lr_scheduler") is not None
        found.client_state = client_state_keys(root)
        module = root.get("module")
        module = module if isinstance(module, Mapping) else {}
        buffers = root.get("buffer_names")
        for name in buffers if isinstance(buffers, (list, tuple, set)) else ():
            value = module.get(name) if isinstance(name, str) else None
            if isinstance(value, TensorRef):
                found.buffers.append(Buffer(name=name, shape=list(value.shape), dtype=value.dtype))
        own = {buffer.name for buffer in found.buffers}
        dtypes = _count_dtypes(module, but=own)
        found.model_dtype = max(dtypes, key=lambda dtype: (dtypes[dtype], dtype)) if dtypes else None
        self._describe_config(root.get("ds_config"))

    def _describe_config(self, config: object) -> None:
        found = self.found
        if not isinstance(config, dict):
            return
        if found.train_batch_size is None and type(config.get("train_batch_size")) is int:
            found.train_batch_size = config["train_batch_size"]
        if self.listing.kind == "zero-3":
            found.sub_group_size = configured_sub_group_size(config)

    def _describe_shard(self, shard: Shard) -> None:
        found, layout, commit = self.found, shard.layout, self.commit
        if commit is not None:
            if (mixed := other_save(shard, commit)) is not None:
                self.problem(mixed)
            if shard.format != commit.checkpoint_format:
                self.problem(f"{shard.path}: is {shard.format}; its commit record says {commit.checkpoint_format}.")
            trained = {(param.name, tuple(param.shape)) for param in commit.params if param.trainable}
            if trained != {(param.name, param.shape) for param in layout.params}:
                self.problem(f"{shard.path}: holds other parameters than its commit record names. Two saves are mixed.")
        if self.model is not None and (mixed := other_trained_params(self.model, shard)) is not None:
            self.problem(mixed)
        found.format, found.save_id = shard.format, shard.save_id or found.save_id
        found.stage = shard.stage
        found.train_batch_size = shard.train_batch_size or found.train_batch_size
        found.num_sub_groups = layout.num_sub_groups
        found.layout = SavedLayout(
            split="param" if shard.stage == 3 else "group", sub_group_numel=layout.sub_group_numel.tolist()
        )
        found.scaler = shard.scaler
        index = layout.index()
        found.groups = [
            Group(
                options=dict(group.options),
                num_params=len(group.params),
                numel=sum(layout.params[index[name]].numel for name in group.params if name in index),
            )
            for group in shard.groups
        ]
        for scalars in shard.scalars:
            for key, value in scalars.items():
                have = found.scalars.get(key, ())
                if value.canonical() not in {other.canonical() for other in have}:
                    found.scalars[key] = (*have, value)
        masters = shard.extents["fp32"].dtype if "fp32" in shard.extents else {}
        found.master_dtype = ", ".join(sorted(set(masters.values()))) or None
        self._describe_config(shard.ds_config)

    def _list_missing(self) -> None:
        listing, found = self.listing, self.found
        world_size = found.world_size
        if world_size is None:
            self.problem(f"{listing.directory}: no file tells how many ranks saved it. The checkpoint is incomplete.")
            world_size = listing.num_ranks
        found.num_missing, found.missing = listing.missing(world_size)
        found.stale = listing.stale(world_size)
        if found.num_missing:
            self.problem(
                f"{listing.directory}: {found.num_missing} of the files of {counted(world_size, 'rank')} "
                f"{'is' if found.num_missing == 1 else 'are'} missing: "
                f"{some(found.missing, count=found.num_missing)}. The checkpoint is incomplete, or its files are on "
                "other nodes (use_node_local_storage)."
            )
        if found.stale:
            found.notes.append(f"files of ranks that this save does not have are left over: {some(found.stale)}")
        if listing.tp_size > 1 and not found.unsupported:
            found.unsupported.append(
                f"{listing.directory}: was saved with {listing.tp_size} tensor parallel ranks, of which the first is "
                f"shown. {OFFLINE_TENSOR_PARALLEL}"
            )

    def params(self) -> None:
        """Fill in the table of parameters, from headers or, without them, from the commit record."""
        found, commit = self.found, self.commit
        views = found.params
        trained, frozen = list(_trained(self.model, self.shard)), list(_frozen(self.model))
        if self.model is None and commit is not None:
            known = {param for param, _ in trained}
            for saved in commit.params:
                param = Param(saved.name, tuple(saved.shape))
                if param not in known:
                    dtypes: Mapping[str, str] = {key: tensor.dtype for key, tensor in saved.tensors.items()}
                    (trained if saved.trainable else frozen).append((param, dtypes))
        groups = {} if self.shard is None else {n: g for g, group in enumerate(self.shard.groups) for n in group.params}
        places: dict[str, tuple[int, int]] = {}
        if self.shard is not None:
            layout = self.shard.layout
            rows = zip(layout.params, layout.sub_group.tolist(), layout.in_buffer.tolist(), strict=True)
            places = {param.name: (sub_group, offset) for param, sub_group, offset in rows}
        tables: tuple[tuple[ParamKind, list[tuple[Param, Mapping[str, str]]]], ...]
        tables = (("trained", trained), ("frozen", frozen))
        sizes: dict[str, dict[str, list[int]]] = {}  # bytes of each parameter, by state key and dtype
        for kind, params in tables:
            for param, dtypes in params:
                nbytes = param.numel * sum(DTYPE_BYTES[dtype] for dtype in dtypes.values()) if dtypes else None
                group = groups.get(param.name) if kind == "trained" else None
                sub_group, offset = places.get(param.name, (None, None)) if kind == "trained" else (None, None)
                views.append(
                    InspectedParam(
                        name=param.name,
                        kind=kind,
                        shape=list(param.shape),
                        numel=param.numel,
                        bytes=nbytes,
                        group=group,
                        dtypes=dict(dtypes),
                        tied_to=None,
                        sub_group=sub_group,
                        offset=offset,
                    )
                )
                for key, dtype in dtypes.items():
                    sizes.setdefault(key, {}).setdefault(dtype, []).append(param.numel * DTYPE_BYTES[dtype])
        found.state = {
            key: StateKey(
                dtypes=sorted(by_dtype),
                num_params=sum(map(len, by_dtype.values())),
                bytes=sum(map(sum, by_dtype.values())),
            )
            for key, by_dtype in sizes.items()
        }
        shapes = {view.name: view for view in views}
        shared = self.root.get("shared_params")
        for name, owner in shared.items() if isinstance(shared, dict) else ():
            if isinstance(name, str) and isinstance(owner, str) and name not in shapes:
                views.append(
                    InspectedParam(
                        name=name,
                        kind="tied",
                        shape=shapes[owner].shape if owner in shapes else [],
                        numel=0,
                        bytes=0,
                        group=None,
                        dtypes={},
                        tied_to=owner,
                        sub_group=None,
                        offset=None,
                    )
                )
        if self.model is not None and self.model.frozen is None:
            found.notes.append(
                "frozen parameters, if there are any, were left out of this save (exclude_frozen_parameters)"
            )

    def all_ranks(self) -> None:
        """Open every rank's headers and report contradictions."""
        found, directory = self.found, self.listing.directory
        sound = not found.problems and not found.unsupported
        checkpoint = self.attempt(lambda: open_checkpoint(directory)) if sound else None
        if checkpoint is not None:
            for rank in range(checkpoint.world_size):
                self.attempt(partial(checkpoint.model_states, rank))
                self.attempt(partial(checkpoint.shard, rank))
            if not found.problems and not found.unsupported:
                self.attempt(partial(open_state, checkpoint))
            found.headers_read = len(checkpoint.opened)
            return
        shards: dict[int, Shard] = {}
        world_size = found.world_size or 0
        for rank in range(min(world_size, self.listing.num_ranks)):
            model, optim = self.listing.models.get((rank, 0)), self.listing.optim.get((rank, 0))
            if model is not None and (self.model is None or rank != self.model.rank):
                self.attempt(partial(open_model_states, self.path(model), rank, world_size=world_size))
            if self.shard is not None and rank == self.shard.rank:
                shards[rank] = self.shard
            elif optim is not None:
                shard = self.attempt(partial(self._open_shard, optim, rank))
                shards |= {} if shard is None else {rank: shard}
        if shards:
            self.attempt(partial(check_same_save, shards, shards[min(shards)], recorded=self.commit is not None))


def _trained(model: ModelStates | None, shard: Shard | None) -> Iterator[tuple[Param, Mapping[str, str]]]:
    """The trained parameters with the dtype of each state key; without dtypes where no optimizer header tells them."""
    if shard is not None:
        layout = shard.layout
        by_sub_group = [{key: shard.extents[key].dtype[i] for key in keys} for i, keys in enumerate(shard.tensor_keys)]
        for param, sub_group in zip(layout.params, layout.sub_group.tolist(), strict=True):
            yield param, by_sub_group[sub_group]
    elif model is not None:
        for members in model.sub_groups:
            for param in members:
                yield param, {}


def _frozen(model: ModelStates | None) -> Iterator[tuple[Param, Mapping[str, str]]]:
    if model is not None and model.frozen is not None and model.frozen_extents is not None:
        for i, param in enumerate(model.frozen.params):
            yield param, {FROZEN: model.frozen_extents.dtype[i]}


def _count_dtypes(module: Mapping[object, object], *, but: Collection[object]) -> Counter[str]:
    """How many tensors of other names than these have each dtype."""
    if not isinstance(module, NamedColumn):
        return Counter(ref.dtype for name, ref in module.items() if isinstance(ref, TensorRef) and name not in but)
    forms = Counter(module.form[~module.is_in(but)].tolist())
    counts: Counter[str] = Counter()
    for number, count in forms.items():
        form = module.forms[number]
        if isinstance(form, TensorRef):
            counts[form.dtype] += count
    return counts
