"""Files that were made to do harm: nothing of them runs, and they take neither memory nor time out of proportion.

Small files, each by hand. What a fuzzer finds is in test_fuzz.py; calls by name and headers that lie are in
test_hostile_headers.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from programs import ARGUMENTS, run_command
from sample import write_sample
from saved_files import bounded, record_again
from synthetic import edit, edit_optim, optim_name, sealed, write_checkpoint
from torch_files import STORAGE, archive, integer, named, text
from training import Job, build_engine

import zeroelastic
from zeroelastic.checkpoint.open import open_checkpoint
from zeroelastic.errors import CheckpointError, UnsafePickleError, UsageError, shown
from zeroelastic.io.paths import FOLLOW_LINKS
from zeroelastic.testing import RankPool
from zeroelastic.torch_file import safe_unpickler
from zeroelastic.torch_file.archive import write_tree
from zeroelastic.torch_file.header import Stub, read_torch_file, read_tree
from zeroelastic.torch_file.safe_unpickler import allow_globals

# ---- pickles ----


def doubled(pair: bytes = b"\x86") -> bytes:
    """A tuple of twice a tuple of twice a tuple: few bytes, and 2^60 values for code that visits all of them."""
    return b"Nq\0" + (b"0h\0h\0" + pair + b"q\0") * 60


def tensor(slot: int, *, gets: bytes) -> bytes:
    """The opcodes of a tensor as torch.save writes them, which fill seven slots of the memo from one on."""
    put = [b"r" + struct.pack("<I", slot + i) for i in range(6)]
    rebuild, storage, to = gets[:2], gets[2:-2], gets[-2:]
    return (
        rebuild + b"((" + storage + b"K\x08t" + put[0] + b"QK\0K\1\x85" + put[1] + b"K\1\x85" + put[2] + b"\x89"
        + to + b")R" + put[3] + b"t" + put[4] + b"R" + put[5]
    )  # fmt: skip


BOMBS = {
    "a key whose hash takes for ever": b"}" + doubled() + b"Ns.",
    "keys whose hashes take for ever": b"}(" + doubled() + b"N" + doubled() + b"Nu.",
    "one large tuple as key a thousand times": b"(" + b"K\1" * 60_000 + b"tq\0" + b"0}(" + b"h\0N" * 60_000 + b"u.",
    "a frozen set of it": b"(" + doubled() + b"\x91.",
    "a set that it is added to": b"\x8f(" + doubled() + b"\x90.",
    "a set made of it": named("builtins", "set") + b"](" + doubled() + b"e\x85R.",
    "an OrderedDict made of it": named("collections", "OrderedDict") + b"](" + doubled() + b"N\x86e\x85R.",
    "sizes of sizes": b"}" + doubled(b"]q\1h\0ah\0a0" + named("torch", "Size") + b"h\1\x85R") + b"Ns.",
    "integers that have one hash": b"}(" + b"".join(integer(i * ((1 << 61) - 1) << 9) + b"N" for i in range(9999))
    + b"u.",
    "an integer of a million digits": integer(1 << 3_400_000) + b".",
    "sets by the hundred thousand": b"](" + b"\x8f" * 400_000 + b"e.",
    "dictionaries by the hundred thousand": b"](" + b"}" * 400_000 + b"e.",
    "stand-ins by the hundred thousand": named("a", "b") + b"q\0](" + b"h\0)\x81" * 400_000 + b"e.",
    "classes by the thousand": b"](" + b"".join(named("a", f"b{i}") for i in range(5_000)) + b"e.",
    "one text encoded again and again": named("_codecs", "encode") + b"q\0" + text("x" * 100_000) + b"q\1](" +
    (b"h\0h\1" + text("latin1") + b"\x86R") * 5_000 + b"e.",
    "a size of many dimensions": named("torch", "Size") + b"(" + b"K\1" * 200_000 + b"t\x85R.",
    "tensors of a thousand dimensions": named("torch._utils", "_rebuild_tensor_v2") + b"q\0" + STORAGE + b"q\1(" +
    b"K\1" * 1000 + b"tq\2](" + b"h\0(h\1K\0h\2h\2\x89}tR" * 5000 + b"e.",
    "2^63 elements of 2^63 bytes": named("torch._utils", "_rebuild_tensor_v2") + b"(" +
    STORAGE.replace(b"K\x08", integer(1 << 63)) + integer(1 << 63) + integer(1 << 63) + b"\x85K\1\x85\x89}tR.",
    "a storage of 2^63": STORAGE.replace(b"K\x08", integer(1 << 63)) + b".",
    "2^62 bytes of text": b"\x8d" + struct.pack("<Q", 1 << 62) + b"abc.",
    "a key of a storage that is long": STORAGE.replace(text("0"), text("0" * 1_000_000)) + b".",
    "tensors of one another": b"".join(named("a", "b") + b"q" + bytes([i]) for i in range(5)) + doubled()
    + b"r\x40\0\0\0](" + b"".join(tensor(65 + 6 * i, gets=b"h\1h\2h\1j\x40\0\0\0h\3h\4") for i in range(9))
    + b"e}(j\x46\0\0\0Nu.",
    "a memo of 2**31 in a tensor": b"".join(named("a", "b") + b"q" + bytes([i]) for i in range(5)) +
    tensor(2**31, gets=b"h\0h\2h\1" + text("0") + b"r\5\0\0\0h\3h\4") + b".",
    "no stack at all": b"0" * 1000 + b".",
    "marks without end": b"(" * 300_000,
    "a string of 2 GiB": b"X\xff\xff\xff\x7fabc.",
    "bytes of 2**62": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 62) + b"abc.",
    "a frame of 2**62": b"\x80\x04\x95" + struct.pack("<Q", 1 << 62) + b"abc.",
    "a memo of 2**30": b"Nr\x00\x00\x00\x40.",
    "a memo of 2**31": b"Nr\xff\xff\xff\x7f.",
    "a byte array of 2**35": b"\x80\x05\x96" + struct.pack("<Q", 1 << 35) + b"abc.",
    "a missing memo": b"h\x07.",
    "an empty stack": b".",
    "no end": b"N",
    "an unknown opcode": b"\xfe.",
    "protocol 99": b"\x80\x63N.",
    "nothing": b"",
}  # fmt: skip


@pytest.mark.support("Checkpoint engines and storage", "files made to exhaust memory or time", "refused")
@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_refused_before_they_are_built(tmp_path: Path, name: str) -> None:
    path = archive(tmp_path / "bomb.pt", b"\x80\x02" + BOMBS[name])
    for foreign in ("refuse", "inert"):
        with bounded(), pytest.raises(CheckpointError, match=r"bomb\.pt: ") as caught:
            read_torch_file(path, foreign=foreign)  # type: ignore[arg-type]
        assert len(str(caught.value)) < 1000 + len(str(tmp_path))
    with bounded(), contextlib.suppress(CheckpointError):
        read_tree(path)


def test_a_list_of_lists_without_end_takes_little(tmp_path: Path) -> None:
    path = archive(tmp_path / "nested.pt", b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".")
    with bounded(), contextlib.suppress(CheckpointError):
        read_torch_file(path, foreign="inert")


@pytest.mark.parametrize("sharing", [1, 2])
def test_containers_that_hold_themselves_or_one_another_are_refused_where_they_are_walked(
    tmp_path: Path, sharing: int
) -> None:
    loop: list[object] = []
    loop.append(loop)
    deep: list[object] = []
    for _ in range(60):
        deep = [deep] * sharing
    far: list[object] = []
    for _ in range(150):  # each of two halves is shallow enough
        far = [far]
    half = far
    for _ in range(60):
        half = half[0]  # type: ignore[assignment]
    values: list[object] = [loop, [half, far], {"a": {"b": loop}}, *([deep] if sharing == 2 else [])]
    for value in values:
        path = tmp_path / "f.pt"
        torch.save({"x": value}, path)
        with bounded(), pytest.raises(CheckpointError, match=r"f\.pt: its containers"):
            read_torch_file(path)
        with bounded():
            read_torch_file(path, foreign="inert")  # users' own objects may


def test_honest_files_are_far_from_the_limits(tmp_path: Path) -> None:
    """Ten thousand parameters, lists of empty lists, keys that are tuples, seeds of 128 bits, 64 dimensions."""
    step = torch.tensor(1.0)
    value = {
        "state": {i: {"step": step, "exp_avg": torch.zeros(1), "betas": (0.9, 0.99)} for i in range(2000)},
        "shapes": [torch.Size((1,) * 64)] * 1000,
        "empty": [[] for _ in range(10_000)],
        "keys": {(i, (i, "a")): {} for i in range(10_000)},
        "seeds": [1 << 127] * 4000,
        "set": {1, "a", (1, 2)},
        "bytes": [b"x" * 1000, bytearray(b"y" * 10)],
        "complex": 1 + 2j,
    }
    del value["bytes"][1]  # type: ignore[attr-defined]  # protocol 2 makes a bytearray by a call
    torch.save(value, tmp_path / "f.pt")
    root: Any = read_torch_file(tmp_path / "f.pt").root
    assert {k: root[k] for k in value if k != "state"} == {k: v for k, v in value.items() if k != "state"}
    assert write_tree(read_tree(tmp_path / "f.pt"))[0]


def test_attributes_of_a_dictionary_stay_out(tmp_path: Path) -> None:
    """torch sets some on module states; a file must not replace what the readers call."""
    build = b"}" + text("get") + b"N" + b"s" + b"b"
    path = archive(tmp_path / "f.pt", b"\x80\x02" + named("collections", "OrderedDict") + b")R" + build + b".")
    root = read_torch_file(path).root
    assert isinstance(root, dict) and root.get("x") is None and not vars(root)


def test_what_errors_quote_is_short(tmp_path: Path) -> None:
    deep: object = ()
    for _ in range(60):
        deep = (deep, deep)
    for value in (deep, "x" * 10**7, [["y" * 1000] * 1000] * 1000, {i: i for i in range(10**5)}, 1 << 4000):
        assert len(shown(value)) < 260


# ---- checkpoints, and the command line ----


class Evil:
    """Would leave a file behind when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"touch {self.marker}",)


