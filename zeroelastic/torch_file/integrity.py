"""Check the parts of a torch.save archive that have no digest: the structure, and records by their CRC-32.

Tensors of a checkpoint's state are compared by digest when they are loaded. Buffers, schedules, client state and
scalars have only the CRC-32 that torch writes and does not check.
"""

from __future__ import annotations

import numpy as np

from zeroelastic.core.layout import Int64Array
from zeroelastic.errors import CheckpointError
from zeroelastic.executors.dispatch import Executor, FileRanges, scan_segments
from zeroelastic.io.paths import FilePath
from zeroelastic.torch_file.zip_reader import ZipRecord, read_zip_records

_HEADER_WINDOW = 512


def check_archive(path: FilePath, size: int, *, digested: Int64Array | None = None, executor: Executor = "auto") -> int:
    """Compare every header of an archive with its directory, and records with their CRC-32; returns the bytes read.

    ``digested`` are byte positions in the file whose content is compared by digest: the records that hold them are not
    read. ``size`` is the size of the file. Raises CheckpointError with the file and the damaged part, MissingFileError.
    """
    archive = read_zip_records(path, size, window_bytes=_HEADER_WINDOW)
    records = archive.records
    begins, ends = records.offset, records.offset + records.nbytes
    end = int(ends.max(initial=0))
    for fault in archive.faults:
        if fault.offset < end:  # another writer may make the directory behind it in its own way
            raise CheckpointError(f"{path}: {fault.what} (byte {fault.offset}). The file is damaged.")
    places = np.sort(digested) if digested is not None else np.empty(0, dtype=np.int64)
    read = np.flatnonzero((np.searchsorted(places, begins) == np.searchsorted(places, ends)) & (ends > begins))
    found = np.zeros(len(read), dtype=np.uint32)
    table = FileRanges((path,), np.zeros(len(read), dtype=np.int64), begins[read], records.nbytes[read])
    scan_segments(table, crc32=found, executor=executor)
    for number in np.flatnonzero(found != records.crc32[read])[:1].tolist():
        record = records[int(read[number])]
        raise CheckpointError(
            f"{path}: record {_short(record)}, bytes {record.offset} to {record.offset + record.nbytes}, has CRC-32 "
            f"{int(found[number]):08x} and should have {record.crc32:08x}. The file is damaged."
        )
    return archive.bytes_read + int(table.nbytes.sum())


def _short(record: ZipRecord) -> str:
    return record.name.partition("/")[2] or record.name
