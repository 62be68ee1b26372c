"""What was saved and what is live are compared by parameter, though the parameters of a group share their scalars."""

from __future__ import annotations

from collections.abc import Mapping

from zeroelastic.core.digest import ParamContent, ScalarValue
from zeroelastic.core.layout import Param
from zeroelastic.deepspeed.live.digests import differences, with_saved_kinds

INT_3, FLOAT_3, FLOAT_4 = ScalarValue("pyint", 3), ScalarValue("float32", 3.0), ScalarValue("float32", 4.0)


def content(name: str, scalars: Mapping[str, ScalarValue], digest: int = 7) -> ParamContent:
    return ParamContent(Param(name, (2,)), {"fp32": ("float32", digest), "exp_avg": ("float32", digest)}, scalars)


def test_every_parameter_with_another_number_is_named() -> None:
    saved_3, live_3, live_4, none = {"step": INT_3}, {"step": FLOAT_3}, {"step": FLOAT_4}, dict[str, ScalarValue]()
    saved = [content(name, saved_3) for name in "abcde"]
    live = [
        content("a", live_3),
        content("b", live_4),
        content("c", live_4),
        content("d", none),
        content("e", live_3, digest=8),
    ]
    digests = [("e", "exp_avg"), ("e", "fp32")]
    steps = [("b", "step"), ("c", "step"), ("d", "step")]
    assert differences(saved, live, weights_only=False) == [*steps, *digests]
    assert differences(saved, live, weights_only=True) == [("e", "fp32")]
    assert differences(saved, live[1:], weights_only=True) == [("a", "the parameter itself"), ("e", "fp32")]


def test_equal_numbers_take_the_kind_of_the_saved_one() -> None:
    live_3, live_4 = {"step": FLOAT_3}, {"step": FLOAT_4}
    saved = [content("a", {"step": INT_3}), content("b", {"step": INT_3}), content("d", {})]
    live = [content(name, live_3) for name in "acd"] + [content("b", live_4)]
    found = {each.param.name: each.scalars["step"] for each in with_saved_kinds(live, saved)}
    assert found == {"a": INT_3, "b": FLOAT_4, "c": FLOAT_3, "d": FLOAT_3}
