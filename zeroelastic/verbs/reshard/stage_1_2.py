"""The files of ranks at ZeRO stages 1 and 2: one of the optimizer each, of which a buffer is an optimizer group.

Data parallel rank 0 alone has module states, with the whole weights, or all that its tensor parallel rank has of them;
the weights of each expert are in a file of their own. A source of stage 1 or 2 has the weights as well: they are
copied. From one of stage 3 they are made: trained weights by rounding the master weights to the dtype of the run, as
DeepSpeed does after every step, frozen ones from their parts.

The layout follows from the groups, ``round_robin_gradients`` and ``parameter_alignment``, as
``DeepSpeedZeroOptimizer.__init__`` makes it, or ``BF16_Optimizer`` without these two.

Source (DeepSpeed 0.19.8): ``DeepSpeedEngine._save_zero_checkpoint``, ``state_dict`` of ``DeepSpeedZeroOptimizer`` with
``elastic_checkpoint`` off, and of ``BF16_Optimizer``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from zeroelastic.checkpoint.module_names import ModuleNames
from zeroelastic.checkpoint.optimizer_file import FP32, configured_dtype, steps_with_bf16_optimizer, zero_option
from zeroelastic.checkpoint.tag_files import expert_file_name
from zeroelastic.checkpoint.topology import numbered_expert, view_of
from zeroelastic.core.layout import Int64Array, Layout, Param
from zeroelastic.core.slices import Strip
from zeroelastic.errors import CheckpointError, UnsupportedError, some
from zeroelastic.executors.tables import cast_between
from zeroelastic.torch_file.header import DTYPE_BYTES
from zeroelastic.torch_file.tree import Dict, TensorRef, instance, new_global, new_storage, pairs_of, storage_of, tensor
from zeroelastic.verbs.reshard.new_run import ORDER_OPTIONS
from zeroelastic.verbs.reshard.sink import (
    APART,
    ZERO_STAGE,
    NativeSink,
    RankFiles,
    Root,
    Weight,
    flat,
    loss_scaler,
    shapes_of,
)
from zeroelastic.verbs.reshard.slicing import EXPERT_WEIGHTS, INFO, MoeLayer, Slicing, any_slices
from zeroelastic.verbs.reshard.source import ReshardSource, names_in_module, refuse_own_weights

_FRAGMENT_ADDRESS = new_global("deepspeed.utils.tensor_fragment", "fragment_address")
_TO_STAGE_3 = "Choose stage 3, with --stage 3."


class GroupSink(NativeSink):
    """The files of stage 1 or 2, always rigid.

    ``gaps[i]`` are the elements that are left free behind each parameter of group i, in buffer order. ``is_bf16``:
    DeepSpeed's class is its ``BF16_Optimizer``, of stage 1, which deals and aligns nothing.
    """

    times_listed = False

    def __init__(self, source: ReshardSource, slicing: Slicing, stage: int) -> None:
        _check_optimizer(source, stage, slicing)
        groups = source.grouped(param for param in source.trained.params if param.numel > 0)
        if not all(groups):
            raise UnsupportedError(
                f"optimizer group {groups.index([])} has no trained parameters: DeepSpeed does not start with such a "
                f"group at stages 1 and 2. {_TO_STAGE_3}"
            )
        _check_module(source)
        dtypes = _weight_dtypes(source)
        self.format, self.weights = "rigid", _made_weights(source, slicing, dtypes)
        # DeepSpeed takes the dtype of the parameter that the optimizer lists first.
        itemsizes = [DTYPE_BYTES[dtypes[members[0].name]] for members in groups]
        layout, self.gaps = slicing.layout(groups, stage, source.config, itemsizes=itemsizes)
        self.is_bf16 = stage == 1 and steps_with_bf16_optimizer(source.config)
        advice = "An optimizer group has one state at stages 1 and 2: choose stage 3, with --stage 3, and a"
        super().__init__(source, slicing, stage, layout, buffer="an optimizer group", advice=f"{advice} {APART}")

    @property
    def num_files(self) -> int:
        """The files of all ranks."""
        return super().num_files + sum(layer.num_experts for layer in self.slicing.layers)

    @property
    def nbytes(self) -> int:
        """Bytes that are written, weights that are made included."""
        made = [param for param in self.layout.params if param.name in self.weights]
        return super().nbytes + sum(param.numel * DTYPE_BYTES[self.weights[param.name]] for param in made)

    def file_names(self, rank: int) -> tuple[str, ...]:
        """DeepSpeed's names of one rank's files; experts come last."""
        experts = (expert_file_name(layer.number, expert) for layer, expert in self._experts(rank))
        return (*super().file_names(rank), *experts)

    def _experts(self, rank: int) -> list[tuple[MoeLayer, int]]:
        """The experts whose files a rank writes."""
        slicing, size = self.slicing, self.slicing.expert_size
        expert_rank = self.topology.expert_rank(rank, size)
        if self.topology.sharers(0, expert_rank, size).first != rank:
            return []
        return [
            (layer, expert)
            for layer in slicing.layers
            for expert in range(layer.num_experts)
            if expert // (layer.num_experts // size) == expert_rank
        ]

    def files(self, rank: int, *, save_id: str) -> RankFiles:
        """One rank's files; experts come last."""
        files = super().files(rank, save_id=save_id)
        files.trees += self._expert_trees(files)
        return files

    def optimizer_state(self, files: RankFiles) -> Root:
        """The state dict of DeepSpeed's optimizer, with the padding at the end, and master weights without it.

        A ``BF16_Optimizer`` leaves it in both, has no loss scaler, and names no stage.
        """
        source, layout = self.source, files.layout
        padded, (number, parts) = layout.sub_group_numel, _shares(layout, files.rank)
        lean = layout.lean_numel(files.rank)
        paddings = padded - lean
        if self.is_bf16:  # books all padding on the last rank
            numel = np.bincount(layout.sub_group, weights=layout.numel, minlength=layout.num_sub_groups)
            paddings = (padded * parts - numel.astype(np.int64)) * (number == parts - 1)
        state: Root = {} if self.is_bf16 else loss_scaler(source)
        if (clip_grad := _clip_grad(source)) is not None:  # where it is missing, a run keeps its own
            state["clip_grad"] = clip_grad
        state["base_optimizer_state"] = self.torch_state(files, self.scalar_nodes())
        state["single_partition_of_fp32_groups"] = [
            flat(files.flats[i, FP32], numel, requires_grad=True)
            for i, numel in enumerate((padded if self.is_bf16 else lean).tolist())
        ]
        if not self.is_bf16:
            state["zero_stage"] = ZERO_STAGE(self.stage)
        state["group_paddings"] = paddings.tolist()
        if not self.is_bf16:
            state["param_alignment_paddings"] = [list(gaps) for gaps in self.gaps]
        state["partition_count"] = parts.tolist()
        state["ds_version"] = _version(source)
        state["param_slice_mappings"] = self._slice_mappings(files)
        if not self.is_bf16 and self.slicing.info is not None:
            state[INFO] = self.slicing.info
        return state

    def _slice_mappings(self, files: RankFiles) -> list[Dict]:
        """``param_slice_mappings``: by group, where the rank's buffer has its part of each parameter.

        A resume does not read it, ``ds_to_universal`` does. Under ``round_robin_gradients`` DeepSpeed writes the places
        of another order than the buffer's; here they are always the buffer's.
        """
        layout, rank = files.layout, files.rank
        number, names = layout.index(), self.slicing.file_names()
        length, offset = layout.owned(rank)[1].tolist(), layout.buffer_offset(rank).tolist()
        mappings: list[Dict] = []
        for group in self.source.groups:
            own = [(name, number[name]) for name in group.params if name in number]
            held = ((names.get(name, name), p) for name, p in own if length[p] > 0)
            places = ((name, {"numel": length[p], "start": offset[p]}) for name, p in held)
            mappings.append(Dict((name, instance(_FRAGMENT_ADDRESS, place)) for name, place in places))
        return mappings

    def model_states(self, files: RankFiles) -> Root:
        """The module states, with all that a tensor parallel rank has of the weights."""
        root, params = self.model_root(files), files.frozen_layout.params
        storages = files.frozen.values()
        frozen = {param.name: tensor(it, 0, param.shape) for param, it in zip(params, storages, strict=True)}
        tied = names_in_module(self.source, self.source.model_root(0)).tied
        root["module"] = whole_module(root, self._made(files) | frozen, tied)
        excluded = root.get("frozen_param_shapes") is None and self.source.stage != 1 and not frozen
        if self.stage == 1 or excluded:  # stage 1 lists no frozen parameters
            root["frozen_param_shapes"] = root["frozen_param_fragments"] = None
        else:
            root["frozen_param_shapes"] = shapes_of(params)
            root["frozen_param_fragments"] = Dict(frozen.items())
        return root

    def _made(self, files: RankFiles) -> dict[str, TensorRef]:
        """The weights of the module that are made, by name."""
        names, tensor_rank = self.slicing.file_names(), self.topology.place(files.rank)[1]
        made: dict[str, TensorRef] = {}
        for param, whole in zip(files.layout.params, files.layout.tensors, strict=True):
            name = names.get(param.name, param.name)
            if param.name in self.weights and not self.slicing.is_expert(name):
                strips = view_of(self.slicing.maps, whole, tensor_rank, 0).strips
                storage = new_storage(self.weights[param.name], param.numel)
                files.weights.append(Weight(whole, strips, storage))
                made[param.name] = tensor(storage, 0, param.shape)
        return made

    def _expert_trees(self, files: RankFiles) -> list[Root]:
        """The files of the experts that a rank writes: what the saved ones have, and weights that are made."""
        experts = self._experts(files.rank)
        trees: dict[tuple[str, int], Root] = {
            (layer.prefix, expert): dict(self.source.expert_root(layer.number, expert)) for layer, expert in experts
        }
        for whole in self.source.trained.params if experts else ():
            for prefix, number, name, start, shape in _weights_of_experts(whole):
                if (prefix, number) in trees:
                    numel = math.prod(shape)
                    storage = new_storage(self.weights[whole.name], numel)
                    files.weights.append(Weight(whole, (Strip(start, 0, numel),) if numel else (), storage))
                    trees[prefix, number][name] = tensor(storage, 0, shape)
        return [*trees.values()]

    def order_notes(self, given: Sequence[str]) -> list[str]:
        """A sentence on the options that the run which loads it must have."""
        if self.source.stage == self.stage and not given:
            return []
        order = [str(bool(zero_option(self.source.config, key))).lower() for key in ORDER_OPTIONS]
        origin = f"{' and '.join(given)} as given" if given else "as in the saved configuration"
        return [f"for a run with round_robin_gradients {order[0]} and parameter_alignment {order[1]}, {origin}"]


