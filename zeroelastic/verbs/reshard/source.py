"""The source of new ranks' files: the tensors of a saved checkpoint, and its files' trees for the rest.

Checkpoints of all ZeRO stages are taken. Everything that is not partitioned is taken unchanged from the saved files,
including objects of unknown classes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from zeroelastic.checkpoint.module_names import ModuleNames, module_names, places_of
from zeroelastic.checkpoint.open import Checkpoint
from zeroelastic.checkpoint.optimizer_file import configured_sub_group_size
from zeroelastic.checkpoint.saved_state import SavedState, TensorSet
from zeroelastic.checkpoint.tag_files import EXPERT_FILE, expert_file_name
from zeroelastic.checkpoint.topology import Topology, numbered_expert
from zeroelastic.core.layout import Layout, Param
from zeroelastic.errors import CheckpointError, UnsupportedError
from zeroelastic.io.paths import FilePath
from zeroelastic.torch_file.header import read_tree
from zeroelastic.torch_file.tree import entry, pairs_of
from zeroelastic.verbs.reshard.slicing import INFO, Slicing, expert_slicing

_BOTH = ("zero_stage", "loss_scaler", "dynamic_loss_scale", "overflow", "partition_count", "base_optimizer_state")
_STATE_KEYS = {*_BOTH, "ds_zero_partition_groups", "optimizer_state_dict", "fp32_flat_groups", "zeroelastic"}
"""The keys of optimizer_state_dict in a file of stage 3, with those that the elastic format adds."""

_GROUP_STATE_KEYS = {
    *_BOTH,
    "clip_grad",
    "ds_version",
    "single_partition_of_fp32_groups",
    "group_paddings",
    "param_alignment_paddings",
    "param_slice_mappings",
    INFO,
}
"""The keys there in a file of stage 1 or 2."""


@dataclass(frozen=True, slots=True)
class OptimGroup:
    """One optimizer group: its hyper-parameters as the files have them, its parameters, and how often each is listed.

    ``repeats`` is 1 but for optimizers such as DeepSpeed's Adagrad, whose groups list every flat buffer twice.
    """

    options: Mapping[object, object]
    params: tuple[str, ...]
    repeats: int


@dataclass(frozen=True, slots=True)
class ReshardSource:
    """The source of new ranks' files: the saved tensors, and the trees of saved files for the rest.

    ``parts`` are the trained and the frozen parameters. ``optim_root`` is the tree of an optimizer file;
    ``model_root(rank)`` the module states that target rank ``rank`` takes over; ``config_path`` the file that has the
    saved DeepSpeed configuration; ``train_batch_size`` the global batch of the save, where it is known.

    ``slicing`` says which slices of tensors the ranks that saved it had, ``buffers`` the parameters of each of their
    flat buffers, in the order of the optimizer, where ranks of ZeRO saved it.
    """

    checkpoint: Checkpoint
    parts: tuple[TensorSet, TensorSet]
    stage: int
    global_steps: int
    train_batch_size: int | None
    groups: tuple[OptimGroup, ...]
    optim_root: Mapping[object, object]
    model_root: Callable[[int], Mapping[object, object]]
    config_path: FilePath
    bf16_names: bool
    slicing: Slicing
    buffers: Sequence[Sequence[Param]] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, padding excluded."""
        return sum(tensor.nbytes for part in self.parts for tensor in part.tensors())

    @property
    def whole_model(self) -> bool:
        """Return whether the module states have the whole weights, as at stages 1 and 2."""
        return self.stage != 3

    @property
    def config(self) -> dict[str, object]:
        """The saved DeepSpeed configuration."""
        return {str(key): value for key, value in pairs_of(self.optim_root.get("ds_config")).items()}

    @property
    def inner(self) -> Mapping[object, object]:
        """The state dict of DeepSpeed's optimizer."""
        return pairs_of(self.optim_root.get("optimizer_state_dict"))

    @property
    def trained(self) -> TensorSet:
        """The trained parameters."""
        return self.parts[0]

    @property
    def frozen(self) -> TensorSet:
        """The frozen parameters."""
        return self.parts[1]

    @property
    def models(self) -> Topology:
        """The ranks that have saved module states."""
        return model_ranks(self.slicing.topology, self.stage)

    def model_root_for(self, data_rank: int, tensor_rank: int) -> Mapping[object, object]:
        """The module states that were saved by the same data and tensor parallel rank, or else by another one."""
        saved = self.models
        data_rank = data_rank if data_rank < saved.data_size else 0
        return self.model_root(saved.rank(data_rank, tensor_rank % saved.tensor_size))

    def expert_root(self, layer: int, expert: int) -> Mapping[object, object]:
        """The tree of the file of an expert; empty at stage 3, where experts have none."""
        return (
            pairs_of(read_tree(self.checkpoint.tag_dir / expert_file_name(layer, expert))) if self.whole_model else {}
        )

    def grouped(self, params: Iterable[Param]) -> list[list[Param]]:
        """Deal parameters to their optimizer groups, each in the order of the group."""
        table = {param.name: param for param in params}
        return [[table[name] for name in group.params if name in table] for group in self.groups]


