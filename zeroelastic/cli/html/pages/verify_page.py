"""The report of ``zeroelastic verify``."""

from __future__ import annotations

from zeroelastic.byte_sizes import format_size
from zeroelastic.cli.documents.checkpoints import Problem, Verify
from zeroelastic.cli.html.page import Cell, Page, Section, Table, Tone, facts, items, sections, table
from zeroelastic.cli.html.pages.damage import draw_damage
from zeroelastic.errors import counted


def verify_page(found: Verify) -> Page:
    """The page: whether the checkpoint is valid, its files with damage at its place, what was checked."""
    tone, sentence = _answer(found)
    mark = found.quarantine
    marked = (
        () if mark is None else (f"Marked as damaged at {mark.marked_at} by zeroelastic {mark.version}: {mark.why}",)
    )
    if found.lifted:
        marked = (*marked, "The mark was removed, because the checkpoint is valid.")
    rate = found.bytes_read / found.read_seconds if found.read_seconds else 0.0
    return Page(
        "verify",
        found.path,
        tone,
        sentence,
        facts(
            ("format", found.format),
            ("ranks", f"{found.world_size:,}" if found.world_size else None),
            ("files", f"{found.num_files:,}"),
            ("parameters", f"{found.num_params:,}"),
            ("tensors digested", f"{found.num_tensors:,}" if found.mode == "full" else None),
            ("bytes read", format_size(found.bytes_read) if found.mode == "full" else None),
            ("seconds", f"{found.seconds:.2f}" + (f", {format_size(rate)}/s" if rate else "")),
            ("content root", None if found.content_root is None else found.content_root[:12]),
            ("recorded root", None if found.recorded_root is None else found.recorded_root[:12]),
        ),
        sections(
            Section("Files", draw_damage(found.files, found.problems, found.world_size)),
            Section("Problems", _problems(found.problems)),
            Section("What to do", items("plain", [] if found.remedy is None else [found.remedy.replace("`", "")])),
            Section("What is not supported", items("note", found.unsupported)),
            Section("What was checked", items("good" if found.ok else "plain", found.checked)),
            Section("What was not checked, and notes", (*items("plain", found.unchecked), *items("note", marked))),
        ),
    )


def _answer(found: Verify) -> tuple[Tone, str]:
    if found.ok and found.mode == "quick":
        return "note", "Nothing is wrong with names and sizes; the contents of the files were not read (--quick)."
    if found.ok and found.unsupported:
        return "note", "Sound by its checksums, and not supported: DeepSpeed alone resumes it, at the sizes that saved."
    if found.ok:
        compared = "" if found.recorded_root is None else ", and the contents are those of the commit record"
        files = counted(found.num_files, "file")
        return "good", f"Valid: every byte of {files} was read; nothing is damaged or missing{compared}."
    blamed = sorted({problem.file for problem in found.problems if problem.file})
    params = sorted({problem.param for problem in found.problems if problem.param})
    where = f" in {_some(blamed)}" if blamed else ""
    of = f"; {counted(len(params), 'parameter')} concerned: {_some(params)}" if params else ""
    return "bad", f"Invalid: {counted(len(found.problems), 'problem')}{where}{of}. {found.problems[0].sentence}"


def _some(names: list[str]) -> str:
    return ", ".join(names[:2]) + (f" and {len(names) - 2:,} more" if len(names) > 2 else "")


def _problems(problems: list[Problem]) -> tuple[Table, ...]:
    if not problems:
        return ()
    rows = [
        (
            Cell(problem.sentence, "bad"),
            Cell(problem.param or "", name=True),
            Cell(problem.key or ""),
            Cell("" if problem.offset is None else f"{problem.offset:,}"),
            Cell("" if problem.bytes is None else f"{problem.bytes:,}"),
        )
        for problem in problems
    ]
    return (table("What is wrong, and where", ["problem", "parameter", "state key", ">at byte", ">bytes"], rows),)