def _weights_of_experts(whole: Param) -> list[tuple[str, int, str, int, tuple[int, ...]]]:
    """The experts of which a parameter has weights: layer, number, the weight's name, where it begins, its shape."""
    own = numbered_expert(whole.name)
    if own is not None:
        return [(own.prefix, own.number, whole.name, 0, whole.shape)]
    prefix, _, last = whole.name.rpartition(".")
    if last not in EXPERT_WEIGHTS or not whole.shape:
        return []
    (count, *rest), numel = whole.shape, math.prod(whole.shape[1:])
    return [(prefix, number, f"{whole.name}.{number}", number * numel, tuple(rest)) for number in range(count)]


def _shares(own: Layout, rank: int) -> tuple[Int64Array, Int64Array]:
    """Which part of each flat buffer a rank has, and how many ranks have one, from the rank's layout."""
    first = np.unique(own.sub_group, return_index=True)[1]
    return np.broadcast_to(own.part_number(rank), own.numel.shape)[first], own.num_parts[first]


def _clip_grad(source: ReshardSource) -> int | float | None:
    found = source.inner.get("clip_grad", source.config.get("gradient_clipping"))
    return found if isinstance(found, (int, float)) else None


def _version(source: ReshardSource) -> str:
    """The version of DeepSpeed that saved it, without which DeepSpeed loads no file of stages 1 and 2."""
    for root in (source.inner, source.optim_root, source.model_root(0)):
        if isinstance(found := root.get("ds_version"), str):
            return found
    raise CheckpointError("the checkpoint names no version of DeepSpeed (ds_version), which stages 1 and 2 need.")


