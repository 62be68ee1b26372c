"""The report of ``verify``, made of headers and scan: each problem with its place, and what was checked or not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from zeroelastic.checkpoint.commit_record import RECORD_NAME
from zeroelastic.checkpoint.saved_state import compare_weights, other_weights
from zeroelastic.checkpoint.tag_files import parse_rank_file
from zeroelastic.checkpoint.tag_headers import CopySums, Problem, TagHeaders, sum_copies
from zeroelastic.core.digest import content_root
from zeroelastic.core.layout import Int64Array
from zeroelastic.errors import COPY_OR_GO_BACK, CheckpointError, ZeroElasticError, counted, finding, some
from zeroelastic.verbs.interface import Format, GivenPath, Part, Report, Seconds
from zeroelastic.verbs.verify.payload_scan import BadRecord, RankRows, RankScan, file_rows


class VerifiedFile(Part):
    """A file that a rank has written: its name, which rank, of which kind, and its size in bytes."""

    name: str
    rank: int
    kind: Literal["optimizer", "model", "whole_model"]
    bytes: int


class VerifyReport(Report):
    """The result of a verification. ``valid`` means no problems in what was checked; ``unchecked`` lists what was not.

    ``unsupported`` says what of the checkpoint is not read here and what resumes it: it is sound where it is ``valid``.
    ``content_root`` is computed from the files: None with ``quick``, or where not all of them could be read.
    ``recorded_root`` is that of the commit record. ``remedy`` says what to do about the problems. ``files`` are those
    that ranks have written, damaged or not. ``bytes_read`` bytes were read, the CRC-32 of ``num_records`` records and
    the digests of ``num_tensors`` tensors were computed. ``read_seconds`` is the part of ``seconds`` in which the
    payload was read.
    """

    path: GivenPath
    mode: Literal["full", "quick"]
    format: Format | None
    world_size: int
    content_root: str | None = None
    recorded_root: str | None = None
    problems: tuple[Problem, ...]
    remedy: str | None = None
    checked: tuple[str, ...]
    unchecked: tuple[str, ...]
    unsupported: tuple[str, ...] = ()
    files: tuple[VerifiedFile, ...] = ()
    num_files: int = 0
    num_params: int = 0
    num_tensors: int = 0
    num_records: int = 0
    bytes_read: int = 0
    seconds: Seconds = 0.0
    read_seconds: Seconds = 0.0

    @property
    def valid(self) -> bool:
        """Return whether the checks found no problem."""
        return self.ok


class VerifyAllReport(Report):
    """The results for all tags of a run, newest first. It is ``ok`` where all are valid."""

    path: GivenPath
    mode: Literal["full", "quick"]
    tags: tuple[VerifyReport, ...]
    bytes_read: int = 0
    seconds: Seconds = 0.0
    read_seconds: Seconds = 0.0


_Flags: TypeAlias = npt.NDArray[np.bool_]


def not_opened(name: str, error: ZeroElasticError, *, quick: bool) -> VerifyReport:
    """The report on a checkpoint that is damaged, or of which it cannot be known whether it is valid."""
    is_damaged = isinstance(error, CheckpointError)
    return VerifyReport(
        ok=False,
        path=name,
        mode="quick" if quick else "full",
        format=None,
        world_size=0,
        problems=(Problem(file="", sentence=finding(error)),) if is_damaged else (),
        checked=(),
        unchecked=("not checked: anything else",),
        unsupported=() if is_damaged else (finding(error),),
        remedy=error.remedy or None,
    )


def quick_report(headers: TagHeaders) -> VerifyReport:
    """The report on names, sizes and the commit record alone."""
    num_files = sum(len(headers.files(rank)) for rank in headers.ranks)
    ranks = counted(headers.world_size, "rank")
    checked = [f"the files of {ranks} are there"]
    unchecked = ["not checked, because of --quick: headers and payload"]
    if headers.saved.is_recorded:
        checked = [
            f"the files of {ranks} are there and have the sizes of the commit record",
            "the commit record: its schema, and its content root against its own table",
        ]
    else:
        unchecked.insert(0, "not checked, because there is no commit record: the sizes of files")
    if headers.problems:
        checked = []
    return _report(headers, None, headers.problems, checked, unchecked, None, num_files)


def full_report(headers: TagHeaders, scan: RankScan) -> VerifyReport:
    """The report on a checkpoint, given the scan of all its ranks."""
    saved_root = headers.saved.content_root
    numel = np.array([tensor.param.numel for tensor in headers.tensors], dtype=np.int64)
    saved = _saved_digests(headers)
    whole_tensors = sum_copies(headers.streams, scan.digests, scan.covered, saved)
    complete = whole_tensors.covered == numel
    comparable = complete & np.array([digest is not None for digest in saved], dtype=bool)
    want = np.array([digest or 0 for digest in saved], dtype=np.uint64)
    right = comparable & (whole_tensors.digests == want)
    wrong = comparable & ~right
    problems = list(_merged(headers.problems, scan))
    problems += _placed(headers, scan, whole_tensors, right, wrong)
    root = content_root(headers.contents(whole_tensors.digests)) if headers.parts and bool(complete.all()) else None
    whole = bool(headers.shards) and bool(headers.models) and root is not None
    if whole and saved_root not in (None, root) and not problems:
        sentence = f"the files have content root {str(root)[:12]}..., the commit record {str(saved_root)[:12]}...."
        problems.append(Problem(file=RECORD_NAME, sentence=sentence))
    problems += headers.other_directories({problem.file for problem in problems})
    checked, unchecked = _words(headers, scan, whole_tensors, right, comparable)
    if saved_root is None and not problems and headers.shards:
        for model in islice(headers.models.values(), 1):
            found = compare_weights(headers.parts[0], headers.shards, model)
            if (mixed := other_weights(model, next(iter(headers.shards.values())), found)) is not None:
                problems.append(Problem(file=model.path.name, sentence=mixed))
            elif found.compared:
                same = f"{len(found.compared) - len(found.differing)} of {counted(len(found.compared), 'parameter')}"
                checked.append(f"the weights of {same} are what the master weights are rounded to")
    return _report(headers, scan, problems, checked, unchecked, root if whole else None, scan.num_files)


def _report(
    headers: TagHeaders,
    scan: RankScan | None,
    problems: Sequence[Problem],
    checked: Sequence[str],
    unchecked: Sequence[str],
    root: str | None,
    num_files: int,
) -> VerifyReport:
    record, directory = headers.record, str(headers.tag_dir)
    params = len(record.params) if record is not None else sum(len(part.params) for part in headers.parts)
    return VerifyReport(
        ok=not problems,
        path=directory,
        mode="quick" if scan is None else "full",
        format=headers.format,
        world_size=headers.world_size,
        problems=tuple(replace(found, sentence=found.sentence.replace(f"{directory}/", "")) for found in problems),
        remedy=COPY_OR_GO_BACK if problems else None,
        checked=tuple(checked),
        unchecked=(*unchecked, *([note] if (note := headers.saved.excluded_note) else ()), *headers.notes),
        content_root=None if headers.unsupported else root,
        unsupported=tuple(
            sentence.replace(f"{directory}/", "").removeprefix(f"{directory}: ") for sentence in headers.unsupported
        ),
        recorded_root=headers.saved.content_root,
        files=_verified_files(headers),
        num_files=num_files,
        num_params=params,
        num_tensors=0 if scan is None else len(headers.tensors),
        num_records=0 if scan is None else scan.num_records,
        bytes_read=0 if scan is None else scan.nbytes,
    )


def _verified_files(headers: TagHeaders) -> tuple[VerifiedFile, ...]:
    """The files that ranks have written and that are there, damaged or not, by rank."""
    found = ((name, parse_rank_file(name), nbytes) for name, nbytes in headers.sizes.items())
    files = [
        VerifiedFile(name=name, rank=said.rank, kind=said.kind, bytes=nbytes)
        for name, said, nbytes in found
        if said is not None
    ]
    return tuple(sorted(files, key=lambda file: (file.rank, file.kind, file.name)))


def _saved_digests(headers: TagHeaders) -> list[int | None]:
    """Return the commit record's digest of each tensor; None for a tensor that it does not have."""
    recorded = {
        (content.param, key, dtype): digest
        for content in headers.saved.contents()
        for key, (dtype, digest) in content.tensors.items()
    }
    return [recorded.get((tensor.param, tensor.key, tensor.dtype)) for tensor in headers.tensors]


