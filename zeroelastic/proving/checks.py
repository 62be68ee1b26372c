"""The checks of a proof, from the records of its runs. Pure: records in, checks out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from zeroelastic.errors import some
from zeroelastic.proving.records import Role, RunRecord
from zeroelastic.testing.state import Fingerprint, Fingerprints, compare_states
from zeroelastic.verbs.report import Part
from zeroelastic.verbs.verify.report import VerifyReport

TOLERANCES = {"fp32": 1e-4, "fp16": 4e-3, "bf16": 8e-3}
"""Largest relative difference between the losses of the two sizes. The state is the same bit for bit, but gradients are
summed in another order: 2 roundings of bf16 (2^-8 each), 8 of fp16 (2^-11), which loses more to small gradients, and a
thousand of fp32."""

CONTROL: Role = "reference size"
REPEAT: Role = "reference size again"
OTHER: Role = "other size"
BACK: Role = "back"


class Check(Part):
    """One check. ``ok`` None is information without a verdict; ``details`` are lines of text."""

    name: str
    ok: bool | None
    sentence: str
    details: list[str]


def _check(name: str, ok: bool | None, sentence: str, details: Sequence[str] = ()) -> Check:
    return Check(name=name, ok=ok, sentence=sentence, details=list(details))


def tolerance_of(precision: str | None) -> float:
    """The tolerance of a precision in the words of ``precision_of``; autocast counts as the dtype it casts to."""
    found = [TOLERANCES[name] for name in TOLERANCES if name in (precision or "")]
    return max(found, default=TOLERANCES["fp32"])


def check_records(
    source: VerifyReport,
    step: int | None,
    records: Mapping[Role, RunRecord],
    *,
    saved_root: str | None,
    tolerance: float | None,
    changed_files: Sequence[str],
    failures: Mapping[Role, str],
) -> list[Check]:
    """Every check that the records allow; each failed run gives a failed check.

    ``source`` is the checkpoint, ``step`` the one in its commit record, ``saved_root`` the content root of the other
    size's save. ``tolerance`` None: by precision.
    """
    assert source.content_root is not None
    recorded = "no commit record has one" if source.recorded_root is None else ""
    sentence = f"every byte of the checkpoint was read; its content root is {source.content_root[:12]}"
    checks = [_check("source", True, f"{sentence}; {recorded}" if recorded else f"{sentence}, the recorded one")]
    for role, reason in failures.items():
        first = reason.splitlines()[0] if reason else "no reason is known"
        checks.append(_check(f"run, {role}", False, f"the run at the {role} failed: {first}", [reason]))
    control, other = records.get(CONTROL), records.get(OTHER)
    for record in filter(None, (control, records.get(REPEAT), other)):
        checks += _loaded(source.content_root, step, record)
    if control is not None and other is not None:
        checks.append(_states("state after the load", control.loaded, other.loaded, control, other))
        if control.started is not None and other.started is not None:
            checks.append(_states("state at the first step", control.started, other.started, control, other))
        checks += _training(control, records.get(REPEAT), other, tolerance)
    back = records.get(BACK)
    if other is not None and back is not None:
        checks += _round_trip(other, back, saved_root)
    sentence = "the files of the checkpoint are as they were" if not changed_files else "the run changed the checkpoint"
    return [*checks, _check("source untouched", not changed_files, sentence, changed_files)]


def loss_difference(first: Sequence[float], second: Sequence[float]) -> float:
    """The largest difference of two runs' losses, relative to the first's; infinite where one is not finite."""
    gaps = [abs(a - b) / abs(a) if a else abs(a - b) for a, b in zip(first, second, strict=True)]
    return max((gap if math.isfinite(gap) else math.inf for gap in gaps), default=0.0)


def _at(record: RunRecord) -> str:
    return f"{record.world_size} rank{'s' if record.world_size > 1 else ''}"


def _loaded(saved_root: str, step: int | None, record: RunRecord) -> list[Check]:
    """The checks of one run's own load."""
    root = None if record.report is None else record.report.get("loaded_root")
    if root is None:
        notes = "; ".join(map(str, (record.report or {}).get("notes", ()))) or "DeepSpeed loaded it without zeroelastic"
        sentence = f"at the {record.role} no content root was computed: {notes}"
    elif root != saved_root:
        sentence = f"at the {record.role} the live state has content root {root[:12]}, the files {saved_root[:12]}"
    else:
        sentence = f"at the {record.role} ({_at(record)}) the live state has the files' content root"
    checks = [_check(f"content root, {record.role}", root == saved_root, sentence)]
    if step is not None and record.loaded is not None:
        steps = record.loaded["engine/global_steps"]
        if steps != step:
            sentence = f"at the {record.role} the run is at step {steps}, the checkpoint at {step}"
            checks.append(_check(f"step, {record.role}", False, sentence))
    if record.replicas:
        sentence = f"at the {record.role} the ranks differ in replicated state"
        checks.append(_check(f"copies, {record.role}", False, sentence, record.replicas))
    if record.loaded is not None and record.started is not None:
        changes = compare_states(record.loaded, record.started)
        sentence = f"at the {record.role} nothing changed between the load and the first step"
        if changes:
            listed = some(changes, 3, separator="; ")
            sentence = f"at the {record.role} the script changed what was loaded before the first step: {listed}"
        checks.append(_check(f"unchanged by the script, {record.role}", not changes, sentence, changes))
    return checks


