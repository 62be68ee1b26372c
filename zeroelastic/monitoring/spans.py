"""OpenTelemetry spans of saves, loads and resumes, where the program has set up OpenTelemetry.

This module never imports OpenTelemetry: a program that has not done so has no exporter either, and a span costs a
dictionary look-up. ``pip install 'zeroelastic[otel]'`` brings ``opentelemetry-api``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

_TRACER = "zeroelastic"

Attribute = str | int | float | bool


def span(name: str, **attributes: Attribute) -> AbstractContextManager[Any]:
    """A span ``zeroelastic.NAME`` for the time of the context; an exception in it is recorded. A no-op without set-up.

    Attributes get the prefix ``zeroelastic.`` too::

        with span("save.commit", step=7): ...
    """
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return nullcontext()
    named = {f"zeroelastic.{key}": value for key, value in attributes.items()}
    started: AbstractContextManager[Any] = trace.get_tracer(_TRACER).start_as_current_span(
        f"zeroelastic.{name}", attributes=named
    )
    return started


def current_context() -> Any:
    """The context of the span that this thread is in, for ``continued`` in another thread; None without set-up."""
    context = sys.modules.get("opentelemetry.context")
    return None if context is None else context.get_current()


@contextmanager
def continued(context: Any) -> Iterator[None]:
    """Within this context, spans of this thread are below the span of ``current_context`` in another one."""
    module = sys.modules.get("opentelemetry.context")
    if module is None or context is None:
        yield
        return
    token = module.attach(context)
    try:
        yield
    finally:
        module.detach(token)
