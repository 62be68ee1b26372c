"""How sequences are drawn: hypothesis' rules over the actions of ``world``."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, Verbosity, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from lifecycle.bench import process_of
from lifecycle.jobs import Server
from lifecycle.world import ODD_TAGS, OWN_KEYS, Failed, World

AREAS = (
    "background",
    "chdir",
    "client_state",
    "concurrent",
    "damage",
    "freeze",
    "kills",
    "memory",
    "odd_tags",
    "preemption",
    "rollback",
    "tools",
    "two_engines",
    "workers",
    "worlds",
)
"""What can be left out, to see whether the rest holds."""

OTHERS = ({"net": "D"}, {"batch": 12}, {"stage": 1})
"""What a node builds that does not fit into a job."""

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
TAGS = st.sampled_from(["best", "last", None, None, "best", "last", "v1.5"])
WITH_ODD_TAGS = st.one_of(TAGS, TAGS, st.sampled_from(ODD_TAGS))
EVENTS = st.integers(1, 60)
PICKS = st.integers(0, 7)


@dataclass
class Plan:
    """Where machines run, what they leave out, and what became of them."""

    server: Server
    scratch: Path
    without: Collection[str] = ()
    collect: bool = False
    """Whether a failure is noted, and the next machine begins, instead of being raised."""
    most_actions: int | None = None
    stage: int = 3
    """The ZeRO stage of all jobs."""
    ended: Callable[[World, Failed | None], None] = lambda world, failed: None
    actions: int = 0
    numbers: Any = field(default_factory=itertools.count)


def machine(plan: Plan) -> type[RuleBasedStateMachine]:
    """The machine of a plan."""

    def has(area: str) -> Callable[[Any], bool]:
        return lambda self: area not in plan.without and self.going

    alive = precondition(lambda self: self.going)
    tags = TAGS if "odd_tags" in plan.without else WITH_ODD_TAGS
    memories: st.SearchStrategy[dict[str, Any]] = st.just({})
    if "memory" not in plan.without:
        memories |= st.sampled_from(MEMORY).map(lambda memory: {"memory": memory})
    in_memory = st.fixed_dictionaries(
        {"world_size": SIZES, "options": st.sampled_from(MEMORY).map(lambda memory: {"memory": memory})}
    )
    options = st.one_of(memories, st.sampled_from([{"keep": 1}, {"keep": 2}]))
    starts = st.fixed_dictionaries({"world_size": SIZES, "options": options})
    holds = st.just(0) if "background" in plan.without else st.sampled_from([0, 0, 1, 2])
    backgrounds = st.just(False) if "background" in plan.without else st.booleans()
    client_states: st.SearchStrategy[dict[str, Any] | None] = st.sampled_from([None, None, {"note": "n", "epoch": 3}])
    if "client_state" not in plan.without:
        client_states |= st.sampled_from(OWN_KEYS).map(lambda key: {key: 7})

    class Lifecycle(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.world: World | None = None
            self.failed: Failed | None = None

        @property
        def going(self) -> bool:
            enough = plan.most_actions is not None and plan.actions >= plan.most_actions
            return self.world is not None and self.failed is None and not enough

        def act(self, name: str, **params: Any) -> None:
            assert self.world is not None
            if params.get("job") not in self.world.jobs and name != "start":
                params |= {"job": process_of(params["job"])} if "job" in params else {}
            try:
                plan.actions += self.world.act(name, **params)
            except Failed as failed:
                self.failed = failed
                if not plan.collect:
                    raise Failed(f"{failed}\nthe sequence: {self.world.log}") from failed

        def tag(self, place: str, pick: int, job: str = "") -> str | None:
            """One of the tags that are there, the newest first."""
            assert self.world is not None
            there = self.world.tags_of(job, place)
            return there[-1 - pick % len(there)] if there else None

        def own(self, job: str, tag: str | None) -> str | None:
            """The tag as the engine of a job would name it. Both of one process may use the names for steps."""
            assert self.world is not None
            return (
                f"D_{tag}" if tag and tag not in ODD_TAGS and job in self.world.jobs and process_of(job) != job else tag
            )

        def running(self, job: str, how: dict[str, Any]) -> bool:
            """Start the job, if it is not there; whether it goes on."""
            assert self.world is not None
            if process_of(job) not in self.world.jobs and self.going:
                self.act("start", job=process_of(job), **how)
            return self.going

        @initialize(precision=st.sampled_from(["bf16", "bf16", "fp16"]), how=starts)
        def begin(self, precision: str, how: dict[str, Any]) -> None:
            if plan.most_actions is None or plan.actions < plan.most_actions:
                root = plan.scratch / f"world{next(plan.numbers)}"
                self.world = World(plan.server, root, precision=precision, stage=plan.stage)
                self.running("a", how)

        @rule()
        def nothing(self) -> None:
            """What is left to do once a sequence has ended."""

        @alive
        @rule(job=JOBS, how=starts, elastic=st.sampled_from([True, True, True, False]), steps=st.integers(1, 2))
        def train(self, job: str, how: dict[str, Any], elastic: bool, steps: int) -> None:
            if self.running(job, how if elastic else {**how, "elastic": False}):
                self.act("train", job=job, steps=steps)

        @alive
        @rule(job=JOBS, how=starts, place=PLACES, tag=tags, background=backgrounds, hold=holds, own=client_states)
        def save(
            self, job: str, how: dict[str, Any], place: str, tag: str | None, background: bool, hold: int, own: Any
        ) -> None:
            if self.running(job, how):
                given = {"client_state": own} if own else {}
                written = {"background": True, "hold": hold} if background else {}
                self.act("save", job=job, directory=place, tag=self.own(job, tag), **written, **given)

        @alive
        @rule(job=JOBS, how=starts, place=PLACES, tag=TAGS, steps=st.integers(1, 2))
        def train_and_save(self, job: str, how: dict[str, Any], place: str, tag: str | None, steps: int) -> None:
            if self.running(job, how):
                self.act("train", job=job, steps=steps)
            if self.going:
                self.act("save", job=job, directory=place, tag=self.own(job, tag))

        @alive
        @rule(job=JOBS)
        def wait(self, job: str) -> None:
            self.act("wait", job=job)

        @precondition(has("chdir"))
        @rule(job=JOBS, to=st.sampled_from(["home", "elsewhere"]))
        def chdir(self, job: str, to: str) -> None:
            self.act("chdir", job=job, to=to)

        @alive
        @rule(
            job=JOBS,
            how=starts,
            place=PLACES,
            pick=PICKS,
            by_latest=st.booleans(),
            verify=st.sampled_from(["full", "quick", "off"]),
        )
        def load(self, job: str, how: dict[str, Any], place: str, pick: int, by_latest: bool, verify: str) -> None:
            if self.running(job, how):
                tag = None if by_latest or "rollback" in plan.without else self.tag(place, pick, job)
                self.act("load", job=job, directory=place, tag=tag, verify=verify)

        @alive
        @rule(job=JOBS, how=starts, place=PLACES, required=st.sampled_from([False, False, True]))
        def resume(self, job: str, how: dict[str, Any], place: str, required: bool) -> None:
            if self.running(job, how):
                self.act("resume", job=job, directory=place, **({"required": True} if required else {}))

        @precondition(has("rollback"))
        @rule(job=JOBS, place=PLACES, pick=PICKS, steps=st.integers(1, 2))
        def roll_back(self, job: str, place: str, pick: int, steps: int) -> None:
            """Load an older tag, go on from there, and save."""
            assert self.world is not None
            tag = self.tag(place, pick, job)
            if job in self.world.jobs and tag is not None:
                self.act("load", job=job, directory=place, tag=tag)
                if self.going:
                    self.act("train", job=job, steps=steps)
                if self.going:
                    self.act("save", job=job, directory=place)

        @precondition(has("freeze"))
        @rule(job=JOBS, frozen=st.booleans())
        def freeze(self, job: str, frozen: bool) -> None:
            self.act("freeze", job=job, frozen=frozen)

        @alive
        @rule(job=JOBS)
        def reinstall(self, job: str) -> None:
            self.act("reinstall", job=job)

        @alive
        @rule(job=JOBS)
        def destroy(self, job: str) -> None:
            self.act("destroy", job=job)

        @precondition(has("concurrent"))
        @rule(
            reader=JOBS,
            how=starts,
            place=DISK_PLACES,
            pick=PICKS,
            at=EVENTS,
            rank=st.integers(0, 2),
            verify=st.sampled_from(["full", "quick", "off", "resume", "resume"]),
            other=st.sampled_from([None, None, "last"]),
        )
        def load_during_save(
            self,
            reader: str,
            how: dict[str, Any],
            place: str,
            pick: int,
            at: int,
            rank: int,
            verify: str,
            other: str | None,
        ) -> None:
            reader = process_of(reader)
            writer = "b" if reader == "a" else "a"
            tag = self.tag(place, pick)
            if tag is not None and self.running(reader, how) and self.running(writer, {"world_size": 1}):
                how_to: dict[str, Any] = {"resume": True} if verify == "resume" else {"verify": verify}
                if other:
                    how_to["other_tag"] = other
                self.act(
                    "load_during_save",
                    reader=reader,
                    writer=writer,
                    directory=place,
                    tag=tag,
                    at=at,
                    rank=rank,
                    **how_to,
                )

        @precondition(has("two_engines"))
        @rule(job=st.sampled_from(["a_D", "b_D"]), options=options)
        def second_engine(self, job: str, options: dict[str, Any]) -> None:
            self.act("start", job=job, world_size=0, options=options)

        @precondition(has("memory"))
        @rule(
            job=JOBS,
            how=in_memory,
            again=in_memory,
            place=st.sampled_from(["run", "run", "/home/run"]),
            steps=st.tuples(st.integers(1, 3), st.integers(0, 3)),
            saves=st.sampled_from([None, None, "save", "slow", "slow"]),
            late=st.sampled_from([True, True, False]),
            dies=st.sampled_from([["die"], ["die"], ["die", 0], ["vanish"], ["vanish", 1]]),
            lost=st.sampled_from([None, None, None, "node", "node", "bit"]),
            pick=PICKS,
        )
        def crash(
            self,
            job: str,
            how: dict[str, Any],
            again: dict[str, Any],
            place: str,
            steps: tuple[int, int],
            saves: str | None,
            late: bool,
            dies: list[Any],
            lost: str | None,
            pick: int,
        ) -> None:
            """Train in a loop until all or one of the ranks die, perhaps lose something, start again and resume."""
            if not self.running(job, how):
                return
            script: list[list[Any]] = [["train"]] * steps[0] + ([[saves]] if saves else []) + [["train"]] * steps[1]
            script += [["release"]] if late and saves == "slow" else []
            self.act("preempt", job=job, directory=place, script=[*script, dies, ["train"]])
            assert self.world is not None
            job = process_of(job)
            if self.going and job not in self.world.jobs and lost:
                self.act("damage_memory", job=job) if lost == "bit" else self.act("lose_node", job=job, pick=pick)
            if self.going and job not in self.world.jobs and self.running(job, again):
                self.act("resume", job=job, directory=place)

        @precondition(has("worlds"))
        @rule(
            rare=st.sampled_from([True, False, False]),
            place=st.sampled_from(["/home/run", "/elsewhere/run", "/home/new"]),
            size=SIZES,
            memory=st.sampled_from([None, None, {"every": 1}, {"every": 2}]),
            workers=st.sampled_from([0, 0, 1]),
            changes=st.lists(
                st.one_of(
                    st.just(("join",)),
                    st.sampled_from([("join other", other) for other in OTHERS]),
                    st.tuples(st.just("leave"), PICKS, st.just(1)),
                    st.tuples(st.just("die"), PICKS, st.integers(1, 2)),
                ),
                min_size=1,
                max_size=3,
            ),
        )
        def worlds(self, rare: bool, place: str, size: int, memory: Any, workers: int, changes: list[Any]) -> None:
            if rare:
                self.act("worlds", directory=place, size=size, memory=memory, workers=workers, changes=changes)

        @precondition(has("preemption"))
        @rule(
            job=JOBS,
            how=starts,
            place=PLACES,
            again=st.booleans(),
            background=backgrounds,
            every=st.sampled_from([None, 1, 2]),
            pick=PICKS,
            workers=st.just(0) if "workers" in plan.without else st.sampled_from([0, 0, 1]),
            script=st.lists(st.sampled_from(["train", "train", "load", "signal", "save"]), min_size=1, max_size=5),
        )
        def preempt(
            self,
            job: str,
            how: dict[str, Any],
            place: str,
            again: bool,
            background: bool,
            every: int | None,
            pick: int,
            workers: int,
            script: list[str],
        ) -> None:
            if not self.running(job, how):
                return
            tag = None if "rollback" in plan.without else self.tag(place, pick, job)
            items = [
                [what, tag] if what == "load" else ["group" if workers else what, pick] if what == "signal" else [what]
                for what in script
                if what != "load" or tag is not None
            ]
            if items:
                self.act(
                    "preempt",
                    job=job,
                    directory=place,
                    script=items,
                    every_steps=every,
                    background=background,
                    signal_again=again,
                    **({"workers": workers} if workers else {}),
                )

        @precondition(has("kills"))
        @rule(
            job=JOBS,
            place=PLACES,
            at=EVENTS,
            rank=st.integers(0, 2),
            everyone=st.booleans(),
            moment=st.sampled_from(["idle", "save", "save", "load", "resume", "resume"]),
            tag=tags,
            how=st.sampled_from(["kill", "sigterm"]),
            background=backgrounds,
        )
        def kill(
            self,
            job: str,
            place: str,
            at: int,
            rank: int,
            everyone: bool,
            moment: str,
            tag: str | None,
            how: str,
            background: bool,
        ) -> None:
            chosen: dict[str, Any] = {"tag": tag, "background": background} if moment == "save" else {}
            self.act(
                "kill",
                job=job,
                moment=moment,
                at=at,
                rank=rank,
                everyone=everyone or how == "sigterm",
                how=how,
                directory=place,
                **chosen,
            )

        @precondition(has("tools"))
        @rule(
            place=DISK_PLACES,
            verb=st.sampled_from(["verify", "latest_fix", "latest_set", "prune"]),
            pick=PICKS,
            keep=st.integers(1, 3),
            at=EVENTS,
            job=st.sampled_from(["", "", "a", "b"]),
            tag=TAGS,
        )
        def tool(self, place: str, verb: str, pick: int, keep: int, at: int, job: str, tag: str | None) -> None:
            given: dict[str, Any] = {"keep": keep} if verb == "prune" else {}
            if verb in ("verify", "latest_set"):
                given["tag"] = self.tag(place, pick)
            if job and verb != "latest_set" and "concurrent" not in plan.without:
                given |= {"job": job, "at": at, "tag": given.get("tag", tag)}
            if given.get("tag") is not None or verb in ("latest_fix", "prune"):
                self.act(verb, directory=place, **given)

        @precondition(has("damage"))
        @rule(place=DISK_PLACES, pick=PICKS, kind=st.sampled_from(["flip", "truncate", "remove"]))
        def damage(self, place: str, pick: int, kind: str) -> None:
            tag = self.tag(place, pick)
            if tag is not None:
                self.act("damage", directory=place, tag=tag, kind=kind)

        @precondition(has("tools"))
        @rule(place=DISK_PLACES, to=st.sampled_from(["/copy1", "/copy2"]))
        def copy(self, place: str, to: str) -> None:
            self.act("copy", directory=place, to=to)

        def teardown(self) -> None:
            if self.world is not None:
                plan.ended(self.world, self.failed)
                self.world.close()

    return Lifecycle


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
    kind = machine(plan)
    if chosen is not None:
        kind = seed(chosen)(kind)
    run_state_machine_as_test(kind, settings=made)
