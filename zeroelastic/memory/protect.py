"""Copies of a generation's files for other nodes: which rank keeps what of which, and what is sent between them.

The copies follow from the files of all ranks and the placement alone, so that two ranks agree on what is between them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from zeroelastic.distributed.exchange import Transfer, run_transfers
from zeroelastic.memory.placement import Placement

Take = Callable[[str, int], torch.Tensor]
"""Gives the memory of a file by name and size."""


def protect(
    files: Sequence[Mapping[str, int]],
    placement: Placement,
    own: Mapping[str, torch.Tensor],
    take: Take,
    group: dist.ProcessGroup,
) -> tuple[dict[str, torch.Tensor], Callable[[], int]]:
    """The copies of others' files that this rank is going to keep, by name, in memory that ``take`` gives; and a call.

    ``files`` are those of each rank that others keep, with their sizes; ``own`` are those of this rank. The call runs
    the transfers of this rank, as all ranks do (``run_transfers``), and returns the bytes that it sent. Raises OSError
    where memory is lacking.
    """
    rank = dist.get_rank()
    keepers, owners = placement.keepers(rank), placement.kept(rank)
    kept = {name: take(name, nbytes) for owner in owners for name, nbytes in files[owner].items()}

    def run() -> int:
        transfers = [Transfer(rank, keeper, own[name]) for keeper in keepers for name in files[rank]]
        transfers += [Transfer(owner, rank, kept[name]) for owner in owners for name in files[owner]]
        return run_transfers(transfers, group)

    return kept, run
