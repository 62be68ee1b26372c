"""What is put on foreign classes and objects is taken back to exactly what was there, and no further."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest

from zeroelastic.deepspeed.patching import is_wrapped, patched, unwrap_all, wrap


class Parent:
    def act(self) -> str:
        return "parent"


class Child(Parent):
    pass


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    yield
    unwrap_all()
    assert "act" not in vars(Child) and Parent().act() == "parent"


def around(original: Any, self: Parent) -> str:
    return f"<{original(self)}>"


def test_a_method_is_wrapped_once_and_put_back() -> None:
    stock = Parent.act
    wrap(Parent, "act", around)
    wrap(Parent, "act", around)
    assert Parent().act() == "<parent>" and Parent.act.__wrapped__ is stock and is_wrapped(Parent, "act")
    unwrap_all()
    assert Parent.act is stock and not is_wrapped(Parent, "act")


def test_an_inherited_method_is_inherited_again() -> None:
    wrap(Child, "act", around)
    assert Child().act() == "<parent>" and Parent().act() == "parent"
    unwrap_all()
    assert "act" not in vars(Child)


def test_a_later_wrapper_that_hides_ours_stays_and_a_second_install_acts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that does not say what it wraps: ours is put around it, and the one below it does nothing any more."""
    wrap(Parent, "act", around)
    below = Parent.act
    another = lambda self: f"[{below(self)}]"  # noqa: E731
    Parent.act = another  # type: ignore[method-assign]
    unwrap_all()
    assert Parent.act is another and Parent().act() == "[parent]"
    wrap(Parent, "act", around)
    assert Parent().act() == "<[parent]>"
    unwrap_all()
    assert Parent.act is another
    Parent.act = below  # type: ignore[method-assign]
    assert Parent().act() == "parent"
    Parent.act = below.__wrapped__  # type: ignore[attr-defined, method-assign]


def test_a_later_wrapper_that_says_what_it_wraps_is_called_as_before_and_ours_below_it_acts_once() -> None:
    wrap(Parent, "act", around)
    below = Parent.act

    @functools.wraps(below)
    def another(self: Parent) -> str:
        return f"[{below(self)}]"

    Parent.act = another  # type: ignore[method-assign]
    for _ in range(2):
        unwrap_all()
        assert Parent.act is another and Parent().act() == "[parent]" and not is_wrapped(Parent, "act")
        wrap(Parent, "act", around)
        assert Parent().act() == "[<parent>]"
    Parent.act = below  # type: ignore[method-assign]  # the other library takes its wrapper off
    assert Parent().act() == "<parent>"


def test_an_object_gets_back_its_own_attributes_and_no_others() -> None:
    thing = Child()
    thing.act = lambda: "override"  # type: ignore[method-assign]
    mine = thing.act
    with pytest.raises(ZeroDivisionError), patched(thing, act=lambda: "patched", other=1):
        assert (thing.act(), thing.other) == ("patched", 1)  # type: ignore[attr-defined]
        1 / 0  # noqa: B018
    assert thing.act is mine and vars(thing) == {"act": mine}
    del thing.act
    with patched(thing, act=lambda: "patched"):
        del thing.act
    assert vars(thing) == {}
