"""``zeroelastic.plan``: which target rank reads how many bytes from the files of which saved rank.

The plan of each target rank is made as a load makes it (``core.plan.make_plan``), from the headers of one saved rank.
"""

from __future__ import annotations

import os
from typing import ClassVar

import numpy as np

from zeroelastic.checkpoint.open import Checkpoint, open_committed
from zeroelastic.checkpoint.optimizer_file import OptimizerHeader, configured_dtype, zero_option
from zeroelastic.checkpoint.saved_state import TensorSet, saved_parts
from zeroelastic.checkpoint.tag_files import one_save
from zeroelastic.checkpoint.topology import Topology, expert_sizes
from zeroelastic.core.layout import Int64Array, Layout, unpacked_layout
from zeroelastic.core.plan import make_plan
from zeroelastic.core.world_size import misfit_notes
from zeroelastic.errors import UsageError, with_remedy
from zeroelastic.runs.locate import Source, find_source
from zeroelastic.torch_file.header import DTYPE_BYTES
from zeroelastic.verbs.interface import Format, Framework, Part, Report, whole_option
from zeroelastic.verbs.reshard.slicing import Slicing

_MOST_RANKS = 1 << 16


class PlannedState(Part):
    """The state of the checkpoint."""

    bytes: int
    params: int
    frozen_params: int
    state_keys: tuple[str, ...]


class PlannedSource(Part):
    """The bytes that a target rank reads from the files of one saved rank."""

    rank: int
    bytes: int


class PlannedRank(Part):
    """One target rank: bytes of state that it owns and reads, files that it opens for them, and where it reads them.

    ``bytes_owned`` is computed from the layout of the target alone.
    """

    rank: int
    bytes_owned: int
    bytes_read: int
    files: int
    sources: tuple[PlannedSource, ...]


class PlannedTopology(Part):
    """The tensor and the expert parallel sizes of the save and of the target; ``experts`` are those of all layers."""

    tensor_parallel: int
    target_tensor_parallel: int
    expert_parallel: int
    target_expert_parallel: int
    experts: int

    @property
    def sentence(self) -> str:
        """The sizes of both sides."""
        sizes = [("tensor parallel", self.tensor_parallel, self.target_tensor_parallel)]
        sizes += [("expert parallel", self.expert_parallel, self.target_expert_parallel)] if self.experts else []
        return ", ".join(f"{what} {saved} to {target}" for what, saved, target in sizes if (saved, target) != (1, 1))


class PlanReport(Report):
    """Who reads how much from where in a load or a reshard.

    ``notes`` are about the global batch and another ZeRO stage. ``topology`` is there where ranks have slices of
    tensors.
    """

    path: str
    tag: str
    framework: Framework
    format: Format
    step: int
    world_size: int
    target_world_size: int
    stage: int
    target_stage: int
    state: PlannedState
    ranks: tuple[PlannedRank, ...]
    topology: PlannedTopology | None = None
    notes: tuple[str, ...]

    only_where_given: ClassVar[frozenset[str]] = frozenset({"topology"})


@with_remedy()
def plan(
    src: str | os.PathLike[str],
    *,
    world_size: int,
    stage: int | None = None,
    tp: int | None = None,
    ep: int | None = None,
    like: str | os.PathLike[str] | None = None,
    tag: str | None = None,
) -> PlanReport:
    """Say which of ``world_size`` ranks would read how many bytes of state from which saved rank's files.

    ``world_size`` counts all ranks. ``stage`` is the ZeRO stage of the run or of the result, ``tp`` its tensor
    parallel and ``ep`` its expert parallel size, by default those of the save; ``like`` is a checkpoint of a run of
    that tensor parallel size, where the save does not say how it cuts. Everything else is as in the saved
    configuration. Only headers are read. Raises UsageError, CheckpointError, UnsupportedError, UnreadableError.

    Example::

        import zeroelastic
        report = zeroelastic.plan("ckpt", world_size=3)
        for rank in report.ranks:
            print(rank.rank, rank.bytes_read, [source.rank for source in rank.sources])
    """
    world_size = whole_option(world_size, "--world-size")
    if not 1 <= world_size <= _MOST_RANKS:
        raise UsageError(f"a world size is a number from 1 to {_MOST_RANKS}, not {world_size}. Give another.")
    if stage not in (None, 1, 2, 3):
        raise UsageError(f"there is no ZeRO stage {stage} to plan for; give 1, 2 or 3.")
    source = find_source(src, tag=tag)
    with one_save(source.tag_dir):
        checkpoint = open_committed(source.tag_dir)
        head, model = checkpoint.shard(0), checkpoint.model_states(0)
        trained, frozen = parts = saved_parts(checkpoint, {0: head}, (model,))
        target_stage, topology = stage or head.stage, None
        if checkpoint.layout.slices is None and tp in (None, 1) and ep in (None, 1) and like is None:
            targets = [_run_layout(head, world_size, target_stage), unpacked_layout(frozen.params, world_size)]
        else:
            slicing, layout = _sliced_target(source, world_size, stage, tp, ep, like)
            topology = _planned_topology(checkpoint, slicing)
            # A rank fills its part of frozen parameters at every stage.
            targets = [layout, slicing.frozen_layout(frozen.params, slicing.topology)]
        ranks = tuple(_planned_rank(checkpoint, rank, parts, targets) for rank in range(world_size))
    data_size = checkpoint.topology.data_size
    num_ranks = world_size // (1 if topology is None else topology.target_tensor_parallel)
    notes = misfit_notes(checkpoint.train_batch_size(head), num_ranks, data_size, head.ds_config)
    return PlanReport(
        ok=True,
        path=str(source.tag_dir),
        tag=source.tag,
        framework=source.framework,
        format=head.format,
        step=model.global_steps,
        world_size=checkpoint.world_size,
        target_world_size=world_size,
        stage=head.stage,
        target_stage=target_stage,
        state=PlannedState(
            bytes=sum(tensor.nbytes for part in parts for tensor in part.tensors()),
            params=len(trained.params),
            frozen_params=len(frozen.params),
            state_keys=tuple(dict.fromkeys(key for keys in head.tensor_keys for key in keys)),
        ),
        ranks=ranks,
        topology=topology,
        notes=(*notes, *_stage_notes(head, target_stage)),
    )


