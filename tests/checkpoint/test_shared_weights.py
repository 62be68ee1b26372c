"""What a model states file says of shared weights: read as written, and refused where no save can have written it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic import edit, model_name, write_checkpoint

from zeroelastic.checkpoint.model_states import open_model_states
from zeroelastic.checkpoint.shared_files import FROZEN_FOLDER, SharedFile
from zeroelastic.checkpoint.shared_weights import SHARED_KEY, SharedTensor, SharedWeights, shared_weights_of
from zeroelastic.errors import CheckpointError
from zeroelastic.verbs.inspect.inspect import inspect
from zeroelastic.verbs.verify.verify import verify

WHERE = Path("tag/model_states.pt")
NAME = f"../{FROZEN_FOLDER}/frozen-{'0' * 32}.safetensors"
WEIGHTS = SharedWeights(
    (SharedFile(path=NAME, nbytes=4096, digest="0" * 64),),
    {"base": SharedTensor(0, 512, "bfloat16", (4, 8), 7), "empty": SharedTensor(0, 600, "float32", (0, 3), 0)},
    {"table": SharedTensor(0, 1024, "float32", (16,), (1 << 64) - 1)},
    frozenset(["base", "table", "w"]),
)


def row(**changes: Any) -> Callable[[dict[str, Any]], object]:
    """Let the row of "base" say something else."""
    columns = ("file", "offset", "dtype", "shape", "digest")

    def apply(entry: dict[str, Any]) -> None:
        values = dict(zip(columns, entry["params"]["base"], strict=True)) | changes
        entry["params"]["base"] = tuple(values.values())

    return apply


def nested(depth: int) -> Any:
    value: Any = ()
    for _ in range(depth):
        value = (value,)
    return value


def file(*values: Any) -> Callable[[dict[str, Any]], object]:
    return lambda entry: entry.update(files=[values])


HOSTILE: dict[str, Callable[[dict[str, Any]], object]] = {
    "another version": lambda entry: entry.update(version=3),
    "no files": lambda entry: entry.pop("files"),
    "files that are text": lambda entry: entry.update(files="abc"),
    "a file that is a number": lambda entry: entry.update(files=[7]),
    "a million files": lambda entry: entry.update(files=entry["files"] * 1_000_000),
    "a path out of the folder": file("../../etc/passwd", 4096, "0" * 64),
    "a path of another name": file(f"../{FROZEN_FOLDER}/../../x/frozen-{'0' * 32}.safetensors", 4096, "0" * 64),
    "a path with a line after it": file(f"{NAME}\n", 4096, "0" * 64),
    "an absolute path of no safetensors file": file("/etc/passwd", 4096, "0" * 64),
    "an absolute path with a zero byte": file("/etc\0.safetensors", 4096, "0" * 64),
    "a long path": file(f"/{'x' * 5000}.safetensors", 4096, "0" * 64),
    "a negative size": file(NAME, -1, "0" * 64),
    "a huge size": file(NAME, 1 << 70, "0" * 64),
    "a size that is a fraction": file(NAME, 4096.0, "0" * 64),
    "a size that is text": file(NAME, "4096", "0" * 64),
    "a digest of a file that is none": file(NAME, 4096, "0" * 63),
    "no parameters": lambda entry: entry.pop("params"),
    "parameters in a list": lambda entry: entry.update(params=[1]),
    "a row that is a number": lambda entry: entry["params"].update(base=7),
    "a short row": lambda entry: entry["params"].update(base=(0, 512)),
    "a name that is a number": lambda entry: entry["params"].update({7: entry["params"]["base"]}),
    "a file that is not there": row(file=1),
    "a negative file": row(file=-1),
    "a file that is true": row(file=False),
    "a negative offset": row(offset=-512),
    "no offset": row(offset=None),
    "an offset behind the file": row(offset=4090),
    "a huge offset": row(offset=1 << 80),
    "an unknown dtype": row(dtype="complex128"),
    "a dtype that is a list": row(dtype=[]),
    "a dtype deep in tuples": row(dtype=nested(50_000)),
    "a huge shape": row(shape=(1 << 40, 1 << 40)),
    "a negative shape": row(shape=(-4, -8)),
    "a shape of fractions": row(shape=(4.0, 8)),
    "a shape that is text": row(shape="48"),
    "a shape of many dimensions": row(shape=(1 << 61,) * 200_000),
    "a shape of many ones": row(shape=(1,) * 65),
    "a short digest": row(digest="7"),
    "a negative digest": row(digest="-00000000000007f"),
    "a digest with a sign in it": row(digest="0x0000000000007f"),
    "a long digest": row(digest="f" * 1_000_000),
    "a digest that is a number": row(digest=7),
    "nothing left out": lambda entry: entry.pop("left_out"),
    "left out: a number": lambda entry: entry.update(left_out=7),
    "left out: numbers": lambda entry: entry.update(left_out=[7]),
    "left out: tuples deep in tuples": lambda entry: entry.update(left_out=[nested(50_000)]),
}


def test_what_was_written_is_read() -> None:
    assert shared_weights_of({SHARED_KEY: WEIGHTS.entry()}, WHERE) == WEIGHTS
    assert shared_weights_of({}, WHERE) is None


@pytest.mark.parametrize("what", HOSTILE)
def test_what_no_save_has_written_is_refused(what: str) -> None:
    entry = WEIGHTS.entry()
    HOSTILE[what](entry)
    with pytest.raises(CheckpointError, match=SHARED_KEY) as error:
        shared_weights_of({SHARED_KEY: entry}, WHERE)
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize("entry", [7, "text", [], nested(50_000), {}], ids=["7", "text", "list", "nested", "empty"])
def test_an_entry_that_is_no_table_is_refused(entry: object) -> None:
    with pytest.raises(CheckpointError, match=SHARED_KEY):
        shared_weights_of({SHARED_KEY: entry}, WHERE)


_ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(0, 5000),
    st.floats(),
    st.text(max_size=40),
    st.binary(max_size=8),
    st.sampled_from(["float32", "0" * 16, NAME, (), [], {}, (4, 8), (1 << 62,)]),
)


@given(data=st.data())
def test_whatever_stands_anywhere_in_it_is_read_or_refused(data: st.DataObject) -> None:
    """What is read is inside of its files, and is a layout."""
    entry: dict[str, Any] = copy.deepcopy(WEIGHTS.entry())
    entry["files"] = [list(file) for file in entry["files"]]
    entry["params"] = {name: list(row) for name, row in entry["params"].items()}
    for _ in range(data.draw(st.integers(1, 3))):
        place: Any = entry
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            if not keys:
                break
            key = data.draw(st.sampled_from(keys))
            if not isinstance(place[key], (dict, list)) or data.draw(st.integers(0, 3)) == 0:
                place[key] = data.draw(_ODD)
                break
            place = place[key]
    try:
        found = shared_weights_of({SHARED_KEY: entry}, WHERE)
        assert found is not None
        found.frozen(Path("tag"))
    except CheckpointError:
        return
    for tensor in (*found.params.values(), *found.buffers.values()):
        assert tensor.offset > 0 and tensor.offset + tensor.place.nbytes <= found.files[tensor.file].nbytes


@pytest.mark.parametrize("what", ["a million files", "a path out of the folder", "a negative offset", "a huge shape"])
def test_hostile_entries_of_a_file_are_damage_and_nothing_else(tmp_path: Path, what: str) -> None:
    write_checkpoint(tmp_path / "tag", world_size=1, record=False)
    path = tmp_path / "tag" / model_name(0)
    entry = WEIGHTS.entry()
    HOSTILE[what](entry)
    edit(path, lambda data: data.update({SHARED_KEY: entry}))
    with pytest.raises(CheckpointError, match=SHARED_KEY):
        open_model_states(path, 0, world_size=1)
    report = verify(tmp_path / "tag")
    assert not report.valid and report.problems[0].file == path.name
    assert any(SHARED_KEY in problem for problem in inspect(tmp_path / "tag").problems)


def test_a_parameter_that_is_trained_is_not_frozen_too(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, world_size=1)
    path = tmp_path / model_name(0)

    def freeze(data: dict[str, Any]) -> None:
        entry = WEIGHTS.entry()
        entry["params"] = {next(iter(data["param_shapes"][0])): (0, 512, "bfloat16", (4, 8), "0" * 16)}
        data[SHARED_KEY] = entry

    edit(path, freeze)
    with pytest.raises(CheckpointError, match="is trained and frozen"):
        open_model_states(path, 0, world_size=1)


@pytest.mark.parametrize("where", ["/base/model.safetensors", "s3://bucket/base/model.safetensors", f"../{NAME}"])
def test_files_of_base_models_and_of_trainer_runs_are_referred_to(where: str) -> None:
    entry = WEIGHTS.entry()
    entry["files"] = [(where, 4096, "0" * 64)]
    found = shared_weights_of({SHARED_KEY: entry}, WHERE)
    assert found is not None and found.files[0].path == where
    assert found.files[0].is_of_run == where.startswith("..")
