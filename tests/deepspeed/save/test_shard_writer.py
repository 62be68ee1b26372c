"""Saving through DeepSpeed: files are written and digested in one pass, and are the ones that torch would write."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from saved_files import logged, record_of
from training import Job, build_engine, train_step

from zeroelastic.checkpoint.commit_record import read_record
from zeroelastic.deepspeed.live.digests import LivePiece
from zeroelastic.errors import UnsupportedError
from zeroelastic.testing import RankPool


def save_and_look(job: Job, directory: str, executor: str) -> tuple[list[bool], list[str], str]:
    """Saves; returns whether each file is torch's, the digests that were made apart, and the content root."""
    from zeroelastic.deepspeed.live import digests
    from zeroelastic.deepspeed.save import shard_writer

    engine = build_engine(job)
    engine._config._param_dict.setdefault("zeroelastic", {})["io_engine"] = executor
    train_step(engine, 0)
    apart: list[str] = []
    same: list[bool] = []
    digest_pieces, write = digests.digest_pieces, shard_writer.write_torch_file

    def digest_apart(pieces: Sequence[LivePiece]) -> list[int]:
        apart.extend(f"{piece.key} of {piece.param}" for piece in pieces if piece.tensor.numel())
        return digest_pieces(pieces)

    def write_both(obj: object, path: Path, **options: Any) -> Any:
        found = write(obj, path, **options)
        other = Path(directory) / "torch" / path.name
        other.parent.mkdir(exist_ok=True)
        torch.save(obj, other)
        same.append(other.read_bytes() == path.read_bytes())
        return found

    digests.digest_pieces, shard_writer.write_torch_file = digest_apart, write_both
    engine.save_checkpoint(directory, tag="tag")
    digests.digest_pieces, shard_writer.write_torch_file = digest_pieces, write
    return same, apart, record_of(Path(directory) / "tag").content_root


@pytest.mark.parametrize("elastic", [True, False])
def test_files_are_torchs_and_digested_while_they_are_written(
    rank_pool: RankPool, tmp_path: Path, elastic: bool
) -> None:
    """Module states and optimizer states; trained and frozen parameters; whatever the executor."""
    roots = set()
    for executor in ("numpy", "auto"):
        results = rank_pool.run(save_and_look, 3, Job(elastic=elastic), str(tmp_path / executor), executor)
        for same, apart, root in results:
            assert same == [True, True] and apart == []
            roots.add(root)
    assert len(roots) == 1


def test_a_torch_that_lays_files_out_in_another_way_saves_them_itself(rank_pool: RankPool, tmp_path: Path) -> None:
    roots = rank_pool.run(save_with_other_layout, 2, Job(), str(tmp_path))
    assert len(set(roots)) == 1


def save_with_other_layout(job: Job, directory: str) -> str:
    """The record is that of an ordinary save of the same state, and the checkpoint loads."""
    from zeroelastic.torch_file import save as skeleton

    engine = build_engine(job)
    train_step(engine, 0)
    engine.save_checkpoint(directory, tag="known")

    def refuse(obj: object, path: Path) -> Any:
        raise UnsupportedError(f"{path}: this torch is from the future")

    said = logged("deepspeed.save.shard_writer")
    lay_out, skeleton._lay_out = skeleton._lay_out, refuse
    engine.save_checkpoint(directory, tag="unknown")
    skeleton._lay_out = lay_out
    assert len(said) == 2 and all("from the future" in line for line in said)
    known, unknown = (read_record(Path(directory) / tag) for tag in ("known", "unknown"))
    assert known is not None and unknown is not None and known.content_root == unknown.content_root
    engine.load_checkpoint(directory, tag="unknown")
    assert engine.zeroelastic_report.root_matches
    return known.content_root


def test_a_save_method_that_was_replaced_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the object or on the class: whoever did that wants to see what is saved."""
    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

    from zeroelastic.deepspeed.save.shard_writer import writes_with_torch

    engine = TorchCheckpointEngine()
    assert not writes_with_torch(engine)  # the format without a zip archive
    engine.zipfile_serialization = True
    assert writes_with_torch(engine)
    with monkeypatch.context() as patch:
        patch.setattr(TorchCheckpointEngine, "save", lambda self, state_dict, path: None)
        assert not writes_with_torch(engine)
    engine.save = lambda state_dict, path: None
    assert not writes_with_torch(engine)