def model_ranks(topology: Topology, stage: int) -> Topology:
    """The ranks that write module states: at stage 3 all, below it the first data parallel rank."""
    return topology if stage == 3 else replace(topology, data_size=1)


def reshard_source(state: SavedState) -> ReshardSource:
    """The tensors and trees of a saved checkpoint.

    Raises UnsupportedError when an optimizer file holds something that is not known to be the same at every world size.
    """
    root = pairs_of(read_tree(state.head.path))
    inner = pairs_of(root.get("optimizer_state_dict"))
    known = _STATE_KEYS if state.head.stage == 3 else _GROUP_STATE_KEYS
    unknown = sorted(str(key) for key in inner if key not in known)
    if unknown:
        raise UnsupportedError(
            f"{state.head.path}: optimizer_state_dict holds {', '.join(unknown)}, which is not known to be the same at "
            "another world size. Load it with zeroelastic in the training job, which restores what it knows."
        )
    layout, checkpoint = state.head.layout, state.checkpoint
    slicing = slicing_of(checkpoint)
    groups = _groups(state, inner)
    _check_order(groups, slicing, layout, state.head.path)
    return ReshardSource(
        checkpoint=checkpoint,
        parts=state.parts,
        stage=state.head.stage,
        global_steps=state.models[0].global_steps,
        train_batch_size=checkpoint.train_batch_size(state.head),
        groups=groups,
        optim_root=root,
        model_root=model_roots(checkpoint.model_files),
        config_path=state.head.path,
        bf16_names=state.head.path.name.startswith("bf16_"),
        slicing=slicing,
        buffers=[
            [layout.params[p] for p in np.flatnonzero(layout.sub_group == i).tolist()]
            for i in range(layout.num_sub_groups)
        ],
    )


def with_options(source: ReshardSource, options: Mapping[str, Mapping[str, object]]) -> ReshardSource:
    """The source as a run with these entries of blocks of its configuration would have saved it.

    They are changed in the ds_config of the files: readers need ``round_robin_gradients`` of ``zero_optimization``
    there to know the order in which the optimizer lists its parameters.
    """
    options = {block: entries for block, entries in options.items() if entries}
    if not options:
        return source
    model_root = source.model_root

    def changed(root: Mapping[object, object]) -> dict[object, object]:
        config = pairs_of(root.get("ds_config"))
        blocks: dict[object, object] = {}
        for block, entries in options.items():
            blocks[block] = own = dict(pairs_of(config.get(block)))
            own.update(entries.items())
        return {**root, "ds_config": {**config, **blocks}}

    return replace(source, optim_root=changed(source.optim_root), model_root=lambda rank: changed(model_root(rank)))


def for_slicing(source: ReshardSource, slicing: Slicing) -> ReshardSource:
    """The source as a run of that slicing would name its groups of experts and the sizes in its configuration."""
    saved = source.slicing
    sizes: dict[str, Mapping[str, object]] = {}
    if slicing.topology.tensor_size != saved.topology.tensor_size:
        sizes["tensor_parallel"] = {"autotp_size": slicing.topology.tensor_size}
    if slicing.expert_size == saved.expert_size:
        return with_options(source, sizes)
    if not saved.has_own_experts:
        sizes["expert_parallel"] = {"autoep_size": slicing.expert_size}
    old, new = f"ep_size_{saved.expert_size}", f"ep_size_{slicing.expert_size}"
    groups = [
        replace(group, options={**group.options, "name": new}) if group.options.get("name") == old else group
        for group in source.groups
    ]
    return replace(with_options(source, sizes), groups=tuple(groups))


def slicing_of(checkpoint: Checkpoint) -> Slicing:
    """Which slices of tensors the ranks of a checkpoint had. Raises CheckpointError, UnsupportedError."""
    if checkpoint.layout.slices is None and not checkpoint.expert_files:
        return Slicing(checkpoint.topology)
    root, sliced = pairs_of(read_tree(checkpoint.model_files[0])), checkpoint.sliced
    if sliced is not None and checkpoint.topology.tensor_size > 1:
        layouts = (checkpoint.layout, checkpoint.frozen.layout)
        maps = {tensor.name: sliced.maps[tensor.name] for layout in layouts for tensor in layout.whole_tensors}
        return Slicing(checkpoint.topology, maps, info=pairs_of(root.get(INFO)) or None)
    try:
        return expert_slicing(root, checkpoint.layout, checkpoint.topology, _own_layers(checkpoint))
    except (CheckpointError, UnsupportedError) as error:
        raise type(error)(f"{checkpoint.model_files[0]}: {error}") from None


def _own_layers(checkpoint: Checkpoint) -> list[str]:
    """The prefixes of DeepSpeed's own MoE layers, by the number with which their files begin."""
    found: dict[int, str] = {}
    for name in checkpoint.expert_files:
        match = EXPERT_FILE.fullmatch(name)
        assert match is not None, "the files of experts are named by DeepSpeed"
        layer = int(match[1])
        if layer not in found:
            experts = map(numbered_expert, map(str, pairs_of(read_tree(checkpoint.tag_dir / name))))
            found[layer] = next((expert.prefix for expert in experts if expert is not None), "")
    return [found[layer] for layer in sorted(found) if found[layer]]


