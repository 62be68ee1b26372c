"""Every optimizer, precision, offload and cut of parameters resumes at another size bit for bit.

Each configuration is saved and resumed once, five by one start of ranks. Its stage, the form of the files and the sizes
are drawn, so that each two of their values meet; `make sweep` has every configuration at each stage and in each form.
``ZEROELASTIC_SEED`` draws others; the seed is in the name of each case.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from exact_jobs import BUCKETS, OPTIMIZERS, PRECISIONS
from saves import Saved, check_resumed, resume_each, save_each
from training import Job

from zeroelastic import verify
from zeroelastic.testing import RankPool

SEED = int(os.environ.get("ZEROELASTIC_SEED", "1"))
TOGETHER = 5
"""Configurations of one start of ranks."""
STEPS = {"before": 2, "after": 1}
SIZES = ((4, 3), (2, 3), (3, 1))
FORMS: dict[str, dict[str, bool]] = {
    "elastic": {},
    "rigid": {"elastic": False},
    "DeepSpeed alone": {"elastic": False, "installed": False},
}

CPU = {"device": "cpu"}
PINNED = {"device": "cpu", "pin_memory": True}
NOTES = {
    "adagrad": "one group: with two DeepSpeed itself fails",
    "lamb": "a trust ratio over a rank's part makes steps depend on the world size",
    "fp16_autocast": "with its GradScaler, which DeepSpeed saves nowhere",
}
VARIANTS: dict[str, tuple[Job, tuple[str, ...]]] = {
    "one sub-group": (Job(sub_group_size=10**9), ("Parameters", "one sub-group, or one a parameter")),
    "tiny sub-groups": (Job(sub_group_size=1), ("Parameters", "one sub-group, or one a parameter")),
    "all trained": (Job(frozen=False), ()),
    "a group of frozen parameters": (Job(groups=3), ("Parameters", "a group of frozen parameters alone")),
    "accumulation": (
        Job(micro=2),
        ("Using it", "gradient accumulation", "the global batch stays, or the report says so"),
    ),
    "everything persistent": (
        Job(zero={"stage3_param_persistence_threshold": 10**6}),
        ("Parameters", "persistent parameters", "any threshold"),
    ),
    "nothing persistent": (
        Job(zero={"stage3_param_persistence_threshold": 0}),
        ("Parameters", "persistent parameters", "any threshold"),
    ),
    "offload": (Job(zero={"offload_optimizer": CPU}), ("Offload", "`offload_optimizer: cpu`")),
    "offload, pinned": (
        Job(zero={"offload_optimizer": PINNED}),
        ("Offload", "`offload_optimizer: cpu`, torch optimizers"),
    ),
    "offload, DeepSpeedCPUAdam": (
        Job(optimizer="cpu_adam", zero={"offload_optimizer": CPU}),
        ("Offload", "`offload_optimizer: cpu`, DeepSpeedCPUAdam"),
    ),
    "offload of both": (
        Job(zero={"offload_optimizer": CPU, "offload_param": CPU}),
        ("Offload", "`offload_param: cpu`"),
    ),
    "offload of both, pinned": (
        Job(optimizer="cpu_adam", zero={"offload_optimizer": PINNED, "offload_param": PINNED}),
        ("Offload", "`offload_param: cpu`, `pin_memory`"),
    ),
}
SETTINGS = (
    "Parallelism and communication",
    "other `overlap_comm`, `contiguous_gradients`, buckets, persistence",
    "than the run that saved",
)


@dataclass(frozen=True)
class Configuration:
    """A job, ``zero`` of the run that loads it where that is another one, and what shows it: section, feature, note."""

    job: Job
    shows: tuple[str, ...]
    zero: Mapping[str, Any] | None = None


CONFIGURATIONS = {
    **{
        name: Configuration(job, ("Optimizers", feature, NOTES.get(name, "")))
        for name, (job, feature) in OPTIMIZERS.items()
    },
    **{
        name: Configuration(job, ("Precision", feature, NOTES.get(name, "")))
        for name, (job, feature) in PRECISIONS.items()
    },
    **{name: Configuration(job, shows) for name, (job, shows) in VARIANTS.items()},
    **{name: Configuration(Job(zero=zero), SETTINGS, other) for name, (zero, other) in BUCKETS.items()},
}
ONLY_STAGE_3 = {
    *(name for name in CONFIGURATIONS if any(word in name for word in ("muon", "masters", "states", "autocast"))),
    *("lamb", "adagrad", "one sub-group", "tiny sub-groups", "buckets", "persistence", "fp32_accumulation"),
    *("everything persistent", "nothing persistent", "offload of both", "offload of both, pinned"),
}
"""What DeepSpeed has at stage 3 alone, or what is about it."""
NOT_ALONE = {"fp16_autocast"}
"""What the files of DeepSpeed alone do not hold."""


@dataclass(frozen=True)
class Start:
    """A start of ranks that saves and one that resumes: the form, the sizes, and the stage of each configuration."""

    form: str
    sizes: tuple[int, int]
    stages: Mapping[str, int]


def drawn(seed: int) -> Iterator[Start]:
    """Starts in which each configuration is once."""
    choose = random.Random(seed)
    names = [*CONFIGURATIONS]
    choose.shuffle(names)
    ways = [*itertools.product(FORMS, SIZES)]
    choose.shuffle(ways)
    groups: dict[tuple[str, tuple[int, int]], list[str]] = {way: [] for way in ways}
    for name in sorted(names, key=lambda name: name not in NOT_ALONE):
        way = min((way for way in ways if can_be(name, way[0])), key=lambda way: len(groups[way]))
        groups[way].append(name)
    stages = itertools.cycle((1, 2, 3))
    for (form, sizes), members in groups.items():
        yield Start(form, sizes, {name: 3 if name in ONLY_STAGE_3 else next(stages) for name in members})


OF_THE_CORE = (
    Start("elastic", (4, 3), dict.fromkeys(("fp32", "adagrad", "offload of both", "a group of frozen parameters"), 3)),
    Start("rigid", (2, 3), dict.fromkeys(("fp16_dynamic", "sgd", "offload"), 3)),
)
"""What older DeepSpeeds have, too."""


def can_be(name: str, form: str) -> bool:
    return FORMS[form].get("installed", True) or name not in NOT_ALONE


def every() -> Iterator[Start]:
    """Every configuration at each stage and in each form."""
    sizes = itertools.cycle(SIZES)
    for stage, form in itertools.product((1, 2, 3), FORMS):
        names = [name for name in CONFIGURATIONS if can_be(name, form) and (stage == 3 or name not in ONLY_STAGE_3)]
        for first in range(0, len(names), TOGETHER):
            yield Start(form, next(sizes), dict.fromkeys(names[first : first + TOGETHER], stage))


def case(start: Start, how: str, *marks: pytest.MarkDecorator) -> Any:
    shown = [CONFIGURATIONS[name].shows for name in start.stages if CONFIGURATIONS[name].shows]
    rows = [pytest.mark.support(section, feature, "exact", *note) for section, feature, *note in shown]
    before, after = start.sizes
    return pytest.param(start, marks=[*rows, *marks], id=f"{how}: {start.form}, {before} to {after}")


def pairs_of(starts: Iterable[Start]) -> set[tuple[Any, Any]]:
    """Each two values that meet in a start."""
    return {
        pair
        for start in starts
        for stage in start.stages.values()
        for pair in itertools.combinations((stage, start.form, start.sizes), 2)
    }


def test_each_configuration_comes_once_and_each_two_values_of_the_rest_meet() -> None:
    starts = [*drawn(SEED)]
    assert sorted(name for start in starts for name in start.stages) == sorted(CONFIGURATIONS)
    assert pairs_of(starts) == pairs_of(
        Start(form, sizes, {"": s}) for form in FORMS for sizes in SIZES for s in (1, 2, 3)
    )


@pytest.mark.parametrize(
    "start",
    [
        *(case(start, f"seed {SEED}") for start in drawn(SEED)),
        *(case(start, "core", pytest.mark.core, pytest.mark.extended) for start in OF_THE_CORE),
        *(case(start, f"all {number}", pytest.mark.sweep) for number, start in enumerate(every())),
    ],
)
def test_a_configuration_resumes_bit_exact_at_another_size(rank_pool: RankPool, tmp_path: Path, start: Start) -> None:
    before: dict[str, Job] = {}
    after: list[Job] = []
    for name, stage in start.stages.items():
        own = CONFIGURATIONS[name]
        before[name] = replace(own.job, stage=stage, **FORMS[start.form])
        after.append(before[name].other(installed=True, zero=own.job.zero if own.zero is None else dict(own.zero)))
    ranks = rank_pool.run(save_each, start.sizes[0], [*before.values()], str(tmp_path), timeout=300, **STEPS)
    resumed = rank_pool.run(resume_each, start.sizes[1], after, str(tmp_path), timeout=300, **STEPS)
    for number, (name, job) in enumerate(before.items()):
        assert all(outcomes[number].state == ranks[0][number].state for outcomes in ranks), name
        saved = Saved(str(tmp_path / str(number)), ranks[0][number])
        check_resumed(saved, [outcomes[number] for outcomes in resumed], job, what=name)
        assert resumed[0][number].report.root_matches is (True if job.installed else None), name
        check_kinds(name, saved.outcome.state)
        found = verify(saved.directory)
        assert found.problems == () and not any("do not say which" in clause for clause in found.unchecked), name


def check_kinds(name: str, state: Mapping[str, Any]) -> None:
    """There is optimizer state, and master weights and it are of the precision's types."""
    assert any(key.startswith("state/") for key in state) == (name != "plain_sgd"), name
    if name in PRECISIONS:
        masters, states = (
            {entry.split()[0] for key, entry in state.items() if key.startswith(kind)} for kind in ("master/", "state/")
        )
        narrow = {"bf16_": "torch.bfloat16", "fp16_": "torch.float16"}.get(name[:5], "")
        assert masters == {narrow if name[5:11] in ("master", "states") else "torch.float32"}, name
        assert states == {"torch.bfloat16" if name.startswith("bf16_states") else "torch.float32"}, name
