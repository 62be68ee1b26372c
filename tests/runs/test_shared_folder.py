"""Files that tags share: which of them go, when, and that no interleaving leaves a tag without its file."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lean_runs import FIRST, HOUR, SECOND, THIRD, lean_tag, referring, shared_path, write_shared
from saved_files import record_of
from synthetic import edit, model_name, write_checkpoint

from zeroelastic.checkpoint.commit_record import RECORD_NAME, CommitRecord, record_text
from zeroelastic.checkpoint.shared_files import FROZEN_FOLDER, shared_name
from zeroelastic.checkpoint.shared_weights import SHARED_KEY, SharedWeights
from zeroelastic.errors import CheckpointError
from zeroelastic.runs.candidates import check_quickly
from zeroelastic.runs.latest import find_latest
from zeroelastic.runs.names import TRASH, is_ours, list_tags, look_for_tags, why_not_saved
from zeroelastic.runs.run_store import RunStore
from zeroelastic.runs.shared_folder import (
    open_shared,
    plan_shared,
    put_back,
    put_back_missing,
    remove_shared,
    shared_files_of,
)
from zeroelastic.runs.tag_directory import make_staging_dir, publish_tag

OLD, NEW = "0" * 32, "1" * 32


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two tags that share a file, and a file to which none refers."""
    root = tmp_path / "run"
    for step in (1, 2):
        lean_tag(root / f"s{step}", step, FIRST)
    write_shared(root, FIRST)
    write_shared(root, SECOND)
    return root


def decisions(root: Path, *removed: str, min_age_s: float = HOUR) -> dict[str, tuple[bool, str]]:
    """By the file's first digit: whether a plan removes it once some tags are gone, and why."""
    plan = plan_shared(root, kept=(), removed=[root / name for name in removed], min_age_s=min_age_s)
    return {one.file.name[len("frozen-")]: (one.remove, one.reason) for one in plan}


def remove_all(root: Path, min_age_s: float = HOUR) -> list[str | None]:
    return [remove_shared(root, file, min_age_s) for file in open_shared(root).files()]


def left(root: Path) -> set[str]:
    """The first digits of the shared files that are there, hidden ones with a dot."""
    return {name.replace("frozen-", "")[: 1 + name.startswith(".")] for name in os.listdir(root / FROZEN_FOLDER)}


# --- names ------------------------------------------------------------------------------------------------------------


def test_the_folder_is_no_tag_and_cannot_be_saved_as_one(run: Path) -> None:
    assert is_ours(FROZEN_FOLDER)
    write_checkpoint(run / FROZEN_FOLDER, world_size=1)
    assert list_tags(run) == ("s1", "s2") and look_for_tags(run, lambda name: name) == ["s1", "s2"]
    for tag in (FROZEN_FOLDER, f"epoch1/{FROZEN_FOLDER}", f"{FROZEN_FOLDER}/s3"):
        assert "zeroelastic gives to folders of its own" in str(why_not_saved(run, tag))


# --- what goes, and what stays ----------------------------------------------------------------------------------------


def test_a_file_goes_when_no_tag_refers_to_it(run: Path) -> None:
    assert decisions(run) == {"a": (False, "s1 refers to it"), "b": (True, "no tag refers to it")}
    assert decisions(run, "s1")["a"] == (False, "s2 refers to it")
    assert decisions(run, "s1", "s2")["a"] == (True, "no tag refers to it")
    assert left(run) == {"a", "b"}, "a plan changes nothing"
    assert remove_all(run) == ["s1 refers to it", None] and left(run) == {"a"}
    shutil.rmtree(run / "s1")
    shutil.rmtree(run / "s2")
    assert remove_all(run) == [None] and left(run) == set()


def test_a_young_file_stays(run: Path) -> None:
    write_shared(run, SECOND, age_s=0.5 * HOUR)
    assert decisions(run)["b"] == (False, "a save may be on its way: it changed within the last 60 minutes")
    assert decisions(run, min_age_s=0.4 * HOUR)["b"][0]


@pytest.mark.parametrize("tag", ["s3", "epoch1/s3", "checkpoint-3/global_step3", "X.ckpt/checkpoint"])
def test_while_a_save_may_be_on_its_way_nothing_goes(run: Path, tag: str) -> None:
    staging_dir = make_staging_dir(run / tag, NEW)
    assert "its save is on its way" in decisions(run)["b"][1]
    assert "its save is on its way" in str(remove_all(run)[1]) and left(run) == {"a", "b"}
    (note,) = staging_dir.iterdir()
    note.unlink()
    assert "it changed within the last 60 minutes" in decisions(run)["b"][1]
    then = time.time() - 2 * HOUR
    os.utime(staging_dir, (then, then))
    assert decisions(run)["b"][0]


