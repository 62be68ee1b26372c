"""Ranks of a save that are late, that never come, and that die: the others name them, in the same error."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from programs import wait_for
from training import Job, build_engine, train_step

from zeroelastic.elastic import set_collective_timeout
from zeroelastic.errors import AbsentRankError
from zeroelastic.testing import RankError, RankPool
from zeroelastic.verbs.verify.verify import verify_checkpoint

SAVING = "Checkpoint engines and storage"


def raised(action: Callable[[], Any]) -> tuple[str, str, float]:
    """The type and text of an error, and how long it took."""
    began = time.monotonic()
    try:
        action()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - began
    return "", "", time.monotonic() - began


def save_late(directory: str) -> list[tuple[str, str, float]]:
    """Rank 2 comes late to a save, then to the middle of another one, rank 0 to the end of one; then all are there.

    The late rank comes when the others have given it up.
    """
    from zeroelastic.deepspeed.save import shard_writer
    from zeroelastic.deepspeed.save.barrier import SaveBarrier

    engine = build_engine(Job(options={"save_timeout_s": 2.0}))
    train_step(engine, 0)
    engine.save_checkpoint(directory, tag="good")
    write = shard_writer.write_torch_file

    def be_late(tag: str, rank: int) -> None:
        if dist.get_rank() == rank:
            wait_for(lambda: len([*Path(directory).parent.glob(f"{tag} without *")]) == 2, "the others give up")

    def save(tag: str) -> tuple[str, str, float]:
        outcome = raised(lambda: engine.save_checkpoint(directory, tag=tag))
        Path(directory).with_name(f"{tag} without {dist.get_rank()}").touch()
        dist.barrier()
        return outcome

    def check_late(barrier: SaveBarrier) -> bool:
        be_late("stopped", 0)
        return check(barrier)

    def write_late(*args: Any, **kwargs: Any) -> Any:
        be_late("slow", 2)
        return write(*args, **kwargs)

    be_late("late", 2)
    outcomes = [save("late")]
    with mock.patch.object(shard_writer, "write_torch_file", write_late):
        outcomes.append(save("slow"))
    check = SaveBarrier.is_given_up
    with mock.patch.object(SaveBarrier, "is_given_up", check_late):
        outcomes.append(save("stopped"))
    left = sorted(name for name in os.listdir(directory) if not name.endswith(".py"))
    outcomes.append((",".join(left), (Path(directory) / "latest").read_text(), 0.0))
    dist.barrier()
    engine.save_checkpoint(directory, tag="next")
    return outcomes


@pytest.mark.support(SAVING, "a rank that does not arrive within `save_timeout_s`", "refused", "named on every rank")
def test_a_rank_that_does_not_arrive_is_named_on_every_rank(rank_pool: RankPool, tmp_path: Path) -> None:
    """The late one gets the same error when it comes, and the next save goes well."""
    results = rank_pool.run(save_late, 3, str(tmp_path / "run"))
    tmp_path /= "run"
    for outcomes in results:
        (kind, said, _), (slow_kind, slow_said, _), (stopped_kind, stopped_said, _), (left, latest, _) = outcomes
        assert kind == slow_kind == stopped_kind == "AbsentRankError"
        assert said == results[0][0][1] and slow_said == results[0][1][1] and stopped_said == results[0][2][1]
        assert "rank 0 did not arrive within 2 s" in stopped_said and "The tag is not committed" in stopped_said
        assert f"{tmp_path}/late: rank 2 did not arrive within 2 s" in said and "was about to be saved" in said
        assert f"{tmp_path}/slow: rank 2 did not arrive within 2 s" in slow_said and "files were written" in slow_said
        assert (left, latest) == ("good,latest", "good")
    assert all(outcomes[0][2] < 5 for outcomes in results)
    assert issubclass(AbsentRankError, (OSError, TimeoutError))
    assert verify_checkpoint(tmp_path / "next").valid and (tmp_path / "latest").read_text() == "next"


def save_late_in_a_limit(directory: str) -> tuple[str, str, float]:
    engine = build_engine(Job())
    dist.barrier()
    set_collective_timeout(2.0)
    given_up = Path(directory, "given up")
    if dist.get_rank() == 1:
        wait_for(given_up.exists, "the other gives up")
    outcome = raised(lambda: engine.save_checkpoint(directory, tag="late"))
    given_up.touch()
    return outcome


def test_a_save_waits_for_a_rank_no_longer_than_collectives_may_take(rank_pool: RankPool, tmp_path: Path) -> None:
    results = rank_pool.run(save_late_in_a_limit, 2, str(tmp_path))
    for kind, said, waited in results:
        assert kind == "AbsentRankError" and waited < 10
        assert "rank 1 did not arrive within 2 s (set_collective_timeout) while it was about to be saved" in said


def test_a_store_whose_process_is_stopped_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing ends such a request, so that the log is the only place to say it."""
    from zeroelastic.deepspeed.save import barrier

    monkeypatch.setattr(barrier, "_GRACE_S", 0.1)
    with mock.patch.object(barrier.logger, "error") as logged:
        barrier.store_request(lambda: time.sleep(1.0), "ckpt/tag", "", patience_s=0.1)
        barrier.store_request(lambda: None, "ckpt/quick", "", patience_s=0.1)
        time.sleep(0.5)
    ((line, *args),) = [call.args for call in logged.call_args_list]
    assert (line % tuple(args)).startswith("ckpt/tag: has waited for the store of this process group")