def _check_optimizer(source: ReshardSource, stage: int, slicing: Slicing) -> None:
    """Raise UnsupportedError for an optimizer whose state DeepSpeed keeps in another form at the stage."""
    if not slicing.has_experts and any(group.options.get("moe") for group in source.groups):
        raise UnsupportedError(
            "has an optimizer group of experts (MoE), and nothing says which experts its parameters are: such "
            f"checkpoints are not written. {_TO_STAGE_3}"
        )
    adagrad = any("sum" in keys for keys in source.trained.dtypes)
    # torch.optim.Adagrad is made anew over all flat buffers, as one group, by initialize_optimizer_states.
    if adagrad or any(group.repeats > 1 for group in source.groups):
        raise UnsupportedError(
            f"was saved with Adagrad, whose optimizer groups DeepSpeed joins at stage {stage}: such checkpoints are "
            f"not written. {_TO_STAGE_3}"
        )
    if any(group.options.get("use_muon") for group in source.groups):
        raise UnsupportedError(
            f"was saved with Muon, whose momentum DeepSpeed keeps in another form at stage {stage}: such checkpoints "
            f"are not written. {_TO_STAGE_3}"
        )


def _weight_dtypes(source: ReshardSource) -> dict[str, str]:
    """The dtype of each trained weight, by the entry in the module's state, which may be without elements.

    For a weight without an entry it is the dtype that the saved configuration chooses.
    """
    module = pairs_of(source.model_root(0).get("module"))
    default = configured_dtype(source.config)
    storages = {param.name: storage_of(module.get(param.name)) for param in source.trained.params}
    return {name: default if storage is None else storage.dtype for name, storage in storages.items()}


