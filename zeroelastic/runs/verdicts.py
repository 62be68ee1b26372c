"""Verdicts on the tags of a run: which of them is whole, and which can be removed.

Tags are checked one at a time, newest first, until one is whole. What a prune removes, and why, is a plan, which
changes nothing; ``remove_tag`` does it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from zeroelastic.checkpoint.commit_record import RECORD_NAME
from zeroelastic.checkpoint.open import open_checkpoint
from zeroelastic.checkpoint.saved_state import open_state
from zeroelastic.checkpoint.tag_files import is_rank_file, is_universal, saved_again, was_saved_again
from zeroelastic.errors import (
    CheckpointError,
    MissingFileError,
    NewerFormatError,
    OldFormatError,
    UnreadableError,
    UnsafePickleError,
    UnsupportedError,
    UsageError,
    some,
)
from zeroelastic.io.paths import FilePath, relative_name
from zeroelastic.io.storage import file_sizes, list_directory, read_whole
from zeroelastic.runs.names import HERE, LATEST, LATEST_UNIVERSAL, PARTIAL, look_for_tags, named_latest
from zeroelastic.runs.run_store import CHANGED, MIN_AGE_S, RunStore, Tree, leftover_names, survey, why_kept
from zeroelastic.runs.tag_directory import open_tag
from zeroelastic.runs.tags import Tag, by_params, in_folders

OTHER_PARAMS = "its trained parameters are others"
"""The reason to keep a tag where only those with the same trained parameters are looked at."""

_TRAINER_STATE = "trainer_state.json"
_MAX_STATE_BYTES = 1 << 28


@dataclass(frozen=True, slots=True)
class Verdict:
    """A tag that is not whole, and why; ``undecided``: it may be whole, and cannot be checked now.

    ``may_be_newest``: it is undecided and of a kind that a run can resume, so no older tag may take its place.
    """

    tag: Tag
    problems: tuple[str, ...]
    undecided: bool = False
    may_be_newest: bool = False


Check = Callable[[FilePath], tuple[str, ...]]
"""Returns the problems of a tag directory; a CheckpointError or UnsupportedError that it raises is a problem, too."""


def refuse_fresh_start(root: FilePath) -> None:
    """Raise CheckpointError where a directory without a resumable checkpoint has any file of a checkpoint in it."""
    try:
        sign = _sign_of_checkpoint(root)
        signs = [sign] if sign else look_for_tags(root, lambda name: _sign_of_checkpoint(root / name))
    except MissingFileError:
        return
    if signs:
        raise CheckpointError(
            f"{root}: {LATEST} names no checkpoint, and none that is committed trains the parameters of this engine, "
            f"but {signs[0]}. A new run in this directory would look like its continuation. Load a checkpoint by its "
            "tag, give another directory for the new run, or begin anew here with resume(..., fresh=True).",
            remedy="",
        )


def _sign_of_checkpoint(directory: FilePath) -> str | None:
    """A file in a directory that belongs to a DeepSpeed checkpoint of any stage, whole or not, as a clause."""
    try:
        files, inside = list_directory(directory)
    except UnreadableError as error:
        return str(error).rstrip(".")
    signs = [name for name in files if name in (LATEST, LATEST_UNIVERSAL, RECORD_NAME) or is_rank_file(name)]
    if not signs and "zero" in inside and is_universal(directory):
        signs = ["zero"]
    return f"there is {directory / signs[0]}" if signs else None


def find_newest(tags: Iterable[Tag], check: Check) -> tuple[Tag | None, tuple[Verdict, ...]]:
    """The first whole tag, and the tags before it, which are not whole. Later tags are not checked."""
    passed: list[Verdict] = []
    for tag in tags:
        verdict = check_tag(tag, check)
        if verdict is None:
            return tag, tuple(passed)
        passed.append(verdict)
    return None, tuple(passed)


def check_tag(tag: Tag, check: Check) -> Verdict | None:
    """None for a whole tag, else its problems. Raises SavedAgainError for one that is saved again during the check."""
    if tag.unfinished is not None:
        return Verdict(tag, (tag.unfinished,))
    tag_dir, problems, undecided, may_be_newest = open_tag(tag.tag_dir), tuple[str, ...](), False, False
    try:
        problems = check(tag_dir)
    except (UnsupportedError, CheckpointError, UnreadableError) as error:
        undecided = isinstance(error, (UnsupportedError, UnreadableError, NewerFormatError))
        may_be_newest = undecided and not isinstance(error, UnsupportedError)
        # the caller names the tag directory
        problems = (str(error).removeprefix(f"{tag.tag_dir}: ").removeprefix(f"{tag.tag_dir}/"),)
    if not problems:
        return None
    if was_saved_again(tag_dir):
        raise saved_again(tag_dir)
    if not undecided and is_universal(tag_dir):
        return Verdict(tag, ("is a Universal checkpoint (ds_to_universal).",), undecided=True)
    return Verdict(tag, problems, undecided, may_be_newest)


def is_damage(error: CheckpointError | UnreadableError) -> bool:
    """Whether an error means that files are damaged, rather than that they cannot be read now or by this version.

    Not damage: an unreachable server, a format newer than this zeroelastic, torch's old format, a class that an
    allow-list refuses.
    """
    return not isinstance(error, (UnreadableError, UnsafePickleError, OldFormatError, NewerFormatError))


def check_quickly(tag_dir: FilePath) -> tuple[str, ...]:
    """A check that reads no payload; it raises the problem and returns none.

    With a commit record: every rank's files exist with the recorded sizes; no header is opened. Without one: every
    rank's headers can be read and belong to one save, as far as they are read here: a checkpoint that only DeepSpeed
    loads may be whole, too. Raises CheckpointError, and UnsupportedError where not even its files are known.
    """
    checkpoint = open_checkpoint(tag_dir)
    if not checkpoint.inventory.is_recorded:
        model = checkpoint.model_states(0)
        for rank in range(checkpoint.world_size):
            with suppress(UnsupportedError):
                checkpoint.require_committed(checkpoint.shard(rank))
        with suppress(UnsupportedError):
            open_state(checkpoint, resizable=False)
        missing = sorted({*model.expert_files} - {*file_sizes(checkpoint.tag_dir)} if model.expert_files else ())
        if missing:
            raise MissingFileError(f"{tag_dir}: files of experts are missing: {some(missing)}.")
    return ()


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
class Leftover:
    """The files of a save that did not finish, or may still be running; ``remove``: it is dead."""

    name: str
    tree: Tree
    remove: bool
    reason: str


@dataclass(frozen=True, slots=True)
class PrunePlan:
    """A plan for a directory: ``decisions`` on the tags, newest first, and the leftovers of killed saves."""

    root: Path
    decisions: tuple[Decision, ...]
    unfinished: tuple[Leftover, ...]

    @property
    def removals(self) -> tuple[Decision, ...]:
        """The tags to remove, oldest first."""
        return tuple(decision for decision in reversed(self.decisions) if decision.remove)

    @property
    def has_valid(self) -> bool:
        """Whether any tag is whole. If none is, no tag is removed."""
        return any(decision.valid for decision in self.decisions)


def plan_prune(
    root: Path,
    *,
    keep: int,
    invalid: bool = False,
    min_age_s: float = MIN_AGE_S,
    check: Check = check_quickly,
    of: str | None = None,
) -> PrunePlan:
    """Decide what to remove so that the ``keep`` newest whole tags with the same trained parameters stay, and why.

    Tags of other parameters are counted apart. docs/guides/keeping.md has the other reasons for which a tag stays.
    ``invalid`` removes damaged tags too, where they are older than the newest whole one. A tag without a commit record
    in which nothing changed for ``min_age_s`` is taken not to be in the middle of a save. With ``of``, a tag, only
    those with its parameters are looked at. Raises UsageError for a directory without checkpoints, and ``keep`` below
    1.
    """
    if keep < 1:
        raise UsageError(f"--keep {keep}: at least 1 checkpoint is kept. Give 1 or more.")
    root = Path(os.path.realpath(root))
    store = RunStore(root)
    tags = store.tags()
    unfinished = _leftovers(root, tags, min_age_s) if root.is_dir() else ()
    if not tags and not unfinished:  # else a removal or a save that was killed has left nothing else
        store.require_tags()
    links = _links(root, tags) if tags else {}
    decisions: dict[str, Decision] = {}
    for tag in tags:
        reason = "its trained parameters are not known" if tag.trained_params is None else OTHER_PARAMS
        decisions[tag.name] = Decision(tag, False, reason, valid=False)
    latest = named_latest(root)
    for group in by_params(tags):
        if of is None or any(tag.name == of for tag in group):
            of_group = _decide(group, links, latest, keep=keep, invalid=invalid, min_age_s=min_age_s, check=check)
            decisions |= {decision.tag.name: decision for decision in of_group}
    return PrunePlan(root, tuple(decisions.values()), unfinished)


def _decide(
    tags: Sequence[Tag],
    links: Mapping[str, str],
    named: tuple[str | None, str | None],
    *,
    keep: int,
    invalid: bool,
    min_age_s: float,
    check: Check,
) -> Iterator[Decision]:
    """Decide on each of the tags with the same parameters; ``named`` is what ``latest`` names, and its problem."""
    latest, problem = named
    verdicts = [check_tag(tag, check) for tag in tags]
    whole = [tag for tag, verdict in zip(tags, verdicts, strict=True) if verdict is None]
    counted = [tag for tag in whole if tag.is_finished] or whole
    newest = {tag.name for tag in [tag for tag in counted if not os.path.islink(str(tag.path))][:keep]}
    best = _best_of_trainer(whole[0]) if whole and in_folders(tags) else None
    for tag, verdict in zip(tags, verdicts, strict=True):
        tree = None
        valid = verdict is None
        reason = ""
        if tag.name in newest:
            reason = "one of the newest that verify" if keep > 1 else "the newest that verifies"
        elif not whole:
            reason = f"no tag verifies, so that none is removed: {'; '.join(verdict.problems) if verdict else ''}"
        elif tag.name == latest:
            reason = "latest names it"
        elif problem is not None:
            reason = f"latest cannot be read: {problem}"
        elif verdict is None and tag not in counted:
            reason = "has no commit record, unlike others"
        elif tag.name in links:
            reason = links[tag.name]
        elif tag.name == HERE:
            reason = "it is the directory itself"
        elif tag.name == best:
            reason = f"{_TRAINER_STATE} of {whole[0].name} names it as the best model"
        elif verdict is not None and verdict.undecided:
            reason = f"cannot be judged: {verdict.problems[0]}"
        elif verdict is not None and _may_be_newer(tag, counted[0]):
            older = "its step cannot be known" if tag.step is None else "not older than the newest that does"
            reason = f"does not verify, but {older}: {verdict.problems[0]}"
        elif verdict is not None and not invalid:
            reason = f"does not verify (--invalid removes it): {verdict.problems[0]}"
        else:
            try:
                tree = survey(Path(str(tag.path)))
                if not (valid and tag.step_from == "record") and time.time() - tree.changed_at < min_age_s:
                    reason = f"may be being written: it changed within the last {min_age_s / 60:.0f} minutes"
            except FileNotFoundError:
                reason = CHANGED
        if reason:
            yield Decision(tag, False, reason, valid, undecided=verdict is not None and verdict.undecided)
        else:
            why = f"older than the newest {keep} that verify" if keep > 1 else "older than the newest that verifies"
            why = why if verdict is None else f"does not verify: {verdict.problems[0]}"
            yield Decision(tag, True, why, valid, tree)


def _may_be_newer(tag: Tag, newest: Tag) -> bool:
    """Whether a damaged tag may have been saved later than the newest whole one; a record that is torn has no time."""
    return tag.step is None or tag.age_key > newest.age_key or tag.step > (newest.step or 0)


def remove_tag(plan: PrunePlan, decision: Decision) -> str | None:
    """Remove one tag. Returns the reason when it was kept after all, else None. Raises OSError.

    It is kept where ``latest`` names it by now, or cannot be read, and where the tag changed since the decision.
    """
    assert decision.remove and decision.tree is not None
    latest, problem = named_latest(plan.root)
    if problem is not None or latest == decision.tag.name:
        return problem or "latest names it by now"
    return RunStore(plan.root).remove(Path(str(decision.tag.path)), decision.tree)


def _best_of_trainer(newest: Tag) -> str | None:
    """The folder with the best model so far, by the Trainer's state."""
    try:
        state = json.loads(read_whole(newest.path / _TRAINER_STATE, limit=_MAX_STATE_BYTES))
    except (CheckpointError, ValueError, RecursionError):
        return None
    best = state.get("best_model_checkpoint") if isinstance(state, dict) else None
    return Path(best).name if isinstance(best, str) else None


