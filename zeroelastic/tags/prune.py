"""Which checkpoints of a run to remove, and why, as a plan; and the removal itself.

The plan changes nothing. A tag is removed in two steps: its directory is moved into a hidden folder beside it, and that
move is on disk before the first file is deleted. So no tag is ever half there under its own name, and the next removal
finishes what a killed one left.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from zeroelastic.checkpoint.commit_record import RECORD_NAME
from zeroelastic.checkpoint.listing import is_temporary
from zeroelastic.errors import CheckpointError, UsageError
from zeroelastic.io.atomic import sync_directory
from zeroelastic.io.paths import FilePath
from zeroelastic.io.storage import read_whole
from zeroelastic.tags.candidates import Check, Run, check_quickly, check_tag, going_on_from, list_run, named_latest
from zeroelastic.tags.commit_order import Tag, left_behind
from zeroelastic.tags.leftovers import leftovers, walk, why_kept
from zeroelastic.tags.names import HERE, TRASH
from zeroelastic.tags.runs import runs_of
from zeroelastic.tags.tag_directory import replaces_nothing

MIN_AGE_S = 3600.0
"""A tag without a commit record in which nothing changed for this long is taken not to be in the middle of a save."""

CHANGED = "it changed while this ran"
"""The reason to keep a tag, or the files of a dead save, that a save or another removal is changing."""

OTHER_RUN = "of another run"
"""The reason to keep a tag where only one run is looked at."""

_TRAINER_STATE = "trainer_state.json"
_MAX_STATE_BYTES = 1 << 28


Links = dict[str, str]
"""Symbolic links, by their own names or by their targets, relative to a directory."""


@dataclass(frozen=True, slots=True)
class Tree:
    """The contents of a directory: bytes that its removal frees, time of the last change, and a mark of its state."""

    nbytes: int
    changed_at: float
    temporaries: tuple[str, ...]
    one_device: bool
    mark: tuple[tuple[str, int, int, int], ...]


Look = Callable[[Tag, bool], tuple[Tree, str]]
"""What there is of a tag, which is whole or not, and the reason to keep it because something works on it, or ""."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether to remove one tag, and the reason. ``tree``, only for a removal, is the state the decision is based on.

    ``undecided``: it cannot be checked now whether the tag is whole.
    """

    tag: Tag
    remove: bool
    reason: str
    valid: bool
    tree: Tree | None = None
    undecided: bool = False


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A hidden directory or file of a save that did not finish, or may still be running."""

    name: str
    tree: Tree
    remove: bool
    reason: str


@dataclass(frozen=True, slots=True)
class PrunePlan:
    """What to remove from a directory; ``decisions`` are newest first. ``leftovers`` are those of a killed removal."""

    root: FilePath
    decisions: tuple[Decision, ...]
    leftovers: tuple[str, ...]
    unfinished: tuple[Unfinished, ...] = ()

    @property
    def removals(self) -> tuple[Decision, ...]:
        """The tags to remove, oldest first."""
        return tuple(decision for decision in reversed(self.decisions) if decision.remove)

    @property
    def has_valid(self) -> bool:
        """Whether any tag is whole. If none is, no tag is removed."""
        return any(decision.valid for decision in self.decisions)


def refuse_to_keep_none(keep: int) -> None:
    """Raise UsageError for a number of checkpoints below 1."""
    if keep < 1:
        raise UsageError(f"--keep {keep}: at least 1 checkpoint is kept. Give 1 or more.")