def _check_order(groups: Sequence[OptimGroup], slicing: Slicing, first: Layout, path: FilePath) -> None:
    """Raise UnsupportedError where DeepSpeed's own experts are in another order than in the module.

    ``first`` is the layout of the first rank, whose files have their parameters in the order of the optimizer.
    """
    if not slicing.has_own_experts:
        return
    names, there = slicing.file_names(), {param.name: param for param in first.params}
    for group in groups:
        own = [names.get(name, name) for name in group.params if name in there]
        every = [Param(name, ()) for name in group.params]
        if own != [param.name for param in slicing.in_files(every, 0)]:
            raise UnsupportedError(
                f"{path}: an optimizer group lists experts in another order than the module has them: the order at "
                "another expert parallel size is not known. Load it with zeroelastic in the training job."
            )


def model_roots(files: Sequence[FilePath]) -> Callable[[int], Mapping[object, object]]:
    """The module states of each target rank: of the same saved rank, or of rank 0 for a new rank.

    Each file is read once; rank 0's stays in memory for the new ranks.
    """

    def read(rank: int) -> Mapping[object, object]:
        return pairs_of(read_tree(files[rank]))

    read_first = functools.cache(lambda: read(0))
    return lambda rank: read(rank) if 0 < rank < len(files) else read_first()


def saved_sub_group_size(source: ReshardSource) -> int:
    """``sub_group_size`` of the saved configuration.

    Raises UnsupportedError where the sub-groups of stage 3 contradict it; other stages have none.
    """
    size = configured_sub_group_size(source.config)
    if source.stage != 3 or not source.buffers:
        return size
    saved = [list(members) for members in source.buffers]
    implied = source.slicing.sub_groups(source.grouped(source.trained.params), size)
    if implied != saved:
        raise UnsupportedError(
            f"{source.config_path}: has {len(saved)} sub-groups; a sub_group_size of {size}, as in its "
            f"configuration, gives {len(implied)} others. Give the one of the run that will load the result, with "
            "--sub-group-size."
        )
    return size


def _groups(state: SavedState, inner: Mapping[object, object]) -> tuple[OptimGroup, ...]:
    """The optimizer groups, with hyper-parameters as the file's own objects, so that they are written unchanged."""
    own_state = "optimizer_state_dict" if state.head.stage == 3 else "base_optimizer_state"
    nested = entry(inner, own_state, "param_groups")
    if state.head.stage != 3 and nested is None:
        raise no_hyper_parameters(state.head.path)
    ours = entry(inner, "zeroelastic", "param_groups")
    raw = nested if state.head.format == "rigid" else ours
    listed = nested if isinstance(nested, list) else []
    groups = state.checkpoint.groups(state.head)
    if not isinstance(raw, list) or len(raw) != len(groups) or len(listed) not in (0, len(raw)):
        raise CheckpointError(f"{state.head.path}: its optimizer groups contradict each other. The file is damaged.")
    repeats = [_repeats(entry(group, "params")) for group in listed] or [1] * len(raw)
    return tuple(
        make_group(pairs_of(options), group.params, repeats=times)
        for options, group, times in zip(raw, groups, repeats, strict=True)
    )


def no_hyper_parameters(path: FilePath) -> UnsupportedError:
    """The error for a file that DeepSpeed saved at stage 1 or 2 with ``elastic_checkpoint``."""
    return UnsupportedError(
        f"{path}: holds no hyper-parameters: DeepSpeed saves none at stages 1 and 2 with elastic_checkpoint. Load it "
        "in the training job, which has its own."
    )


def make_group(options: Mapping[object, object], params: tuple[str, ...], *, repeats: int | None = None) -> OptimGroup:
    """A group from its entry in a file; by default ``repeats`` is counted in its list of flat buffers."""
    kept = {key: value for key, value in options.items() if key != "params"}
    return OptimGroup(kept, params, _repeats(options.get("params")) if repeats is None else repeats)


def _repeats(listed: object) -> int:
    """How often each flat buffer is listed."""
    return max(1, len(listed) // len(set(map(str, listed)))) if isinstance(listed, list) and listed else 1


def refuse_own_weights(source: ReshardSource) -> None:
    """Raise UnsupportedError where weights are not the master weights, cast, so that no other ones can be made."""
    if source.checkpoint.inventory.own_weights:
        raise UnsupportedError(
            f"{source.checkpoint.tag_dir}: the weights of the model were not the master weights when this was "
            "saved, as those of a schedule-free optimizer in eval() are not. Only files of stages 1 and 2 have a place "
            "for them, of the same tensor and expert parallel sizes: pass --stage 1 or 2."
        )


def names_in_module(source: ReshardSource, root: Mapping[object, object]) -> ModuleNames:
    """Return the names in the module's state of a model states file that are not one parameter each."""
    module = pairs_of(root.get("module"))
    return module_names(root, module, places_of(module), is_whole=source.whole_model)