def _merged(problems: Iterable[Problem], scan: RankScan) -> Iterable[Problem]:
    """The problems of headers and of file structure, each once."""
    bad_records = [bad for records in scan.bad_records.values() for bad in records]
    damaged_pickles = {bad.file for bad in bad_records if bad.record.name.endswith("/data.pkl")}
    misplaced = {problem.file for problem in problems}
    for problem in problems:
        if problem.file in damaged_pickles and "Bad CRC-32" in problem.sentence:
            continue  # reported below, with its place
        yield problem
    yield from (damage for damage in scan.damage if damage.offset is not None or damage.file not in misplaced)


def _placed(
    headers: TagHeaders, scan: RankScan, whole_tensors: CopySums, tensor_right: _Flags, tensor_wrong: _Flags
) -> list[Problem]:
    """Bad records and digests as problems: which tensor, in which file, at which bytes."""
    tensor_of = headers.streams.tensor
    right = tensor_right[tensor_of] & ~whole_tensors.differs
    wrong = tensor_wrong[tensor_of] | (whole_tensors.differs & ~whole_tensors.unsure)
    param_of = headers.param_of[tensor_of]
    is_trained = tensor_of < headers.num_trained
    problems: list[Problem] = []
    explained = np.zeros(len(tensor_of), dtype=bool)
    for rank, file in sorted(scan.bad_records):
        records, suspects = scan.bad_records[rank, file], scan.bad_parts.get((rank, file), [])
        if not records and not suspects:
            continue
        rows = file_rows(headers, rank, headers.tag_dir / file)
        named_rows = rows._replace(tensor=tensor_of[rows.tensor])
        named = np.isin(param_of[rows.tensor], suspects)  # by the file's own digests, if it has any
        sound = right[rows.tensor]
        if file in scan.tables:
            sound |= ~named & is_trained[rows.tensor]
        informed = sound | wrong[rows.tensor] | named
        placed = np.zeros(len(sound), dtype=bool)
        for bad in records:
            inside = (rows.offset >= bad.record.offset) & (rows.offset < bad.record.offset + bad.record.nbytes)
            problems += _of_record(headers, bad, named_rows, inside, sound, informed)
            placed |= inside & ~sound
        explained[rows.tensor[placed]] = True
        # A part that is not what the file's own digests say, although no checksum of it is wrong.
        left = named & ~sound & ~placed
        left &= wrong[rows.tensor] | ~np.isin(param_of[rows.tensor], param_of[rows.tensor[placed]])
        for p in np.unique(param_of[rows.tensor[left]]).tolist():
            here = np.flatnonzero(left & (param_of[rows.tensor] == p))
            problems += _altered(headers, file, named_rows, here, wrong[rows.tensor])
            explained[rows.tensor[here]] = True
    problems += _differing_copies(headers, whole_tensors, explained)
    np.logical_or.at(explained, tensor_of, explained)
    unplaced = np.flatnonzero(tensor_wrong & ~explained[: len(tensor_wrong)])
    return problems + _unplaced(headers, unplaced.tolist())