def plan_prune(
    root: Path,
    *,
    keep: int,
    invalid: bool = False,
    min_age_s: float = MIN_AGE_S,
    check: Check = check_quickly,
    of: str | None = None,
) -> PrunePlan:
    """Decide what to remove so that the ``keep`` newest whole tags of each run (``runs``) stay, and for what reasons.

    docs/reference/cli/prune.md has the other reasons for which a tag stays. ``invalid`` removes damaged tags too, where
    they are older than the newest whole one of their run. With ``of``, a tag, only its run is looked at. Raises
    UsageError for a directory without checkpoints, and ``keep`` below 1.
    """
    refuse_to_keep_none(keep)
    root = Path(os.path.realpath(root))
    interrupted = _in_trash(root)
    try:
        run = list_run(root)
    except UsageError:
        if interrupted:  # an interrupted removal took the last one
            return PrunePlan(root, (), interrupted)
        raise
    folders = _folders(root, run.tags)

    def look(tag: Tag, valid: bool) -> tuple[Tree, str]:
        tree = survey(Path(str(tag.path)))
        # A record is written last and removed first.
        return tree, busy(tree, min_age_s, committed=valid and (Path(str(tag.tag_dir)) / RECORD_NAME).exists())

    decisions = tuple(decide(root, run, keep, invalid, check, _links(root, folders), look, of))
    return PrunePlan(root, decisions, interrupted, tuple(_unfinished(root, folders, min_age_s)))


def _unfinished(root: Path, folders: Iterable[Path], min_age_s: float) -> Iterator[Unfinished]:
    """The leftovers of unfinished saves in the folders that hold tags."""
    for folder in folders:
        for name in leftovers(folder):
            try:
                tree = survey(folder / name)
            except FileNotFoundError:  # a save has just put it in place, or removed it
                continue
            kept = why_kept(folder / name, min_age_s)
            if kept is None and not tree.one_device:
                kept = "another file system is mounted in it"
            path = str((folder / name).relative_to(root))
            yield Unfinished(path, tree, kept is None, kept or "of a save that did not finish")


def _folders(root: Path, tags: Iterable[Tag]) -> list[Path]:
    """The directory itself, and the folders between it and its tags."""
    above = {parent for tag in tags for parent in Path(str(tag.path)).parents if parent.is_relative_to(root)}
    return sorted({root, *above})


def decide(
    root: FilePath,
    run: Run,
    keep: int,
    invalid: bool,
    check: Check,
    found: tuple[Links, Links],
    look: Look,
    of: str | None = None,
) -> list[Decision]:
    """What becomes of each tag, newest first; ``found`` are the symbolic links (``_links``).

    Each run in the directory is decided on by itself. A tag that cannot be assigned to one of them stays.
    """
    runs = runs_of(run.tags)
    decisions: dict[str, Decision] = {}
    for tags in runs:
        if of is None or any(tag.name == of for tag in tags):
            for decision in _decide(root, replace(run, tags=tags), keep, invalid, check, found, look):
                decisions[decision.tag.name] = decision
    assigned = {tag.name for tags in runs for tag in tags}
    for tag in run.tags:
        if tag.name not in decisions:
            reason = OTHER_RUN if tag.name in assigned else "cannot be assigned to one of the runs that save here"
            decisions[tag.name] = Decision(tag, False, reason, valid=False)
    return [decisions[tag.name] for tag in run.tags]