@dataclass(frozen=True)
class Case:
    """How a checkpoint is bent, and what is said of it by the verbs that notice; ``good`` if it is still valid."""

    bend: Callable[[Path, Path], object]  # tag directory, and a path that nothing may create or read
    said: str = ""
    good: bool = False


def replace_by_link(path: Path, outside: Path) -> None:
    outside.parent.mkdir(exist_ok=True)
    shutil.move(path, outside)
    path.symlink_to(outside)


def write_record(tag: Path, data: bytes) -> None:
    (tag / "zeroelastic.json").write_bytes(data)


def edit_record(tag: Path, **changes: object) -> None:
    data = json.loads((tag / "zeroelastic.json").read_bytes())
    write_record(tag, sealed(json.dumps(data | changes)).encode())


def bent_optimizer(tag: Path, pickled: bytes) -> None:
    archive(tag / optim_name(0), pickled)
    record_again(tag)


def with_pipe(tag: Path, name: str) -> None:
    (tag / name).unlink()
    os.mkfifo(tag / name)


def evil_state(tag: Path, marker: Path) -> None:
    edit_optim(tag / optim_name(0), lambda state: state.update(extra=Evil(marker)))
    record_again(tag)


def huge_header(tag: Path, outside: Path) -> None:
    for path in tag.glob("*model_states.pt"):
        edit(path, lambda data: data.update(dp_world_size=1 << 24))
    (tag / "zeroelastic.json").unlink()