def _differing_copies(headers: TagHeaders, whole_tensors: CopySums, explained: _Flags) -> list[Problem]:
    """Copies that are not what the other ranks have, although their checksums are right; they are then explained."""
    streams = headers.streams
    problems: list[Problem] = []
    groups = np.unique(streams.group[whole_tensors.differs]).tolist()
    for members in (np.flatnonzero(streams.group == group) for group in groups):
        if explained[members].any():
            continue
        explained[members] = True
        tensor = headers.tensors[int(streams.tensor[members[0]])]
        files = headers.optim_files if streams.tensor[members[0]] < headers.num_trained else headers.model_files
        chosen = members if whole_tensors.unsure[members].any() else members[whole_tensors.differs[members]]
        names = [
            files[rank].name
            for stream in chosen.tolist()
            for rank in headers.parts[int(streams.part[stream])].layout_holders(int(streams.slice[stream]))
            if rank in files
        ]
        all_differ = len(chosen) == len(members)
        how = f"differ in {some(names)}" if all_differ else f"in {some(names)} differ from those of other ranks"
        sentence = (
            f"The copies of {tensor.key} of {tensor.param.name} {how}, although the checksums are right: files of "
            "another save, or altered."
        )
        file = names[0] if len(names) == 1 else ""
        problems.append(Problem(file=file, sentence=sentence, param=tensor.param.name, key=tensor.key))
    return problems