def _links(root: Path, tags: Sequence[Tag]) -> dict[str, str]:
    """Why symbolic links in the folders of the tags keep directories, by the directory's name."""
    kept = dict[str, str]()
    for folder in _folders(root, tags):
        for entry in os.scandir(folder):
            if entry.is_symlink():
                name, target = relative_name(Path(entry.path), root), Path(os.path.realpath(entry.path))
                inside = [path for path in (target, *target.parents) if path.is_relative_to(root)]
                kept |= {relative_name(path, root): f"the symbolic link {name} leads to it" for path in inside}
                kept[name] = "is a symbolic link"
    return kept


def _leftovers(root: Path, tags: Sequence[Tag], min_age_s: float) -> tuple[Leftover, ...]:
    """List the files that saves and verbs have left, or are using now, in the folders that hold tags."""
    found: list[Leftover] = []
    for folder in _folders(root, tags):
        of_verbs = sorted(path.name for path in folder.glob(f".?*{PARTIAL}"))
        for name in (*leftover_names(folder), *of_verbs):
            path, what = folder / name, "command" if name in of_verbs else "save"
            with suppress(FileNotFoundError):  # a save has just put it in place, or removed it
                tree, kept = survey(path), why_kept(path, min_age_s, what)
                reason = kept or f"of a {what} that did not finish"
                found.append(Leftover(relative_name(path, root), tree, kept is None, reason))
    return tuple(found)


def _folders(root: Path, tags: Sequence[Tag]) -> list[Path]:
    """The directory itself, and the folders between it and its tags."""
    above = {parent for tag in tags for parent in Path(str(tag.path)).parents if parent.is_relative_to(root)}
    return sorted({root, *above})