def save_without_a_launcher(directory: str) -> tuple[str, str, float]:
    from zeroelastic.deepspeed.save import save_checkpoint as save

    engine, gone = build_engine(Job()), dist.DistNetworkError("Failed to recv, got 0 bytes.")
    with mock.patch.object(save, "require_partners", side_effect=gone):
        return raised(lambda: engine.save_checkpoint(directory, tag="orphaned"))


def test_a_save_after_the_launcher_has_died_says_so(rank_pool: RankPool, tmp_path: Path) -> None:
    (kind, said, _) = rank_pool.run(save_without_a_launcher, 1, str(tmp_path))[0]
    assert kind == "AbsentRankError" and said.startswith(f"{tmp_path}/orphaned: the process that holds the store")
    assert said.endswith("(Failed to recv, got 0 bytes.): rank 0, or the launcher. Nothing was written.")


def die_beside_a_slow_rank(meets: bool) -> tuple[str, str, float]:
    """Rank 1 dies, rank 0 loses a collective by it, and rank 2 is busy for longer than the others are patient."""
    from zeroelastic.deepspeed.save import barrier

    calls = barrier.SaveBarrier("the save", timeout_s=60.0)
    calls.wait("begin")
    barrier._GRACE_S = 1.0

    def lose_a_collective() -> None:
        with calls.attribute_failures():
            raise dist.DistBackendError("a peer is gone")

    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if dist.get_rank() == 2:
        time.sleep(4)
        if meets:
            calls.wait("write")
    lose_a_collective()
    raise AssertionError("nobody is lost")


@pytest.mark.parametrize("meets", [True, False])
def test_a_slow_rank_that_lives_is_not_called_lost_when_another_dies(rank_pool: RankPool, meets: bool) -> None:
    """Whether it comes to the next meeting, or finds its own collective lost."""
    with pytest.raises(RankError) as caught:
        rank_pool.run(die_beside_a_slow_rank, 3, meets, grace=60)
    said = {failure.rank: failure.headline for failure in caught.value.failures}
    assert "SIGKILL" in said[1]
    assert all("the save: the process of rank 1 has ended" in said[rank] for rank in (0, 2)), said