@pytest.mark.parametrize("tag", ["epoch1/s3", "checkpoint-3/global_step3", "X.ckpt/checkpoint", "link"])
def test_tags_in_all_folders_count(run: Path, tmp_path: Path, tag: str) -> None:
    if tag == "link":
        lean_tag(tmp_path / "elsewhere", 3, SECOND)
        (run / tag).symlink_to(tmp_path / "elsewhere")
    else:
        lean_tag(run / tag, 3, SECOND, depth=1 + tag.count("/"))
        (run / tag).parent.joinpath("latest").write_text(Path(tag).name)
    assert decisions(run)["b"] == (False, f"{tag} refers to it")


def test_without_a_record_the_model_states_say_it(run: Path) -> None:
    write_checkpoint(run / "s3", world_size=2, frozen=None)
    assert shared_files_of(run / "s3") == () and decisions(run)["b"][0]
    shared = SharedWeights(referring(record_of(run / "s1"), SECOND).shared, {}, {}, frozenset())
    edit(run / "s3" / model_name(0), lambda data: data.update({SHARED_KEY: shared.entry()}))
    assert shared_files_of(run / "s3") == shared.files and decisions(run)["b"] == (False, "s3 refers to it")
    (run / "s3" / model_name(0)).write_bytes(b"torn")
    (run / "s3" / model_name(1)).unlink()
    assert "s3 may refer to it" in decisions(run)["b"][1]


