"""The options of a reshard, checked when they are made."""

from __future__ import annotations

from dataclasses import dataclass

from zeroelastic.byte_sizes import format_size
from zeroelastic.checkpoint.commit_record import CheckpointFormat
from zeroelastic.errors import UsageError

LEAST_MEMORY = 64 << 20
"""The smallest ``max_memory``: buffers of a few threads and the tables of one rank."""

ORDER_OPTIONS = ("round_robin_gradients", "parameter_alignment")
"""The entries of ``zero_optimization`` on which the order of parameters in the buffers of stages 1 and 2 depends."""


@dataclass(frozen=True, slots=True)
class ReshardOptions:
    """The options of a reshard.

    ``world_size`` counts all ranks. ``stage`` is the ZeRO stage of the result, ``tp`` its tensor parallel and ``ep``
    its expert parallel size, by default those of the source; ``like`` is a checkpoint of a run that cuts weights as the
    result shall. ``format`` is by default elastic at stage 3, and always rigid below it. ``sub_group_size`` overrides
    that of the saved configuration, and at stages 1 and 2 ``round_robin_gradients`` and ``parameter_alignment`` theirs;
    ``verify`` reads the result back before it is published. Raises UsageError for invalid values.
    """

    world_size: int
    format: CheckpointFormat | None = None
    sub_group_size: int | None = None
    stage: int | None = None
    round_robin_gradients: bool | None = None
    parameter_alignment: bool | None = None
    max_memory: int = 1 << 30
    verify: bool = False
    tp: int | None = None
    ep: int | None = None
    like: str | None = None

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise UsageError(f"a world size of {self.world_size} makes no sense; give 1 or more.")
        for name, size in (("tensor", self.tp), ("expert", self.ep)):
            if size is not None and size < 1:
                raise UsageError(f"{size} {name} parallel ranks make no sense; give 1 or more.")
        if self.sub_group_size is not None and self.sub_group_size < 1:
            raise UsageError(f"a sub_group_size of {self.sub_group_size} makes no sense; give 1 or more.")
        if self.stage not in (None, 1, 2, 3):
            raise UsageError(f"there is no ZeRO stage {self.stage} to reshard to; give 1, 2 or 3.")
        if self.max_memory < LEAST_MEMORY:
            raise UsageError(
                f"--max-memory: at least {LEAST_MEMORY >> 20} MiB are needed, got {format_size(self.max_memory)}."
            )

    @property
    def zero_options(self) -> dict[str, bool]:
        """The entries of ``zero_optimization`` that are given instead of the saved configuration's."""
        return {key: value for key in ORDER_OPTIONS if (value := getattr(self, key)) is not None}

    def check(self, stage: int) -> None:
        """Raise UsageError for an option that the ZeRO stage of the result does not have."""
        if stage == 3 and self.zero_options:
            raise UsageError(
                f"{' and '.join(self.zero_options)} makes no difference at ZeRO stage {stage}. Leave it out, or give "
                "--stage 1 or 2."
            )
        if stage != 3 and self.format == "elastic":
            raise UsageError(
                f"there is no elastic format of ZeRO stage {stage}: DeepSpeed's own, with elastic_checkpoint, has no "
                "hyper-parameters. Leave --format out, or give rigid."
            )
        if stage != 3 and self.sub_group_size is not None:
            raise UsageError(f"there are no sub-groups at ZeRO stage {stage}. Leave --sub-group-size out.")
