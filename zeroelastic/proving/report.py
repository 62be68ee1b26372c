"""The report of a proof: the document that ``prove --json`` prints, with its own digest, and the same as Markdown.

``python -m zeroelastic.proving.report proof/report.json`` checks that a report has not been changed.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict

from zeroelastic.json_document import json_proper
from zeroelastic.proving.checks import OTHER, Check
from zeroelastic.proving.records import Role
from zeroelastic.verbs.report import Format, Number, Part, Report

DIGEST = "digest"


class ProvedSource(Part):
    path: str
    format: Format | None
    world_size: int
    step: int | None
    num_files: int
    num_params: int
    num_tensors: int
    bytes_read: int


class ContentRoots(Part):
    recorded: str | None
    files: str | None
    loaded_at_reference_size: str | None
    loaded_at_other_size: str | None
    saved_at_other_size: str | None
    loaded_back: str | None


class Run(Part):
    """One run, with the file name and SHA-256 of its raw record; a run that failed has none of the last fields."""

    model_config = ConfigDict(json_schema_serialization_defaults_required=False)

    role: Role
    world_size: int
    seconds: float
    finished: bool
    record: str | None
    record_sha256: str | None
    saves_skipped: int | None = None
    precision: str | None = None
    device: str | None = None
    global_batch: int | None = None
    accumulation: int | None = None
    samples: list[str | None] | None = None
    loads: Any = None
    resume_report: dict[str, Any] | None = None


class Machine(Part):
    host: str
    kernel: str
    cores: int
    device: str


class Prove(Report):
    """A proof. ``reasons`` are the sentences of the checks that failed; ``digest`` is over everything else."""

    verdict: Literal["PROVED", "NOT PROVED"]
    reasons: list[str]
    checks: list[Check]
    source: ProvedSource
    content_roots: ContentRoots
    steps: int
    tolerance: float
    losses: dict[str, list[Number | None]]
    runs: list[Run]
    script: list[str]
    command: list[str]
    versions: dict[str, str]
    machine: Machine
    written: str
    signed_off_by: str | None
    digest: str = ""

    def to_json(self) -> dict[str, Any]:
        """The document, without the fields that a failed run does not have."""
        body = {key: json_proper(value) for key, value in self.model_dump(exclude_unset=True).items()}
        return {"schema_version": self.schema_version, **body}


def report_digest(report: Mapping[str, Any]) -> str:
    """SHA-256 of a report as JSON with sorted keys and no blanks, without its own digest."""
    body = {key: value for key, value in report.items() if key != DIGEST}
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()).hexdigest()


def write_report(out: Path, report: Prove) -> None:
    """Write ``report.json`` and ``report.md``."""
    (out / "report.json").write_text(json.dumps(report.to_json(), indent=1, allow_nan=False) + "\n")
    (out / "report.md").write_text(markdown(report))


_MARKDOWN = """\
# {{ report.verdict }}: {{ source.path }}, {{ report.runs[0].world_size }} -> {{ other }} ranks

{% for reason in report.reasons %}
* {{ reason }}
{% if loop.last %}

{% endif %}
{% endfor %}
Saved as {{ source.format }} by {{ source.world_size }} ranks at step {{ source.step }}; {{ source.num_params }} \
parameters, {{ "{:,}".format(source.bytes_read) }} bytes in {{ source.num_files }} files, all of which were read first.

| check | | |
|---|---|---|
{% for check in report.checks %}
| {{ check.name|cell }} | {{ {true: "ok", false: "**FAIL**", none: "note"}[check.ok] }} | {{ check.sentence|cell }} |
{% endfor %}

| content root | |
|---|---|
{% for name, root in report.content_roots %}
| {{ name.replace("_", " ") }} | `{{ root or "none" }}` |
{% endfor %}

{% if report.losses %}
| step after the load | {{ report.losses|join(" | ") }} |
|--:|{{ "--:|" * report.losses|length }}
{% for values in zip(*report.losses.values(), strict=true) %}
| {{ loop.index }} | {{ values|join(" | ") }} |
{% endfor %}

Tolerance: {{ "{:.1e}".format(report.tolerance) }} of the loss at the reference size.
{% endif %}

| run | ranks | seconds | saves skipped | record |
|---|--:|--:|--:|---|
{% for run in report.runs %}
| {{ run.role }} | {{ run.world_size }} | {{ "{:.1f}".format(run.seconds) }} | {{ run.saves_skipped }} | \
`{{ run.record }}` |
{% endfor %}

{% for name, version in report.versions.items() %}{{ name }} {{ version }}{{ ", " if not loop.last }}{% endfor %}; \
{{ machine.host }}, Linux {{ machine.kernel }}, {{ machine.cores }} cores, {{ machine.device }}; {{ report.written }}.

```text
{{ report.command|join(" ") }}
```

Signed off{{ " by " ~ report.signed_off_by if report.signed_off_by }}: sha256 `{{ report.digest }}` of report.json, as \
`python -m zeroelastic.proving.report report.json` computes it.
"""


def markdown(report: Prove) -> str:
    """The report as Markdown; all of it is in the document, too."""
    from jinja2 import Environment, StrictUndefined

    made = Environment(trim_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined)
    made.filters["cell"] = lambda text: text.replace("|", "\\|").replace("\n", " ")
    made.globals["zip"] = zip
    other = next((run.world_size for run in report.runs if run.role == OTHER), "?")
    return made.from_string(_MARKDOWN).render(report=report, source=report.source, machine=report.machine, other=other)


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
