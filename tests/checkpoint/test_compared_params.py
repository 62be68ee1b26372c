"""The parameters of a save and those of a run compared: by name, kind and shape, in groups, and what is then moved.

Loads between runs that differ are in ``test_param_changes``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroelastic.checkpoint.optimizer_file import ParamGroup
from zeroelastic.checkpoint.param_changes import GroupMatch, ParamSet, compare, wrapper_advice
from zeroelastic.core.layout import Layout, Param, layout_from_sub_groups
from zeroelastic.core.plan import check_plan, make_plan

TRAINED, FROZEN, ABSENT = "trained", "frozen", "absent"


def inventory(kinds: dict[str, str], numels: dict[str, int], *, excluded: bool = False) -> ParamSet:
    params = {name: Param(name, (numels[name],)) for name in kinds}
    return ParamSet(
        tuple(params[name] for name, kind in kinds.items() if kind == TRAINED),
        tuple(params[name] for name, kind in kinds.items() if kind == FROZEN and not excluded),
        names_frozen=not excluded,
    )


kinds_of_names = st.lists(
    st.tuples(*[st.sampled_from([TRAINED, FROZEN, ABSENT])] * 2, st.integers(0, 30)), min_size=1, max_size=12
)


@given(rows=kinds_of_names, excluded=st.booleans())
def test_every_parameter_of_the_run_is_in_exactly_one_list(rows: list[tuple[str, str, int]], excluded: bool) -> None:
    numels = {f"p{i}": row[2] for i, row in enumerate(rows)}
    was = {f"p{i}": row[0] for i, row in enumerate(rows)}
    now = {f"p{i}": row[1] for i, row in enumerate(rows)}
    found = compare(inventory(was, numels, excluded=excluded), inventory(now, numels), [], [])
    if excluded:
        was = {name: ABSENT if kind == FROZEN else kind for name, kind in was.items()}
    want: dict[tuple[str, str], str] = {
        (TRAINED, TRAINED): "restored",
        (FROZEN, FROZEN): "frozen",
        (FROZEN, TRAINED): "unfrozen",
        (TRAINED, FROZEN): "newly_frozen",
        (ABSENT, TRAINED): "added_trained",
        (ABSENT, FROZEN): "excluded" if excluded else "added_frozen",
        (TRAINED, ABSENT): "dropped",
        (FROZEN, ABSENT): "dropped",
    }
    lists: dict[str, list[str]] = {name: [] for name in {*want.values(), "added_frozen", "excluded", "relisted"}}
    for name in numels:
        pair = was[name], now[name]
        if pair == (ABSENT, ABSENT):
            continue
        relisted = numels[name] == 0 and set(pair) == {TRAINED, FROZEN}
        lists["relisted" if relisted else want[pair]].append(name)
    for which, names in lists.items():
        assert sorted(getattr(found, which)) == sorted(names), which
    different = [name for which in lists if which not in ("restored", "frozen", "excluded") for name in lists[which]]
    assert found.same_params == (not different)
    assert len(found.problems) == len(different) - len(lists["relisted"]) and not found.reshaped
    assert len(found.frozen_problems) == len(lists["added_frozen"])
    for name in set(different) - set(lists["relisted"]):
        assert any(f" {name} [" in problem for problem in found.problems)


@given(rows=kinds_of_names, data=st.data())
def test_another_shape_is_always_a_problem_of_its_own(rows: list[tuple[str, str, int]], data: st.DataObject) -> None:
    numels = {f"p{i}": row[2] for i, row in enumerate(rows)}
    was, now = ({f"p{i}": row[side] for i, row in enumerate(rows)} for side in (0, 1))
    victim = data.draw(st.sampled_from(sorted(numels)))
    found = compare(inventory(was, numels), inventory(now, {**numels, victim: numels[victim] + 1}), [], [])
    both = ABSENT not in (was[victim], now[victim])
    assert [victim in problem for problem in found.reshaped] == [True] * both
    assert set(found.reshaped) <= set(found.problems) and set(found.frozen_problems) <= set(found.problems)


def build(names: Iterable[tuple[str, int]], world_size: int, cut: int) -> Layout:
    params = [Param(name, (numel,)) for name, numel in names]
    groups = [params[at : at + cut] for at in range(0, len(params), cut)]
    return layout_from_sub_groups(groups, world_size)


@given(
    numels=st.lists(st.integers(0, 40), min_size=1, max_size=9),
    then=st.sets(st.integers(0, 8)),
    now=st.sets(st.integers(0, 8)),
    sizes=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    cuts=st.tuples(st.integers(1, 4), st.integers(1, 4)),
)
def test_what_both_have_is_moved_exactly_and_nothing_else_is_touched(
    numels: list[int], then: set[int], now: set[int], sizes: tuple[int, int], cuts: tuple[int, int]
) -> None:
    """Buffers of every rank filled by plans, against the whole parameters."""
    named = [(f"p{i}", numel) for i, numel in enumerate(numels)]
    values = {name: np.arange(numel) + 1000 * (i + 1) for i, (name, numel) in enumerate(named)}
    src = build([named[i] for i in sorted(then) if i < len(named)], sizes[0], cuts[0])
    dst = build([named[i] for i in reversed(sorted(now)) if i < len(named)], sizes[1], cuts[1])
    common = {p.name for p in src.params} & {p.name for p in dst.params}
    buffers = {
        (rank, sub_group): buffer
        for rank in range(sizes[0])
        for sub_group, buffer in enumerate(filled(src, rank, values, {p.name for p in src.params}))
    }
    for rank in range(sizes[1]):
        plan = make_plan(src, dst.only(common), rank)
        check_plan(plan)
        got = [np.zeros(n, dtype=np.int64) for n in dst.sub_group_numel.tolist()]
        for i in range(plan.num_segments):
            source = buffers[int(plan.src_rank[i]), int(plan.src_sub_group[i])]
            begin, to, length = int(plan.src_offset[i]), int(plan.dst_offset[i]), int(plan.length[i])
            got[int(plan.dst_sub_group[i])][to : to + length] += source[begin : begin + length]
        for mine, want in zip(got, filled(dst, rank, values, common), strict=True):
            assert np.array_equal(mine, want)


def filled(layout: Layout, rank: int, values: dict[str, np.ndarray], names: set[str]) -> list[np.ndarray]:
    flats = [np.zeros(n, dtype=np.int64) for n in layout.sub_group_numel.tolist()]
    for p, param in enumerate(layout.params):
        if param.name in names:
            part = -(-param.numel // layout.world_size)
            mine = values[param.name][rank * part : (rank + 1) * part]
            flats[layout.sub_group[p]][layout.offset[p] : layout.offset[p] + len(mine)] = mine
    return flats


def test_a_layout_with_everything_is_the_layout() -> None:
    layout = build([("a", 3), ("b", 4)], 2, 1)
    assert layout.only({"a", "b", "c"}) is layout
    assert layout.only(set()).num_params == 0 and layout.only(set()).num_sub_groups == 2


def matched(saved: list[tuple[dict[str, Any], str]], live: list[str]) -> tuple[GroupMatch, ...]:
    """Groups by the one-letter names of their parameters; letters that are on both sides are trained in both."""
    groups = [ParamGroup(options, tuple(names)) for options, names in saved]
    then = inventory({name: TRAINED for _, names in saved for name in names}, dict.fromkeys("abcdefgh", 5))
    now = inventory({name: TRAINED for names in live for name in names}, dict.fromkeys("abcdefgh", 5))
    return compare(then, now, groups, [tuple(names) for names in live]).groups


ONE, TWO = {"lr": 1.0, "betas": (0.9, 0.99)}, {"lr": 2.0, "betas": (0.9, 0.99)}


@pytest.mark.parametrize(
    ("saved", "live", "want"),
    [
        ([(ONE, "ab"), (TWO, "c")], ["ab", "c"], [(0, (0,)), (1, (1,))]),
        ([(ONE, "ab"), (TWO, "c")], ["c", "ab"], [(1, (1,)), (0, (0,))]),
        ([(ONE, "ab"), (TWO, "c")], ["abd", "ce"], [(0, (0,)), (1, (1,))]),
        ([(ONE, "ab"), (TWO, "c")], ["de", "ab", "c"], [(None, ()), (0, (0,)), (1, (1,))]),
        ([(ONE, "ab"), (TWO, "c")], ["abc"], [(None, (0, 1))]),
        ([(ONE, "ab"), (dict(ONE), "c")], ["abc"], [(0, (0, 1))]),
        ([(ONE, "abc")], ["a", "bc"], [(0, (0,)), (0, (0,))]),
        ([(ONE, "ab"), (TWO, "")], ["ab", ""], [(0, (0,)), (1, (1,))]),
        ([(ONE, "ab"), (TWO, "")], ["abc", ""], [(0, (0,)), (1, (1,))]),
        ([(ONE, "ab"), (TWO, "c")], ["ab", ""], [(0, (0,)), (None, ())]),
        ([(ONE, "ab"), (TWO, "c")], ["ab", "d"], [(0, (0,)), (None, ())]),
        ([({"lr": 1}, "a"), ({"lr": 1.0}, "b")], ["ab"], [(None, (0, 1))]),
    ],
)
def test_groups_are_matched_by_their_parameters(
    saved: list[tuple[dict[str, Any], str]], live: list[str], want: list[tuple[int | None, tuple[int, ...]]]
) -> None:
    assert matched(saved, live) == tuple(GroupMatch(*pair) for pair in want)


def test_another_number_of_groups_is_a_problem() -> None:
    then = inventory({"a": TRAINED, "b": TRAINED}, {"a": 3, "b": 2})
    (problem,) = compare(then, then, [ParamGroup({}, ("a",)), ParamGroup({}, ("b",))], [("a", "b")]).group_problems
    assert "2 optimizer groups and the run has 1" in problem


EXPERTS = {**ONE, "moe": True, "name": "ep_size_2"}


@pytest.mark.parametrize(
    ("saved", "live", "wrong"),
    [
        ([(ONE, "a"), (EXPERTS, "bc"), (EXPERTS, "de")], ["a", "bcde"], None),
        ([(ONE, "a"), (EXPERTS, "bcde")], ["a", "b", "c", "de"], None),
        (
            [(ONE, "a"), (EXPERTS, "bc"), ({**EXPERTS, "lr": 2.0}, "de")],
            ["a", "bcde"],
            "group 1 of the run has experts",
        ),
        ([(ONE, "a"), (TWO, "f"), (EXPERTS, "bcde")], ["af", "bc", "de"], "2 optimizer groups and the run has 1"),
        (
            [(ONE, "a"), (TWO, "f"), (EXPERTS, "bcde")],
            ["f", "a", "bc", "de"],
            "group 1 of the checkpoint and in group 0",
        ),
    ],
)
def test_experts_may_be_dealt_to_other_groups(
    saved: list[tuple[dict[str, Any], str]], live: list[str], wrong: str | None
) -> None:
    groups = [ParamGroup(options, tuple(names)) for options, names in saved]
    params = inventory({name: TRAINED for names in live for name in names}, dict.fromkeys("abcdef", 5))
    found = compare(params, params, groups, [tuple(names) for names in live])
    assert found.same_params and not found.same_groups
    assert bool(found.group_problems) == (wrong is not None)
    if wrong is None:
        assert all(match.source is not None for match in found.groups)
    else:
        assert wrong in found.group_problems[0]


@pytest.mark.parametrize(
    ("saved_names", "live_names", "side"),
    [
        (["_orig_mod.a.w", "_orig_mod.b.w"], ["a.w", "b.w"], "the checkpoint have"),
        (["a.w", "b.w"], ["a._orig_mod.w", "b.w"], "the model have"),
        (["_orig_mod.a.w"], ["a._orig_mod.w"], "the checkpoint and of the model have"),
        (["module.module.w"], ["module.w"], "the checkpoint and of the model have"),
        (["module.w"], ["module.v"], None),
        (["a.module.w"], ["a.w"], None),
        (["a.w"], ["a.w", "new.w"], None),
    ],
)
def test_a_wrapper_is_recognised_by_names_that_fit_without_it(saved_names, live_names, side) -> None:
    advice = wrapper_advice(saved_names, live_names)
    assert advice is None if side is None else f"names of {side}" in advice
