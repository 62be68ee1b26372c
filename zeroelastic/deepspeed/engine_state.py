"""The state that zeroelastic keeps for a DeepSpeed engine: one object, under one attribute of the engine.

The engine's optimizer has a reference to the engine, under an attribute of the same name.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

from zeroelastic.checkpoint.commit_record import CommitRecord
from zeroelastic.errors import CheckpointError, SaveError, ZeroElasticError, advice, finding
from zeroelastic.io.paths import FilePath

logger = logging.getLogger(__name__)

DAMAGED = "The engine now holds damaged state: do not train on it."

_ATTRIBUTE = "_zeroelastic"
_TICK = 1e-6


@dataclass(slots=True)
class LastSave:
    """The save that an engine follows: the one that it loaded or committed last.

    ``save_id`` is None at a fresh start, and after a load of a checkpoint without a record. ``committed_at`` is the
    time of that commit, by its record. ``begun`` is the save that was begun last: it may be committed later, or never.
    ``unsaved_steps`` and ``unsaved_seconds`` were trained after the last save to a directory when the present training
    loop (``preemption``) began.
    """

    save_id: str | None = None
    committed_at: float = 0.0
    begun: str | None = None
    unsaved_steps: int = 0
    unsaved_seconds: float = 0.0

    def next_time(self, now: float) -> float:
        """The time of the next commit: later than the last one, even if the clock of this machine is behind."""
        return round(max(now, self.committed_at + _TICK), 6)

    def commit(self, save_id: str, committed_at: float) -> None:
        """Record that a save of the engine was committed."""
        self.save_id, self.committed_at = save_id, committed_at

    def load(self, record: CommitRecord | None) -> None:
        """Record that a checkpoint was loaded, with its counters."""
        self.begun, self.save_id, self.committed_at = None, None, 0.0
        if record is not None:
            self.save_id, self.committed_at = record.save_id, record.committed_at or 0.0
        self.unsaved_steps, self.unsaved_seconds = 0, 0.0


@dataclass(eq=False)
class EngineState:
    """The state of one engine; the modules named at a field set it.

    Fields that hold for the time of one call are set with ``patching.patched``.
    """

    last_save: LastSave = field(default_factory=LastSave)
    on_load: list[Callable[[Mapping[str, Any]], None]] = field(default_factory=list)
    """Called with the client state at the end of each load that sets the engine's counters, on every rank."""
    damage: str | None = None
    """A sentence, of an engine whose state is neither the old nor the new one, because a load failed (``changing``)."""
    loads_in_progress: int = 0
    """How many loads, each within the next, are in progress (``changing``)."""
    options_agreed: bool = False
    """Whether the options were found to be the same on every rank (``engine.agree_on_options``)."""
    strict: bool = False
    """Whether a caller loads with ``strict``, whatever the options say (``wrappers``)."""
    module_paths: tuple[str, ...] | None = None
    """The model states file that DeepSpeed is to read, during a load (``load.module_states``)."""
    pending: object = None
    """The ``BackgroundSave`` that is not finished yet (``save.background``)."""
    async_save: bool | None = None
    """Whether the next saves are asynchronous; None: as the options say (``save.background``)."""
    background: object = None
    """The ``Background`` that the engine's asynchronous saves share (``save.background``)."""
    returned: Mapping[str, object] = field(default_factory=dict)
    """What the last load returned of DeepSpeed's own values that training changes (``wrappers``)."""
    memory: object = None
    """Makes checkpoints in memory (``memory.checkpoints``); True once ``save_checkpoint`` has logged its absence."""
    fresh_common_state: Mapping[str, object] = field(default_factory=dict)
    """What the optimizer kept beside the state of its parameters when the engine was made (``wrappers``)."""
    warned_of_waiting: bool = False
    """Whether the reason why saves are not asynchronous was logged (``save.background``)."""
    warned_of_gone_params: bool = False
    """Whether parameters of the optimizer that the module no longer has were logged (``save.checks``)."""
    warned_of_rigid_saves: bool = False
    """Whether saves that are DeepSpeed's own in spite of ``elastic_checkpoint`` were logged (``save_checkpoint``)."""


def state_of(engine: Any) -> EngineState:
    """The state of an engine, made at the first call."""
    found: EngineState = vars(engine).setdefault(_ATTRIBUTE, EngineState())
    return found


def link(optimizer: Any, engine: Any) -> None:
    """Let ``engine_of`` find the engine of an optimizer."""
    setattr(optimizer, _ATTRIBUTE, ref(engine))


def engine_of(optimizer: Any) -> Any:
    """The engine that was linked to an optimizer, or None."""
    found: ref[Any] | None = getattr(optimizer, _ATTRIBUTE, None)
    return None if found is None else found()


def last_save_of(engine: Any) -> LastSave:
    """The save that an engine follows."""
    return state_of(engine).last_save


def note_load(engine: Any, record: CommitRecord | None, client_state: Mapping[str, Any]) -> None:
    """Record that a checkpoint was loaded, with its counters. Collective, if one of ``on_load`` is."""
    state = state_of(engine)
    state.last_save.load(record)
    for call in state.on_load:
        call(client_state)


@contextmanager
def changing(engine: Any, *, whole: bool = True) -> Iterator[None]:
    """A load from beginning to end, which calls ``begin_change`` just before it first changes the engine.

    A load that fails after that leaves the engine damaged, and its error says so. The mark stays, and nothing begins
    from such an engine (``refuse_damaged``), until a load of the ``whole`` state succeeds. Of loads within one another,
    such as that of a resume, the outermost one decides.
    """
    state = state_of(engine)
    before = state.damage
    state.loads_in_progress += 1
    try:
        yield
    except BaseException as error:
        if state.damage is not None:
            _add(state.damage, error)
        raise
    finally:
        state.loads_in_progress -= 1
    if state.loads_in_progress == 0:
        state.damage = None if whole else before


def begin_change(engine: Any, damage: str = DAMAGED) -> None:
    """Mark the engine as damaged until the load that is going to change it has succeeded."""
    state = state_of(engine)
    state.damage = state.damage or damage


def refuse_damaged(engine: Any) -> None:
    """Raise CheckpointError for an engine that an earlier load has left damaged: a run cannot begin from it."""
    damage = state_of(engine).damage
    if damage is not None:
        raise CheckpointError(
            f"a load failed after it had begun to change the engine, so no run can begin from it. {damage}",
            remedy="Build the engine anew, or load a whole checkpoint into it.",
        )


def refuse_to_save(engine: Any, where: FilePath | str) -> None:
    """Raise SaveError for an engine that an earlier load has left damaged: no resume may take that for a checkpoint."""
    damage = state_of(engine).damage
    if damage is not None:
        raise SaveError(
            f"{where}: a load failed after it had begun to change the engine, so its state is not saved. {damage} "
            "Build the engine anew, or load a whole checkpoint into it."
        )


def _add(sentence: str, error: BaseException) -> None:
    """Add a sentence to what an error says, once: to the remedy of ours, which lists of findings leave out."""
    if not isinstance(error, ZeroElasticError):
        if not hasattr(error, "add_note"):  # Python 3.10
            logger.error("%s", sentence)
        elif sentence not in getattr(error, "__notes__", ()):
            error.add_note(sentence)
    elif sentence not in str(error) and sentence not in error.remedy:
        message, is_advised = finding(error), finding(error) != str(error)
        error.remedy = f"{sentence} {error.remedy}".rstrip()
        error.args = (message,)
        if is_advised:
            error.args = (advice(error),)
