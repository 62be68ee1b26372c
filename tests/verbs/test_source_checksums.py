"""What is copied from files without digests is compared with their CRC-32 first: damage gets no record of its own."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from places import GOLDEN
from saved_files import flip, logged
from stock_programs import make_universal

import zeroelastic
from zeroelastic.checkpoint.commit_record import RECORD_NAME
from zeroelastic.dcp.saved import open_dcp
from zeroelastic.errors import CheckpointError, DigestMismatchError
from zeroelastic.torch_file.zip_check import read_zip_records
from zeroelastic.verbs import reading

Verb = Callable[[Path, Path], Any]


def convert(**options: Any) -> Verb:
    return lambda src, dst: zeroelastic.convert(src, dst, **options)


NATIVE: dict[str, Verb] = {
    "reshard": lambda src, dst: zeroelastic.reshard(src, dst, world_size=3),
    "export": lambda src, dst: zeroelastic.export(src, dst, dtype="bf16"),
    "to fsdp2": convert(to="fsdp2"),
}


def payload(path: Path) -> int:
    """A byte in the middle of the largest tensor of an archive."""
    tensors = [record for record in read_zip_records(path, path.stat().st_size) if "/data/" in record.name]
    record = max(tensors, key=lambda record: record.nbytes)
    return record.offset + record.nbytes // 2


def universal(src: Path) -> tuple[Path, int]:
    make_universal(GOLDEN / "rigid2/global_step2", src)
    path = next(src.rglob("exp_avg.pt"))
    return path, payload(path)


def native(src: Path) -> tuple[Path, int]:
    shutil.copytree(GOLDEN / "rigid2", src)
    path = next(src.rglob("*rank_1_*optim_states.pt"))
    return path, payload(path)


def fsdp2(src: Path) -> tuple[Path, int]:
    shutil.copytree(GOLDEN / "fsdp2/ckpt", src)
    extents = open_dcp(src).trained.extents[1]["exp_avg"]
    at = int((extents.offset >= 0).nonzero()[0][-1])
    assert extents.param_paths is not None
    return src / extents.param_paths[at].name, int(extents.offset[at])


@pytest.mark.parametrize(
    ("make", "verb"),
    [
        *(pytest.param(native, verb, id=name) for name, verb in NATIVE.items()),
        pytest.param(universal, convert(from_="universal", world_size=3), id="from universal"),
        pytest.param(fsdp2, convert(from_="fsdp2", world_size=3), id="from fsdp2"),
    ],
)
def test_a_flipped_bit_of_the_source_is_an_error_and_nothing_is_left(
    tmp_path: Path, make: Callable[[Path], tuple[Path, int]], verb: Verb
) -> None:
    path, offset = make(tmp_path / "src")
    verb(tmp_path / "src", tmp_path / "sound")
    flip(path, offset)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(CheckpointError, match=r"record data/\d+, bytes \d+ to \d+, has CRC-32 ") as caught:
        verb(tmp_path / "src", tmp_path / "dst")
    assert str(caught.value).startswith(f"{path}: ")
    assert sorted(tmp_path.iterdir()) == before


def of_tensor(golden: str, kind: str) -> Callable[[Path], tuple[Path, int]]:
    """A copy of a golden checkpoint, and where its first tensor of a kind and of several elements begins."""

    def make(src: Path) -> tuple[Path, int]:
        shutil.copytree(GOLDEN / golden, src)
        with zeroelastic.open(src) as ck:
            (place, *_) = ck.places(next(name for name in ck if ck[name].kind == kind and len(ck[name]) > 1))
            return Path(str(ck.path / place.file)), place.offset

    return make


frozen, buffer, recorded = (
    of_tensor("rigid2", "frozen"),
    of_tensor("rigid2", "buffer"),
    of_tensor("elastic2", "trained"),
)


@pytest.mark.parametrize("make", [frozen, buffer, recorded])
def test_a_tensor_with_a_flipped_bit_is_not_handed_out(
    tmp_path: Path, make: Callable[[Path], tuple[Path, int]]
) -> None:
    path, offset = make(tmp_path / "src")
    sound = read_all(tmp_path / "src")
    flip(path, offset)
    stated = f"^{path}: record .*, has CRC-32 " if make is not recorded else "has digest .*; the commit record says"
    with pytest.raises(DigestMismatchError, match=stated):
        read_all(tmp_path / "src")
    with zeroelastic.open(tmp_path / "src") as ck:  # rows are read alone, and compared with nothing
        rows = {key: [row.numpy() for row in tensor] for key, tensor in tensors_of(ck) if tensor.numel > 1}
    assert sum(any((x != y).any() for x, y in zip(rows[key], sound[key], strict=True)) for key in rows) == 1


def tensors_of(ck: Any) -> Iterator[tuple[str, Any]]:
    for name in ck:
        yield name, ck[name]
        if ck[name].kind == "trained":
            yield from (
                (f"{name} {key}", state) for key, state in ck.optimizer(name).items() if hasattr(state, "shape")
            )


def read_all(src: Path) -> dict[str, Any]:
    with zeroelastic.open(src) as ck:
        return {key: tensor.numpy() for key, tensor in tensors_of(ck)}


@pytest.mark.parametrize("make", [native, frozen, buffer, recorded])
def test_damage_is_no_difference(tmp_path: Path, make: Callable[[Path], tuple[Path, int]]) -> None:
    path, offset = make(tmp_path / "src")
    if make is recorded:
        zeroelastic.reshard(tmp_path / "src", tmp_path / "other", world_size=2, format="rigid")
    else:
        shutil.copytree(tmp_path / "src", tmp_path / "other")
    for record in (tmp_path / "other").rglob(RECORD_NAME):  # equal digests of both sides would do without the files
        record.unlink()
    assert zeroelastic.diff(tmp_path / "src", tmp_path / "other").equal
    flip(path, offset)
    stated = f"{path}: record .*, has CRC-32 " if make is not recorded else "has digest .*; the commit record says"
    for sides in (("src", "other"), ("other", "src")):
        with pytest.raises(DigestMismatchError, match=stated):
            zeroelastic.diff(*(tmp_path / side for side in sides))


def test_what_has_equal_digests_is_not_read_for_a_diff(tmp_path: Path) -> None:
    """It compares what was saved; that the files still hold it is what verify says."""
    path, offset = recorded(tmp_path / "src")
    shutil.copytree(tmp_path / "src", tmp_path / "other")
    sound = zeroelastic.diff(tmp_path / "src", tmp_path / "other")
    assert sound.equal and sound.content_root.a is not None and sound.content_root.a == sound.content_root.b
    flip(path, offset)
    found = zeroelastic.diff(tmp_path / "src", tmp_path / "other")
    assert found.equal and found.num_by_digest == sound.num_by_digest > 0 and found.bytes_read == sound.bytes_read
    report = zeroelastic.verify(tmp_path / "src")
    assert not report.valid and {problem.file for problem in report.problems} == {path.name}


def test_damage_of_a_checkpoint_of_fsdp2_is_not_taken_for_another_save(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "fsdp2/ckpt", tmp_path / "src")
    (path,) = (tmp_path / "src").rglob("__1_0.distcp")
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(CheckpointError):
        zeroelastic.convert(tmp_path / "src", tmp_path / "native", from_="fsdp2", world_size=2)


def test_a_source_that_states_no_checksums_is_named(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "rigid2", tmp_path / "src")
    path = next((tmp_path / "src").rglob("*rank_1_*optim_states.pt"))
    content = torch.load(path, weights_only=False)
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(content, path)
    finally:
        torch.serialization.set_crc32_options(True)
    said = logged(reading.logger, logging.WARNING)
    zeroelastic.reshard(tmp_path / "src", tmp_path / "dst", world_size=3)
    assert said == [f"{path}: states no CRC-32, so what is read of it is not checked"]
