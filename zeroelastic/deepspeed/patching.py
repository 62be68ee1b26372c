"""Wraps methods of foreign classes and sets attributes of foreign objects, and restores exactly what was there.

Another library may wrap the same method later. Its wrapper is not ours to remove: ours stays below it and passes every
call on, until it is wanted again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Method = Callable[..., Any]


class _Wrapper:
    """One method of a class, and the function in its place, which calls the replacement only while ``active``."""

    def __init__(self, owner: type, name: str, replacement: Method) -> None:
        self.owner, self.name, self.active = owner, name, True
        self.inherited = name not in vars(owner)
        self.original: Method = getattr(owner, name)
        chosen = functools.partial(replacement, self.original)

        @functools.wraps(self.original)
        def method(*args: Any, **kwargs: Any) -> Any:
            return (chosen if self.active else self.original)(*args, **kwargs)

        self.method = method
        setattr(owner, name, method)

    def is_reached(self) -> bool:
        """Whether a call of the method arrives here, as far as ``functools.wraps`` of other wrappers shows."""
        found: Any = getattr(self.owner, self.name)
        while found is not None and found is not self.method:
            found = getattr(found, "__wrapped__", None)
        return found is not None

    def unwrap(self) -> None:
        """Put back what was there."""
        if self.inherited:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.original)


_wrappers: dict[tuple[type, str], _Wrapper] = {}


def wrap(owner: type, name: str, replacement: Method) -> None:
    """Put a function in the place of a method of a class, which it gets first; does nothing the second time."""
    wrapper = _wrappers.get((owner, name))
    if wrapper is not None and wrapper.is_reached():
        wrapper.active = True
        return
    if wrapper is not None:
        wrapper.active = False  # if a call still arrives there, the replacement must not run twice
    _wrappers[owner, name] = _Wrapper(owner, name, replacement)


def unwrap_all() -> None:
    """Put every method back; one that another library has wrapped since stays below its wrapper, and does nothing."""
    for key, wrapper in list(_wrappers.items()):
        wrapper.active = False
        if vars(wrapper.owner).get(wrapper.name) is wrapper.method:  # nobody has wrapped or replaced it since
            wrapper.unwrap()
            del _wrappers[key]


def is_wrapped(owner: type, name: str) -> bool:
    """Whether ``wrap`` was called for a method, and the wrapper is active."""
    wrapper = _wrappers.get((owner, name))
    return wrapper is not None and wrapper.active


@contextmanager
def patched(target: object, **attributes: object) -> Iterator[None]:
    """Within this context, ``target`` itself has these attributes; afterwards exactly the attributes from before."""
    own = vars(target)
    before = {name: own[name] for name in attributes if name in own}
    own.update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            own.pop(name, None)
        own.update(before)