def _made_weights(source: ReshardSource, slicing: Slicing, dtypes: Mapping[str, str]) -> Mapping[str, str]:
    """Of the ``dtypes`` of weights those that are made from master weights; none where the source has the weights.

    ``slicing`` is the result's. Raises UnsupportedError for a dtype to which master weights cannot be rounded, and for
    a weight that has no place in the module's state.
    """
    if source.whole_model and not any_slices(source.slicing, slicing):
        return {}
    refuse_own_weights(source)
    part = source.trained
    for param, saved in zip(part.params, part.dtypes, strict=True):
        if cast_between(saved[FP32], dtypes[param.name]) is None:
            raise UnsupportedError(
                f"{param.name}: its master weights are {saved[FP32]}, its weights {dtypes[param.name]}, which cannot "
                f"be made of them. {_TO_STAGE_3}"
            )
    root, names = source.model_root(0), slicing.file_names()
    module, shared = pairs_of(root.get("module")), names_in_module(source, root).tied
    found = {*module, *(shared.get(str(name), str(name)) for name in module)}
    wanted = sorted(name for name in dtypes if not slicing.is_expert(names.get(name, name)))
    if missing := [name for name in wanted if name not in found and shared.get(name, name) not in found]:
        raise UnsupportedError(
            f"the module's state has no entry for {some(missing)}, whose weights stages 1 and 2 keep there. "
            f"{_TO_STAGE_3}"
        )
    return dtypes


def _check_module(source: ReshardSource) -> None:
    """Raise UnsupportedError where a whole module would not say which of its tensors are frozen parameters.

    At stages 1 and 2 these are its tensors that are neither trained nor among ``ModuleNames``.
    """
    root = source.model_root(0)
    names: ModuleNames = names_in_module(source, root)
    others = {param.name for param in source.trained.params} | names.no_params.union(names.tied)
    module = pairs_of(root.get("module"))
    found = {str(name) for name, value in module.items() if name not in others and storage_of(value) is not None}
    frozen = {param.name for param in source.frozen.params}
    if frozen - found:
        raise UnsupportedError(
            f"the module's state has no entry for {some(sorted(frozen - found))}, frozen parameters, "
            f"which stages 1 and 2 keep there. {_TO_STAGE_3}"
        )
    if found - frozen:
        raise UnsupportedError(
            f"the module's state has {some(sorted(found - frozen))}, neither parameters nor buffers, "
            f"which files of stages 1 and 2 do not distinguish from frozen ones. {_TO_STAGE_3}"
        )


def whole_module(root: Mapping[object, object], whole: Mapping[str, TensorRef], shared: Mapping[str, str]) -> Dict:
    """The module's state with these whole weights; a name that is tied to one (``shared``) has the same tensor.

    Every other entry stays as it is.
    """
    tied = {shared.get(name, name): value for name, value in whole.items()}

    def weight(name: object, value: object) -> object:
        return whole.get(str(name), tied.get(shared.get(str(name), str(name)), value))

    return Dict((name, weight(name, value)) for name, value in pairs_of(root.get("module")).items())
