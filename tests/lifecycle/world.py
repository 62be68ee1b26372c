"""The actions, each on real processes and on the model.

An action is a name and plain values, so that a sequence can be written down, played again and made shorter:

    world.act("start", job="a", world_size=2)
    world.act("save", job="a", directory="run", tag="best")
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lifecycle import disk
from lifecycle.bench import ODD_TAGS, OWN_KEYS, Bench, Failed, Skipped, on_disk
from lifecycle.model import Live, Pending, Saved

__all__ = ["ODD_TAGS", "OWN_KEYS", "Failed", "Skipped", "World"]


class World(Bench):
    """Everything that people do."""

    # Jobs.

    def do_start(self, job: str, world_size: int, elastic: bool = True) -> None:
        if job in self.jobs:
            raise Skipped
        cwd = self.root / "home"
        started = self.server.start(world_size, cwd, self.root)
        self.jobs[job] = started
        salt = next(self._salt)
        cut = {"stage": self.stage, "sub_group_size": 30 + 10 * (salt % 4)}
        answers = started.call("build", seed=salt, precision=self.precision, elastic=elastic, **cut)
        found = self._all_ok("build", answers)[0]
        self.live[job] = Live(world_size, found["state"], found["step"], str(cwd))

    def do_train(self, job: str, steps: int = 1) -> None:
        live = self._live(job)
        if live.state is None:
            raise Skipped
        self._ok(job, "train", steps=steps, salt=next(self._salt))
        self._measure(job)

    def do_chdir(self, job: str, to: str) -> None:
        live = self._live(job)
        target = str(self.root / to)
        self._ok(job, "chdir", to=target)
        live.cwd = target

    def do_freeze(self, job: str, frozen: bool) -> None:
        live = self._live(job)
        self._ok(job, "freeze", trained=not frozen)
        live.frozen = frozen

    def do_reinstall(self, job: str) -> None:
        if self._live(job).pending is not None:
            raise Skipped
        self._ok(job, "reinstall")

    def do_destroy(self, job: str) -> None:
        """A job that ends: what it saves in the background is finished first."""
        self._live(job)
        self._release(job)
        self._ok(job, "destroy")
        self._flushed(job)
        self._end(job)

    # Saves.

    def do_save(
        self,
        job: str,
        directory: str = "run",
        tag: str | None = None,
        background: bool = False,
        hold: int = 0,
        client_state: Mapping[str, Any] | None = None,
    ) -> None:
        """``hold``: a save in the background stops at this event until something waits for it."""
        live = self._live(job)
        if live.state is None:
            raise Skipped
        self._release(job)
        path, saved = self._saved(live, directory, tag, client_state)
        keywords = {"directory": self.given(directory), "tag": tag, "client_state": client_state}
        if background and hold:
            self._wait_done(job)  # or the thread of the save before this one would stop
            gate = self._new_gate()
            self.gates[job] = gate
            self._ok(job, "arm", kind="hold", at=hold, gate=str(gate), background=True)
            # The fault belongs to the thread that outlives the command.
        answers = self._call(job, "save", **keywords, background=background)
        self._flushed(job, others=int(background))  # the new save is on its way by now
        if self._refused(answers, saved):
            self._release(job)
            return
        self._all_ok("save", answers)
        live.pending = Pending(str(path), saved)
        if not background:
            self._flushed(job)
        elif not hold:
            self._wait_done(job)
            self._flushed(job)

    def do_wait(self, job: str) -> None:
        self._live(job)
        self._release(job)
        self._ok(job, "wait")
        self._flushed(job)

    # Loads.

    def do_load(self, job: str, directory: str = "run", tag: str | None = None, verify: str = "full") -> None:
        live = self._live(job)
        path = self.path(directory, live.cwd)
        self._release(job)
        answers = self._call(job, "load", directory=self.given(directory), tag=tag, verify=verify)
        self._flushed(job)
        self._judge_load(job, answers, self._choice(self.directory(path), tag), self.directory(path))

    def do_resume(self, job: str, directory: str = "run", required: bool = False) -> None:
        live = self._live(job)
        path = self.path(directory, live.cwd)
        self._release(job)
        answers = self._call(job, "resume", directory=self.given(directory), required=required)
        self._flushed(job)
        model = self.directory(path)
        self._judge_resume(job, answers, model.resumable(), model, required=required)

    def do_load_during_save(
        self, reader: str, writer: str, directory: str, tag: str, at: int, rank: int = 0, verify: str = "full",
        resume: bool = False, other_tag: str | None = None,
    ) -> None:  # fmt: skip
        """One job loads a tag; in the middle of that another one saves it again, or saves another one."""
        if reader == writer or self._live(writer).pending or self._live(writer).state is None:
            raise Skipped
        live = self._live(reader)
        path = self.path(directory, live.cwd)
        model = self.directory(path)
        if tag not in model.tags or self._in_flight(path):
            raise Skipped
        self._release(reader)
        before = model.resumable() if resume else [model.tags[tag]]
        place = "/" + os.path.relpath(path, self.root)
        name, keywords = ("resume", {"required": False}) if resume else ("load", {"tag": tag, "verify": verify})
        with self._held(reader, name, rank, at, directory=self.given(directory), **keywords) as answers:
            self.do_save(writer, place, other_tag or tag)
            self._compare_disk()
        self._flushed(reader)
        after = self.directory(path)
        if resume:
            if not before and all(answer.kind == "error" for answer in answers):
                self._same_error(answers)  # the tag was damaged when it was looked at
                self.live[reader].state = None
                return
            self._judge_resume(reader, answers, [*before, *after.resumable()], after)
        else:
            self._judge_load(reader, answers, [*before, after.tags[tag]], after)

    # Signals and kills.

    def do_preempt(
        self,
        job: str,
        script: Sequence[Sequence[Any]],
        directory: str = "run",
        every_steps: int | None = None,
        background: bool = False,
        signal_again: bool = False,
    ) -> None:
        """A training loop under ``preemption``; a signal in it ends the job with a save."""
        live = self._live(job)
        path = self.path(directory, live.cwd)
        model = self.directory(path)
        loads = [args[0] for what, *args in script if what == "load"]
        if live.state is None or any(tag not in model.tags or model.tags[tag].damage for tag in loads):
            raise Skipped
        self._release(job)
        answers = self._call(
            job,
            "loop",
            directory=self.given(directory),
            script=[tuple(item) for item in script],
            every_steps=every_steps,
            background=background,
            salt=next(self._salt),
        )
        self._flushed(job)
        found = self._all_ok("preemption", answers)[0]
        for tag in found["saves"]:
            now = found["states"][tag]
            self._commit(str(path), Saved(tag, now["state"], now["step"], live.world_size, {}))
        end = found["states"]["end"]
        live.state, live.step = end["state"], end["step"]
        steps = [what for what, *_ in script]
        told = "signal" in steps and "train" in steps[steps.index("signal") :]
        self._require(found["stopped"] == told, f"stopped is {found['stopped']} after {script}")
        if every_steps == 1:
            trained = steps[: steps.index("train", steps.index("signal")) + 1] if told else steps
            expected = sum(what == "train" for what in trained)
            self._require(len(found["saves"]) == expected, f"{expected} steps were to be saved: {found['saves']}")
        if told:
            newest = model.tags.get(model.latest or "")
            self._require(
                newest is not None and newest.state == end["state"],
                f"the job was stopped at step {end['step']}, and what it had then is not saved",
            )
            answers = self._call(job, "leave", signal_again=signal_again)
            codes = [answer.code for answer in answers]
            self._require(codes == [75] * live.world_size, f"exit codes {codes} of a preempted job")
            self._end(job)

    def do_kill(
        self,
        job: str,
        moment: str,
        at: int = 1,
        rank: int = 0,
        everyone: bool = True,
        how: str = "kill",
        directory: str = "run",
        tag: str | None = None,
        background: bool = False,
    ) -> None:
        """End ranks while the job waits, saves, loads or resumes; one of them, or all."""
        live = self._live(job)
        if moment == "save" and live.state is None:
            raise Skipped
        path = self.path(directory, live.cwd)
        if moment == "idle":
            self._interrupt_pending(job)
            return
        model = self.directory(path)
        number = signal.SIGKILL if how == "kill" else signal.SIGTERM
        loads = moment in ("load", "resume")
        choice = model.resumable()[:1] if moment == "resume" else self._choice(model, tag)
        if loads and not choice:
            raise Skipped
        keywords: dict[str, Any] = {"directory": self.given(directory)}
        if moment == "save":
            _, saved = self._saved(live, directory, tag, None)
            keywords |= {"tag": tag, "client_state": None, "background": background}
        else:
            keywords |= {"required": False} if moment == "resume" else {"tag": tag, "verify": "full"}
        if live.pending is not None:
            self.do_wait(job)  # the save before this one is no part of it
        reached = False
        with self._held(job, moment, rank, at, thread=background and moment == "save", **keywords) as answers:
            reached = True
            for victim in range(live.world_size) if everyone else [rank % live.world_size]:
                self.jobs[job].signal(victim, number)
        hung = [answer for answer in answers if answer.kind == "hang"]
        self._require(not hung, f"a rank that lives waits for one that is gone: {hung[:1]}")
        self._flushed(job)
        if loads and reached and how == "kill":
            model.deaths[choice[0].tag] = model.deaths.get(choice[0].tag, 0) + 1
        said_ok = moment == "save" and not background and any(answer.kind == "ok" for answer in answers)
        self._end(job)
        if moment == "save":
            self._resolve(path, saved)
            if said_ok:
                self._require(
                    saved.tag in self.directory(path).tags
                    and self.directory(path).tags[saved.tag].state == saved.state,
                    f"save_checkpoint returned on a rank, and {saved.tag!r} was not committed",
                )

    # Tools, damage, copies.

    def do_verify(self, directory: str, tag: str, job: str = "", at: int = 0) -> None:
        """``zeroelastic verify``; with ``job``, that one saves the tag again in the middle of it."""
        path = self.path(directory, str(self.root / "home"))
        if tag not in self.directory(path).tags:
            raise Skipped
        code, text = self._tool(["verify", str(path / tag)], path, job, tag, at)
        damaged = self.directory(path).tags[tag].damage and not job
        self._require(code == (3 if damaged else 0), f"verify of {tag!r} exits with {code}: {text[-600:]}")

    def do_latest_fix(self, directory: str, job: str = "", tag: str | None = None, at: int = 0) -> None:
        """``zeroelastic latest --fix``; with ``job``, that one saves a tag in the middle of it."""
        path = self.path(directory, str(self.root / "home"))
        model = self.directory(path)
        if not model.tags:
            raise Skipped
        healthy = bool(model.healthy())
        code, text = self._tool(["latest", str(path), "--fix"], path, job, tag, at)
        self._require(code == (0 if healthy else 3) or bool(job), f"latest --fix exits with {code}: {text[-600:]}")
        model = self.directory(path)
        if model.healthy():
            model.latest = model.healthy()[0].tag

    def do_latest_set(self, directory: str, tag: str) -> None:
        """``zeroelastic latest --set``: a rollback by hand."""
        path = self.path(directory, str(self.root / "home"))
        model = self.directory(path)
        if tag not in model.tags:
            raise Skipped
        code, text = self._tool(["latest", str(path), "--set", tag], path, "", None, 0)
        if model.tags[tag].damage and code:
            return  # refused
        self._require(code == 0, f"latest --set exits with {code}: {text[-600:]}")
        model.latest, model.pointed = tag, model.newest_first()[0].tag != tag

    def do_prune(self, directory: str, keep: int, job: str = "", tag: str | None = None, at: int = 0) -> None:
        """``zeroelastic prune``; with ``job``, that one saves a tag in the middle of it."""
        path = self.path(directory, str(self.root / "home"))
        model = self.directory(path)
        if not any(saved.damage in ("", "flip") for saved in model.tags.values()):
            raise Skipped
        kept = model.kept(keep)
        code, text = self._tool(["prune", str(path), "--keep", str(keep), "--yes"], path, job, tag, at)
        self._require(code == 0, f"prune exits with {code}: {text[-600:]}")
        model, seen = self.directory(path), disk.look(path)
        kept &= model.kept(keep)  # what was saved meanwhile counts where prune saw it
        lost = [name for name in model.tags if name in kept and on_disk(name) not in seen.ids]
        self._require(not lost, f"prune --keep {keep} removed {lost}")
        if job:
            self._require(on_disk(model.newest_first()[0].tag) in seen.ids, "prune removed what was saved while it ran")
        for name in [name for name in model.tags if on_disk(name) not in seen.ids]:
            del model.tags[name]
            self.listings.pop(str(path), None)

    def do_damage(self, directory: str, tag: str, kind: str) -> None:
        path = self.path(directory, str(self.root / "home"))
        model = self.directory(path)
        if tag not in model.tags or model.tags[tag].damage:
            raise Skipped
        disk.damage(path / tag, kind)
        model.tags[tag] = replace(model.tags[tag], damage=kind)
        self.listings.pop(str(path), None)

    def do_copy(self, directory: str, to: str) -> None:
        """``cp -r`` of a directory: the times of its files are new, and their order is any."""
        path = self.path(directory, str(self.root / "home"))
        target = self.root / to[1:]
        pointed = self.directory(path).pointed  # only the times of files tell, which cp -r changes
        if self._in_flight(path) or not self.directory(path).tags or target.exists() or pointed:
            raise Skipped
        shutil.copytree(path, target, copy_function=shutil.copyfile, symlinks=True)
        self.directories[str(target)] = self.directory(path).copy()
        self.listings.pop(str(target), None)
        self.directories[str(target)].crashed = self.directory(path).crashed

    def _tool(self, args: list[str], path: Path, job: str, tag: str | None, at: int) -> tuple[int, str]:
        """A verb in a process of its own; with ``job``, stopped at an event while that job saves."""
        if job and (self._live(job).pending or self._in_flight(path) or self.live[job].state is None):
            raise Skipped
        with self.server.tool(self.root / "home", self.root) as tool:
            if not job:
                answers = tool.call("tool", args=args)
            else:
                self.jobs["tool"] = tool
                try:
                    with self._held("tool", "tool", 0, at, args=args) as answers:
                        self.do_save(job, "/" + os.path.relpath(path, self.root), tag)
                finally:
                    del self.jobs["tool"]
        code, text = self._all_ok(args[0], answers)[0]
        return code, text
