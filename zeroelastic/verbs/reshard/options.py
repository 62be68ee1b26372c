"""The options of a reshard: what is valid at which ZeRO stage, and what a report says about the stage."""

from __future__ import annotations

from dataclasses import dataclass

from zeroelastic.byte_sizes import format_size
from zeroelastic.checkpoint.commit_record import CheckpointFormat
from zeroelastic.errors import UsageError
from zeroelastic.verbs.reshard.source import ReshardSource

LEAST_MEMORY = 64 << 20
"""The smallest ``max_memory``: buffers of a few threads and the tables of one rank."""


@dataclass(frozen=True, slots=True)
class ReshardOptions:
    """The options of a reshard.

    ``stage`` is the ZeRO stage of the result, by default that of the source. ``format`` is by default elastic at stage
    3, and always rigid below it. ``sub_group_size`` overrides that of the saved configuration, and at stages 1
    and 2 ``round_robin_gradients`` and ``parameter_alignment`` theirs; ``verify`` reads the result back before it is
    published; ``fsync`` flushes it to the device before that. Raises UsageError for invalid values.
    """

    world_size: int
    format: CheckpointFormat | None = None
    sub_group_size: int | None = None
    stage: int | None = None
    round_robin_gradients: bool | None = None
    parameter_alignment: bool | None = None
    max_memory: int = 1 << 30
    verify: bool = False
    fsync: bool = True

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise UsageError(f"a world size of {self.world_size} makes no sense; give 1 or more.")
        if self.sub_group_size is not None and self.sub_group_size < 1:
            raise UsageError(f"a sub_group_size of {self.sub_group_size} makes no sense; give 1 or more.")
        if self.stage not in (None, 0, 1, 2, 3):
            raise UsageError(f"there is no ZeRO stage {self.stage} to reshard to; give 0, 1, 2 or 3.")
        if self.max_memory < LEAST_MEMORY:
            raise UsageError(
                f"--max-memory: at least {LEAST_MEMORY >> 20} MiB are needed, got {format_size(self.max_memory)}."
            )

    @property
    def zero_options(self) -> dict[str, bool]:
        """The entries of ``zero_optimization`` that are given instead of the saved configuration's."""
        given = {
            "round_robin_gradients": self.round_robin_gradients,
            "parameter_alignment": self.parameter_alignment,
        }
        return {key: value for key, value in given.items() if value is not None}


def check_options(options: ReshardOptions, stage: int) -> None:
    """Raise UsageError for an option that only other stages have."""
    if stage in (0, 3) and options.zero_options:
        raise UsageError(
            f"{' and '.join(options.zero_options)} makes no difference at ZeRO stage {stage}. Leave it out, or give "
            "--stage 1 or 2."
        )
    if stage == 3:
        return
    if options.format == "elastic":
        own = ": DeepSpeed's own, with elastic_checkpoint, has no hyper-parameters" if stage != 0 else ""
        raise UsageError(f"there is no elastic format of ZeRO stage {stage}{own}. Leave --format out, or give rigid.")
    if options.sub_group_size is not None:
        raise UsageError(f"there are no sub-groups at ZeRO stage {stage}. Leave --sub-group-size out.")


def stage_notes(saved: ReshardSource, stage: int, options: ReshardOptions) -> list[str]:
    """Sentences on another stage than the saved one, and on the options that the run which loads it must have."""
    notes: list[str] = []
    if saved.stage != stage:
        notes.append(f"saved with ZeRO stage {saved.stage}; the result is of stage {stage}")
    if stage in (1, 2) and (notes or options.zero_options):
        order = str(saved.round_robin).lower(), str(saved.param_alignment).lower()
        given = " and ".join(options.zero_options)
        origin = f"{given} as given" if given else "as in the saved configuration"
        notes.append(f"for a run with round_robin_gradients {order[0]} and parameter_alignment {order[1]}, {origin}")
    return notes
