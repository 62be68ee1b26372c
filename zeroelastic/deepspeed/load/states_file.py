"""The model states file as ``torch.load`` reads it: without the bytes of parameters, which a load fills itself."""

from __future__ import annotations

import io
import os
from bisect import bisect_right
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from zeroelastic.core.digest import ByteArray
from zeroelastic.core.slices import Int64Array


class StatesFile(io.RawIOBase):
    """An open file of which the ranges ``left_out`` are not read: in a buffer, their bytes stay as they were.

    ``left_out`` are (offset, nbytes), ascending, with shape ``(num_ranges, 2)``. ``error`` is what ended a read: for
    torch's reader, which is C++, the file ends there. It is no mapping: DeepSpeed's own save writes a file again in its
    place, and a mapped page that has been cut off ends the process with SIGBUS.
    """

    def __init__(self, path: str, left_out: Int64Array) -> None:
        """Raises OSError."""
        super().__init__()
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115 - closed with this one
        self._size, self._at = os.fstat(self._file.fileno()).st_size, 0
        self._begin, self._end = left_out[:, 0], np.maximum.accumulate(left_out.sum(axis=1))
        self._unread: list[tuple[int, int, int]] = []  # (address, offset in the file, nbytes)
        self.error: BaseException | None = None

    def close(self) -> None:
        self._file.close()
        super().close()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Return how many bytes of the buffer now stand for the file's: 0 at its end, and where a read failed."""
        into = np.frombuffer(buffer, dtype=np.uint8)
        nbytes = max(0, min(len(into), self._size - self._at))
        try:
            self._read(into[:nbytes])
        except BaseException as error:
            self.error = error
            return 0
        self._at += nbytes
        return nbytes

    def _read(self, into: ByteArray) -> None:
        at, end = self._at, self._at + len(into)
        for i in range(int(np.searchsorted(self._end, at, side="right")), len(self._begin)):
            begin, stop = max(at, int(self._begin[i])), min(end, int(self._end[i]))
            if begin >= end:
                break
            self._read_all(into[at - self._at : begin - self._at], at)
            self._unread.append((into.ctypes.data + begin - self._at, begin, stop - begin))
            at = stop
        self._read_all(into[at - self._at :], at)

    def _read_all(self, into: ByteArray, offset: int) -> None:
        done = 0
        while done < len(into):
            count = os.preadv(self._file.fileno(), [into[done:].data], offset + done)
            if count == 0:
                raise EOFError(f"it ends at byte {offset + done}, where it had {self._size} when it was opened")
            done += count

    def fill(self, tensors: Iterable[torch.Tensor]) -> None:
        """Read what was left out of these tensors' storages. Raises OSError, EOFError."""
        storages = {one.untyped_storage().data_ptr(): one.untyped_storage() for one in tensors}
        begins = sorted(storages)
        for address, offset, nbytes in self._unread:
            at = bisect_right(begins, address) - 1
            first = address - begins[at] if at >= 0 else 0
            if at >= 0 and first + nbytes <= storages[begins[at]].nbytes():
                data = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storages[begins[at]]).numpy()
                self._read_all(data[first : first + nbytes], offset)
