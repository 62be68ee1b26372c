"""Is a torch.save archive what its directory says? For a file that is going to be used as a whole.

The payload of a checkpoint's state has digests, which are compared when it is loaded. What lies beside it in a
``*_model_states.pt`` (buffers, schedules, client state) has the CRC-32 that torch writes, and torch does not look at.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from zeroelastic.errors import CheckpointError
from zeroelastic.executors import Executor, FileRows, scan_segments
from zeroelastic.storage import FilePath
from zeroelastic.zip_records import ZipRecord, read_zip_records

_HEADER_WINDOW = 512


def check_records(
    path: FilePath, size: int, *, without: Collection[tuple[int, int]] = (), executor: Executor = "auto"
) -> None:
    """Compare every record's CRC-32, and that a reader who goes by its header finds it where the directory has it.

    ``without`` are the (offset, nbytes) of payload that is left to others: records that are just that are not read.
    ``size`` is the file's. Raises CheckpointError naming the file and the record, MissingFileError.
    """
    skipped = set(without)
    records = read_zip_records(path, size, window_bytes=_HEADER_WINDOW).records
    for record in records:
        if record.by_header != record.offset:
            raise CheckpointError(
                f"{path}: the header of record {_short(record)} contradicts the directory. The file is damaged."
            )
    looked_at = [record for record in records if record.nbytes and (record.offset, record.nbytes) not in skipped]
    found = np.zeros(len(looked_at), dtype=np.uint32)
    scan_segments(
        FileRows(
            (path,),
            np.zeros(len(looked_at), dtype=np.int64),
            np.array([record.offset for record in looked_at], dtype=np.int64),
            np.array([record.nbytes for record in looked_at], dtype=np.int64),
        ),
        crc32=found,
        executor=executor,
    )
    for record, checksum in zip(looked_at, found.tolist(), strict=True):
        if checksum != record.crc32:
            raise CheckpointError(
                f"{path}: record {_short(record)}, bytes {record.offset} to {record.offset + record.nbytes}, has CRC-32"
                f" {checksum:08x} and should have {record.crc32:08x}. The file is damaged."
            )


def _short(record: ZipRecord) -> str:
    return record.name.partition("/")[2] or record.name