@pytest.mark.parametrize("what", ["not JSON", "another checksum", "no permission"])
def test_a_record_that_cannot_be_read_keeps_all_files(run: Path, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    record = run / "s1" / RECORD_NAME
    if what == "not JSON":
        record.write_bytes(b"{")
    elif what == "another checksum":
        record.write_bytes(record.read_bytes().replace(b"frozen-aaaa", b"frozen-cccc"))
    else:
        scandir = os.scandir

        def refuse(path: Any) -> Any:
            if Path(path) == run / "logs":
                raise PermissionError(13, "Permission denied", str(path))
            return scandir(path)

        (run / "logs").mkdir()
        monkeypatch.setattr(os, "scandir", refuse)
    remove, reason = decisions(run)["b"]
    assert not remove and ("s1 may refer to it" in reason or "logs: cannot be listed" in reason)
    assert None not in remove_all(run) and left(run) == {"a", "b"}


def test_links_stay(run: Path, tmp_path: Path) -> None:
    shutil.move(shared_path(run, SECOND), tmp_path / "big")
    shared_path(run, SECOND).symlink_to(tmp_path / "big")
    assert decisions(run)["b"] == (False, "it is a symbolic link")
    shutil.move(run / FROZEN_FOLDER, tmp_path / "folder")
    (run / FROZEN_FOLDER).symlink_to(tmp_path / "folder")
    assert "other runs may use what is in it" in decisions(run, "s1", "s2")["a"][1]
    assert None not in remove_all(run)


def test_a_tag_that_is_being_removed_still_counts(run: Path) -> None:
    """It may be put back: see ``RunStore.remove``."""
    shutil.rmtree(run / "s1")
    (run / TRASH).mkdir()
    (run / "s2").rename(run / TRASH / "0123")
    assert remove_all(run)[0] == f"{TRASH}/0123 refers to it"
    assert decisions(run)["a"][0], "the removal finishes that one first"


def test_a_file_that_changed_since_it_was_looked_at_stays(run: Path) -> None:
    (_, file) = open_shared(run).files()
    then = time.time() - 3 * HOUR
    os.utime(shared_path(run, SECOND), (then, then))
    assert remove_shared(run, file, HOUR) == "it changed while this ran" and left(run) == {"a", "b"}
    shared_path(run, SECOND).unlink()
    assert remove_shared(run, file, HOUR) is None


# --- leftovers --------------------------------------------------------------------------------------------------------


def set_aside(root: Path, digest: str) -> Path:
    """As a removal that was killed leaves it."""
    path = shared_path(root, digest)
    return path.rename(path.with_name(f".{path.name}.{'0' * 16}.removed"))


def test_what_a_killed_removal_has_set_aside_is_put_back_or_deleted(run: Path) -> None:
    set_aside(run, FIRST)
    set_aside(run, SECOND)
    assert left(run) == {".a", ".b"}
    kept = (False, "its removal was cut short; s1 refers to it")
    assert decisions(run) == {"a": kept, "b": (True, "no tag refers to it")}
    assert remove_all(run) == ["s1 refers to it", None] and left(run) == {"a"}


def test_put_back_gives_all_files_their_names(run: Path) -> None:
    put_back(run / "s1")  # without shared files
    first, second = set_aside(run, FIRST), set_aside(run, SECOND)
    write_shared(run, SECOND, nbytes=7)
    put_back(run / FROZEN_FOLDER)
    assert left(run) == {"a", "b"} and not first.exists() and not second.exists()
    assert shared_path(run, SECOND).stat().st_size == 7, "a save has made it again"


def test_a_file_system_without_renameat2_puts_back_by_a_link(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zeroelastic.runs.shared_folder.rename_new", lambda src, dst: False)
    test_put_back_gives_all_files_their_names(run)


def test_temporary_files_of_dead_saves_are_leftovers(run: Path) -> None:
    dead, living, unknown = ("2" * 32, "3" * 32, "4" * 32)
    for save_id in (dead, living, unknown):
        (run / FROZEN_FOLDER / f".{shared_name(THIRD)}.{save_id}.tmp").write_bytes(b"x" * 10)
    make_staging_dir(run / "s3", living)
    (note,) = make_staging_dir(run / "s4", dead).iterdir()
    note.rename(note.with_name(f"{note.name.rpartition('%20')[0]}%20-"))  # its process has ended
    found = {one.name: one.remove for one in RunStore(run).leftovers((), HOUR)}
    names = {save_id: f"{FROZEN_FOLDER}/.{shared_name(THIRD)}.{save_id}.tmp" for save_id in (dead, living, unknown)}
    assert found == {names[dead]: True, names[living]: False, names[unknown]: False}
    RunStore(run).remove_dead_saves()
    assert not (run / names[dead]).exists() and (run / names[living]).exists() and (run / names[unknown]).exists()
    then = time.time() - 25 * HOUR
    for save_id in (living, unknown):
        os.utime(run / names[save_id], (then, then))
    RunStore(run).remove_dead_saves()
    assert (run / names[living]).exists() and not (run / names[unknown]).exists()


# --- checks -----------------------------------------------------------------------------------------------------------


def test_a_tag_whose_shared_file_is_not_there_is_not_whole(run: Path) -> None:
    assert check_quickly(run / "s2") == ()
    write_shared(run, THIRD)
    lean_tag(run / "s3", 3, FIRST, THIRD)
    assert find_latest(run, check_quickly).tag.name == "s3"  # type: ignore[union-attr]
    shared_path(run, THIRD).write_bytes(b"x" * 999)
    found = find_latest(run, check_quickly)
    assert found.tag is not None and found.tag.name == "s2"
    assert "has 999 bytes" in found.passed[0].problems[0]
    shared_path(run, THIRD).unlink()
    found = find_latest(run, check_quickly)
    assert found.tag is not None and found.tag.name == "s2"
    assert str(shared_path(run, THIRD)) in found.passed[0].problems[0]


def test_without_a_record_the_shared_file_has_to_be_there_too(run: Path) -> None:
    shared = SharedWeights(referring(record_of(run / "s1"), THIRD).shared, {}, {}, frozenset())
    write_checkpoint(run / "s3", world_size=2, frozen=None)
    for rank in range(2):
        edit(run / "s3" / model_name(rank), lambda data: data.update({SHARED_KEY: shared.entry()}))
    with pytest.raises(CheckpointError, match=shared_name(THIRD)):
        check_quickly(run / "s3")
    write_shared(run, THIRD)
    assert check_quickly(run / "s3") == ()


def test_a_save_or_a_load_finds_what_a_killed_removal_has_set_aside(run: Path) -> None:
    files = shared_files_of(run / "s1")
    set_aside(run, FIRST)
    put_back_missing(files, run / "s1")
    assert shared_path(run, FIRST).exists()
    shared_path(run, FIRST).unlink()
    put_back_missing(files, run / "s1")
    assert not shared_path(run, FIRST).exists()


# --- interleavings ----------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """Ends an actor where it is; it then does nothing any more."""


class Actor:
    """A function in a thread that stops before each of its system calls, until ``step`` lets it go on."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self.ended = self.killed = False
        self.at = ""
        self.result: object = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.boundary("begin")
            self.result = self._work()
        except BaseException as error:  # shown by ``step``
            self.result = error
        self.ended = True
        self._stopped.release()

    def boundary(self, call: str) -> None:
        self.at = call
        self._stopped.release()
        self._go.acquire()
        if self.killed:
            raise Killed

    def step(self) -> None:
        if self.ended:
            return
        self._stopped.acquire()
        if not self.ended:
            self._go.release()
            self._stopped.acquire()
            self._stopped.release()
        if self.ended and isinstance(self.result, Exception) and not isinstance(self.result, CheckpointError):
            raise self.result

    def kill(self) -> None:
        self.killed = True
        self.finish()

    def finish(self) -> None:
        while not self.ended:
            self.step()


CALLS = ("rename", "replace", "unlink", "utime", "scandir", "listdir", "mkdir", "stat")


@contextmanager
def stopping_actors(actors: dict[threading.Thread, Actor]) -> Iterator[None]:
    """Let actors stop at system calls."""
    with pytest.MonkeyPatch.context() as patched:
        for name in CALLS:
            patched.setattr(os, name, _stopping(getattr(os, name), actors))
        yield


def _stopping(real: Callable[..., Any], actors: dict[threading.Thread, Actor]) -> Callable[..., Any]:
    def stop(*args: Any, **kwargs: Any) -> Any:
        actor = actors.get(threading.current_thread())
        if actor is not None:
            actor.boundary(real.__name__)
        return real(*args, **kwargs)

    return stop


def save(
    root: Path, tag: str, save_id: str, record: CommitRecord, digest: str, look: Callable[[Path], object] | None = None
) -> None:
    """The steps of a save, as far as they concern shared files. Raises CheckpointError where it is not committed.

    With ``os.stat`` as its ``look`` it does not touch the file, which alone would keep it.
    """
    try:
        staging_dir = make_staging_dir(root / tag, save_id)
        path = shared_path(root, digest)
        put_back(root / FROZEN_FOLDER)
        try:
            (look or os.utime)(path)
        except FileNotFoundError:
            path.parent.mkdir(exist_ok=True)
            temporary = path.with_name(f".{path.name}.{save_id}.tmp")
            temporary.write_bytes(b"x" * 1000)
            os.replace(temporary, path)
        text = record_text(referring(record.model_copy(update={"save_id": save_id, "tag": tag}), digest))
        (staging_dir / RECORD_NAME).write_bytes(text)
        if not path.exists():
            put_back(root / FROZEN_FOLDER)
            os.stat(path)
        publish_tag(staging_dir, root / tag, sync=False).finish()
    except OSError as error:  # of a tag that is removed at this moment, or a file
        shutil.rmtree(root / f".{tag}.{save_id}.tmp", ignore_errors=True)
        raise CheckpointError("not committed") from error


def remove_tag(root: Path, tag: str) -> None:
    """The steps of a tag's removal."""
    (root / TRASH).mkdir(exist_ok=True)
    with suppress(FileNotFoundError):
        (root / tag).rename(root / TRASH / tag)
        shutil.rmtree(root / TRASH / tag)


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> CommitRecord:
    return record_of(lean_tag(tmp_path_factory.mktemp("record") / "tag", 1))


def begin(root: Path, record: CommitRecord) -> None:
    """A run of one tag that refers to FIRST, and SECOND to which none refers."""
    (root / "s1").mkdir(parents=True)
    (root / "s1" / RECORD_NAME).write_bytes(record_text(referring(record, FIRST)))
    write_shared(root, FIRST)
    write_shared(root, SECOND)


def lost(root: Path) -> list[str]:
    """The tags whose shared file is not there."""
    tags = [name for name in os.listdir(root) if (root / name / RECORD_NAME).exists()]
    return [name for name in tags for file in shared_files_of(root / name) if not file.at(root / name).exists()]


def actors_of(root: Path, record: CommitRecord) -> list[Callable[[], object]]:
    return [
        lambda: remove_all(root, 0.0),
        lambda: remove_all(root, 0.0),
        lambda: save(root, "s2", NEW, record, SECOND),
        lambda: save(root, "s1", OLD, record, SECOND, look=lambda path: os.stat(path)),
        lambda: remove_tag(root, "s1"),
    ]


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    order=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 12)), max_size=60),
    taking_part=st.sets(st.integers(0, 4), min_size=2),
    kill=st.none() | st.tuples(st.integers(0, 4), st.integers(0, 60)),
)
def test_no_interleaving_leaves_a_tag_without_its_file(
    tmp_path_factory: pytest.TempPathFactory,
    record: CommitRecord,
    order: list[tuple[int, int]],
    taking_part: set[int],
    kill: tuple[int, int] | None,
) -> None:
    """Two removals, two saves and the removal of a tag, of which one may die anywhere."""
    root = tmp_path_factory.mktemp("run")
    begin(root, record)
    work = actors_of(root, record)
    threads: dict[threading.Thread, Actor] = {}
    with stopping_actors(threads):
        actors = {number: Actor(work[number]) for number in sorted(taking_part)}
        threads |= {actor.thread: actor for actor in actors.values()}
        for at, (number, steps) in enumerate([*order, *((number, 1000) for number in actors)]):
            if kill is not None and at == kill[1] and kill[0] in actors:
                actors[kill[0]].kill()
            for _ in range(steps if number in actors else 0):
                actors[number].step()
        for actor in actors.values():
            actor.finish()
    if any(actor.killed for actor in actors.values()):
        put_back(root / FROZEN_FOLDER)
    assert lost(root) == []
    for hidden in root.glob(".s?.*"):  # of a save that died: this process, which noted it, runs
        shutil.rmtree(hidden)
    shutil.rmtree(root / TRASH, ignore_errors=True)
    remove_all(root, 0.0)
    wanted = {file.name for name in os.listdir(root) for file in _files_of(root / name)}
    there = {path.name for path in (root / FROZEN_FOLDER).iterdir() if not path.name.endswith(".tmp")}
    assert there == wanted, "what nothing refers to goes at last"


