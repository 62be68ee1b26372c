"""The live optimizers of ZeRO stages 1 and 2: every optimizer group is one buffer, of which each rank has a part.

Where a parameter begins in its group's buffer is read off its 16-bit weight's memory, which is a view of that
buffer, and compared with the layout. DeepSpeed's own table (``_hp_mapping``) is of another order than the buffer under
``round_robin_gradients``; a load puts it right. Source: ``DeepSpeedZeroOptimizer`` of
stage_1_and_2.py (``_update_model_bit16_weights``, ``update_lp_params``, ``_link_all_hp_params``) and ``BF16_Optimizer``
of bf16_optimizer.py, which steps stage 1 with bf16 weights and fp32 accumulation; DeepSpeed 0.19.8.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.pipe.module import PipelineModule
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import get_hp_fragment_mapping

from zeroelastic.core.layout import Layout, Param
from zeroelastic.deepspeed.engine import Engine, GroupOptimizer
from zeroelastic.deepspeed.engine_state import engine_of
from zeroelastic.deepspeed.live.live_optimizer import LiveOptimizer
from zeroelastic.deepspeed.live.topology import expert_group, has_expert_buffers, is_expert, is_opaque, uncovered_groups
from zeroelastic.deepspeed.patching import patched
from zeroelastic.distributed.spreading import gather_from_peers
from zeroelastic.errors import UnsupportedError
from zeroelastic.errors import buffer_kind as word_for_buffer

_LEAST_COPIED_BYTES = 1 << 20
"""Of less than this, broadcasts take no longer than what it takes ranks to copy from each other."""


@dataclass(frozen=True, slots=True)
class _Lists:
    """DeepSpeed's own lists, each with one entry per optimizer group.

    ``params`` are in the order of the group, ``in_buffer`` in that of the buffer. ``weights`` is the whole buffer of
    16-bit weights, ``parts`` the ranks' views of it, ``master`` this rank's part of the master weights with padding,
    and ``padding`` the number of padding elements that DeepSpeed takes off in its files.
    """

    params: Sequence[Sequence[torch.nn.Parameter]]
    in_buffer: Sequence[Sequence[torch.nn.Parameter]]
    weights: Sequence[torch.Tensor]
    parts: Sequence[Sequence[torch.Tensor]]
    master: Sequence[torch.Tensor]
    padding: Sequence[int]


class GroupSplit(LiveOptimizer):
    """A ``DeepSpeedZeroOptimizer``, with offloading to the CPU. A sub-group is an optimizer group."""

    optimizer: GroupOptimizer
    per_param = False
    buffer_kind = word_for_buffer(2)
    has_elastic_form = False

    @staticmethod
    def lists(optimizer: Any) -> _Lists:
        """Return DeepSpeed's lists under one set of names; looked up anew, because DeepSpeed may replace them."""
        return _Lists(
            optimizer.bit16_groups,
            optimizer.round_robin_bit16_groups,
            optimizer.bit16_groups_flat,
            optimizer.parallel_partitioned_bit16_groups,
            optimizer.single_partition_of_fp32_groups,
            optimizer.groups_padding,
        )

    def _module(self) -> torch.nn.Module:
        engine = engine_of(self.optimizer)
        assert engine is not None, "linked when the engine was configured"
        module: torch.nn.Module = engine.module
        return module

    def _read(self, names: Mapping[torch.nn.Parameter, str]) -> None:
        lists, sharing = self.lists(self.optimizer), self.sharing
        self.group_of = tuple(range(len(lists.params)))
        self.groups = tuple(
            tuple(sharing.whole_name(names[param]) for param in group if param.numel()) for group in lists.params
        )
        described = [[Param(names[param], tuple(param.shape)) for param in group] for group in lists.in_buffer]
        gaps = getattr(self.optimizer, "round_robin_bit16_padding", None)  # DeepSpeed before 0.19.8 leaves none
        params = [param for group in lists.in_buffer for param in group if param.numel()]
        self.trained = frozenset(params)
        self._frozen = [param for param in self.module.parameters() if param not in self.trained]
        self._copies: dict[int, torch.Tensor] = {}
        frozen = [[Param(names[param], tuple(param.shape))] for param in self._frozen]
        self._take_layouts(sharing.layout(described, stage=2, gaps=gaps), sharing.layout(frozen, stage=3))
        self._names = names
        self._check_places(lists, names)

    def _check_places(self, lists: _Lists, names: Mapping[torch.nn.Parameter, str]) -> None:
        """Raise UnsupportedError where a weight is elsewhere in its group's buffer than the layout says."""
        computed = dict(zip(self.layout.index(), self.layout.origin.tolist(), strict=True))
        if getattr(self.optimizer, "offloaded_states", None):
            return  # by offload_states(): the weights are away
        for group, buffer in zip(lists.params, lists.weights, strict=True):
            for param in group:
                begin = (param.data_ptr() - buffer.data_ptr()) // buffer.element_size()
                name = self.sharing.whole_name(names[param])
                if param.numel() and begin != computed[name]:
                    raise UnsupportedError(
                        f"parameter {name} begins at element {begin} of its group's buffer, where ZeRO-1 and 2 imply "
                        f"{computed[name]}."
                    )
        parts = [part.numel() for part in lists.master]
        if parts != self.layout.sub_group_numel.tolist():
            raise UnsupportedError(
                f"the master weights have {parts} elements on this rank, where ZeRO-1 and 2 imply "
                f"{self.layout.sub_group_numel.tolist()}."
            )

    @classmethod
    def left_to_deepspeed(cls, optimizer: Any) -> str | None:
        engine = engine_of(optimizer)
        if engine is None:
            return "an optimizer outside of an engine"
        groups = optimizer.optimizer.param_groups
        reasons = {
            type(optimizer).__name__: type(optimizer) not in (DeepSpeedZeroOptimizer, BF16_Optimizer),
            "a pipeline": isinstance(engine.module, PipelineModule),
            "tensor parallelism": is_opaque(optimizer, engine.module),
            "experts with buffers, which only their own files have": has_expert_buffers(engine.module),
            "ZenFlow": bool(getattr(optimizer, "zenflow", False)),
            "Muon": any(group.get("use_muon") for group in groups),
            "other optimizer groups than were given": len(groups) != len(cls.lists(optimizer).params),
        }
        return next((what for what, used in reasons.items() if used), None) or next(
            iter(uncovered_groups(optimizer, engine)), None
        )

    @staticmethod
    def uncovered(optimizer: Any, engine: Engine) -> list[str]:
        return []  # it is left to DeepSpeed

    def flat(self, sub_group: int) -> torch.Tensor:
        return self.lists(self.optimizer).master[sub_group]

    def frozen_tensor(self, param: int) -> torch.Tensor:
        """This rank's part of a frozen parameter, which every rank has whole: a view, or else a copy of it.

        ``end_load`` sends each part to all ranks.
        """
        start, length = (int(column[param]) for column in self.frozen.owned(self.rank))
        whole = self._frozen[param].detach()
        if whole.is_contiguous():
            return whole.view(-1)[start : start + length]
        if param not in self._copies:
            self._copies[param] = whole.reshape(-1)[start : start + length].clone()
        return self._copies[param]

    def begin_load(self) -> None:
        optimizer: Any = self.optimizer  # an older DeepSpeed, or a BF16_Optimizer, may lack what is looked for
        if getattr(optimizer, "offloaded_states", None):
            optimizer.reload_states()
        if hasattr(optimizer, "_wait_for_offload_copies"):
            optimizer._wait_for_offload_copies()

    def weights(self, sub_group: int) -> torch.Tensor | None:
        away = getattr(self.optimizer, "offloaded_states", None)  # by offload_states()
        return None if away else self.low(sub_group)

    def low(self, sub_group: int) -> torch.Tensor:
        number = dist.get_rank(group=self._group_of_buffer(sub_group))
        return self.lists(self.optimizer).parts[sub_group][number].detach()

    def _group_of_buffer(self, sub_group: int) -> dist.ProcessGroup:
        """The ranks that share a buffer: of the same experts, if it is one of experts."""
        return self.optimizer.real_dp_process_group[sub_group]

    def finish_weights(
        self, *, from_16_bit: bool, rounded: Collection[int] = (), restored: Layout | None = None
    ) -> None:
        """Make this rank's part of the 16-bit weights, which ``end_load`` sends to the others."""
        for i in range(self.layout.num_sub_groups):
            low, master = self.low(i), self.fp32(i)
            made = self.layout if i in rounded else restored
            for begin, end in [(0, len(low))] if made is None else made.padding(self.rank, i):
                low[begin:end].copy_(master[begin:end])
            if from_16_bit:
                master.copy_(low)

    def end_load(self) -> None:
        """Gather every rank's part of the 16-bit weights and of frozen parameters on all ranks. Collective."""
        for i, weights in enumerate(self.lists(self.optimizer).weights):
            _all_gather(weights.data, self._group_of_buffer(i))
        for number, (param, part) in enumerate(zip(self._frozen, self.frozen.part.tolist(), strict=True)):
            if not param.numel():
                continue
            group = expert_group(param) if is_expert(param) else self.dp_group
            nbytes = dist.get_world_size(group=group) * part * param.element_size()
            whole = torch.zeros(nbytes, dtype=torch.uint8, device=param.device).view(param.dtype)  # any dtype has bytes
            piece = self.frozen_tensor(number)
            whole[dist.get_rank(group=group) * part :][: piece.numel()].copy_(piece)
            _all_gather(whole, group)
            param.data.copy_(whole[: param.numel()].view(param.shape))
        self._copies.clear()
        self._link_fragments()

    def _link_fragments(self) -> None:
        """Point DeepSpeed's fragments (``_hp_mapping``) at the buffers.

        DeepSpeed takes the order of the optimizer group for that of the buffer, which ``round_robin_gradients`` deals.
        The table that it saves (``_param_slice_mappings``) stays as it is: loading a Universal checkpoint makes the
        same mistake again, and at the same size the two cancel.
        """
        self.optimizer._link_all_hp_params()
        if isinstance(self.optimizer, DeepSpeedZeroOptimizer) and self.optimizer.round_robin_gradients:
            self._link_dealt_fragments(self.optimizer)
        self.optimizer._hp_optimizer_states_linked = False
        if all(self.state(i) for i in range(self.layout.num_sub_groups)):
            self.optimizer._lazy_init_hp_params_optimizer_state()

    def _link_dealt_fragments(self, optimizer: Any) -> None:
        offset = dict(zip(self.layout.index(), self.layout.origin.tolist(), strict=True))
        for g, (group, part) in enumerate(
            zip(optimizer.bit16_groups, self.layout.sub_group_numel.tolist(), strict=True)
        ):
            begin = dist.get_rank(group=self._group_of_buffer(g)) * part
            end = begin + part
            position = {id(param): i for i, param in enumerate(optimizer.params_in_partition[g])}
            for param in group:
                param._hp_mapping = None
                start = offset.get(self.sharing.whole_name(self._names[param]))
                if start is None or not (start < end and begin < start + param.numel()):
                    continue
                param._index_in_param_group = position[id(param)]
                param._hp_mapping = get_hp_fragment_mapping(
                    param,
                    start,
                    self.flat(g),
                    optimizer.averaged_gradients,
                    optimizer.offload_gradient_dict,
                    optimizer.cpu_offload,
                    g,
                    begin,
                    part,
                )

    @contextmanager
    def saving(self, engine: Engine, *, elastic: bool, written: Callable[[], object]) -> Iterator[None]:
        """Within this context, DeepSpeed's save writes its rigid form, which has the hyper-parameters.

        Its own form under ``elastic_checkpoint`` lacks hyper-parameters, and cannot be loaded by DeepSpeed itself.
        Frozen parameters are contiguous in the files, so that ranges of them can be read.
        """
        fragment = engine._get_param_fragment_func

        def contiguous(original: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
            def state_dict(*args: Any, **kwargs: Any) -> dict[str, Any]:
                state = original(*args, **kwargs)
                state.update({name: state[name].contiguous() for name in state.keys() & frozen})
                return state

            return state_dict

        frozen = {name for name, param in self.module.named_parameters() if not param.is_contiguous()}
        with (
            patched(self.optimizer, elastic_checkpoint=False, checkpoint_event_epilogue=written),
            patched(
                engine,
                module_state_dict=contiguous(engine.module_state_dict),
                _get_non_moe_state_dict=contiguous(engine._get_non_moe_state_dict),  # with experts
                _get_param_fragment_func=lambda param: fragment(param).contiguous(),
            ),
        ):
            yield

    @contextmanager
    def saving_alone(self, engine: Engine, *, writes_module: bool, tied: Mapping[str, str]) -> Iterator[None]:
        with patched(engine, save_non_zero_checkpoint=writes_module, _get_shared_params=lambda: dict(tied)):
            yield

    @property
    def params_in_expert_files(self) -> Collection[str]:
        return self.sharing.expert_sizes

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()


class Bf16GroupSplit(GroupSplit):
    """A ``BF16_Optimizer`` at stage 1: no loss scaler, no offloading, nothing dealt, and whole parts in its files."""

    @staticmethod
    def lists(optimizer: Any) -> _Lists:
        return _Lists(
            optimizer.bf16_groups,
            optimizer.bf16_groups,
            optimizer.bf16_groups_flat,
            optimizer.bf16_partitioned_groups,
            optimizer.fp32_groups_flat_partition,
            (0,) * len(optimizer.bf16_groups),
        )


def _all_gather(whole: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Fill ``whole``, 1-D, in place: equal parts, of which each rank of the group has its own so far. Collective.

    Bytes are sent, because no backend sends every dtype. gloo's all-gather goes through a second buffer of this size;
    its broadcasts need none, and half of the time. Ranks of one machine copy large parts from each other, in a third of
    that.
    """
    whole = whole.view(torch.uint8)
    parts = whole.view(dist.get_world_size(group=group), -1).unbind()
    if dist.get_backend(group) != "gloo":
        dist.all_gather_into_tensor(whole, parts[dist.get_rank(group=group)], group=group)
        return
    if whole.device.type == "cpu" and whole.nbytes >= _LEAST_COPIED_BYTES and gather_from_peers(whole, group):
        return
    works = [
        dist.broadcast(part, source, group=group, async_op=True)
        for source, part in zip(dist.get_process_group_ranks(group), parts, strict=True)
    ]
    for work in works:
        work.wait()