def evil_client(tag: Path, marker: Path) -> None:
    for path in tag.glob("*model_states.pt"):
        edit(path, lambda data: data.update(mine=Evil(marker)))
    record_again(tag)


CASES = {
    "code in client state": Case(evil_client, good=True),
    "code in an optimizer file": Case(evil_state, "posix.system, which is not on the allow-list"),
    "a link to a file elsewhere": Case(
        lambda tag, out: replace_by_link(tag / optim_name(0), out / "secret"), "is a symbolic link to"
    ),
    "a record that is a link": Case(
        lambda tag, out: replace_by_link(tag / "zeroelastic.json", out / "secret"), "is a symbolic link to"
    ),
    "a record that is a pipe": Case(lambda tag, out: with_pipe(tag, "zeroelastic.json"), "not a regular file"),
    "a record of a million levels": Case(lambda tag, out: write_record(tag, b"[" * 1_000_000), "zeroelastic.json: "),
    "a record with 1e400": Case(lambda tag, out: edit_record(tag, world_size=float("inf")), "world_size"),
    "a record of 2^63 ranks": Case(lambda tag, out: edit_record(tag, world_size=1 << 63), "world_size"),
    "a record of 16 million ranks": Case(lambda tag, out: edit_record(tag, world_size=1 << 24), "16777216"),
    "a record that claims other files": Case(
        lambda tag, out: edit_record(tag, files=[{"name": "../../etc/passwd"}]), "zeroelastic.json: files"
    ),
    "a number of a million digits": Case(
        lambda tag, out: write_record(tag, b'{"format_version": ' + b"1" * 1_000_000 + b"}"), "zeroelastic.json: "
    ),
    "a bomb in an optimizer file": Case(
        lambda tag, out: bent_optimizer(tag, b"\x80\x02" + BOMBS["a key whose hash takes for ever"]), "hold one another"
    ),
    "16 million ranks in a header": Case(huge_header, "16777216"),
}


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("honest")
    write_checkpoint(root / "global_step3", world_size=2, record=True)
    (root / "latest").write_text("global_step3")
    return root