def lose_a_rank_while_a_collective_is_under_way() -> None:
    """Rank 1 dies; the error of the other comes where the result is waited for, in whatever function that is."""
    from zeroelastic.deepspeed.save import barrier

    calls = barrier.SaveBarrier("the save", timeout_s=60.0)
    calls.wait("begin")
    dist.all_reduce(torch.ones(1))
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with calls.attribute_failures():
        dist.all_reduce(torch.ones(1), async_op=True).wait()


def test_an_error_of_a_collective_is_known_wherever_it_is_waited_for(rank_pool: RankPool) -> None:
    with pytest.raises(RankError) as caught:
        rank_pool.run(lose_a_rank_while_a_collective_is_under_way, 2, grace=60)
    said = {failure.rank: failure.headline for failure in caught.value.failures}
    assert "the save: the process of rank 1 has ended" in said[0], said


def miss_saves(misses: int) -> list[tuple[str, str]]:
    """Rank 1 is not at the first saves; all are at those that follow."""
    from zeroelastic.deepspeed.save import barrier

    seen = []
    for number in range(misses + 2):
        if number < misses and dist.get_rank() == 1:
            continue
        if number == misses:
            dist.barrier()
        calls = barrier.SaveBarrier(f"save {number}", timeout_s=1.0)
        seen.append(raised(lambda calls=calls: calls.wait("begin"))[:2])
        calls.close()
    return seen


def test_a_rank_that_missed_saves_is_at_the_next_one_with_the_others(rank_pool: RankPool) -> None:
    first, second = rank_pool.run(miss_saves, 2, 2)
    assert [kind for kind, _ in first] == ["AbsentRankError", "AbsentRankError", "", ""], first
    assert [kind for kind, _ in second] == ["", ""], second


def slow_beside_a_lost_collective() -> tuple[str, str, float]:
    """A collective fails on rank 0 although nobody is lost, while rank 1 is busy for a while."""
    from zeroelastic.deepspeed.save import barrier

    calls = barrier.SaveBarrier("the save", timeout_s=60.0)
    calls.wait("begin")
    barrier._GRACE_S = 1.0

    def lose_a_collective() -> None:
        with calls.attribute_failures():
            raise dist.DistBackendError("gloo is confused")

    if dist.get_rank() == 1:
        time.sleep(3)
        return raised(lambda: calls.wait("write"))
    return raised(lose_a_collective)


def test_a_slow_rank_that_lives_is_not_called_lost_when_nobody_dies(rank_pool: RankPool) -> None:
    (kind, said, _), (other_kind, other_said, _) = rank_pool.run(slow_beside_a_lost_collective, 2)
    assert (kind, said) == ("DistBackendError", "gloo is confused")
    assert other_kind == "AbsentRankError" and "a collective failed on another rank" in other_said


def fail_on(failing: int) -> list[tuple[str, str]]:
    """What ``all_or_raise`` gives or raises: without a failure, with one, and without again; and what it reduces."""
    from zeroelastic.deepspeed.save import barrier
    from zeroelastic.errors import SaveError

    calls, seen = barrier.SaveBarrier("the save", timeout_s=60.0), []
    for number in range(3):

        def act(fails: bool) -> str:
            if fails:
                raise SaveError("the disk is full")
            return f"rank {dist.get_rank()}"

        with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduced:
            try:
                outcome = calls.all_or_raise(partial(act, number == 1 and dist.get_rank() == failing), "write")
            except SaveError as error:
                outcome = str(error)
        seen.append((outcome, "reduces" if reduced.call_count else "asks the store"))
    return seen


def test_a_failure_on_one_rank_is_raised_on_all_and_without_one_there_is_no_collective(rank_pool: RankPool) -> None:
    for rank, seen in enumerate(rank_pool.run(fail_on, 3, 2)):
        assert seen == [
            (f"rank {rank}", "asks the store"),
            ("the disk is full", "reduces"),
            (f"rank {rank}", "asks the store"),
        ]


RANKS_PER_MACHINE = 8


