"""The names of the files that ranks of DeepSpeed write into a tag directory, and what a name says."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

OPTIM_FILE = re.compile(r"^(bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt$")
MODEL_FILE = re.compile(r"^zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt$")
WHOLE_MODEL_FILE = re.compile(r"^mp_rank_(\d+)_model_states\.pt$")
"""What data parallel rank 0 writes where every rank has the whole weights: at ZeRO stages 0, 1 and 2."""
EXPERT_FILE = re.compile(r"^layer_(\d+)_expert_(\d+)_mp_rank_(\d+)_model_states\.pt$")
"""The weights of one expert of a mixture-of-experts layer, at ZeRO stages 0, 1 and 2."""


class RankFile(NamedTuple):
    """What a file name says: which kind of file it is, and of which rank. ``whole_model`` is that of stages 0, 1, 2."""

    kind: Literal["optimizer", "model", "whole_model"]
    rank: int
    tp_rank: int


def parse_rank_file(name: str) -> RankFile | None:
    """What a file name says, or None for one that no rank of a ZeRO run writes."""
    match = OPTIM_FILE.match(name)
    if match is not None:
        return RankFile("optimizer", int(match[2]), int(match[3]))
    match = MODEL_FILE.match(name)
    if match is not None:
        return RankFile("model", int(match[1]), int(match[2]))
    match = WHOLE_MODEL_FILE.match(name)
    return None if match is None else RankFile("whole_model", 0, int(match[1]))


def model_file_name(rank: int, tp_rank: int, *, whole: bool) -> str:
    """The name of a rank's model states file; ``whole`` where rank 0 writes the weights for all ranks."""
    return f"{'' if whole else f'zero_pp_rank_{rank}_'}mp_rank_{tp_rank:02d}_model_states.pt"


def expert_file_name(layer: int, expert: int, tp_rank: int = 0) -> str:
    """The name of the file with the weights of one expert."""
    return f"layer_{layer}_expert_{expert}_mp_rank_{tp_rank:02d}_model_states.pt"


def saved_as(folder: str, name: str) -> str | None:
    """The name under which a rank's file was saved, where that is another's; torch calls an archive after its file."""
    saved = f"{folder}.pt"
    if saved.removeprefix("bf16_") == name.removeprefix("bf16_") or not is_rank_file(saved):
        return None
    return saved


def is_rank_file(name: str) -> bool:
    """Whether a file name is one that a rank of DeepSpeed writes into a tag directory, at any ZeRO stage."""
    return parse_rank_file(name) is not None