@pytest.fixture(scope="module")
def honest_of(honest: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """A checkpoint of each ZeRO stage."""
    root = tmp_path_factory.mktemp("stage2")
    write_sample(root / "sample", world_size=2, steps=[3])
    zeroelastic.reshard(root / "sample", root / "honest", world_size=2, stage=2)
    return {3: honest, 2: root / "honest"}


@pytest.mark.support(
    "Checkpoint engines and storage", "code in files, on the command line", "refused", "nothing is run"
)
@pytest.mark.parametrize("stage", [3, 2])
@pytest.mark.parametrize("name", CASES)
def test_every_verb_on_a_hostile_checkpoint(honest_of: dict[int, Path], tmp_path: Path, name: str, stage: int) -> None:
    case, honest = CASES[name], honest_of[stage]
    root, outside = tmp_path / "run", tmp_path / "outside"
    shutil.copytree(honest, root)
    case.bend(root / "global_step3", outside)
    texts: dict[str, str] = {}
    for verb, options in ARGUMENTS.items():
        given = [option.format(dst=tmp_path / f"dst-{verb}", good=honest) for option in options]
        with bounded():
            done = run_command(verb, root, *given)
        assert done.returncode in ((0, 1) if case.good else (0, 1, 2, 3)), (verb, done.output)
        texts[verb] = " ".join(done.output.split())
    assert not (outside.exists() and case.good), "something ran"
    assert outside.exists() == name.endswith(("elsewhere", "is a link"))
    if case.good:
        assert "Valid" in texts["verify"], texts["verify"]
    else:
        for verb in ("inspect", "verify", "reshard", "export", *(("plan",) if stage == 3 else ())):
            assert case.said.replace(",", "") in texts[verb].replace(",", ""), (verb, texts[verb])
        assert not list(tmp_path.glob("dst-reshard*")), "something was written all the same"


def test_a_hostile_latest_leads_nowhere(honest: Path, tmp_path: Path) -> None:
    root = tmp_path / "run"
    shutil.copytree(honest, root)
    for content in (b"../run/global_step3", b"/etc", b"..", b"x" * 10**6, b"\xff\xfe", b"a\0b", b"a\nb"):
        (root / "latest").write_bytes(content)
        done = run_command("inspect", root)
        assert done.returncode in (2, 3)
        assert "latest" in done.output


def test_links_within_a_run_and_of_the_hub_are_followed_and_others_when_they_are_allowed(
    honest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "run"
    shutil.copytree(honest, root)
    file = root / "global_step3" / optim_name(0)
    replace_by_link(file, root / "shared" / "file")
    open_checkpoint(root / "global_step3").shard(0)
    hub = tmp_path / "hub/models--a--b"
    (hub / "blobs").mkdir(parents=True)
    shutil.copytree(honest, hub / "snapshots/12ab")
    replace_by_link(hub / "snapshots/12ab/global_step3" / optim_name(0), hub / "blobs/34cd")
    open_checkpoint(hub / "snapshots/12ab/global_step3").shard(0)
    file.unlink()
    file.symlink_to(hub / "blobs/34cd")
    with pytest.raises(CheckpointError, match=f"is a symbolic link to .*blobs.*{FOLLOW_LINKS}=1"):
        open_checkpoint(root / "global_step3").shard(0)
    monkeypatch.setenv(FOLLOW_LINKS, "1")
    open_checkpoint(root / "global_step3").shard(0)
    (tmp_path / "alias").symlink_to(honest)  # a directory that is a link was chosen by whoever names it
    monkeypatch.delenv(FOLLOW_LINKS)
    open_checkpoint(tmp_path / "alias" / "global_step3").shard(0)


def test_a_class_is_let_pass_by_its_name_and_stays_inert(honest: Path, tmp_path: Path) -> None:
    root, marker = tmp_path / "run", tmp_path / "ran"
    shutil.copytree(honest, root)
    evil_state(root / "global_step3", marker)
    refused = run_command("verify", root)
    assert refused.returncode == 3 and "--allow-global posix.system" in " ".join(refused.output.split())
    passed = run_command("--allow-global", "posix.system", "verify", root)
    assert passed.returncode == 0, passed.output
    again = run_command("verify", root)
    assert again.returncode == 3, "the permission outlived the command"
    wrong = run_command("--allow-global", "posix system", "verify", root)
    assert wrong.returncode == 2 and not marker.exists()
    path = root / "global_step3" / optim_name(0)
    with allow_globals(["posix:system"]):
        state: Any = read_torch_file(path).root["optimizer_state_dict"]  # type: ignore[index]
        assert isinstance(state["extra"], Stub) and state["extra"].args == (f"touch {marker}",)
    for name in ("", "a b.c", "system", "os.", ".system", "os.system()", "a:b:c"):
        with pytest.raises(UsageError, match="does not name a class"), allow_globals([name]):
            pass


def test_what_one_thread_allows_another_refuses(tmp_path: Path) -> None:
    """A save in a background thread allows the run's globals; what the training thread reads is not more open by it."""
    path = tmp_path / "x.pt"
    torch.save({"mine": Mine(7)}, path)
    allowed, done = threading.Event(), threading.Event()
    kinds: list[type[object]] = []

    def save() -> None:
        with allow_globals([f"{Mine.__module__}.Mine"]):
            allowed.set()
            done.wait(60)
            kinds.append(type(read_torch_file(path).root["mine"]))  # type: ignore[index]

    thread = threading.Thread(target=save)
    thread.start()
    try:
        assert allowed.wait(60)
        with pytest.raises(UnsafePickleError, match="Mine, which is not on the allow-list"):
            read_torch_file(path)
    finally:
        done.set()
        thread.join()
    assert len(kinds) == 1 and issubclass(kinds[0], Stub)


# ---- in a training job ----


class Mine:
    """What a user keeps in client state."""

    def __init__(self, value: int) -> None:
        self.value = value


def save_with_objects(job: Job, directory: str) -> None:
    build_engine(job).save_checkpoint(directory, client_state={"mine": Mine(7)})


def load_with_options(job: Job, directory: str) -> tuple[str, Any]:
    """What became of the load, and what the client state held."""
    engine = build_engine(job)
    try:
        _, client = engine.load_checkpoint(directory)
    except Exception as error:
        return f"{type(error).__name__}: {error}", None
    return "", getattr(client.get("mine"), "value", client.get("mine"))


@pytest.fixture(scope="module", params=[3, 2])
def job_save(request: pytest.FixtureRequest, rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a job of the parameter's ZeRO stage saved."""
    directory = tmp_path_factory.mktemp(f"stage{request.param}")
    rank_pool.run(save_with_objects, 2, Job(stage=request.param), str(directory))
    return directory


def loaded(rank_pool: RankPool, directory: Path, stage: int = 3, **options: object) -> tuple[str, Any]:
    job = Job(stage=stage).other(options=options)
    outcomes = rank_pool.run(load_with_options, 3, job, str(directory), timeout=90.0)
    assert len({error for error, _ in outcomes}) == 1, outcomes
    return outcomes[0]


MINE = f"{Mine.__module__}.{Mine.__qualname__}"


@pytest.mark.support(
    "Using it", '`"allow_globals"`', "exact", "classes named there pass, under `weights_only_load` too"
)
def test_classes_in_client_state_are_loaded_by_deepspeed_alone_or_when_they_are_named(
    rank_pool: RankPool, job_save: Path
) -> None:
    assert loaded(rank_pool, job_save) == ("", 7), "DeepSpeed's own path makes objects"
    error, _ = loaded(rank_pool, job_save, weights_only_load=True)
    assert error.startswith("UnsafePickleError") and f"it names {MINE}. " in error
    assert f'"allow_globals": ["{MINE}"]' in error and "torch.load" not in error
    assert loaded(rank_pool, job_save, weights_only_load=True, allow_globals=[MINE]) == ("", 7)
    error, _ = loaded(rank_pool, job_save, weights_only_load=True, allow_globals=["no.such.Class"])
    assert error.startswith("ConfigError") and "no.such.Class" in error


@pytest.mark.support("Checkpoint engines and storage", "code in an optimizer file", "refused", "on every rank; named")
@pytest.mark.parametrize("weights_only_load", [False, True])
def test_a_job_refuses_hostile_files_on_every_rank(
    rank_pool: RankPool, job_save: Path, tmp_path: Path, weights_only_load: bool
) -> None:
    root, marker = tmp_path / "run", tmp_path / "ran"
    shutil.copytree(job_save, root)
    tag = next(root.glob("global_step*"))
    path = next(tag.glob("*rank_1_mp*optim_states.pt"))
    good = path.read_bytes()
    edit_optim(path, lambda state: state.update(extra=Evil(marker)))
    record_again(tag)
    error, _ = loaded(rank_pool, root, weights_only_load=weights_only_load)
    assert error.startswith("UnsafePickleError") and path.name in error and "posix.system" in error
    assert '"allow_globals": ["posix.system"]' in error and not marker.exists()
    allowed = (
        {"weights_only_load": True, "allow_globals": ["posix.system", MINE]}
        if weights_only_load
        else {"allow_globals": ["posix.system"]}
    )
    assert loaded(rank_pool, root, **allowed) == ("", 7) and not marker.exists()
    archive(path, b"\x80\x02" + BOMBS["a key whose hash takes for ever"])
    error, _ = loaded(rank_pool, root, weights_only_load=weights_only_load)
    assert error.startswith("CheckpointError") and path.name in error
    path.write_bytes(good)
    replace_by_link(path, tmp_path / "elsewhere" / "file")
    error, _ = loaded(rank_pool, root, weights_only_load=weights_only_load)
    assert error.startswith("CheckpointError") and "is a symbolic link to" in error
    (root / "latest").write_text("../run/" + tag.name)
    error, _ = loaded(rank_pool, root, weights_only_load=weights_only_load)
    assert error.startswith("CheckpointError") and "latest" in error


def weigh(data: bytes, *, one_by_one: bool, free: int) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(safe_unpickler, "_FREE_HASHES", free)
        if one_by_one:
            patch.setattr(safe_unpickler, "_TENSOR", re.compile(b"(?!)"))
        try:
            safe_unpickler.check_opcodes(data)
        except CheckpointError as error:
            return str(error)
    return "passes"


@given(st.data())
def test_the_opcodes_of_a_tensor_are_followed_at_once_as_one_by_one(data: st.DataObject) -> None:
    """Also where slots are filled again, taken before they are filled, or hold keys whose hash takes for ever."""
    near = [b"h" + bytes([slot]) for slot in range(8)]
    gets = st.sampled_from([*near, *(b"j" + struct.pack("<I", slot) for slot in (5, 13, 19))])
    heads = b"".join(named("a", f"b{i}") + b"q" + bytes([i]) for i in range(6)) + b"Nq\6" + b"h\6h\6\x86q\7"
    pieces = data.draw(
        st.lists(
            st.one_of(
                st.builds(
                    lambda slot, names: tensor(slot, gets=b"".join(names)),
                    st.sampled_from([8, 14, 20, 26]) | st.integers(0, 130),
                    st.lists(st.sampled_from(near[:6]) | st.sampled_from(near), min_size=6, max_size=6),
                ),
                gets, st.just(b"\x86r\x0d\0\0\0"), st.just(b"}q\5"), st.just(b"Ns"), st.just(b"h\7h\7\x86q\7"),
            ),
            max_size=12,
        )
    )  # fmt: skip
    pickled = b"\x80\x02" + heads + b"".join(pieces) + b"."
    assert weigh(pickled, one_by_one=False, free=1 << 20) == weigh(pickled, one_by_one=True, free=1 << 20)
    free = -safe_unpickler._HASHES_PER_BYTE * len(pickled) + 30
    assert weigh(pickled, one_by_one=True, free=free) in ("passes", weigh(pickled, one_by_one=False, free=free))
