"""Is a checkpoint what its save left? Every file, every byte, read once; all that is wrong is found and placed.

    report = verify_checkpoint(Path("ckpt/global_step100"))
    report.valid, report.problems

The steps may be run apart, so that several processes share the reading: ``take_inventory``, ``scan_rank`` for each
rank that was saved, ``combine``, ``judge``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from zeroelastic.checkpoint import ModelStates, other_directory
from zeroelastic.digest import content_root
from zeroelastic.inventory import Inventory, Problem, take_inventory
from zeroelastic.layout import Int64Array
from zeroelastic.one_save import may_mix_saves, one_save, pin, saved_again, was_saved_again
from zeroelastic.processes import Processes
from zeroelastic.quarantine import MARK_NAME, Quarantine, read_mark
from zeroelastic.record import RECORD_NAME, CheckpointFormat
from zeroelastic.scan import BadRecord, Progress, RankRows, RankScan, combine, file_rows, scan_rank
from zeroelastic.shard import Shard
from zeroelastic.storage import FilePath

_SHOWN = 4

_Flags: TypeAlias = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What was found. ``valid`` means that nothing is wrong with what was checked; ``unchecked`` says what was not.

    ``quarantine`` is a mark of damage that was found in the tag, whatever was found now. ``content_root`` is computed
    from the files, None when not all of them could be read or ``quick`` was asked for;
    ``recorded_root`` is the commit record's. ``num_bytes`` were read to the last one; ``num_records`` are those whose
    CRC-32 was computed, ``num_tensors`` those whose digest was.
    """

    tag_dir: str
    mode: Literal["full", "quick"]
    format: CheckpointFormat | None
    world_size: int
    problems: tuple[Problem, ...]
    checked: tuple[str, ...]
    unchecked: tuple[str, ...]
    content_root: str | None
    recorded_root: str | None
    num_files: int
    num_params: int
    num_tensors: int
    num_records: int
    num_bytes: int
    quarantine: Quarantine | None = None

    @property
    def valid(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems


def verify_checkpoint(tag_dir: FilePath, *, quick: bool = False, progress: Progress | None = None) -> VerifyReport:
    """Check a checkpoint: its files, headers and record, and unless ``quick`` every byte of every rank's files.

    Without a commit record there are no digests to compare with; the report says so. ``progress`` is given the number
    of bytes done since it was last called; there are ``take_inventory(tag_dir).nbytes``. Memory: the headers of all
    ranks and a few MiB. Damage is reported, not raised. Raises MissingFileError where there is no ZeRO-3 checkpoint,
    UnsupportedError for one that is not read here, SavedAgainError for one that was saved again meanwhile.

    Example::

        for problem in verify_checkpoint(Path("ckpt/global_step100")).problems:
            print(problem.sentence)
    """
    tag_dir = pin(tag_dir)
    with one_save(tag_dir):
        return verify_inventory(take_inventory(tag_dir, quick=quick), quick=quick, progress=progress)


def verify_inventory(
    inventory: Inventory,
    *,
    quick: bool = False,
    progress: Progress | None = None,
    processes: Processes | None = None,
) -> VerifyReport:
    """``verify_checkpoint`` for headers that are open already.

    Several ``processes``, each with the same inventory, share the reading by rank and get the same report. Collective.
    """
    processes = processes or Processes()
    report = judge_quick(inventory) if quick else _read_all(inventory, progress, processes)
    tag_dir = inventory.tag_dir
    again = may_mix_saves(tag_dir, alone=processes.size == 1) if report.valid else was_saved_again(tag_dir)
    if any(processes.gather(again)):
        raise saved_again(tag_dir)
    return report


def _read_all(inventory: Inventory, progress: Progress | None, processes: Processes) -> VerifyReport:
    mine = [inventory.ranks[number] for number in processes.mine(len(inventory.ranks))]
    own = processes.settle(lambda: combine((scan_rank(inventory, rank, progress=progress) for rank in mine), inventory))
    return judge(inventory, combine(processes.gather(own), inventory))


def damaged(name: str, sentence: str, *, quick: bool) -> VerifyReport:
    """The report on a checkpoint that cannot even be looked at."""
    problem = Problem("", sentence)
    mode: Literal["full", "quick"] = "quick" if quick else "full"
    return VerifyReport(name, mode, None, 0, (problem,), (), ("everything else",), None, None, 0, 0, 0, 0, 0)


def judge_quick(inventory: Inventory) -> VerifyReport:
    """The report when nothing but names, sizes and the record was looked at."""
    record = inventory.record
    num_files = sum(len(inventory.files(rank)) for rank in inventory.ranks)
    checked = [f"the files of all {inventory.world_size} ranks are there"]
    unchecked = ["headers and payload (--quick)"]
    if record is not None:
        checked = [
            f"the files of all {inventory.world_size} ranks are there and have the sizes of the commit record",
            "the commit record: its schema, and its content root against its own table",
        ]
    else:
        unchecked.insert(0, "the sizes of files: there is no commit record")
    if inventory.problems:
        checked = []
    return _report(inventory, None, inventory.problems, checked, unchecked, None, num_files)


def judge(inventory: Inventory, scan: RankScan) -> VerifyReport:
    """The report on all ranks of a checkpoint, given what reading them found."""
    record = inventory.record
    numel = np.array([tensor.param.numel for tensor in inventory.tensors], dtype=np.int64)
    complete = scan.covered == numel
    saved = _saved_digests(inventory)
    comparable = complete & np.array([digest is not None for digest in saved], dtype=bool)
    want = np.array([digest or 0 for digest in saved], dtype=np.uint64)
    right = comparable & (scan.digests == want)
    wrong = comparable & ~right
    problems = list(_merged(inventory.problems, scan))
    problems += _placed(inventory, scan, right, wrong)
    root = content_root(inventory.contents(scan.digests)) if inventory.parts and bool(complete.all()) else None
    whole = bool(inventory.shards) and bool(inventory.models) and root is not None
    if record is not None and root is not None and whole and root != record.content_root and not problems:
        sentence = f"the files have content root {root[:12]}..., the commit record {record.content_root[:12]}...."
        problems.append(Problem(RECORD_NAME, sentence))
    problems += _other_directories(inventory, {problem.file for problem in problems})
    checked, unchecked = _words(inventory, scan, right, comparable)
    return _report(inventory, scan, problems, checked, unchecked, root if whole else None, scan.num_files)


def _other_directories(inventory: Inventory, blamed: Collection[str]) -> list[Problem]:
    """Files that are sound in themselves, and not those that the commit record states."""
    recorded = inventory.record.directories if inventory.record is not None else {}
    headers: list[Shard | ModelStates] = [*inventory.shards.values(), *inventory.models.values()]
    return [
        Problem(header.path.name, other_directory(header.path).replace(f"{header.path.parent}/", ""))
        for header in headers
        if header.path.name not in blamed and recorded.get(header.path.name, header.directory) != header.directory
    ]


def _report(
    inventory: Inventory,
    scan: RankScan | None,
    problems: Sequence[Problem],
    checked: Sequence[str],
    unchecked: Sequence[str],
    root: str | None,
    num_files: int,
) -> VerifyReport:
    record = inventory.record
    params = len(record.params) if record is not None else sum(part.layout.num_params for part in inventory.parts)
    return VerifyReport(
        tag_dir=str(inventory.tag_dir),
        mode="quick" if scan is None else "full",
        format=inventory.format,
        world_size=inventory.world_size,
        problems=tuple(problems),
        checked=tuple(checked),
        unchecked=(*unchecked, *inventory.notes),
        content_root=root,
        recorded_root=None if record is None else record.content_root,
        num_files=num_files,
        num_params=params,
        num_tensors=0 if scan is None else len(inventory.tensors),
        num_records=0 if scan is None else scan.num_records,
        num_bytes=0 if scan is None else scan.nbytes,
        quarantine=read_mark(inventory.tag_dir) if MARK_NAME in inventory.sizes else None,
    )


def _saved_digests(inventory: Inventory) -> list[int | None]:
    """The record's digest of each tensor; None where it has none to compare with."""
    if inventory.record is None:
        return [None] * len(inventory.tensors)
    recorded = {
        (content.param.name, key): (content.param.shape, dtype, digest)
        for content in inventory.record.contents()
        for key, (dtype, digest) in content.tensors.items()
    }
    found: list[int | None] = []
    for tensor in inventory.tensors:
        shape, dtype, digest = recorded.get((tensor.param.name, tensor.key), (None, None, None))
        found.append(digest if (shape, dtype) == (tensor.param.shape, tensor.dtype) else None)
    return found


def _merged(problems: Iterable[Problem], scan: RankScan) -> Iterable[Problem]:
    """Problems of headers and of structure; of a file that both complain about in the same words only one."""
    damaged_pickles = {bad.file for bad in scan.bad_records if bad.record.name.endswith("/data.pkl")}
    misplaced = {problem.file for problem in problems}
    for problem in problems:
        if problem.file in damaged_pickles and "Bad CRC-32" in problem.sentence:
            continue  # which is said below, with the place
        yield problem
    for damage in scan.damage:
        if damage.offset is not None or damage.file not in misplaced:
            yield Problem(damage.file, damage.sentence, None, None, damage.offset, damage.nbytes)


def _placed(inventory: Inventory, scan: RankScan, right: _Flags, wrong: _Flags) -> list[Problem]:
    """Bad records and digests as problems: which tensor, in which file, at which bytes."""
    records: dict[tuple[int, str], list[BadRecord]] = defaultdict(list)
    suspects: dict[tuple[int, str], list[int]] = defaultdict(list)
    for bad in scan.bad_records:
        records[bad.rank, bad.file].append(bad)
    for part in scan.bad_parts:
        suspects[part.rank, part.file].append(part.param)
    param_of = _params_of_tensors(inventory)
    problems: list[Problem] = []
    explained = np.zeros(len(wrong), dtype=bool)
    for rank, file in sorted({*records, *suspects}):
        rows = file_rows(inventory, rank, inventory.tag_dir / file)
        named = np.isin(param_of[rows.tensor], suspects[rank, file])  # by the file's own digests, if it has any
        sound = right[rows.tensor]
        if file in scan.tables:
            sound |= ~named & (rows.tensor < inventory.num_trained)
        informed = sound | wrong[rows.tensor] | named
        placed = np.zeros(len(sound), dtype=bool)
        for bad in records[rank, file]:
            inside = (rows.offset >= bad.record.offset) & (rows.offset < bad.record.offset + bad.record.nbytes)
            problems += _of_record(inventory, bad, rows, inside, sound, informed)
            placed |= inside & ~sound
        explained[rows.tensor[placed]] = True
        # A part that is not what the file's own digests say, although no checksum of it is wrong.
        left = named & ~sound & ~placed
        left &= wrong[rows.tensor] | ~np.isin(param_of[rows.tensor], param_of[rows.tensor[placed]])
        for p in np.unique(param_of[rows.tensor[left]]).tolist():
            here = np.flatnonzero(left & (param_of[rows.tensor] == p))
            problems += _altered(inventory, file, rows, here, wrong)
            explained[rows.tensor[here]] = True
    return problems + _unplaced(inventory, scan, np.flatnonzero(wrong & ~explained).tolist())


def _altered(inventory: Inventory, file: str, rows: RankRows, here: Int64Array, wrong: _Flags) -> list[Problem]:
    """One parameter's part that contradicts the file's own digests: which of its tensors, where that is known."""
    what = "is not what the file's own digests say, although its checksum is right: the file was altered"
    known = here[wrong[rows.tensor[here]]] if len(here) > 1 else here
    if len(known):
        return [_row_problem(inventory, file, rows, i, what) for i in known.tolist()]
    tensors = [inventory.tensors[t] for t in rows.tensor[here].tolist()]
    name, keys = tensors[0].param.name, " or ".join(tensor.key for tensor in tensors)
    return [Problem(file, f"{file}: {keys} of {name} {what}.", name)]


def _of_record(
    inventory: Inventory, bad: BadRecord, rows: RankRows, inside: _Flags, sound: _Flags, informed: _Flags
) -> list[Problem]:
    """One problem for each tensor that is damaged in a record; one for the record where no digest tells which."""
    record = bad.record
    name = record.name.partition("/")[2] or record.name
    sums = f"record {name} has CRC-32 {bad.found:08x} and should have {record.crc32:08x}"
    damaged = np.flatnonzero(inside & ~sound)
    if len(damaged) and (len(damaged) == 1 or bool(informed[inside].any())):
        what = f"is damaged: {sums}"
        return [_row_problem(inventory, bad.file, rows, i, what) for i in damaged.tolist()]
    if len(damaged):
        inside_it = [inventory.tensors[t] for t in rows.tensor[damaged].tolist()]
        which = _some([f"{tensor.key} of {tensor.param.name}" for tensor in inside_it])
        keys = {tensor.key for tensor in inside_it}
        sentence = f"{bad.file}: {sums}. It holds {which}; nothing tells which of these is damaged."
        key = keys.pop() if len(keys) == 1 else None
        return [Problem(bad.file, sentence, None, key, record.offset, record.nbytes)]
    if inside.any():
        sentence = f"{bad.file}: {sums}. Every tensor in it is right: padding is damaged."
    else:
        headers = (inventory.shards.get(bad.rank), inventory.models.get(bad.rank))
        known = any(header is not None and header.path.name == bad.file for header in headers)
        held = "no parameter or optimizer state" if known else "what the file's own header would tell"
        sentence = f"{bad.file}: {sums}. {_ROLES.get(name, f'It holds {held}.')}"
    return [Problem(bad.file, sentence, None, None, record.offset, record.nbytes)]


_ROLES = {
    "data.pkl": "It says what the file holds.",
    "version": "It is torch's version of the file format.",
    "byteorder": "It is torch's mark of the byte order.",
}


def _row_problem(inventory: Inventory, file: str, rows: RankRows, row: int, what: str) -> Problem:
    tensor = inventory.tensors[int(rows.tensor[row])]
    offset, nbytes = int(rows.offset[row]), int(rows.nbytes[row])
    sentence = f"{file}: {tensor.key} of {tensor.param.name}, bytes {offset} to {offset + nbytes}, {what}."
    return Problem(file, sentence, tensor.param.name, tensor.key, offset, nbytes)


def _unplaced(inventory: Inventory, scan: RankScan, wrong: Sequence[int]) -> list[Problem]:
    """Digests that differ from the record although no file contradicts itself."""
    problems: list[Problem] = []
    param_of = _params_of_tensors(inventory)
    params = [(part, p) for part in inventory.parts for p in range(part.layout.num_params)]
    for number in wrong:
        tensor, (part, p) = inventory.tensors[number], params[int(param_of[number])]
        numel, cut = int(part.layout.numel[p]), int(part.layout.part[p])
        holders = range(-(-numel // cut) if cut else 0)
        files = inventory.optim_files if number < inventory.num_trained else inventory.model_files
        names = [files[rank].name for rank in holders]
        where = names[0] if len(names) == 1 else f"one of {_some(names)}"
        sentence = (
            f"{tensor.key} of {tensor.param.name} is not what the commit record says was saved. It is in {where}, "
            "whose checksums are right: a file of another save, or altered."
        )
        problems.append(Problem(names[0] if len(names) == 1 else "", sentence, tensor.param.name, tensor.key))
    return problems


def _params_of_tensors(inventory: Inventory) -> Int64Array:
    """The number of each tensor's parameter, counted over all parts."""
    counts = [len(dtypes) for part in inventory.parts for dtypes in part.dtypes]
    return np.repeat(np.arange(len(counts), dtype=np.int64), np.array(counts, dtype=np.int64))


def _words(inventory: Inventory, scan: RankScan, right: _Flags, comparable: _Flags) -> tuple[list[str], list[str]]:
    """What was checked and what was not, as clauses."""
    record, world_size, num_tensors = inventory.record, inventory.world_size, len(inventory.tensors)
    headers = len(inventory.shards) + len(inventory.models)
    read = sum(len(inventory.files(rank)) for rank in inventory.ranks)
    checked = [
        f"{read} of {2 * world_size} files of {world_size} ranks "
        + ("are there with the sizes of the commit record" if record is not None else "are there"),
        f"{headers} headers agree on {sum(part.layout.num_params for part in inventory.parts)} parameters"
        + (" and with the commit record" if record is not None else ""),
        f"CRC-32 of {scan.num_records - len(scan.bad_records)} of {scan.num_records} records right, in "
        f"{scan.num_files} files read to the last byte",
    ]
    unchecked: list[str] = []
    if record is not None:
        checked.append(f"digests of {int(right.sum())} of {num_tensors} tensors equal those of the commit record")
        if not comparable.all():
            unchecked.append(f"digests of {int((~comparable).sum())} tensors: not all of their parts could be read")
    else:
        unchecked.append(
            "not comparable with what was saved: no commit record. An altered file whose checksums were computed anew "
            "would not be noticed"
        )
    if scan.tables:
        checked.append(f"{len(scan.tables)} files' own digests against what they hold")
    if scan.unread:
        unchecked.append(f"the payload of {_some(scan.unread)}")
    return checked, unchecked


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
