"""The actions, each on real processes and on the model.

An action is a name and plain values, so that a sequence can be written down, played again and made shorter:

    world.act("start", job="a", world_size=2)
    world.act("save", job="a", directory="run", tag="best")
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lifecycle import disk
from lifecycle.bench import IN_MEMORY, ODD_TAGS, OWN_KEYS, REFUSED_KEYS, Bench, Failed, Skipped, process_of
from lifecycle.model import Live, Memory, Origin, Pending, Saved

__all__ = ["ODD_TAGS", "OWN_KEYS", "Failed", "Skipped", "World"]


class World(Bench):
    """Everything that people do."""

    # Jobs.

    def do_start(
        self,
        job: str,
        world_size: int,
        elastic: bool = True,
        options: Mapping[str, Any] | None = None,
        own: Mapping[str, Any] | None = None,
    ) -> None:
        """Start a job, on the nodes that it had before as far as there are some. "a_D" is one more engine of "a".

        ``own``: the stage and what else it has in another way than the world's other jobs.
        """
        if job in self.jobs or (process_of(job) != job and process_of(job) not in self.jobs):
            raise Skipped
        cwd = self.root / "home"
        if process_of(job) == job:
            self.jobs[job] = self.server.start(world_size, cwd, self.root)
            nodes = self.nodes.get(job, ())
            self.nodes[job] = (*nodes[:world_size], *(next(self._node) for _ in range(world_size - len(nodes))))
            for node in nodes[world_size:]:
                shutil.rmtree(self._memory_of(job) / f"node{node}", ignore_errors=True)
        else:
            first = process_of(job)
            self._settle(first)
            self.jobs[job], cwd = replace(self.jobs[first], net="D"), Path(self.live[first].cwd)
            world_size = self.live[first].world_size
        salt, own = next(self._salt), dict(own or {})
        options = {**own.pop("options", {}), **(options or {})}
        nodes, origin = self.nodes[process_of(job)], Origin(salt, self.jobs[job].net)
        answers = self.jobs[job].call(
            "build",
            **self._build(salt, own),
            elastic=elastic,
            options=options,
            nodes=[str(self._memory_of(job) / f"node{node}") for node in nodes],
        )
        found = self._all_ok("build", answers)[0]
        self.live[job] = Live(
            world_size, found["state"], found["step"], str(cwd), found["position"], origin,
            options, nodes, elastic,
        )  # fmt: skip

    def do_train(self, job: str, steps: int = 1) -> None:
        live = self._live(job)
        if live.state is None:
            raise Skipped
        self._ok(job, "train", steps=steps, salt=next(self._salt))
        self._measure(job)

    def do_chdir(self, job: str, to: str) -> None:
        self._live(job)
        target = str(self.root / to)
        self._ok(job, "chdir", to=target)
        for name in self._names(job):
            self.live[name].cwd = target

    def do_freeze(self, job: str, frozen: bool) -> None:
        live = self._live(job)
        self._ok(job, "freeze", trained=not frozen)
        live.frozen = frozen

    def do_reinstall(self, job: str) -> None:
        self._live(job)
        if any(self.live[name].pending is not None for name in self._names(job)):
            raise Skipped
        self._ok(job, "reinstall")

    def do_destroy(self, job: str) -> None:
        """A job that ends: what it saves in the background is finished first, and what is in memory goes with it."""
        self._live(job)
        for name in self._names(job):
            self._release(name)
        self._ok(job, "destroy")
        for name in self._names(job):
            self._flushed(name)
        self._end(job)
        shutil.rmtree(self._memory_of(job), ignore_errors=True)
        self.nodes.pop(process_of(job), None)
        for key in [key for key in self.memory if process_of(key[0]) == process_of(job)]:
            del self.memory[key]

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
        odd = tag in ODD_TAGS or not REFUSED_KEYS.isdisjoint(client_state or ())
        if live.state is None or (odd and not live.elastic):
            raise Skipped  # without the flag DeepSpeed saves these alone, and there is no commit record
        self._release(job)
        if len(self._names(job)) > 1:
            self._settle(job)
        path, saved = self._saved(live, directory, tag, client_state)
        keywords = {"directory": self.given(directory), "tag": tag, "client_state": client_state}
        if background and hold:
            self._wait_done(job)  # or the thread of the save before this one would stop
            gate = self._new_gate()
            self.gates[job] = gate
            self._ok(job, "arm", kind="hold", at=hold, gate=str(gate), background=True)
            # The fault belongs to the thread that outlives the command.
        answers = self._call(job, "save", **keywords, background=background)
        self._flushed(job, others=int(background), keep=False)  # the new save is on its way by now, or committed
        if self._refused(answers, saved):
            self._release(job)
            return
        self._all_ok("save", answers)
        live.pending, live.begun = Pending(str(path), saved), saved.number
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
        choice = self._choice(self.directory(path), tag)
        if any(saved.origin.net != live.origin.net for saved in choice):
            self._same_error(answers)  # and nothing has changed
            return
        self._judge_load(job, answers, choice, self.directory(path))

    def do_resume(self, job: str, directory: str = "run", required: bool = False) -> None:
        live = self._live(job)
        path = self.path(directory, live.cwd)
        self._settle(job)
        allowed, damaged = self._going_on(job, path)
        strict = bool(allowed) and all(saved.position is not None for saved in allowed)
        answers = self._call(job, "resume", directory=self.given(directory), required=required, strict=strict)
        self._judge_resume(job, answers, allowed, self.directory(path), required=required, damaged=damaged)
        if live.memory and all(answer.kind == "ok" for answer in answers):
            self._goes_on_in_memory(job, path, from_memory=answers[0].value["tier"] == "memory")
            live.unprotected = answers[0].value["unsaved"] and not live.looped

    def _goes_on_in_memory(self, job: str, path: Path, *, from_memory: bool) -> None:
        """After a resume, memory has what it was from, or nothing."""
        memory = self.memory.pop((job, str(path)), Memory())
        if from_memory:
            live = self.live[job]
            held = (live.state, live.step, live.position)
            (kept,) = [one for one in memory.kept if (one.saved.state, one.saved.step, one.saved.position) == held][:1]
            on_disk = self.directory(path).resumable(live.origin.net)
            live.loaded(kept.saved, on_disk[0].number if on_disk else kept.parent)
            self.memory[job, str(path)] = Memory([kept])

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
        if tag not in model.tags or self._in_flight(path) or self.live[writer].options.get("keep"):
            raise Skipped
        if self._unlike(live, replace(model.tags[tag], damage="")):
            raise Skipped
        if (reader, str(path)) in self.memory or reader in self._names(writer):
            raise Skipped
        self._settle(reader)
        net = live.origin.net
        before = model.resumable(net) if resume else [model.tags[tag]]
        place = "/" + os.path.relpath(path, self.root)
        name, keywords = (
            ("resume", {"required": False, "strict": False}) if resume else ("load", {"tag": tag, "verify": verify})
        )
        with self._held(reader, name, rank, at, directory=self.given(directory), **keywords) as answers:
            self.do_save(writer, place, other_tag or tag)
            self._compare_disk()
        self._flushed(reader)
        after = self.directory(path)
        if other_tag in (None, tag) and all("SavedAgainError" in str(answer) for answer in answers):
            self._same_error(answers)  # files of two saves may have been read
            self.live[reader].state = None
            return
        if resume:
            if not before and all(answer.kind == "error" for answer in answers):
                self._same_error(answers)  # the tag was damaged when it was looked at
                self.live[reader].state = None
                return
            self._judge_resume(reader, answers, [*before, *after.resumable(net)], after)
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
        workers: int = 0,
    ) -> None:
        """A training loop under ``preemption``; a signal in it ends the job with a save, a death without."""
        live = self._live(job)
        path = self.path(directory, live.cwd)
        model = self.directory(path)
        steps = [what for what, *_ in script]
        loads = [args[0] for what, *args in script if what == "load"]
        if live.state is None or any(tag not in model.tags or self._unlike(live, model.tags[tag]) for tag in loads):
            raise Skipped
        if loads and live.options.get("keep"):
            raise Skipped
        if (
            live.memory
            and "vanish" in steps
            and steps[: steps.index("vanish")].count("train") < 2 * live.memory["every"]
        ):
            raise Skipped  # the first checkpoint in memory is complete or not
        self._settle(job)
        journal, gate = self.root / f"journal{next(self._gate)}", self._new_gate()
        gate.unlink()
        answers = self._call(
            job,
            "loop",
            directory=self.given(directory),
            script=[tuple(item) for item in script],
            every_steps=every_steps,
            background=background,
            workers=workers,
            salt=next(self._salt),
            journal=str(journal),
            gate=str(gate),
        )
        events = [json.loads(line) for line in journal.read_text().splitlines()] if journal.exists() else []
        if live.memory and live.unprotected:
            kept = self.memory[job, str(path)].kept if (job, str(path)) in self.memory else []
            self.memory[job, str(path)] = Memory([live.kept(self._copied(live, IN_MEMORY)), *kept[:1]], certain=False)
        live.unprotected, live.looped = False, bool(live.memory) or live.looped
        saved = self._replayed(job, path, events)
        if (memory := self.memory.get((job, str(path)))) is not None and "vanish" not in steps:
            memory.kept, memory.certain = memory.kept[:1], True
        if any(answer.code == -signal.SIGKILL for answer in answers):
            gate.unlink(missing_ok=True)
            self._crashed(job)
            self._after_keep(str(path), live)
            return
        stopped = self._all_ok("preemption", answers)[0]
        self._flushed(job, keep=False)
        self._after_keep(str(path), live)
        is_signalled = any("train" in steps[at:] for at, what in enumerate(steps) if what in ("signal", "group"))
        self._require(stopped == is_signalled, f"stopped is {stopped} after {script}")
        if every_steps == 1:
            trained = sum(event["did"] == "step" for event in events)
            self._require(len(saved) >= trained, f"{trained} steps were to be saved: {saved}")
        if is_signalled:
            newest = model.tags.get(model.latest or "")
            self._require(
                newest is not None and (newest.state, newest.position) == (live.state, live.position),
                f"the job was stopped at step {live.step}, and what it had then is not saved",
            )
            if live.memory and (memory is None or memory.kept[0].saved.state != live.state):
                self.memory[job, str(path)] = Memory([live.kept(self._copied(live, IN_MEMORY))])
            answers = self._call(job, "leave", signal_again=signal_again)
            codes = [answer.code for answer in answers]
            self._require(codes == [75] * live.world_size, f"exit codes {codes} of a preempted job")
            self._end(job)

    def _unlike(self, live: Live, saved: Saved) -> bool:
        return bool(saved.damage) or saved.origin.net != live.origin.net

    def _replayed(self, job: str, path: Path, events: Sequence[Mapping[str, Any]]) -> list[str]:
        """What the model says after the events of a loop; the tags that were saved."""
        live, key, saved = self.live[job], (job, str(path)), list[str]()
        for event in events:
            if event["did"] == "loaded":
                self._flushed(job, keep=False)
                there = self.directory(path).tags[event["tag"]]
                position = live.position if there.position is None else there.position
                self._require(
                    (event["state"], event["step"], event["position"]) == (there.state, there.loaded_step, position),
                    f"a load of {event['tag']!r} in the loop gives {event}, saved was {there}",
                )
                live.loaded(there, there.number)
                self.memory.pop(key, None)
            live.state, live.step, live.position = event["state"], event["step"], event["position"]
            if event["did"] == "step" and live.memory and live.step % live.memory["every"] == 0:
                memory = self.memory.setdefault(key, Memory())
                memory.kept = [live.kept(self._copied(live, IN_MEMORY)), *memory.kept[:1]]
                memory.certain = False
            elif event["did"] == "saved":
                self._flushed(job, others=1, keep=False)
                made = self._copied(live, event["tag"])
                live.pending, live.begun = Pending(str(path), made), made.number
                saved.append(event["tag"])
                if not event["background"]:
                    self._flushed(job, keep=False)
            elif event["did"] == "released":
                self._flushed(job, keep=False)
        return saved

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
        model, memory = self.directory(path), self.memory.get((job, str(path)))
        number = signal.SIGKILL if how == "kill" else signal.SIGTERM
        loads = moment in ("load", "resume")
        choice = self._going_on(job, path)[0][:1] if moment == "resume" else self._choice(model, tag)
        if loads and (not choice or choice[0].origin.net != live.origin.net):
            raise Skipped
        keywords: dict[str, Any] = {"directory": self.given(directory)}
        if moment == "save":
            _, saved = self._saved(live, directory, tag, None)
            keywords |= {"tag": tag, "client_state": None, "background": background}
        else:
            keywords |= {"required": False, "strict": False} if moment == "resume" else {"tag": tag, "verify": "full"}
        self._settle(job)  # the save before this one is no part of it
        with self._held(job, moment, rank, at, thread=background and moment == "save", **keywords) as answers:
            for victim in range(live.world_size) if everyone else [rank % live.world_size]:
                self.jobs[job].signal(victim, number)
        hung = [answer for answer in answers if answer.kind == "hang"]
        self._require(not hung, f"a rank that lives waits for one that is gone: {hung[:1]}")
        if moment == "resume" and memory is not None and memory.kept:
            memory.certain = memory.certain and choice[0].tag == IN_MEMORY
        said_ok = moment == "save" and not background and any(answer.kind == "ok" for answer in answers)
        self._end(job)
        if moment == "save":
            self._resolve(path, saved, live)
            if said_ok:
                self._require(
                    saved.tag in self.directory(path).tags
                    and self.directory(path).tags[saved.tag].state == saved.state,
                    f"save_checkpoint returned on a rank, and {saved.tag!r} was not committed",
                )

    # Nodes.

    def do_lose_node(self, job: str, pick: int) -> None:
        """A node of a job that was killed goes, and what it has in memory."""
        nodes = self.nodes.get(job, ())
        if job in self.jobs or not nodes:
            raise Skipped
        lost = nodes[pick % len(nodes)]
        shutil.rmtree(self._memory_of(job) / f"node{lost}", ignore_errors=True)
        self.nodes[job] = tuple(node for node in nodes if node != lost)

    def do_damage_memory(self, job: str) -> None:
        """Flip a bit of a tensor of each checkpoint in the memory of a job that was killed, in each copy of it."""
        memories = [memory for (name, _), memory in self.memory.items() if process_of(name) == job]
        if job in self.jobs or not any(memory.kept for memory in memories):
            raise Skipped
        if not all(memory.certain for memory in memories) or any(one.damaged for m in memories for one in m.kept):
            raise Skipped
        files = list(self._memory_of(job).rglob("complete/*/*_optim_states.pt"))
        for tag in {file.parent.name for file in files}:
            copies = [file for file in files if file.parent.name == tag]
            for file in copies:
                if file.name == max(copy.name for copy in copies):
                    disk.flip(file, "/data/")
        for memory in memories:
            memory.kept = [replace(one, damaged=True) for one in memory.kept]

    # Tools, damage, copies.

    def do_verify(self, directory: str, tag: str, job: str = "", at: int = 0) -> None:
        """``zeroelastic verify``; with ``job``, that one saves the tag again in the middle of it, or after it."""
        path = self.path(directory)
        if tag not in self.directory(path).tags:
            raise Skipped
        damaged = self.directory(path).tags[tag].damage
        code, text = self._tool(["verify", str(path / tag)], path, job, tag, at)
        allowed = {3, 0} if damaged and job else {3 if damaged else 0}
        self._require(code in allowed, f"verify of {tag!r} exits with {code}: {text[-600:]}")

    def do_latest_fix(self, directory: str, job: str = "", tag: str | None = None, at: int = 0) -> None:
        """``zeroelastic latest --fix``; with ``job``, that one saves a tag in the middle of it."""
        path = self.path(directory)
        model = self.directory(path)
        if not model.tags:
            raise Skipped
        net = model.continued()
        healthy = bool(model.healthy(net))
        code, text = self._tool(["latest", str(path), "--fix"], path, job, tag, at)
        self._require(code == (0 if healthy else 3) or bool(job), f"latest --fix exits with {code}: {text[-600:]}")
        model = self.directory(path)
        net = model.continued()
        if model.healthy(net):
            model.latest = model.healthy(net)[0].tag

    def do_latest_set(self, directory: str, tag: str) -> None:
        """``zeroelastic latest --set``: a rollback by hand."""
        path = self.path(directory)
        model = self.directory(path)
        if tag not in model.tags:
            raise Skipped
        code, text = self._tool(["latest", str(path), "--set", tag], path, "", None, 0)
        if model.tags[tag].damage and code:
            return  # refused
        self._require(code == 0, f"latest --set exits with {code}: {text[-600:]}")
        model.latest = tag

    def do_prune(self, directory: str, keep: int, job: str = "", tag: str | None = None, at: int = 0) -> None:
        """``zeroelastic prune``; with ``job``, that one saves a tag in the middle of it."""
        path = self.path(directory)
        model = self.directory(path)
        if not any(saved.damage in ("", "flip") for saved in model.tags.values()):
            raise Skipped
        kept = model.kept(keep)
        code, text = self._tool(["prune", str(path), "--keep", str(keep), "--yes"], path, job, tag, at)
        self._require(code == 0, f"prune exits with {code}: {text[-600:]}")
        model = self.directory(path)
        kept &= model.kept(keep)  # what was saved meanwhile counts where prune saw it
        if job:
            kept.add(model.newest_first()[0].tag)
        self._removed(str(path), kept, f"prune --keep {keep}")

    def do_damage(self, directory: str, tag: str, kind: str) -> None:
        path = self.path(directory)
        model = self.directory(path)
        if tag not in model.tags or model.tags[tag].damage:
            raise Skipped
        disk.damage(path / tag, kind)
        model.tags[tag] = replace(model.tags[tag], damage=kind)
        self.listings.pop(str(path), None)

    def do_copy(self, directory: str, to: str) -> None:
        """``cp -r`` of a directory: the times of its files are new, and their order is any."""
        path = self.path(directory)
        target = self.root / to[1:]
        if self._in_flight(path) or not self.directory(path).tags or target.exists():
            raise Skipped
        shutil.copytree(path, target, copy_function=shutil.copyfile, symlinks=True)
        self.directories[str(target)] = self.directory(path).copy()
        self.listings.pop(str(target), None)

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
