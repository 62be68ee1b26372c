"""What the actions stand on: directories and jobs, calls to ranks, and what is compared after every action."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from lifecycle import disk
from lifecycle.jobs import Answer, Job, Server
from lifecycle.model import Directory, Live, Memory, Saved, differing, interrupted

REFUSALS = {"UsageError", "ConfigError", "UnsupportedError", "SaveError"}
"""What a save is refused with, by name."""
ODD_TAGS = (
    "",
    ".",
    ".hidden",
    "a\u00a0b",
    "\u65e5\u3000\u672c",
    "tab\there",
    "epoch1/step5",
    "x" * 200 + "-1",
    "x" * 200 + "-2",
)
OWN_KEYS = ("global_steps", "module", "mp_world_size", "param_shapes", "dp_world_size", "buffer_names")
REFUSED_KEYS = frozenset(OWN_KEYS) - {"global_steps"}
"""Those that a save refuses, with the values that are drawn."""
"""Keys of client state that DeepSpeed's own files have, too."""
IN_MEMORY = "(in memory)"
"""Stands for the tag of a checkpoint in memory."""


class Failed(AssertionError):
    """Disk or memory is not what the model says."""


class Skipped(Exception):
    """An action that is not possible now."""


class Bench:
    """Some directories and up to two jobs ("a", "b") that use them; ``kind`` is what all jobs have in common."""

    def __init__(self, server: Server, root: Path, *, kind: Mapping[str, Any] | None = None) -> None:
        self.server, self.root, self.kind = server, root, dict(kind or {})
        for place in ("home", "elsewhere"):
            (root / place).mkdir(parents=True)
        self.directories: dict[str, Directory] = {}
        self.jobs: dict[str, Job] = {}
        self.live: dict[str, Live] = {}
        self.memory: dict[tuple[str, str], Memory] = {}
        self.nodes: dict[str, tuple[int, ...]] = {}
        self.gates: dict[str, Path] = {}
        self.listings: dict[str, dict[str, Any]] = {}
        self.verified: set[tuple[str, str]] = set()
        self.log: list[tuple[str, dict[str, Any]]] = []
        self.counts: Counter[str] = Counter()
        self.slowest: tuple[float, str] = (0.0, "")
        self._num_held = 0
        self._salt = itertools.count(1)
        self._gate = itertools.count(1)
        self._node = itertools.count(1)
        self._saves = itertools.count(1)

    def close(self) -> None:
        for gate in self.gates.values():
            gate.unlink(missing_ok=True)
        for job in self.jobs.values():
            job.end()
        shutil.rmtree(self.root, ignore_errors=True)

    def act(self, name: str, **params: Any) -> bool:
        """Do it, and compare; False where it is not possible now. Raises Failed."""
        began = time.monotonic()
        self.log.append((name, params))
        action: Callable[..., None] = getattr(self, f"do_{name}")
        from zeroelastic.errors import ZeroElasticError

        try:
            action(**params)
            self.check()
        except Skipped:
            self.log.pop()
            return False
        except ZeroElasticError as error:
            raise Failed(f"{type(error).__name__}: {error}".replace(str(self.root), "")) from error
        self.counts[name] += 1
        self.slowest = max(self.slowest, (time.monotonic() - began, name))
        return True

    # Places.

    def path(self, place: str, cwd: str | None = None) -> Path:
        """The directory that a place means for a job in ``cwd``, by default that of people and tools."""
        return self.root / place[1:] if place.startswith("/") else Path(cwd or self.root / "home") / place

    def given(self, place: str) -> str:
        """What the job is given: a relative path stays one."""
        return str(self.root / place[1:]) if place.startswith("/") else place

    def directory(self, path: Path | str) -> Directory:
        return self.directories.setdefault(str(path), Directory())

    def tags_of(self, job: str, place: str) -> list[str]:
        """The committed tags of a place, for whoever chooses one."""
        return list(self.directory(self.path(place, self.live[job].cwd if job in self.live else None)).tags)

    # What must hold after every action.

    def check(self) -> None:
        self._compare_disk()
        for name, job in self.jobs.items():
            live = self.live[name]
            if live.state is None:
                continue
            for found in self._all_ok("state", job.call("state")):
                self._require(found["cwd"] == live.cwd, f"job {name} is in {found['cwd']}")
                seen, expected = _held_by(found), (live.state, live.step, live.position)
                self._require(seen == expected, f"job {name} holds {text_of(*seen)}, expected {text_of(*expected)}")

    def _compare_disk(self) -> None:
        from zeroelastic.runs.run_store import RunStore

        for name, model in self.directories.items():
            path = Path(name)
            seen = disk.look(path)
            expected: dict[str, object] = {}
            for tag, saved in list(model.tags.items()):
                found = seen.ids.get(on_disk(tag))
                if not saved.save_id and found is not None:
                    others = {other.save_id for d in self.directories.values() for other in d.tags.values()}
                    self._require(found not in others, f"{path}: {tag!r} is the save before this one")
                    model.tags[tag] = replace(saved, save_id=found)
                    self.listings.pop(name, None)
                expected[on_disk(tag)] = model.tags[tag].save_id or "(a new save)"
            wrong = list(differing(expected, seen.ids))
            self._require(not wrong, f"{path}: tags differ: {'; '.join(wrong)}")
            self._require(seen.latest == model.latest, f"{path}: latest is {seen.latest!r}, expected {model.latest!r}")
            files = {file: found for file, found in seen.listing.items() if _is_of(file, model.tags)}
            changed = list(differing(self.listings.get(name, files), files))
            self._require(not changed, f"{path}: files changed that nothing wrote: {changed[:4]}")
            self.listings[name] = files
            self._verify_new(path, model)
            if model.tags:
                listed = [tag.name for tag in RunStore(path).tags()]
                order = [saved.tag for saved in model.newest_first()]
                self._require(
                    [tag for tag in listed if _tag_like(tag, model.tags)] == order,
                    f"{path}: the tags are listed as {listed}, newest first they are {order}",
                )

    def _verify_new(self, path: Path, model: Directory) -> None:
        """Every byte of a save that was not looked at yet."""
        from zeroelastic.verbs.verify.verify import verify_checkpoint

        for tag, saved in model.tags.items():
            if not saved.damage and (str(path), saved.save_id) not in self.verified:
                report = verify_checkpoint(path / tag)
                self._require(report.valid, f"{path / tag}: {[p.sentence for p in report.problems][:3]}")
                self.verified.add((str(path), saved.save_id))

    # The rest is how.

    def _build(self, salt: int, own: Mapping[str, Any]) -> dict[str, Any]:
        """How an engine is built. Sub-groups are cut in one of several ways."""
        kind = {**self.kind, **own, "zero": {**self.kind.get("zero", {}), **own.get("zero", {})}}
        return {"sub_group_size": 150 + 50 * (salt % 4), "seed": salt, **kind}

    def _live(self, job: str) -> Live:
        if job not in self.live:
            raise Skipped
        return self.live[job]

    def _call(self, job: str, name: str, **kwargs: Any) -> list[Answer]:
        answers = self.jobs[job].call(name, **kwargs)
        hung = [answer for answer in answers if answer.kind == "hang"]
        self._require(not hung, f"{name} hangs: {hung[:1]}")
        return answers

    def _ok(self, job: str, name: str, **kwargs: Any) -> list[Any]:
        return self._all_ok(name, self._call(job, name, **kwargs))

    def _all_ok(self, what: str, answers: Sequence[Answer]) -> list[Any]:
        wrong = [str(answer) for answer in answers if answer.kind != "ok"]
        trace = next((str(answer.value) for answer in answers if answer.kind == "error"), "")
        self._require(not wrong, f"{what} fails on {len(wrong)} of {len(answers)} ranks: {wrong[:1]}\n{trace[-1500:]}")
        return [answer.value for answer in answers]

    def _require(self, holds: bool, text: str) -> None:
        if not holds:
            raise Failed(text.replace(str(self.root), ""))

    def _measure(self, job: str) -> None:
        found = self._all_ok("state", self.jobs[job].call("state"))
        self._require(len(set(map(_held_by, found))) == 1, f"the ranks of job {job} hold different states")
        live = self.live[job]
        live.state, live.step, live.position = _held_by(found[0])

    def _saved(
        self, live: Live, directory: str, tag: str | None, client_state: Mapping[str, Any] | None
    ) -> tuple[Path, Saved]:
        path = self.path(directory, live.cwd)
        name = f"global_step{live.step}" if tag is None else tag
        return path, replace(self._copied(live, name), client_state=dict(client_state or {}), position=None)

    def _copied(self, live: Live, tag: str) -> Saved:
        """A save of what an engine holds, with its position."""
        assert live.state is not None
        number = next(self._saves)
        return Saved(
            tag, live.state, live.step, live.world_size, {}, position=live.position, origin=live.origin,
            number=number, committed=number,
        )  # fmt: skip

    def _refused(self, answers: Sequence[Answer], saved: Saved) -> bool:
        """Whether an odd save was refused by name, on every rank, before anything was written."""
        odd = saved.tag in ODD_TAGS or any(key in OWN_KEYS for key in saved.client_state)
        return odd and self._refuse(answers)

    def _refuse(self, answers: Sequence[Answer]) -> bool:
        return all(answer.kind == "error" and REFUSALS & set(answer.names) for answer in answers)

    def _commit(self, path: str, saved: Saved, live: Live, *, others: int = 0, keep: bool = True) -> None:
        model = self.directory(path)
        # A tag that is saved again is another directory; the files of others stay.
        self.listings.pop(path, None)
        model.commit(replace(saved, committed=next(self._saves)))
        live.continues = saved.number
        if keep:
            self._after_keep(path, live)
        seen = disk.look(Path(path))
        beside = os.path.dirname(on_disk(saved.tag))
        mine = {name for name in seen.hidden if os.path.dirname(name) == beside}
        flying = sum(live.pending is not None and live.pending.directory == path for live in self.live.values())
        self._require(
            len(mine) <= flying + others + self._num_held, f"{path}: left over after a later save: {sorted(mine)}"
        )

    def _flushed(self, job: str, *, others: int = 0, keep: bool = True) -> None:
        """The save in the background is committed now; ``others`` may have begun since."""
        live = self.live[job]
        if live.pending is not None:
            pending, live.pending = live.pending, None
            self._commit(pending.directory, pending.saved, live, others=others, keep=keep)

    def _after_keep(self, path: str, live: Live) -> None:
        """What the option "keep" has removed after a commit."""
        if live.options.get("keep"):
            kept = self.directory(path).kept(live.options["keep"], only=live.origin.net)
            self._removed(path, kept, f'"keep": {live.options["keep"]}')

    def _removed(self, path: str, kept: Collection[str], what: str) -> None:
        """Take note of the tags that are gone: none of those to be kept."""
        model, seen = self.directory(path), disk.look(Path(path))
        gone = [name for name in model.tags if on_disk(name) not in seen.ids]
        lost = [name for name in gone if name in kept]
        self._require(not lost, f"{what} removed {lost}")
        for name in gone:
            del model.tags[name]
            self.listings.pop(path, None)

    def _settle(self, job: str) -> None:
        """Let the saves in the background of a process end."""
        for name in self._names(job):
            if self.live[name].pending is not None:
                self._release(name)
                self._ok(name, "wait")
                self._flushed(name)

    def _names(self, job: str) -> list[str]:
        """The engines of the same processes."""
        return [name for name in self.jobs if self.jobs[name].processes is self.jobs[job].processes]

    def _wait_done(self, job: str) -> None:
        deadline = time.monotonic() + 30
        while not all(self._ok(job, "is_done")):
            self._require(time.monotonic() < deadline, "a save in the background does not end")
            time.sleep(0.005)

    def _new_gate(self) -> Path:
        gate = self.root / f"gate{next(self._gate)}"
        gate.touch()
        return gate

    def _release(self, job: str) -> None:
        gate = self.gates.pop(job, None)
        if gate is not None:
            gate.unlink(missing_ok=True)

    def _in_flight(self, path: Path | str) -> bool:
        return any(live.pending is not None and live.pending.directory == str(path) for live in self.live.values())

    def _memory_of(self, job: str) -> Path:
        """Where the nodes of a job have their memory. Engines of the same processes have it in common."""
        return self.root / "memory" / process_of(job)

    @contextmanager
    def _held(
        self, job: str, name: str, rank: int, at: int, *, thread: bool = False, **kwargs: Any
    ) -> Iterator[list[Answer]]:
        """The command, stopped on one rank at an event, while the block runs; its answers are there afterwards.

        Where the command is over before the event comes, the block runs after it.
        """
        running = self.jobs[job]
        gate = self._new_gate()
        chosen = rank % max(running.world_size, 1)
        running.send_to(chosen, "arm", kind="hold", at=at, gate=str(gate), background=thread)
        assert running.processes[chosen].connection.recv()[0] == "ok"
        running.send(name, **kwargs)
        answers: list[Answer] = []
        deadline = time.monotonic() + 60
        while not list(self.root.glob(f"{gate.name}.held.*")) and time.monotonic() < deadline:
            over = all(process.connection.poll() for process in running.processes)
            if over and (not thread or time.monotonic() > deadline - 59.5):  # a thread goes on after the command
                break
            time.sleep(0.002)
        self._num_held += 1
        try:
            yield answers
        finally:
            self._num_held -= 1
            gate.unlink(missing_ok=True)
            answers += running.collect()

    def _choice(self, model: Directory, tag: str | None) -> list[Saved]:
        name = model.latest if tag is None else tag
        return [model.tags[name]] if name in model.tags else []

    def _judge_load(self, job: str, answers: Sequence[Answer], allowed: Sequence[Saved], model: Directory) -> None:
        """The state is that of the save, exactly; or there is none, and the load says so."""
        live = self.live[job]
        loaded = all(answer.kind == "ok" and answer.value[0] for answer in answers)
        damaged = any(saved.damage for saved in allowed)
        if not allowed:
            self._require(not loaded, "a tag was loaded that is not there")
            return
        if not loaded and damaged:
            self._same_error(answers)
            live.state = None
            return
        self._all_ok("load", answers)
        self._require(loaded, f"load_checkpoint loads nothing, {[s.tag for s in allowed]} is there")
        self._holds(job, allowed, [answer.value[1] for answer in answers])

    def _going_on(self, job: str, path: Path | str) -> tuple[list[Saved], bool]:
        """What a resume may take, and whether it has to fail because what it would take is damaged."""
        live, model = self.live[job], self.directory(path)
        memory = self.memory.get((job, str(path))) if live.memory else None
        if memory is None:
            return model.resumable(live.origin.net), False
        return memory.resumable(model, live.origin.net, live.nodes)

    def _judge_resume(
        self,
        job: str,
        answers: Sequence[Answer],
        allowed: Sequence[Saved],
        model: Directory,
        *,
        required: bool = False,
        damaged: bool = False,
    ) -> None:
        live = self.live[job]
        if not allowed:
            if model.tags or required or damaged or live.state is None:  # no run begins from what a failed load left
                self._same_error(answers)
                if damaged or any(saved.damage for saved in model.tags.values()):
                    live.state = None
            else:
                for value in self._all_ok("resume", answers):
                    self._require(value["tag"] is None, f"resume loads {value['tag']!r} from an empty directory")
                self._measure_unchanged(job)
            return
        values = self._all_ok("resume", answers)
        first = values[0]
        fitting = [
            saved
            for saved in allowed
            if (saved.tag == IN_MEMORY if first["tier"] == "memory" else saved.tag == first["tag"])
        ]
        for value in values:
            self._require(
                bool(fitting) and (value["tag"], value["tier"]) == (first["tag"], first["tier"]),
                f"resume goes on from {value['tag']!r} ({value['tier']}), the newest is {allowed[0].tag!r} of step "
                f"{allowed[0].step}; {value['passed']}",
            )
        self._holds(job, fitting, [value["client_state"] for value in values], with_position=True)

    def _same_error(self, answers: Sequence[Answer]) -> None:
        kinds = {answer.kind for answer in answers}
        self._require(kinds == {"error"}, f"an error is expected on every rank: {[str(a)[:300] for a in answers]}")
        ours = all("ZeroElasticError" in answer.names for answer in answers)
        self._require(ours, f"an error that is not ours: {answers[0]}\n{answers[0].value}")

    def _holds(
        self,
        job: str,
        allowed: Sequence[Saved],
        client_states: Sequence[Mapping[str, Any]],
        *,
        with_position: bool = False,
    ) -> None:
        """The engine holds one of these saves, bit for bit, with its client state."""
        live = self.live[job]
        before = None if live.state is None else live.position
        self._measure(job)
        held = (live.state, live.step, live.position)
        expected = {
            (saved.state, saved.loaded_step, before if saved.position is None or not with_position else saved.position)
            for saved in allowed
        }
        if before is None:
            expected |= {(state, step, live.position) for state, step, position in expected if position is None}
        fitting = [saved for saved in allowed if (saved.state, saved.loaded_step) == (live.state, live.step)]
        # A tag that is saved again meanwhile may have the same state, and another client state.
        fitting.sort(key=lambda saved: any(_wrong(saved, found) for found in client_states))
        self._require(
            held in expected, f"loaded {text_of(*held)}; saved was {[saved.tag for saved in allowed]} {expected}"
        )
        live.loaded(fitting[0], fitting[0].number)
        for found in client_states:
            wrong = _wrong(fitting[0], found)
            self._require(not wrong, f"client state {wrong}, saved {dict(fitting[0].client_state)}")

    def _measure_unchanged(self, job: str) -> None:
        live = self.live[job]
        before = (live.state, live.step, live.position)
        self._measure(job)
        self._require((live.state, live.step, live.position) == before, "what loads nothing changed the engine")

    def _end(self, job: str) -> None:
        names = self._names(job)
        self.jobs[job].end()
        for name in names:
            self._release(name)
            del self.jobs[name], self.live[name]

    def _interrupt_pending(self, job: str) -> None:
        """Kill a job that only waits; what it saves in the background may be there or not."""
        for rank in range(self.live[job].world_size):
            self.jobs[job].signal(rank, signal.SIGKILL)
        self.jobs[job].collect()
        self._crashed(job)

    def _crashed(self, job: str) -> None:
        """The processes of a job were killed: their saves in the background are there or not."""
        live = [self.live[name] for name in self._names(job)]
        self._end(job)
        for one in live:
            if one.pending is not None:
                self._resolve(Path(one.pending.directory), one.pending.saved, one)

    def _resolve(self, path: Path, saved: Saved, live: Live) -> None:
        """Look which of the two the disk has after a kill."""
        seen = disk.look(path)
        model = self.directory(path)
        ids = {tag: seen.ids[on_disk(tag)] for tag in [saved.tag] if on_disk(tag) in seen.ids}
        try:
            self.directories[str(path)] = interrupted(
                model, replace(saved, committed=next(self._saves)), ids=ids, latest=seen.latest
            )
        except AssertionError as error:
            raise Failed(str(error)) from None
        self.listings.pop(str(path), None)
        self._after_keep(str(path), live)


def _wrong(saved: Saved, found: Mapping[str, Any]) -> dict[str, Any]:
    """What is not the saved client state; what DeepSpeed has a use of its own for is not given back."""
    expected = {key: value for key, value in saved.client_state.items() if key not in OWN_KEYS}
    return {key: found.get(key) for key, value in expected.items() if found.get(key) != value}


def _held_by(found: Mapping[str, Any]) -> tuple[str, int, int]:
    return found["state"], found["step"], found["position"]


def text_of(state: str | None, step: int, position: int) -> str:
    return f"state {state} of step {step} at sample {position}"


def process_of(job: str) -> str:
    """The job whose processes an engine is in: "a" for "a_D"."""
    return job.partition("_")[0]


def on_disk(tag: str) -> str:
    return os.path.normpath(tag)


def _is_of(file: str, tags: Mapping[str, Saved]) -> bool:
    return any(file.startswith(f"{on_disk(tag)}/") for tag in tags)


def _tag_like(name: str, tags: Mapping[str, Saved]) -> bool:
    return name in tags or on_disk(name) in {on_disk(tag) for tag in tags}