def _files_of(tag_dir: Path) -> tuple[Any, ...]:
    return shared_files_of(tag_dir) if (tag_dir / RECORD_NAME).exists() else ()


def remove_second(root: Path) -> None:
    for file in open_shared(root).files():
        if file.name == shared_name(SECOND):
            remove_shared(root, file, 0.0)


def interleaved(root: Path, first: Callable[[], object], steps: tuple[int, int], *, looked: bool) -> bool:
    """Let ``first``, then a removal, do some steps, then both the rest; whether both stopped before their end.

    With ``looked`` the removal has looked before all that, and is about to rename the file.
    """
    threads: dict[threading.Thread, Actor] = {}
    with stopping_actors(threads):
        actors = [Actor(first), Actor(lambda: remove_second(root))]
        threads |= {actor.thread: actor for actor in actors}
        while looked and actors[1].at != "rename":
            actors[1].step()
        for actor, number in zip(actors, steps, strict=True):
            for _ in range(number):
                actor.step()
        stopped = not any(actor.ended for actor in actors)
        for actor in actors:
            actor.finish()
    return stopped


@pytest.mark.parametrize(
    ("other", "looked"),
    [
        *((other, True) for other in ("save", "save without touch", "removal")),
        pytest.param("save", False, marks=pytest.mark.extended),
        *(pytest.param(other, False, marks=pytest.mark.sweep) for other in ("save without touch", "removal")),
    ],
)
def test_a_save_or_a_removal_that_stops_anywhere_beside_a_removal_that_stops_anywhere(
    tmp_path: Path, record: CommitRecord, other: str, looked: bool
) -> None:
    root = tmp_path / "run"
    look = None if other == "save" else lambda path: os.stat(path)
    saves = other != "removal"
    first = (lambda: save(root, "s2", NEW, record, SECOND, look)) if saves else (lambda: remove_second(root))
    i = j = cases = 0
    while i < 100:
        begin(root, record)
        stopped = interleaved(root, first, (i, j), looked=looked)
        assert lost(root) == [], (i, j)
        assert left(root) == ({"a", "b"} if saves else {"a"}), (i, j)
        shutil.rmtree(root)
        cases += 1
        j += 1
        if not stopped:
            if j == 1:
                break
            i, j = i + 1, 0
    assert cases > 100


def test_a_removal_that_is_killed_anywhere(tmp_path: Path, record: CommitRecord) -> None:
    """The next save finds the file again, and the next removal finishes it."""
    number = 0
    while True:
        for saves in (False, True):
            root = tmp_path / f"{number}-{saves}"
            begin(root, record)
            threads: dict[threading.Thread, Actor] = {}
            with stopping_actors(threads):
                actor = Actor(lambda root=root: remove_all(root, 0.0))  # type: ignore[misc]
                threads[actor.thread] = actor
                for _ in range(number):
                    actor.step()
                ended = actor.ended
                actor.kill()
            if saves:
                save(root, "s2", NEW, record, SECOND)
            assert lost(root) == []
            remove_all(root, 0.0)
            assert left(root) == ({"a", "b"} if saves else {"a"}), number
        if ended:
            break
        number += 1
    assert number > 10