def _altered(headers: TagHeaders, file: str, rows: RankRows, here: Int64Array, wrong: _Flags) -> list[Problem]:
    """Describe a parameter's part that contradicts the file's own digests, by tensor where that is known.

    ``wrong`` is by row.
    """
    what = "does not match the file's own digests, although its checksum is right: the file was altered"
    known = here[wrong[here]] if len(here) > 1 else here
    if len(known):
        return [_row_problem(headers, file, rows, i, what) for i in known.tolist()]
    tensors = [headers.tensors[t] for t in rows.tensor[here].tolist()]
    name, keys = tensors[0].param.name, " or ".join(tensor.key for tensor in tensors)
    return [Problem(file=file, sentence=f"{file}: {keys} of {name} {what}.", param=name)]


def _of_record(
    headers: TagHeaders, bad: BadRecord, rows: RankRows, inside: _Flags, sound: _Flags, informed: _Flags
) -> list[Problem]:
    """One problem for each tensor that is damaged in a record; one for the record where no digest tells which."""
    record = bad.record
    name = record.name.partition("/")[2] or record.name
    sums = f"record {name} has CRC-32 {bad.found:08x} and should have {record.crc32:08x}"
    damaged = np.flatnonzero(inside & ~sound)
    if len(damaged) and (len(damaged) == 1 or bool(informed[inside].any())):
        what = f"is damaged: {sums}"
        return [_row_problem(headers, bad.file, rows, i, what) for i in damaged.tolist()]
    if len(damaged):
        inside_it = [headers.tensors[t] for t in rows.tensor[damaged].tolist()]
        which = some([f"{tensor.key} of {tensor.param.name}" for tensor in inside_it])
        keys = {tensor.key for tensor in inside_it}
        sentence = f"{bad.file}: {sums}. It holds {which}; it is not known which of these is damaged."
        key = keys.pop() if len(keys) == 1 else None
        return [Problem(file=bad.file, sentence=sentence, key=key, offset=record.offset, bytes=record.nbytes)]
    if inside.any():
        sentence = f"{bad.file}: {sums}. Every tensor in it is right: padding is damaged."
    else:
        opened = (headers.shards.get(bad.rank), headers.models.get(bad.rank))
        known = any(header is not None and header.path.name == bad.file for header in opened)
        held = "It holds no parameter or optimizer state." if known else "Only the file's header says what it holds."
        sentence = f"{bad.file}: {sums}. {_ROLES.get(name, held)}"
    return [Problem(file=bad.file, sentence=sentence, offset=record.offset, bytes=record.nbytes)]


