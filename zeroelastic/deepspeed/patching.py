"""Wraps methods of foreign classes and sets attributes of foreign objects, and restores exactly what was there.

Another library may wrap the same method later. Its wrapper is not ours to remove: ours stays below it and passes every
call on, until it is wanted again.

Frameworks with state of their own that is wrong at another world size have a module of ours that wraps their methods.
It is looked up by name, and only where the framework has been imported: zeroelastic imports none.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any

from zeroelastic.activation import forget, when_imported

Method = Callable[..., Any]

_BEFORE_THE_ENGINE = {
    "transformers.trainer": "zeroelastic.integrations.trainer",
    "swift.dataloader.shard": "zeroelastic.integrations.ms_swift",
}
"""The module of a framework that is wrapped -> our module whose ``wrap_module`` does it.

These act before there is an engine, and are wrapped by ``install()``, or when the framework is imported after it.
"""

_WITH_AN_ENGINE = {
    "accelerate.accelerator": "zeroelastic.integrations.accelerate",
    "lightning.fabric.strategies.deepspeed": "zeroelastic.integrations.fabric",
    "lightning_fabric.strategies.deepspeed": "zeroelastic.integrations.fabric",
    "lightning.pytorch.strategies.deepspeed": "zeroelastic.integrations.lightning",
    "pytorch_lightning.strategies.deepspeed": "zeroelastic.integrations.lightning",
}
"""The same for those that are wrapped when a ZeRO engine is built: after the script's imports, and before any load."""


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


def wrap_before_the_engine() -> None:
    """Wrap the frameworks that act before there is an engine, now or when they are imported."""
    for framework in _BEFORE_THE_ENGINE:
        when_imported(framework, _wrap_framework)
        module = sys.modules.get(framework)
        # One that is being imported now is wrapped when its code has run.
        if module is not None and not getattr(module.__spec__, "_initializing", False):
            _wrap_framework(module)


def forget_frameworks() -> None:
    """Wrap no framework that is imported from now on."""
    for framework in _BEFORE_THE_ENGINE:
        forget(framework, _wrap_framework)


def wrap_frameworks() -> None:
    """Wrap the frameworks that are imported, when a ZeRO engine is built; idempotent."""
    for framework in _WITH_AN_ENGINE:
        if (module := sys.modules.get(framework)) is not None:
            _wrap_framework(module)


def _wrap_framework(module: ModuleType) -> None:
    import_module({**_WITH_AN_ENGINE, **_BEFORE_THE_ENGINE}[module.__name__]).wrap_module(module)
