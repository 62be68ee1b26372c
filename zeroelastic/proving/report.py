"""The report of a proof: one JSON document with its own digest, and the same as Markdown.

``python -m zeroelastic.proving.report proof/report.json`` checks that a report has not been changed.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zeroelastic._version import __version__
from zeroelastic.json_document import SCHEMA_VERSION, json_proper
from zeroelastic.proving.checks import BACK, CONTROL, OTHER, REPEAT, Check, tolerance_of
from zeroelastic.proving.driver import ProofOutcome
from zeroelastic.proving.records import ROLES, Role, RunRecord

DIGEST = "digest"
PROVED, NOT_PROVED = "PROVED", "NOT PROVED"


def document(
    outcome: ProofOutcome, *, script: Sequence[str], command: Sequence[str], device: str, signed_off_by: str | None
) -> dict[str, Any]:
    """The report as plain JSON values; ``digest`` is over everything else in it."""
    request, verified, verdict = outcome.request, outcome.verified, outcome.verdict
    control = outcome.records.get(CONTROL)
    tolerance = request.tolerance
    if tolerance is None:
        tolerance = tolerance_of(control.precision if control else None)
    body: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "ok": verdict.proved,
        "verdict": PROVED if verdict.proved else NOT_PROVED,
        "reasons": list(verdict.reasons),
        "checks": [_check(check) for check in verdict.checks],
        "source": {
            "path": verified.path,
            "format": verified.format,
            "world_size": verified.world_size,
            "step": _steps(outcome),
            "num_files": verified.num_files,
            "num_params": verified.num_params,
            "num_tensors": verified.num_tensors,
            "bytes_read": verified.bytes_read,
        },
        "content_roots": {
            "recorded": verified.recorded_root,
            "files": verified.content_root,
            "loaded_at_reference_size": _root(control),
            "loaded_at_other_size": _root(outcome.records.get(OTHER)),
            "saved_at_other_size": outcome.saved_root,
            "loaded_back": _root(outcome.records.get(BACK)),
        },
        "steps": request.steps,
        "tolerance": tolerance,
        "losses": {role: outcome.records[role].losses for role in (CONTROL, REPEAT, OTHER) if role in outcome.records},
        "runs": [
            _run(role, outcome.records.get(role), run.world_size, outcome.seconds[role], Path(run.folder), request.out)
            for run in outcome.runs
            for role in (run.role,)
        ],
        "script": list(script),
        "command": list(command),
        "versions": {"zeroelastic": __version__, **(control.versions if control else {})},
        "machine": {
            "host": platform.node(),
            "kernel": platform.release(),
            "cores": len(os.sched_getaffinity(0)),
            "device": device,
        },
        "written": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "signed_off_by": signed_off_by,
    }
    plain = json_proper(body)
    assert isinstance(plain, dict)
    return {**plain, DIGEST: report_digest(plain)}


def report_digest(report: Mapping[str, Any]) -> str:
    """SHA-256 of a report as JSON with sorted keys and no blanks, without its own digest."""
    body = {key: value for key, value in report.items() if key != DIGEST}
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()).hexdigest()


def write_report(out: Path, report: Mapping[str, Any]) -> None:
    """Write ``report.json`` and ``report.md``."""
    (out / "report.json").write_text(json.dumps(report, indent=1, allow_nan=False) + "\n")
    (out / "report.md").write_text(markdown(report))


def markdown(report: Mapping[str, Any]) -> str:
    """The report as Markdown; all of it is in the document, too."""
    source, roots = report["source"], report["content_roots"]
    sizes = [run["world_size"] for run in report["runs"]]
    other = next((run["world_size"] for run in report["runs"] if run["role"] == OTHER), None)
    lines = [
        f"# {report['verdict']}: {source['path']}, {sizes[0]} -> {other or '?'} ranks",
        "",
        *([f"* {reason}" for reason in report["reasons"]] + [""] if report["reasons"] else []),
        f"Saved as {source['format']} by {source['world_size']} ranks at step {source['step']}; "
        f"{source['num_params']} parameters, {source['bytes_read']:,} bytes in {source['num_files']} files, all of "
        "which were read first.",
        "",
        "| check | | |",
        "|---|---|---|",
    ]
    for check in report["checks"]:
        mark = {True: "ok", False: "**FAIL**", None: "note"}[check["ok"]]
        lines.append(f"| {_cell(check['name'])} | {mark} | {_cell(check['sentence'])} |")
    lines += ["", "| content root | |", "|---|---|"]
    lines += [f"| {name.replace('_', ' ')} | `{root or 'none'}` |" for name, root in roots.items()]
    lines += [
        "",
        *_loss_table(report),
        "",
        "| run | ranks | seconds | saves skipped | record |",
        "|---|--:|--:|--:|---|",
    ]
    lines += [
        f"| {run['role']} | {run['world_size']} | {run['seconds']:.1f} | {run['saves_skipped']} | `{run['record']}` |"
        for run in report["runs"]
    ]
    machine = report["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    lines += [
        "",
        f"{versions}; {machine['host']}, Linux {machine['kernel']}, {machine['cores']} cores, {machine['device']}; "
        f"{report['written']}.",
        "",
        "```text",
        " ".join(report["command"]),
        "```",
        "",
        f"Signed off{' by ' + report['signed_off_by'] if report['signed_off_by'] else ''}: sha256 `{report[DIGEST]}` "
        "of report.json, as `python -m zeroelastic.proving.report report.json` computes it.",
    ]
    return "\n".join(lines) + "\n"


def _loss_table(report: Mapping[str, Any]) -> list[str]:
    losses: Mapping[str, list[float]] = report["losses"]
    if not losses:
        return []
    lines = [f"| step after the load | {' | '.join(losses)} |", f"|--:|{'--:|' * len(losses)}"]
    for step, values in enumerate(zip(*losses.values(), strict=True), start=1):
        lines.append(f"| {step} | {' | '.join(f'{value!r}' for value in values)} |")
    return [*lines, "", f"Tolerance: {report['tolerance']:.1e} of the loss at the reference size."]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _check(check: Check) -> dict[str, Any]:
    return {"name": check.name, "ok": check.ok, "sentence": check.sentence, "details": list(check.details)}


def _steps(outcome: ProofOutcome) -> int | None:
    """The checkpoint's optimizer steps: from its commit record or, without one, from the loaded state."""
    control = outcome.records.get(CONTROL)
    if outcome.global_steps is not None or control is None or control.loaded is None:
        return outcome.global_steps
    steps = control.loaded["engine/global_steps"]
    return steps if isinstance(steps, int) else None