def requests_of_ranks(num_ranks: int, late_s: float, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The requests to the store of each rank, a thread here, in a barrier at which the last rank is late."""
    from zeroelastic.deepspeed.save import barrier

    shared, counts, rank_of = dist.HashStore(), Counter[int](), threading.local()

    class CountingStore:
        def __getattr__(self, name: str) -> Any:
            counts[rank_of.rank] += 1
            return getattr(shared, name)

    def identities_on_this_machine() -> dict[int, str]:
        first = rank_of.rank // RANKS_PER_MACHINE * RANKS_PER_MACHINE
        return dict.fromkeys(range(first, first + RANKS_PER_MACHINE), "")

    def wait(rank: int) -> None:
        rank_of.rank = rank
        time.sleep(late_s if rank == num_ranks - 1 else 0.0)
        barriers[rank].wait("write")

    store = CountingStore()
    world = SimpleNamespace(get_rank=lambda: rank_of.rank, get_world_size=lambda: num_ranks, group=dist.group)
    for name, value in {
        "dist": world,
        "_get_default_store": lambda: store,
        "announce": lambda: None,
        "life_of": lambda name: "lives",
        "identities_on_this_machine": identities_on_this_machine,
    }.items():
        monkeypatch.setattr(barrier, name, value)
    barriers = []
    for rank in range(num_ranks):
        rank_of.rank = rank
        monkeypatch.setattr(barrier, "_known", barrier._GroupSaves())  # of the process, which a rank is elsewhere
        barriers.append(barrier.SaveBarrier("the save", timeout_s=60.0))
    counts.clear()
    threads = [threading.Thread(target=wait, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sorted(counts[rank] for rank in range(num_ranks))


def test_what_a_waiting_rank_asks_of_the_store_does_not_grow_with_the_number_of_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All but one rank wait for 1.5 s."""
    for num_ranks in (8, 512):
        assert requests_of_ranks(num_ranks, 1.5, monkeypatch)[-1] <= 20


def die_in_a_save(directory: str, moment: str, victim: int) -> None:
    from zeroelastic.deepspeed.save import directory as on_disk
    from zeroelastic.deepspeed.save import shard_writer

    engine = build_engine(Job())
    train_step(engine, 0)
    engine.save_checkpoint(directory, tag="good")
    dist.barrier()

    def die(*args: Any, **kwargs: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    if dist.get_rank() == victim:
        if moment == "before":
            die()
        owner, name = {
            "writing": (shard_writer, "write_torch_file"),
            "in a collective": (dist, "all_reduce"),
            "placing": (on_disk, "publish_tag"),
        }[moment]
        setattr(owner, name, die)
    engine.save_checkpoint(directory, tag="bad")


@pytest.mark.support(SAVING, "a rank that is killed during a save", "refused", "named on every rank, within seconds")
@pytest.mark.parametrize(
    ("moment", "victim"),
    [("before", 1), ("writing", 2), ("in a collective", 1), ("placing", 0)],
)
def test_a_rank_that_dies_is_named_on_every_other_and_the_last_save_stays(
    rank_pool: RankPool, tmp_path: Path, moment: str, victim: int
) -> None:
    """Within seconds on one machine, whatever the time limit, which is at its default of minutes here."""
    began = time.monotonic()
    with pytest.raises(RankError) as caught:
        rank_pool.run(die_in_a_save, 3, str(tmp_path), moment, victim, grace=60)
    assert time.monotonic() - began < 60
    said = {failure.rank: failure.headline for failure in caught.value.failures}
    assert set(said) == {0, 1, 2} and "SIGKILL" in said.pop(victim)
    assert len(set(said.values())) == 1
    (text,) = set(said.values())
    assert text.startswith(
        f"zeroelastic.errors.AbsentRankError: {tmp_path}/bad: the process of rank {victim} has ended"
    )
    assert "The tag is not committed, and `latest` is unchanged" in text
    assert not (tmp_path / "bad").exists() and (tmp_path / "latest").read_text() == "good"
    assert verify_checkpoint(tmp_path / "good").valid