def _states(
    name: str, first: Fingerprints | None, second: Fingerprints | None, one: RunRecord, two: RunRecord
) -> Check:
    if first is None or second is None:
        return _check(name, False, f"{name}: was not recorded")
    differences = compare_states(first, second)
    if differences:
        return _check(
            name,
            False,
            f"{name}: {_at(one)} and {_at(two)} differ: {some(differences, 3, separator='; ')}",
            differences,
        )
    return _check(name, True, f"{name}: {describe(first)}, the same on {_at(one)} and {_at(two)}")


def describe(state: Fingerprints) -> str:
    """The number of tensors and numbers in a state."""
    tensors = sum(isinstance(entry, Fingerprint) for entry in state.values())
    return f"{tensors} tensors and {len(state) - tensors} numbers"


def _training(control: RunRecord, repeat: RunRecord | None, other: RunRecord, tolerance: float | None) -> list[Check]:
    """The checks of the steps after the load."""
    checks = []
    if control.global_batch != other.global_batch:
        sentence = (
            f"the global batch is {control.global_batch} on {_at(control)} and {other.global_batch} on {_at(other)}: "
            "their losses cannot be compared. Give the script arguments that keep it at any size."
        )
        checks.append(_check("global batch", False, sentence))
    else:
        checks.append(_check("global batch", True, f"the global batch is {control.global_batch} at both sizes"))
    allowed = tolerance_of(control.precision) if tolerance is None else tolerance
    difference = loss_difference(control.losses, other.losses)
    same_samples = _same_samples(control, other)
    sentence = (
        f"the losses of {len(control.losses)} steps differ by {difference:.1e} at most; allowed are {allowed:.1e}"
        + ("" if control.precision is None or tolerance is not None else f" ({control.precision})")
    )
    if not difference <= allowed and control.started == other.started:  # a difference in the state would be the cause
        sentence += {
            True: ". Both sizes saw the same samples: look for what is random in the model, such as dropout.",
            False: ". The sizes saw different samples: the script's order of samples depends on the number of ranks.",
            None: "",
        }[same_samples]
    checks.append(_check("losses", difference <= allowed, sentence))
    if same_samples is not None:
        what = "the same samples" if same_samples else "different samples (or the same, padded otherwise)"
        checks.append(_check("samples", None, f"both sizes trained each step on {what}"))
    if repeat is not None and repeat.ended is not None and control.ended is not None:
        noise = loss_difference(control.losses, repeat.losses)
        moved = len(compare_states(control.ended, repeat.ended))
        state = "every tensor is the same" if not moved else f"{moved} of {len(control.ended)} entries differ"
        sentence = f"the same size twice: losses differ by {noise:.1e} at most, and after the last step {state}"
        checks.append(_check("noise", None, sentence))
    return checks


def _same_samples(one: RunRecord, two: RunRecord) -> bool | None:
    if None in one.samples or None in two.samples or not one.samples:
        return None
    return one.samples == two.samples


def _round_trip(other: RunRecord, back: RunRecord, saved_root: str | None) -> list[Check]:
    """The checks of the other size's save, loaded at the first size."""
    root = None if back.report is None else back.report.get("loaded_root")
    same = root is not None and root == saved_root
    sentence = (
        f"saved on {_at(other)} after the steps and loaded on {_at(back)}: content root {str(saved_root)[:12]}"
        + (" both times" if same else f", then {str(root)[:12]}")
    )
    checks = [_check("round trip, content root", same, sentence)]
    if other.ended is not None and back.loaded is not None:
        checks.append(_states("round trip, state", other.ended, back.loaded, other, back))
    if back.replicas:
        checks.append(_check("copies, back", False, "on the way back ranks differ in replicated state", back.replicas))
    return checks
