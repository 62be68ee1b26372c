"""``--html``: check the file's name before the work, write the report after it; never half a file."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from zeroelastic.cli.output.new_file import check_new_file, write_new_file
from zeroelastic.json_document import json_proper

_SUFFIXES = (".html", ".htm")


def check_report(path: Path | None, *, force: bool = False) -> None:
    """Raise UsageError, with what to do, where no report can be written to ``path``; ``force`` replaces a file."""
    if path is not None:
        check_new_file(path, "a report is written", _SUFFIXES, force=force)


def write_report(
    path: Path | None, verb: str, document: Callable[[], Mapping[str, object]], *, force: bool = False
) -> None:
    """Write the report on the document of a verb, if there is a ``path``. Raises UsageError where it exists."""
    if path is not None:
        write_new_file(path, report(verb, document()).encode(), force=force)


def report(verb: str, document: Mapping[str, object]) -> str:
    """The HTML of the report on the document that ``zeroelastic VERB --json`` prints."""
    from zeroelastic.cli.documents.schemas import DOCUMENTS
    from zeroelastic.cli.html.render import render_page

    proper: Any = json_proper(document)
    model = DOCUMENTS[verb].model_validate_json(json.dumps(proper))
    return render_page(_page_of(verb)(model), proper)


def _page_of(verb: str) -> Callable[[Any], Any]:
    from zeroelastic.cli.html.pages.diff_page import diff_page
    from zeroelastic.cli.html.pages.inspect_page import inspect_page
    from zeroelastic.cli.html.pages.plan_page import plan_page
    from zeroelastic.cli.html.pages.prove_page import prove_page
    from zeroelastic.cli.html.pages.timeline_page import timeline_page
    from zeroelastic.cli.html.pages.verify_page import verify_page

    pages: dict[str, Callable[[Any], Any]] = {
        "inspect": inspect_page,
        "verify": verify_page,
        "plan": plan_page,
        "diff": diff_page,
        "prove": prove_page,
        "timeline": timeline_page,
    }
    return pages[verb]
