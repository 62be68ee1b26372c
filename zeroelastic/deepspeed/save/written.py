"""What each rank says of the files that it has written, and the way of it to the rank that writes the commit record."""

from __future__ import annotations

import struct
from typing import NamedTuple

from zeroelastic.checkpoint.file_names import model_file_name, parse_rank_file
from zeroelastic.distributed.collective import all_gather, gather, gather_bytes, maximum

_PACKED = struct.Struct("<iHH" + 2 * "q32s")  # ranks and flags; of either file its size and its digest
_BF16, _WHOLE = 1, 2
_FILE, _DIRECTORY = (4, 8), (16, 32)
_OPTIM_NAMES = ("zero_pp_rank_{}_mp_rank_{:02d}_optim_states.pt", "bf16_zero_pp_rank_{}_mp_rank_{:02d}_optim_states.pt")


class Written(NamedTuple):
    """Sizes and zip directories' digests of a rank's files, why only DeepSpeed reads them, if so, and a time.

    ``not_before``: the earliest time of a commit that this rank allows, in seconds since 1970. Rank 0's clock counts.
    """

    sizes: dict[str, int]
    directories: dict[str, str]
    unreadable: str | None
    not_before: float


def gather_written(own: Written, names: tuple[str, str], *, to_all: bool) -> tuple[float, bool, list[Written]]:
    """The time of the commit, whether only DeepSpeed reads the save, and what every rank has written. Collective.

    The last is by rank, on rank 0, or on all; times in it are those of this rank. ``names`` are those of this rank's
    module states and its optimizer file. 88 bytes come from each rank, unless one has files of other names or files
    that only DeepSpeed reads.
    """
    packed = _pack(own, names)
    facts = maximum([round(own.not_before * 1e6), int(own.unreadable is not None), int(packed is None)])
    microseconds, unreadable, unpacked = facts
    if unpacked or packed is None:
        written = all_gather(own) if to_all else gather(own)
    else:
        written = [_unpack(data, own.not_before) for data in gather_bytes(packed, to_all=to_all)]
    return microseconds / 1e6, bool(unreadable), written


def _pack(own: Written, names: tuple[str, str]) -> bytes | None:
    """The same in few bytes; None where these do not say it."""
    optim = parse_rank_file(names[1])
    if optim is None or own.unreadable is not None:
        return None
    flags = _BF16 * names[1].startswith("bf16_") + _WHOLE * (names[0] == model_file_name(0, optim.tp_rank, whole=True))
    fields: list[int | bytes] = []
    for i, name in enumerate(names):
        flags += _FILE[i] * (name in own.sizes) + _DIRECTORY[i] * (name in own.directories)
        fields += [own.sizes.get(name, 0), bytes.fromhex(own.directories.get(name, ""))]
    packed = _PACKED.pack(optim.rank, optim.tp_rank, flags, *fields)
    return packed if _unpack(packed, own.not_before) == own else None


def _unpack(data: bytes, not_before: float) -> Written:
    rank, tp_rank, flags, *fields = _PACKED.unpack(data)
    names = (
        model_file_name(rank, tp_rank, whole=bool(flags & _WHOLE)),
        _OPTIM_NAMES[flags & _BF16].format(rank, tp_rank),
    )
    return Written(
        sizes={name: fields[2 * i] for i, name in enumerate(names) if flags & _FILE[i]},
        directories={name: fields[2 * i + 1].hex() for i, name in enumerate(names) if flags & _DIRECTORY[i]},
        unreadable=None,
        not_before=not_before,
    )