_ROLES = {
    "data.pkl": "It says what the file holds.",
    "version": "It is torch's version of the file format.",
    "byteorder": "It is torch's mark of the byte order.",
}


def _row_problem(headers: TagHeaders, file: str, rows: RankRows, row: int, what: str) -> Problem:
    tensor = headers.tensors[int(rows.tensor[row])]
    offset, nbytes = int(rows.offset[row]), int(rows.nbytes[row])
    sentence = f"{file}: {tensor.key} of {tensor.param.name}, bytes {offset} to {offset + nbytes}, {what}."
    return Problem(file=file, sentence=sentence, param=tensor.param.name, key=tensor.key, offset=offset, bytes=nbytes)


def _unplaced(headers: TagHeaders, wrong: Sequence[int]) -> list[Problem]:
    """Digests that differ from the record although the checksums of all files are right."""
    problems: list[Problem] = []
    params = [(part, p) for part in headers.parts for p in range(len(part.params))]
    for number in wrong:
        tensor, (part, p) = headers.tensors[number], params[int(headers.param_of[number])]
        files = headers.optim_files if number < headers.num_trained else headers.model_files
        names = [files[rank].name for rank in part.holders(p)]
        where = names[0] if len(names) == 1 else f"one of {some(names)}"
        sentence = (
            f"{tensor.key} of {tensor.param.name} does not match the commit record. It is in {where}, "
            "whose checksums are right: a file of another save, or altered."
        )
        file = names[0] if len(names) == 1 else ""
        problems.append(Problem(file=file, sentence=sentence, param=tensor.param.name, key=tensor.key))
    return problems


def _words(
    headers: TagHeaders, scan: RankScan, whole_tensors: CopySums, right: _Flags, comparable: _Flags
) -> tuple[list[str], list[str]]:
    """The clauses of ``VerifyReport.checked`` and ``unchecked``."""
    is_recorded, num_whole = headers.saved.is_recorded, int(comparable.sum())
    num_headers = len(headers.shards) + len(headers.models)
    params = counted(sum(len(part.params) for part in headers.parts), "parameter")
    read = sum(len(headers.files(rank)) for rank in headers.ranks)
    num_right = scan.num_records - sum(map(len, scan.bad_records.values()))
    checked = [
        f"{read:,} of {headers.num_files:,} files of {counted(headers.world_size, 'rank')} "
        + ("are there with the sizes of the commit record" if is_recorded else "are there"),
        f"{num_headers} headers agree on {params}" + (" and with the commit record" if is_recorded else ""),
        f"CRC-32 of {num_right} of {counted(scan.num_records, 'record')} right, in "
        f"{counted(scan.num_files, 'file')} read to the last byte",
    ]
    if not num_headers:
        del checked[1]
    unchecked: list[str] = []
    if is_recorded:
        if comparable.all():
            tensors = counted(num_whole, "tensor")
        else:
            tensors = f"{counted(num_whole, 'tensor')} that could be read in full"
            left = counted(len(comparable) - num_whole, "tensor")
            unchecked.append(f"not checked, because parts are missing or unreadable: the digests of {left}")
        if num_whole:
            checked.append(f"digests of {int(right.sum())} of {tensors} equal those of the commit record")
    else:
        unchecked.append(
            "not checked, because there is no commit record: whether this is what was saved; a file that was altered "
            "and given new checksums would not be noticed"
        )
    if scan.unstated:
        files = some(scan.unstated)
        unchecked.append(f"not checked, because these files state no CRC-32: the records of {files}")
    if headers.streams.num_copies:
        equal = headers.streams.num_copies - int(whole_tensors.differs.sum())
        checked.append(f"{equal} of {headers.streams.num_copies} copies that ranks have of the same elements are equal")
    if scan.tables:
        checked.append(f"the own digests of {counted(len(scan.tables), 'file')} against what is in them")
    if scan.unread:
        unchecked.append(f"not checked: the payload of {some(scan.unread)}")
    return checked, unchecked