def _decide(
    root: FilePath, run: Run, keep: int, invalid: bool, check: Check, found: tuple[Links, Links], look: Look
) -> Iterator[Decision]:
    latest, problem = named_latest(root)
    links, linked = found
    verdicts = [check_tag(tag, check) for tag in run.tags]
    whole = [tag for tag, verdict in zip(run.tags, verdicts, strict=True) if verdict is None]
    at = 0 if run.in_folders else going_on_from(root, run.tags)
    newer = {tag.name for tag in run.tags[:at]}
    head = next((tag for tag in whole if tag.name not in newer), None)
    left = {tag.name for tag in left_behind(run.tags, head)} if head is not None else set()
    counted = [tag for tag in whole if tag.name not in links and tag.name not in newer]
    newest = {tag.name for tag in sorted(counted, key=lambda tag: tag.name in left)[:keep]}
    best = _best_of_trainer(whole[0]) if whole and run.in_folders else None
    for tag, verdict in zip(run.tags, verdicts, strict=True):
        tree = None
        valid = verdict is None
        reason = ""
        if tag.name in newest:
            reason = "one of the newest that verify" if keep > 1 else "the newest that verifies"
        elif not whole:
            reason = f"no tag verifies, so that none is removed: {'; '.join(verdict.problems) if verdict else ''}"
        elif tag.name == latest:
            reason = "latest names it"
        elif tag.name in newer:
            reason = f"committed after {latest}, which latest was pointed at since"
        elif problem is not None:
            reason = f"latest cannot be read: {problem}"
        elif tag.name in links:
            reason = "is a symbolic link"
        elif tag.name in linked:
            reason = f"the symbolic link {linked[tag.name]} leads to it"
        elif tag.name == HERE:
            reason = "it is the directory itself"
        elif tag.name == best:
            reason = f"{_TRAINER_STATE} of {whole[0].name} names it as the best model"
        elif verdict is not None and verdict.undecided:
            reason = f"cannot be judged: {verdict.problems[0]}"
        elif verdict is not None and (tag.step is None or tag.age_key > whole[0].age_key):
            older = "its step cannot be known" if tag.step is None else "not older than the newest that does"
            reason = f"does not verify, but {older}: {verdict.problems[0]}"
        elif verdict is not None and verdict.quarantined and not invalid:
            reason = f"quarantined, so that it does not count (--invalid removes it): {verdict.problems[0]}"
        elif verdict is not None and not invalid:
            reason = f"does not verify (--invalid removes it): {verdict.problems[0]}"
        else:
            try:
                tree, reason = look(tag, valid)
            except FileNotFoundError:
                reason = CHANGED
        if reason:
            yield Decision(tag, False, reason, valid, undecided=verdict is not None and verdict.undecided)
        else:
            why = f"older than the newest {keep} that verify" if keep > 1 else "older than the newest that verifies"
            why = f"of a branch that was rolled back; {why}" if tag.name in left else why
            why = why if verdict is None else f"does not verify: {verdict.problems[0]}"
            yield Decision(tag, True, why, valid, tree)


def busy(tree: Tree, min_age_s: float, *, committed: bool) -> str:
    """The reason why a tag may be in the middle of a save; empty where it is not."""
    if not tree.one_device:
        return "another file system is mounted in it"
    if committed:
        return ""
    if tree.temporaries:
        return f"may be being written: it holds temporary files ({tree.temporaries[0]}); remove them if no save runs"
    if time.time() - tree.changed_at < min_age_s:
        return f"may be being written: it changed within the last {min_age_s / 60:.0f} minutes"
    return ""


def survey(directory: Path) -> Tree:
    """List everything below a directory; links are not followed. A file with other hard links frees nothing."""
    nbytes, changed_at = 0, 0.0
    temporaries: list[str] = []
    mark: list[tuple[str, int, int, int]] = []
    device = os.lstat(directory).st_dev
    one_device = True
    for path, found in walk(directory):
        if stat.S_ISREG(found.st_mode):
            nbytes += found.st_size if found.st_nlink == 1 else 0
            if is_temporary(path.name):
                temporaries.append(str(path.relative_to(directory)))
        one_device = one_device and found.st_dev == device
        changed_at = max(changed_at, found.st_mtime)
        mark.append((str(path.relative_to(directory)), found.st_ino, found.st_size, found.st_mtime_ns))
    return Tree(nbytes, changed_at, tuple(sorted(temporaries)), one_device, tuple(sorted(mark)))


def remove_tag(plan: PrunePlan, decision: Decision) -> str | None:
    """Remove one tag. Returns the reason when it was kept after all, else None. Raises OSError.

    It is kept where ``latest`` names it by now, or where it changed since the decision.
    """
    if (kept := why_kept_after_all(plan, decision)) is not None:
        return kept
    path = Path(str(decision.tag.path))
    assert (
        decision.remove
        and decision.tree is not None
        and path.is_relative_to(str(plan.root))
        and path != Path(str(plan.root))
    )
    try:
        if survey(path).mark != decision.tree.mark:
            return CHANGED
        return _remove(Path(str(plan.root)), path, decision.tree)
    except FileNotFoundError:
        return CHANGED


def why_kept_after_all(plan: PrunePlan, decision: Decision) -> str | None:
    """Why a tag that was to be removed stays: ``latest`` names it by now, or cannot be read. Else None."""
    latest, problem = named_latest(plan.root)
    if problem is not None or latest == decision.tag.name:
        return problem or "latest names it by now"
    return None