def _stage_notes(head: OptimizerHeader, target_stage: int) -> list[str]:
    """A sentence on the configuration that decides where parameters are at another stage than the saved one."""
    if target_stage in (3, head.stage):
        return []
    names = ("round_robin_gradients", "parameter_alignment")
    saved = [f"{name} {str(bool(zero_option(head.ds_config, name))).lower()}" for name in names]
    return [f"for a run with {' and '.join(saved)}, as in the saved configuration"]


def _sliced_target(
    source: Source,
    world_size: int,
    stage: int | None,
    tp: int | None,
    ep: int | None,
    like: str | os.PathLike[str] | None,
) -> tuple[Slicing, Layout]:
    """Which slices the ranks of a reshard would have, and the layout of the trained parameters over them."""
    # Imported for these alone: a plan without slices takes a moment.
    from zeroelastic.verbs.reshard.new_run import ReshardOptions
    from zeroelastic.verbs.reshard.plan import plan_reshard

    like = None if like is None else os.fspath(like)
    options = ReshardOptions(world_size=world_size, stage=stage, tp=tp, ep=ep, like=like)
    sink = plan_reshard(source, options).target
    return sink.slicing, sink.layout


def _planned_topology(checkpoint: Checkpoint, target: Slicing) -> PlannedTopology:
    return PlannedTopology(
        tensor_parallel=checkpoint.topology.tensor_size,
        target_tensor_parallel=target.topology.tensor_size,
        expert_parallel=max(expert_sizes(checkpoint.layout, checkpoint.topology), default=1),
        target_expert_parallel=target.expert_size,
        experts=sum(layer.num_experts for layer in target.layers),
    )


def _run_layout(head: OptimizerHeader, world_size: int, stage: int) -> Layout:
    """Return the layout that DeepSpeed makes at a world size, with the options of the saved configuration."""
    by_name = {param.name: param for param in head.layout.params}
    groups = [[by_name[name] for name in group.params if name in by_name] for group in head.groups]
    grouped = {param.name for group in groups for param in group}
    groups.append([param for param in head.layout.params if param.name not in grouped])
    itemsize = 4 if configured_dtype(head.ds_config) == "float32" else 2
    slicing = Slicing(Topology(world_size))
    return slicing.layout(groups, stage, head.ds_config, itemsizes=[itemsize] * len(groups))[0]


def _sizes(part: TensorSet) -> list[int]:
    """Return the bytes of an element of each parameter, all its state keys together."""
    return [sum(DTYPE_BYTES[dtype] for dtype in dtypes.values()) for dtypes in part.dtypes]


def _planned_rank(
    checkpoint: Checkpoint, rank: int, parts: tuple[TensorSet, ...], targets: list[Layout]
) -> PlannedRank:
    """Plan the trained and the frozen parameters of one target rank."""
    owned, files = 0, 0
    total: Int64Array = np.zeros(checkpoint.world_size, dtype=np.int64)
    for part, target in zip(parts, targets, strict=True):
        of_name = dict(zip((param.name for param in part.params), _sizes(part), strict=True))
        own, found = target.on_rank(rank), np.zeros_like(total)
        made = make_plan(part.layout, own, rank)
        per_source = np.array([of_name[param.name] for param in part.layout.tensors], dtype=np.int64)
        per_target = np.array([of_name[param.name] for param in own.tensors], dtype=np.int64)
        np.add.at(found, made.src_rank, made.numel * per_source[made.src_param])
        owned += int((own.owned(rank)[1] * per_target).sum())
        sources = {*np.flatnonzero(found).tolist()}
        # A rank opens one optimizer file where it owns nothing, and the model states of its number beside the frozen.
        files += max(len(sources), 1) if part is parts[0] else len(sources - _own_models(checkpoint, rank))
        total += found
    return PlannedRank(
        rank=rank,
        bytes_owned=owned,
        bytes_read=int(total.sum()),
        files=files + len(_own_models(checkpoint, rank)),
        sources=tuple(PlannedSource(rank=i, bytes=int(total[i])) for i in np.flatnonzero(total).tolist()),
    )


def _own_models(checkpoint: Checkpoint, rank: int) -> set[int]:
    """Return the saved ranks whose model states a target rank loads: one of each tensor parallel rank."""
    topology = checkpoint.topology
    data_rank, num_saved = topology.place(rank)[0], len(checkpoint.model_files) // topology.tensor_size
    return {topology.rank(data_rank if data_rank < num_saved else 0, t) for t in range(topology.tensor_size)}
