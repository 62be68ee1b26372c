"""The commit record: a round trip, an atomic write, and every lie in it is a CheckpointError that names the field."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from synthetic import sealed

from zeroelastic.checkpoint.commit_record import (
    RECORD_NAME,
    RECORD_VERSION,
    CommitRecord,
    SavedWith,
    param_records,
    read_record,
    record_text,
)
from zeroelastic.core.digest import ParamContent, ScalarValue, content_root
from zeroelastic.core.layout import Param
from zeroelastic.errors import CheckpointError, UnreadableError
from zeroelastic.io.atomic import write_atomically

CONTENTS = (
    ParamContent(
        Param("w", (2, 3)),
        {"fp32": ("float32", 1), "exp_avg": ("bfloat16", 2**64 - 1)},
        {"step": ScalarValue("float32", 3.0), "n": ScalarValue("pyint", 4), "flag": ScalarValue("bool", True),
         "none": ScalarValue("none", None)},
    ),
    ParamContent(Param("frozen.b", ()), {"frozen": ("bfloat16", 0)}, {}),
)  # fmt: skip


def make(contents=CONTENTS, **changes) -> CommitRecord:
    fields = {
        "format_version": RECORD_VERSION,
        "checkpoint_format": "elastic",
        "save_id": "0" * 32,
        "tag": "global_step3",
        "world_size": 2,
        "global_steps": 3,
        "train_batch_size": 8,
        "versions": SavedWith(zeroelastic="1", deepspeed="2", torch="3"),
        "files": {"a.pt": 10, "b.pt": 0},
        "params": param_records(contents, frozenset({"w"})),
        "content_root": content_root(contents),
    }
    return CommitRecord(**{**fields, **changes})


def put(tag_dir: Path, record: CommitRecord) -> CommitRecord | None:
    (tag_dir / RECORD_NAME).write_bytes(record_text(record))
    return read_record(tag_dir)


def test_tensor_parallel_ranks_and_lost_micro_batches_are_mentioned_where_there_are_any(tmp_path: Path) -> None:
    """A record without them has the fields that it always had."""
    plain = json.loads(record_text(make()))
    assert set(plain) == {
        "format_version", "checkpoint_format", "save_id", "tag", "world_size", "global_steps", "train_batch_size",
        "versions", "files", "params", "content_root", "checksum",
    }  # fmt: skip
    assert all(set(group) == {"trainable", "tensors", "scalars", "rows"} for group in plain["params"])
    slices = (*CONTENTS, *(replace(content, tp_rank=1) for content in CONTENTS))
    record = make(slices, tp_size=2, lost_micro_batches=3)
    document = json.loads(record_text(record))
    assert (document["tp_size"], document["lost_micro_batches"]) == (2, 3)
    assert sorted((g["rows"][0][0], g.get("tp_rank", 0)) for g in document["params"]) == [
        ("frozen.b", 0), ("frozen.b", 1), ("w", 0), ("w", 1)
    ]  # fmt: skip
    back = put(tmp_path, record)
    assert back == record and [(content.param.name, content.tp_rank) for content in back.contents()] == [
        ("frozen.b", 0), ("frozen.b", 1), ("w", 0), ("w", 1)
    ]  # fmt: skip


def put_json(tag_dir: Path, data: object) -> CommitRecord | None:
    (tag_dir / RECORD_NAME).write_text(json.dumps(data))
    return read_record(tag_dir)


def test_a_record_comes_back_as_it_went(tmp_path):
    assert put(tmp_path, make(())) == make(())
    record = make()
    assert put(tmp_path, record) == record
    assert sorted(record.contents(), key=lambda content: content.param.name) == sorted(
        CONTENTS, key=lambda content: content.param.name
    )
    assert record.params.trained == {"w"}


def test_one_parameter_a_line(tmp_path):
    contents = [replace(CONTENTS[0], param=Param(f"w{i}", (i, 3))) for i in range(3)]
    lines = record_text(make((*contents, CONTENTS[1]))).decode().splitlines()
    digests = '["ffffffffffffffff", "0000000000000001"]'  # exp_avg, fp32
    assert [line for line in lines if ", 3]" in line] == [
        f'    ["w0", [0, 3], {digests}],', f'    ["w1", [1, 3], {digests}],', f'    ["w2", [2, 3], {digests}]'
    ]  # fmt: skip
    assert '    ["frozen.b", [], ["0000000000000000"]]' in lines and '  "a.pt": 10,' in lines


def test_a_row_is_a_parameter_however_the_json_is_laid_out(tmp_path):
    """Another program may write the same JSON with other spaces, and its groups and rows in another order."""
    contents = [replace(CONTENTS[0], param=Param(f"w{i}", (i, 3))) for i in range(3)]
    record = make((*contents, CONTENTS[1]))
    data = json.loads(record_text(record))
    for group in data["params"]:
        group["rows"].reverse()
        group["tensors"] = dict(reversed(group["tensors"].items()))
    data["params"].reverse()
    (tmp_path / RECORD_NAME).write_text(sealed(json.dumps(data, indent=7)))
    assert read_record(tmp_path) == record


@pytest.mark.extended
def test_many_rows_come_back(tmp_path):
    """In two groups whose names are mixed in sorted order."""
    contents = [
        ParamContent(Param(f"w{i}", (i,)), {key: ("float32", i * 977) for key in ("fp32", "m")[: 1 + i % 2]}, {})
        for i in range(40_000)
    ]
    record = make(contents)
    assert put(tmp_path, record) == record
    assert record.contents() == sorted(contents, key=lambda content: content.param.name)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), 1e308, 5e-324, -0.0, 0.1, 2**63, -1])
def test_any_number_comes_back_as_it_went(tmp_path, value):
    kind = "pyfloat" if isinstance(value, float) else "pyint"
    contents = [ParamContent(Param("w", (1,)), {"fp32": ("float32", 1)}, {"x": ScalarValue(kind, value)})]
    back = put(tmp_path, make(contents))
    assert back is not None
    scalar = back.contents()[0].scalars["x"]
    assert type(scalar.value) is type(value) and scalar.canonical() == contents[0].scalars["x"].canonical()


@given(name=st.text(alphabet=st.characters(codec="utf-8"), max_size=20), key=st.text('abc_é\\"\n', max_size=8))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
def test_any_names_come_back_as_they_went(tmp_path, name, key):
    contents = [ParamContent(Param(name, (1,)), {key: ("float32", 1)}, {key: ScalarValue("pyint", 1)})]
    assert put(tmp_path, make(contents)) == make(contents)


def test_no_record_is_none(tmp_path):
    assert read_record(tmp_path) is None


def test_a_record_that_cannot_be_read(tmp_path):
    (tmp_path / RECORD_NAME).mkdir()
    with pytest.raises(UnreadableError, match=r"zeroelastic\.json: cannot be read"):
        read_record(tmp_path)


@pytest.mark.parametrize("text", [b"", b"{", b"\xff\xfe", b"null", b"[]", b"3", b'"x"', b"[" * 100_000, b"{}"])
def test_what_is_no_record_is_refused(tmp_path, text):
    (tmp_path / RECORD_NAME).write_bytes(text)
    with pytest.raises(CheckpointError, match=r"zeroelastic\.json: .*The commit record is damaged"):
        read_record(tmp_path)


def changed(path: str, value: object) -> dict:
    data = json.loads(record_text(make()))
    *parents, last = path.split("/")
    target = data
    for key in parents:
        target = target[int(key) if isinstance(target, list) else key]
    if value is ...:
        del target[last]
    else:
        target[int(last) if isinstance(target, list) else last] = value
    return dict(sorted(data.items(), key=lambda item: item[0] == "checksum"))  # the checksum stays last


ONE, TWO = "ffffffffffffffff", "0000000000000001"  # the digests of w
DIGESTS = (0, None, "", ONE[1:], f"{ONE}0", ONE.upper(), f"{ONE[1:]}\n", f"{TWO[:14]}\u0661\u0661", f" {ONE[1:]}",
           f"{ONE[1:]}g")  # fmt: skip
WRONG: dict[str, tuple[object, ...]] = {
    **{field: (...,) for field in json.loads(record_text(make())) if field != "checksum"},
    "format_version": (..., 0, -1, "1", 1.0, True, None),
    "checkpoint_format": (..., "universal"),
    "save_id": (..., "0" * 31, "0" * 32 + "\n", "G" * 32, 0),
    "tag": (..., 3),
    "world_size": (..., 0, -1, 10**9, 2.0, "2", True),
    "global_steps": (..., 1.5, None),
    "train_batch_size": (..., "8"),
    "versions": (..., {}),
    "versions/torch": (2.13,),
    "versions/python": ("3.11",),
    "files": (..., [], None),
    "files/a.pt": (None, "10", 10.0, -1, 1 << 62),
    "directories": ([], {"a.pt": "0" * 63}, {"a.pt": "G" * 64}, {"a.pt": None}),
    "params": (..., {}),
    "params/0": (None,),
    "params/0/rows": (..., None),
    "params/0/rows/0": (None, {}, "w", [], ["w", [2, 3]], ["w", [2, 3], [ONE, TWO], 1]),
    "params/0/rows/0/0": (3,),
    "params/0/rows/0/1": (None, 3, [-2, 3], [2.0, 3], ["2", 3], [True], [1 << 62], [0] * 65),
    "params/0/rows/0/2/0": DIGESTS,
    "params/0/trainable": ("yes", 1),
    "params/0/tp_rank": (-1,),
    "params/0/tensors": ([],),
    "params/0/tensors/fp32": ("qint8", None),
    "params/0/scalars/step/kind": ("", "Float32"),
    "params/0/scalars/step/value": ("3", [3], {}),
    "params/0/more": (1,),
    "more": (1,),
    "content_root": (..., "0" * 63, None),
}
"""Values that fields must not have; without a value the field is not there."""


@pytest.mark.parametrize(("path", "value"), [(path, value) for path, values in WRONG.items() for value in values])
def test_a_wrong_field_is_named(tmp_path, path, value):
    with pytest.raises(CheckpointError) as caught:
        put_json(tmp_path, changed(path, value))
    message = str(caught.value)
    assert message.startswith(str(tmp_path / RECORD_NAME)) and "The commit record is damaged" in message
    assert path.replace("/", ".") in message


@pytest.mark.parametrize("digests", [[], [ONE], [ONE, TWO, ONE]])
def test_a_row_has_one_digest_for_each_tensor(tmp_path, digests):
    with pytest.raises(CheckpointError, match=rf"rows.0 has {len(digests)} digests.*The commit record is damaged"):
        put_json(tmp_path, changed("params/0/rows/0/2", digests))


@pytest.mark.parametrize("name", ["../a.pt", "/etc/passwd", "a/b", "", "a\0b", "x" * 256])
def test_files_outside_the_tag_are_refused(tmp_path, name):
    with pytest.raises(CheckpointError, match=r"files.*The commit record is damaged"):
        put_json(tmp_path, changed("files", {name: 10}))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("params/0/rows/0/0", "v"),
        ("params/0/rows/0/0", " w"),
        ("params/0/rows/0/1", [3, 2]),
        ("params/0/rows/0/2", [TWO, ONE]),
        ("params/0/rows/0/2", [ONE, "0" * 16]),
        ("params/0/rows", []),
        ("params/0/tp_rank", 1),
        ("params/0/tensors/fp32", "float16"),
        ("params/0/scalars/step/value", 4.0),
        ("params/0/scalars/step/value", float("nan")),
        ("params/0/scalars/step/kind", "pyfloat"),
        ("params/0/scalars", {}),
        ("params", []),
        ("content_root", "0" * 64),
    ],
)
def test_a_table_that_does_not_give_its_root_is_refused(tmp_path, path, value):
    with pytest.raises(CheckpointError, match=r"content_root is .* its own table gives"):
        put_json(tmp_path, changed(path, value))


def test_any_changed_byte_is_noticed(tmp_path):
    text = record_text(make())
    for at in range(len(text)):
        (tmp_path / RECORD_NAME).write_bytes(text[:at] + bytes([text[at] ^ 1]) + text[at + 1 :])
        with pytest.raises(CheckpointError, match=r"damaged|newer"):
            read_record(tmp_path)


@pytest.mark.parametrize("num_bytes", [2, 6, 100, 300])
def test_a_record_that_ends_early_or_goes_on_is_damaged(tmp_path, num_bytes):
    text = record_text(make())
    for other in (text[:-num_bytes], text + b"x" * num_bytes):
        (tmp_path / RECORD_NAME).write_bytes(other)
        with pytest.raises(CheckpointError, match="damaged"):
            read_record(tmp_path)


@pytest.mark.parametrize("path", ["params/0/trainable", "checksum"])
def test_what_is_not_in_the_root_is_in_the_checksum(tmp_path, path):
    with pytest.raises(CheckpointError, match="its checksum is"):
        put_json(tmp_path, changed(path, False if "trainable" in path else ...))


def test_a_newer_version_says_to_upgrade(tmp_path):
    data = changed("format_version", RECORD_VERSION + 1)
    data["something_new"] = 1
    with pytest.raises(CheckpointError, match=rf"format version {RECORD_VERSION + 1} is newer .* Upgrade zeroelastic"):
        put_json(tmp_path, data)


@pytest.mark.parametrize("text", ["1" * 5000, "1e999", "NaN", "-0"])
def test_numbers_that_json_lets_through(tmp_path, text):
    raw = record_text(make()).decode().replace('"global_steps": 3', f'"global_steps": {text}')
    assert text in raw
    (tmp_path / RECORD_NAME).write_text(sealed(raw) if text == "-0" else raw)
    if text == "-0":
        assert read_record(tmp_path) is not None
    else:
        with pytest.raises(CheckpointError):
            read_record(tmp_path)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
LEAVES = ["world_size", "files", "files/a.pt",
          "versions", "params", "params/0", "params/1/tensors", "params/0/tensors/fp32",
          "params/0/scalars/step", "params/0/rows", "params/0/rows/0", "params/0/rows/0/1", "params/0/rows/0/2",
          "save_id", "tag", "content_root", "format_version"]  # fmt: skip


@given(path=st.sampled_from(LEAVES), value=json_values)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200)
def test_any_value_anywhere_is_read_or_refused(tmp_path, path, value):
    try:
        record = put_json(tmp_path, changed(path, value))
    except CheckpointError as error:
        assert str(tmp_path) in str(error)
    else:
        assert record is not None and record.content_root == content_root(record.contents())


# ---- atomic writes ----


def test_a_file_is_replaced_whole(tmp_path):
    path = tmp_path / "latest"
    write_atomically(path, b"old")
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new" and os.listdir(tmp_path) == ["latest"]


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_crash_before_the_rename_leaves_the_old_file(tmp_path, monkeypatch, step):
    path = tmp_path / "latest"
    write_atomically(path, b"old")

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, step, crash)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["latest"]


def test_a_killed_writer_leaves_the_old_file(tmp_path):
    path = tmp_path / "latest"
    write_atomically(path, b"old")
    child = os.fork()
    if child == 0:
        os.replace = lambda *_: os._exit(9)  # the process is gone between write and rename
        try:
            write_atomically(path, b"new")
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 9
    assert path.read_bytes() == b"old"
    write_atomically(path, b"newer")
    assert path.read_bytes() == b"newer"


def test_data_is_synced_before_the_rename_and_the_directory_after(tmp_path, monkeypatch):
    events: list[str] = []
    fsync, replace = os.fsync, os.replace

    def watch_fsync(fd: int) -> None:
        events.append("sync " + Path(os.readlink(f"/proc/self/fd/{fd}")).name)
        fsync(fd)

    def watch_replace(src, dst) -> None:
        events.append("rename")
        assert Path(src).read_bytes() == b"data" and Path(src).parent == Path(dst).parent
        replace(src, dst)

    monkeypatch.setattr(os, "fsync", watch_fsync)
    monkeypatch.setattr(os, "replace", watch_replace)
    write_atomically(tmp_path / "latest", b"data")
    assert [event.split()[0] for event in events] == ["sync", "rename", "sync"]
    assert events[2] == f"sync {tmp_path.name}"
