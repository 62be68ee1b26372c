"""Which save an engine goes on from: the one that it loaded or committed last; and who is to know of a load."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from zeroelastic.record import CommitRecord

_ATTRIBUTE = "_zeroelastic_lineage"
_TICK = 1e-6


@dataclass(slots=True)
class Lineage:
    """``save_id`` is None at a fresh start, and after a load of a checkpoint without a record.

    ``committed_at`` is when it was committed, by its record; ``on_load`` are called with the client state at the end of
    each load that sets the engine's counters, on every rank.
    """

    save_id: str | None = None
    committed_at: float = 0.0
    on_load: list[Callable[[Mapping[str, Any]], None]] = field(default_factory=list)

    def next_time(self, now: float) -> float:
        """The time of the next commit: later than the last, whatever the clock of this machine says."""
        return round(max(now, self.committed_at + _TICK), 6)

    def commit(self, save_id: str, committed_at: float) -> None:
        """A save of the engine was committed."""
        self.save_id, self.committed_at = save_id, committed_at

    def load(self, record: CommitRecord | None, client_state: Mapping[str, Any]) -> None:
        """A checkpoint was loaded, with its counters. Collective, if one of ``on_load`` is."""
        self.save_id = None if record is None else record.save_id
        self.committed_at = max(self.committed_at, (record.committed_at or 0.0) if record is not None else 0.0)
        for call in self.on_load:
            call(client_state)


def lineage_of(engine: Any) -> Lineage:
    """An engine's."""
    found: Lineage = engine.__dict__.setdefault(_ATTRIBUTE, Lineage())
    return found
