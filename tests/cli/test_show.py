"""``zeroelastic show``: every figure of a tensor against torch and numpy, where it lies, and what is said otherwise."""

from __future__ import annotations

import json
import shutil
import tracemalloc
from pathlib import Path

import fsspec
import numpy as np
import pytest
from commands import run_command
from places import GOLDEN

import zeroelastic
from zeroelastic.testing.sample import write_sample
from zeroelastic.verbs.show import ShownTensor
from zeroelastic.verbs.tensor import TensorHandle

NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def ckpt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("show") / "ckpt"
    write_sample(directory)
    return directory


def bytes_at(ckpt: Path, tensor: ShownTensor) -> bytes:
    """The elements of a tensor, read from the places that ``show`` names."""
    parts = []
    for place in tensor.places:
        data = (ckpt / "global_step4" / place.file).read_bytes()
        parts.append(data[place.offset : place.offset + place.bytes])
    return b"".join(parts)


@pytest.mark.parametrize("kind", ["weight", "exp_avg"])
def test_every_parameter_is_read_from_the_places_that_are_shown(ckpt: Path, kind: str) -> None:
    report = zeroelastic.show(ckpt, "*", kind=kind)
    assert report.ok and len(report.tensors) >= 18
    with zeroelastic.open(ckpt) as ck:
        for tensor in report.tensors:
            handle = ck[tensor.name] if kind == "weight" else ck.optimizer(tensor.name)[kind]
            assert bytes_at(ckpt, tensor) == b"".join(map(bytes, handle.windows(64)))
            starts = [0, *np.cumsum([place.numel for place in tensor.places]).tolist()]
            assert [place.start for place in tensor.places] == starts[:-1] and starts[-1] == handle.numel
            values = handle.numpy().astype(np.float64).ravel()
            stats = tensor.statistics
            assert stats.numel == values.size and stats.nans == stats.infs == 0
            got = (stats.min, stats.max, stats.mean, stats.std, stats.norm)
            want = (values.min(), values.max(), values.mean(), values.std(), np.linalg.norm(values))
            assert got == pytest.approx(want, rel=1e-12)
            assert tensor.first == tuple(values[:4]) and tensor.last == tuple(values[-4:])
            if tensor.key not in ("buffer",):
                assert tensor.digest == tensor.recorded_digest


@pytest.mark.parametrize("golden", ["rigid3", "stage2_rank2", "stage1_bf16_optimizer_rank2"])
def test_checkpoints_that_deepspeed_alone_saved(golden: str) -> None:
    for tensor in zeroelastic.show(GOLDEN / golden, "*").tensors:
        data = b"".join(
            (GOLDEN / golden / "global_step2" / place.file).read_bytes()[place.offset : place.offset + place.bytes]
            for place in tensor.places
        )
        with zeroelastic.open(GOLDEN / golden) as ck:
            assert data == b"".join(map(bytes, ck[tensor.name].windows()))
        assert tensor.recorded_digest is None and tensor.ok


def test_for_people_one_tensor_is_a_page(ckpt: Path) -> None:
    lines = run_command("show", ckpt, NORM).stdout.splitlines()
    assert lines[1] == NORM and f"{ckpt}/global_step4" in lines[0]
    labels = [line.split()[0] for line in lines[2:]]
    wanted = "dtype shape group also min max mean std norm zeros NaN Inf digest first last places rank rank rank rank"
    assert labels == wanted.split()
    assert "the recorded one" in next(line for line in lines if "digest" in line)


def test_a_glob_is_a_table_and_scalars_have_values(ckpt: Path) -> None:
    shown = run_command("show", ckpt, "*norm*").stdout.splitlines()
    assert len(shown) == 2 + 5 and shown[1].split()[:3] == ["name", "dtype", "shape"]
    found = json.loads(run_command("show", ckpt, NORM, "--kind", "step", "--json").stdout)
    (step,) = found["tensors"]
    assert step["value"] == 4.0 and step["statistics"] is None and "exp_avg" in step["other_kinds"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["model.nrom.weight"], f"has no tensor model.nrom.weight. Did you mean {NORM}"),
        (["norm.weight"], "Did you mean"),
        (["something else"], "zeroelastic inspect --params"),
        (["nothing*"], "no tensor matches nothing*. Give a glob"),
        ([NORM, "--kind", "exp"], f"there is no exp of {NORM}. Give one of these kinds: weight, exp_avg"),
        (["*rotary*", "--kind", "exp_avg"], "there is no exp_avg of"),
    ],
)
def test_what_is_not_there_is_misuse_that_names_what_is(ckpt: Path, arguments: list[str], said: str) -> None:
    done = run_command("show", ckpt, *arguments)
    assert done.returncode == 2 and said in done.stderr and done.stdout == "" and "global_step4" in done.stderr


def test_a_damaged_tensor_is_invalid(ckpt: Path, tmp_path: Path) -> None:
    shutil.copytree(ckpt, tmp_path / "ckpt")
    (tensor,) = zeroelastic.show(ckpt, NORM).tensors
    place = tensor.places[2]
    path = tmp_path / "ckpt/global_step4" / place.file
    data = bytearray(path.read_bytes())
    data[place.offset : place.offset + 4] = np.float32("nan").tobytes()
    data[place.offset + 4 : place.offset + 8] = np.float32("-inf").tobytes()
    data[place.offset + 8 : place.offset + 12] = np.float32(0).tobytes()
    path.write_bytes(data)
    done = run_command("show", tmp_path / "ckpt", NORM, "--json")
    (found,) = json.loads(done.stdout)["tensors"]
    assert done.returncode == 3 and found["digest"] != found["recorded_digest"]
    counts = {key: found["statistics"][key] for key in ("zeros", "nans", "infs", "numel")}
    assert counts == {"zeros": 1, "nans": 1, "infs": 1, "numel": 24}
    assert "NOT the recorded one" in run_command("show", tmp_path / "ckpt", NORM).stdout
    assert f"not as saved: {NORM}" in run_command("show", tmp_path / "ckpt", "model.nor*").stdout
    assert run_command("show", tmp_path / "ckpt", "model.layers.0.*").returncode == 0


def test_a_url_is_read_by_ranges(ckpt: Path) -> None:
    memory = fsspec.filesystem("memory")
    try:
        for path in ckpt.rglob("*"):
            if path.is_file():
                memory.pipe_file(f"/run/{path.relative_to(ckpt)}", path.read_bytes())
        report = zeroelastic.show("memory://run", NORM)
        here = zeroelastic.show(ckpt, NORM)
        assert report.tensors[0].statistics == here.tensors[0].statistics and report.ok
        assert [place.file for place in report.tensors[0].places] == [place.file for place in here.tensors[0].places]
    finally:
        memory.rm("/run", recursive=True)


def test_a_large_tensor_takes_the_memory_of_a_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor of 4 MiB in windows of 256 KiB; 512 KiB at a time are what statistics compute with."""
    write_sample(tmp_path, world_size=2, steps=[1], hidden=512, layers=1, sub_group_size=10**9)
    name = "model.layers.0.mlp.up_proj.weight"
    zeroelastic.show(tmp_path, NORM)  # what is imported and read once
    monkeypatch.setattr(TensorHandle.windows, "__defaults__", (1 << 18,))
    tracemalloc.start()
    try:
        (tensor,) = zeroelastic.show(tmp_path, name).tensors
        assert tensor.bytes == 4 << 20 and tracemalloc.get_traced_memory()[1] < 7 << 19
    finally:
        tracemalloc.stop()
