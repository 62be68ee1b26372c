"""How sequences are drawn: hypothesis' rules over the actions of ``world``."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, Verbosity, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from lifecycle.bench import process_of
from lifecycle.jobs import Server
from lifecycle.kinds import KINDS, variant
from lifecycle.world import ODD_TAGS, OWN_KEYS, Failed, World

SIZES = st.sampled_from([1, 2, 2, 3])
JOBS = st.sampled_from(["a", "a", "a_D", "b"])
MEMORY: tuple[dict[str, Any], ...] = (
    {"every": 1},
    {"every": 1},
    {"every": 2},
    {"every": 1, "copies": 0},
)
PLACES = st.sampled_from(["run", "run", "run", "/home/run", "/elsewhere/run"])
DISK_PLACES = st.sampled_from(["/home/run", "/home/run", "/home/run", "/elsewhere/run", "/copy1", "/copy2"])
PLAIN_TAGS = st.sampled_from(["best", "last", None, None, "best", "last", "v1.5"])
TAGS = st.one_of(PLAIN_TAGS, PLAIN_TAGS, st.sampled_from(ODD_TAGS))
EVENTS = st.integers(1, 60)
PICKS = st.integers(0, 7)
WITH_MEMORY = st.sampled_from(MEMORY).map(lambda memory: {"memory": memory})
OPTIONS = st.one_of(st.just({}), WITH_MEMORY, st.sampled_from([{"keep": 1}, {"keep": 2}]))
OWN = st.integers(0, 2**16)
"""Chooses what a job has in another way than others of its world (``kinds.variant``)."""
STARTS = st.fixed_dictionaries({"world_size": SIZES, "options": OPTIONS, "own": OWN})
IN_MEMORY = st.fixed_dictionaries({"world_size": SIZES, "options": WITH_MEMORY, "own": OWN})
VERIFIED = st.sampled_from(["full", "quick", "off"])
CLIENT_STATES = st.sampled_from([None, None, {"note": "n", "epoch": 3}]) | st.sampled_from(OWN_KEYS).map(
    lambda key: {key: 7}
)


@dataclass
class Plan:
    """Where machines run, and what became of them."""

    server: Server
    scratch: Path
    collect: bool = False
    """Whether a failure is noted, and the next machine begins, instead of being raised."""
    most_actions: int | None = None
    stage: int | None = 3
    """The ZeRO stage of all jobs; None: every sequence has its own kind of jobs (``kinds``)."""
    ended: Callable[[World, Failed | None], None] = lambda world, failed: None
    actions: int = 0
    numbers: Any = field(default_factory=itertools.count)


alive = precondition(lambda self: self.going)


class Lifecycle(RuleBasedStateMachine):
    """Each rule draws an action, or some that people do one after the other; ``how`` starts a job that is not there."""

    plan: Plan

    def __init__(self) -> None:
        super().__init__()
        self.world: World | None = None
        self.failed: Failed | None = None

    @property
    def going(self) -> bool:
        enough = self.plan.most_actions is not None and self.plan.actions >= self.plan.most_actions
        return self.world is not None and self.failed is None and not enough

    def act(self, name: str, **params: Any) -> None:
        """Do it, unless the sequence has come to its end."""
        if not self.going:
            return
        assert self.world is not None
        if params.get("job") not in self.world.jobs and name != "start":
            params |= {"job": process_of(params["job"])} if "job" in params else {}
        try:
            self.plan.actions += self.world.act(name, **params)
        except Failed as failed:
            self.failed = failed
            if not self.plan.collect:
                raise Failed(f"{failed}\nthe sequence: {self.world.log}") from failed

    def tag(self, place: str, pick: int, job: str = "") -> str | None:
        """One of the tags that are there, the newest first."""
        assert self.world is not None
        there = self.world.tags_of(job, place)
        return there[-1 - pick % len(there)] if there else None

    def own(self, job: str, tag: str | None) -> str | None:
        """The tag as the engine of a job would name it. Both of one process may use the names for steps."""
        assert self.world is not None
        second = job in self.world.jobs and process_of(job) != job
        return f"D_{tag}" if tag and tag not in ODD_TAGS and second else tag

    def start(self, job: str, how: dict[str, Any]) -> None:
        """Start the job, if it is not there."""
        if self.world is not None and process_of(job) not in self.world.jobs:
            own = variant(self.world.kind, how.get("own", 0)) if self.plan.stage is None else {}
            self.act("start", job=process_of(job), **{**how, "own": own})

    @initialize(precision=st.sampled_from(["bf16", "bf16", "fp16"]), drawn=KINDS, how=STARTS)
    def begin(self, precision: str, drawn: dict[str, Any], how: dict[str, Any]) -> None:
        plan = self.plan
        if plan.most_actions is None or plan.actions < plan.most_actions:
            root = plan.scratch / f"world{next(plan.numbers)}"
            kind = drawn if plan.stage is None else {"precision": precision, "stage": plan.stage}
            self.world = World(plan.server, root, kind=kind)
            self.start("a", how)

    @rule()
    def nothing(self) -> None:
        """What is left to do once a sequence has ended."""

    @alive
    @rule(job=JOBS, how=STARTS, elastic=st.sampled_from([True, True, True, False]), steps=st.integers(1, 2))
    def train(self, job: str, how: dict[str, Any], elastic: bool, steps: int) -> None:
        self.start(job, how if elastic else {**how, "elastic": False})
        self.act("train", job=job, steps=steps)

    @alive
    @rule(
        job=JOBS,
        how=STARTS,
        place=PLACES,
        tag=TAGS,
        background=st.booleans(),
        hold=st.sampled_from([0, 0, 1, 2]),
        own=CLIENT_STATES,
        steps=st.integers(0, 2),
    )
    def save(self, job: str, how: dict[str, Any], place: str, tag: str | None, steps: int, **drawn: Any) -> None:
        self.start(job, how)
        if steps:
            self.act("train", job=job, steps=steps)
        written = {"background": True, "hold": drawn["hold"]} if drawn["background"] else {}
        given = {"client_state": drawn["own"]} if drawn["own"] else {}
        self.act("save", job=job, directory=place, tag=self.own(job, tag), **written, **given)

    @alive
    @rule(name=st.sampled_from(["wait", "reinstall", "destroy"]), job=JOBS)
    def plain(self, name: str, job: str) -> None:
        self.act(name, job=job)

    @alive
    @rule(job=JOBS, to=st.sampled_from(["home", "elsewhere"]))
    def chdir(self, **drawn: Any) -> None:
        self.act("chdir", **drawn)

    @alive
    @rule(job=JOBS, frozen=st.booleans())
    def freeze(self, **drawn: Any) -> None:
        self.act("freeze", **drawn)

    @alive
    @rule(job=JOBS, how=STARTS, place=PLACES, pick=st.none() | PICKS, verify=VERIFIED)
    def load(self, job: str, how: dict[str, Any], place: str, pick: int | None, verify: str) -> None:
        self.start(job, how)
        tag = None if pick is None else self.tag(place, pick, job)
        self.act("load", job=job, directory=place, tag=tag, verify=verify)

    @alive
    @rule(job=JOBS, how=STARTS, place=PLACES, required=st.sampled_from([False, False, True]))
    def resume(self, job: str, how: dict[str, Any], place: str, required: bool) -> None:
        self.start(job, how)
        self.act("resume", job=job, directory=place, **({"required": True} if required else {}))

    @alive
    @rule(job=JOBS, place=PLACES, pick=PICKS, steps=st.integers(1, 2))
    def roll_back(self, job: str, place: str, pick: int, steps: int) -> None:
        """Load an older tag, go on from there, and save."""
        assert self.world is not None
        tag = self.tag(place, pick, job)
        if job in self.world.jobs and tag is not None:
            self.act("load", job=job, directory=place, tag=tag)
            self.act("train", job=job, steps=steps)
            self.act("save", job=job, directory=place)

    @alive
    @rule(
        reader=st.sampled_from(["a", "b"]),
        how=STARTS,
        place=DISK_PLACES,
        pick=PICKS,
        at=EVENTS,
        rank=st.integers(0, 2),
        what=VERIFIED.map(lambda verify: {"verify": verify}) | st.just({"resume": True}),
        other=st.sampled_from([{}, {}, {"other_tag": "last"}]),
    )
    def load_during_save(
        self, reader: str, how: dict[str, Any], place: str, pick: int, what: Any, other: Any, **drawn: Any
    ) -> None:
        writer = "b" if reader == "a" else "a"
        if (tag := self.tag(place, pick)) is not None:
            self.start(reader, how)
            self.start(writer, {"world_size": 1})
            both = {"reader": reader, "writer": writer, "directory": place, "tag": tag}
            self.act("load_during_save", **both, **what, **other, **drawn)

    @alive
    @rule(job=st.sampled_from(["a_D", "b_D"]), options=OPTIONS)
    def second_engine(self, **drawn: Any) -> None:
        self.act("start", world_size=0, **drawn)

    @alive
    @rule(
        job=JOBS,
        how=IN_MEMORY,
        again=IN_MEMORY,
        place=st.sampled_from(["run", "run", "/home/run"]),
        steps=st.tuples(st.integers(1, 3), st.integers(0, 3)),
        saves=st.sampled_from([None, None, "save", "slow", "slow"]),
        late=st.sampled_from([True, True, False]),
        dies=st.sampled_from([["die"], ["die"], ["die", 0], ["vanish"], ["vanish", 1]]),
        lost=st.sampled_from([None, None, None, "node", "node", "bit"]),
        pick=PICKS,
    )
    def crash(self, job: str, how: dict[str, Any], again: dict[str, Any], place: str, **drawn: Any) -> None:
        """Train in a loop until all or one of the ranks die, perhaps lose something, start again and resume."""
        self.start(job, how)
        saves, (before, after) = drawn["saves"], drawn["steps"]
        script: list[list[Any]] = [["train"]] * before + ([[saves]] if saves else []) + [["train"]] * after
        script += [["release"]] if drawn["late"] and saves == "slow" else []
        self.act("preempt", job=job, directory=place, script=[*script, drawn["dies"], ["train"]])
        assert self.world is not None
        job = process_of(job)
        if job in self.world.jobs:
            return
        if drawn["lost"] == "bit":
            self.act("damage_memory", job=job)
        elif drawn["lost"]:
            self.act("lose_node", job=job, pick=drawn["pick"])
        self.start(job, again)
        self.act("resume", job=job, directory=place)

    @alive
    @rule(
        job=JOBS,
        how=STARTS,
        place=PLACES,
        pick=PICKS,
        workers=st.sampled_from([0, 0, 1]),
        script=st.lists(st.sampled_from(["train", "train", "load", "signal", "save"]), min_size=1, max_size=5),
        signal_again=st.booleans(),
        background=st.booleans(),
        every_steps=st.sampled_from([None, 1, 2]),
    )
    def preempt(
        self, job: str, how: dict[str, Any], place: str, pick: int, workers: int, script: list[str], **drawn: Any
    ) -> None:
        self.start(job, how)
        tag = self.tag(place, pick, job)
        steps = {"load": ["load", tag], "signal": ["group" if workers else "signal", pick]}
        items = [steps.get(what, [what]) for what in script if what != "load" or tag is not None]
        if items:
            self.act("preempt", job=job, directory=place, script=items, workers=workers, **drawn)

    @alive
    @rule(
        job=JOBS,
        directory=PLACES,
        at=EVENTS,
        rank=st.integers(0, 2),
        everyone=st.booleans(),
        moment=st.sampled_from(["idle", "save", "save", "load", "resume", "resume"]),
        saved=st.fixed_dictionaries({"tag": TAGS, "background": st.booleans()}),
        how=st.sampled_from(["kill", "sigterm"]),
    )
    def kill(self, moment: str, everyone: bool, saved: dict[str, Any], how: str, **drawn: Any) -> None:
        chosen = saved if moment == "save" else {}
        self.act("kill", moment=moment, everyone=everyone or how == "sigterm", how=how, **chosen, **drawn)

    @alive
    @rule(
        place=DISK_PLACES,
        verb=st.sampled_from(["verify", "latest_fix", "latest_set", "prune"]),
        pick=PICKS,
        keep=st.integers(1, 3),
        at=EVENTS,
        job=st.sampled_from(["", "", "a", "b"]),
        tag=PLAIN_TAGS,
    )
    def tool(self, place: str, verb: str, pick: int, keep: int, at: int, job: str, tag: str | None) -> None:
        given: dict[str, Any] = {"keep": keep} if verb == "prune" else {}
        if verb in ("verify", "latest_set"):
            given["tag"] = self.tag(place, pick)
        if job and verb != "latest_set":
            given |= {"job": job, "at": at, "tag": given.get("tag", tag)}
        if given.get("tag") is not None or verb in ("latest_fix", "prune"):
            self.act(verb, directory=place, **given)

    @alive
    @rule(place=DISK_PLACES, pick=PICKS, kind=st.sampled_from(["flip", "truncate", "remove"]))
    def damage(self, place: str, pick: int, kind: str) -> None:
        if (tag := self.tag(place, pick)) is not None:
            self.act("damage", directory=place, tag=tag, kind=kind)

    @alive
    @rule(directory=DISK_PLACES, to=st.sampled_from(["/copy1", "/copy2"]))
    def copy(self, **drawn: Any) -> None:
        self.act("copy", **drawn)

    def teardown(self) -> None:
        if self.world is not None:
            self.plan.ended(self.world, self.failed)
            self.world.close()


def run(plan: Plan, *, examples: int, steps: int, chosen: int | None = None) -> None:
    """Draw that many sequences. Without a seed they are always the same ones."""
    made = settings(
        max_examples=examples,
        stateful_step_count=steps,
        derandomize=chosen is None,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        verbosity=Verbosity.quiet,
        report_multiple_bugs=False,
    )
    kind = type("Lifecycle", (Lifecycle,), {"plan": plan})
    if chosen is not None:
        kind = seed(chosen)(kind)
    run_state_machine_as_test(kind, settings=made)