def _root(record: RunRecord | None) -> str | None:
    return None if record is None or record.report is None else record.report.get("loaded_root")


def _run(
    role: Role, record: RunRecord | None, world_size: int, seconds: float, folder: Path, out: Path
) -> dict[str, Any]:
    """One run: its role and figures, and the file name and SHA-256 of its raw record, which has all digests."""
    assert role in ROLES
    path = folder / "record.json"
    found: dict[str, Any] = {
        "role": role,
        "world_size": world_size,
        "seconds": round(seconds, 3),
        "finished": record is not None,
        "record": os.path.relpath(path, out),
        "record_sha256": hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else None,
        "saves_skipped": 0 if record is None else record.saves_skipped,
    }
    if record is not None:
        found |= {
            "precision": record.precision,
            "device": record.device,
            "global_batch": record.global_batch,
            "accumulation": record.accumulation,
            "samples": record.samples,
            "loads": record.loads,
            "resume_report": record.report,
        }
    return found


def main() -> None:
    """Check the digest of a report; exit status 1 when it differs."""
    if len(sys.argv) != 2:
        sys.exit("usage: python -m zeroelastic.proving.report REPORT.json")
    report = json.loads(Path(sys.argv[1]).read_text())
    found = report_digest(report)
    if report.get(DIGEST) != found:
        sys.exit(f"{sys.argv[1]}: has been changed: its digest is {found}; the one in it is {report.get(DIGEST)}")
    sys.stdout.write(f"{report['verdict']}; {found} as written\n")


if __name__ == "__main__":
    main()
