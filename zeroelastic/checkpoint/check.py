"""Contradictions between the files of one tag, each as a sentence; None where there is none.

A load, ``open_checkpoint`` and ``open_state`` stop at the first, because nothing is loaded then; ``inspect`` and
``verify`` list all.
"""

from __future__ import annotations

from zeroelastic.checkpoint.commit_record import CommitRecord
from zeroelastic.checkpoint.model_states import ModelStates
from zeroelastic.checkpoint.optimizer_file import Shard

MIXED = "Files of two saves are mixed in this directory."


def other_save(shard: Shard, record: CommitRecord | None) -> str | None:
    """Whether an optimizer file names another save than the commit record does."""
    if record is None or shard.save_id in (None, record.save_id):
        return None
    ids = str(shard.save_id)[:8], record.save_id[:8]
    return f"{shard.path}: belongs to save {ids[0]}, the commit record to {ids[1]}. {MIXED}"


def other_trained_params(model: ModelStates, shard: Shard) -> str | None:
    """Whether a model states file lists other trained parameters than an optimizer file has."""
    # Tuples, which are hashed faster than parameters.
    listed = {(param.name, param.shape) for sub_group in model.sub_groups for param in sub_group if param.numel > 0}
    if listed == {(param.name, param.shape) for param in shard.layout.params if param.numel > 0}:
        return None
    return f"{model.path} and {shard.path} differ in the trained parameters. {MIXED}"