def remove_unfinished(plan: PrunePlan, found: Unfinished) -> str | None:
    """Remove the leftovers of a dead save; returns as ``remove_tag`` does."""
    path = Path(str(plan.root)) / found.name
    try:
        if replaces_nothing(path) or survey(path).mark != found.tree.mark:
            return CHANGED
        return _remove(Path(str(plan.root)), path, found.tree)
    except FileNotFoundError:
        return None  # a save has removed it


def _remove(root: Path, path: Path, tree: Tree) -> str | None:
    """Move a directory to the hidden folder and delete it; put it back if a save changed it just before."""
    moved = _trash(root, make=True) / secrets.token_hex(8)
    try:
        os.rename(path, moved)
    except FileNotFoundError:
        if moved.parent.exists():
            raise
        return _remove(root, path, tree)  # another removal has just removed the empty folder
    try:
        if _files(survey(moved)) != _files(tree) and not os.path.lexists(path):
            os.rename(moved, path)
            return CHANGED
    except FileNotFoundError:  # another removal has emptied the folder
        return None
    with suppress(FileNotFoundError):  # another removal empties the same folder
        sync_directory(moved.parent)
    sync_directory(path.parent)
    empty_trash(root)
    return None


def _files(tree: Tree) -> set[tuple[str, int, int, int]]:
    """The entries of a tree without the directory's own, which a rename may change."""
    return {entry for entry in tree.mark if entry[0] != "."}


def empty_trash(root: Path) -> None:
    """Delete the hidden folder and everything that was moved into it. Raises OSError."""
    trash = _trash(root, make=False)
    for name in _in_trash(root):
        _delete(trash / name)
    try:
        trash.rmdir()
    except OSError:  # gone, or another removal has just moved something there
        return


def leftover_bytes(plan: PrunePlan) -> int:
    """Bytes that finishing an interrupted removal frees."""
    nbytes = 0
    trash = Path(str(plan.root)) / TRASH
    for name in plan.leftovers:
        with suppress(FileNotFoundError):
            nbytes += survey(trash / name).nbytes
    return nbytes


def _delete(path: Path) -> None:
    try:
        if stat.S_ISDIR(os.lstat(path).st_mode):
            shutil.rmtree(path)
        else:
            path.unlink()
    except FileNotFoundError:  # another removal deletes it, too
        if path.exists():
            shutil.rmtree(path, ignore_errors=True)


def _trash(root: Path, *, make: bool) -> Path:
    """The hidden folder. Raises UsageError where its name is taken by something that is not a folder."""
    trash = root / TRASH
    if make:
        trash.mkdir(mode=0o700, exist_ok=True)
    if os.path.lexists(trash) and not stat.S_ISDIR(os.lstat(trash).st_mode):
        raise UsageError(f"{trash}: is not a folder; remove it.")
    return trash


def _in_trash(root: Path) -> tuple[str, ...]:
    trash = _trash(root, make=False)
    try:
        return tuple(sorted(os.listdir(trash)))
    except (FileNotFoundError, NotADirectoryError):
        return ()


def _links(root: Path, folders: Iterable[Path]) -> tuple[Links, Links]:
    """The symbolic links in the folders of a directory, and for the paths in it that they lead to or into, the link."""
    links: Links = {}
    linked: Links = {}
    for folder in folders:
        for entry in os.scandir(folder):
            if entry.is_symlink():
                name = str(Path(entry.path).relative_to(root))
                links[name] = name
                target = Path(os.path.realpath(entry.path))
                for path in (target, *target.parents):
                    if path.is_relative_to(root) and path != root:
                        linked[str(path.relative_to(root))] = name
    return links, linked


def _best_of_trainer(newest: Tag) -> str | None:
    """The folder that the Trainer's state names as that of its best model so far."""
    try:
        state = json.loads(read_whole(newest.path / _TRAINER_STATE, limit=_MAX_STATE_BYTES))
    except (CheckpointError, ValueError, RecursionError):
        return None
    best = state.get("best_model_checkpoint") if isinstance(state, dict) else None
    return Path(best).name if isinstance(best, str) else None


def removable(decisions: Iterable[Decision]) -> int:
    """Bytes that the removal of these tags frees."""
    return sum(decision.tree.nbytes for decision in decisions if decision.tree is not None)
