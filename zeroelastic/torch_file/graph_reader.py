"""Reads a torch.save file as a graph of inert nodes (``pickle_graph``): nothing that the file names is imported."""

from __future__ import annotations

import pickle
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from functools import partial

from zeroelastic.errors import UnsafePickleError
from zeroelastic.io.paths import FilePath
from zeroelastic.torch_file.header import TorchFile, pickle_errors, read_pickle
from zeroelastic.torch_file.inert_objects import STORAGE_DTYPES, StorageRef, storage_id
from zeroelastic.torch_file.pickle_graph import Global, Storage, global_named
from zeroelastic.torch_file.pickle_limits import check_opcodes
from zeroelastic.torch_file.safe_unpickler import PickleFile

_MAX_GLOBALS = 4096


def read_graph(path: FilePath) -> object:
    """The object tree of a torch.save file; its storages know where their bytes are, which are not read.

    Raises MissingFileError, CheckpointError for a damaged file, UnsafePickleError for a pickle that torch.save does
    not write.
    """
    data, file = read_pickle(path)
    with pickle_errors(path):
        check_opcodes(data)
        return _GraphUnpickler(data, file).load()


class _GraphUnpickler(pickle.Unpickler):
    def __init__(self, data: bytes, file: TorchFile) -> None:
        super().__init__(PickleFile(data), encoding="utf-8")
        self._file = file
        self._old_names = data[:1] != b"\x80" or data[1] < 3
        self._storages: dict[str, Storage] = {}
        self._named: set[tuple[str, str]] = set()

    def find_class(self, module: str, name: str) -> Global:
        self._named.add((module, name))
        if len(self._named) > _MAX_GLOBALS:
            raise UnsafePickleError(f"the pickle names more than {_MAX_GLOBALS} globals")
        if "\n" in module or "\n" in name:
            raise UnsafePickleError("the pickle has a global whose name has two lines")
        if self._old_names:  # protocol 2 has Python 2's names of some modules
            module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
        return global_named(module, name)

    def persistent_load(self, pid: object) -> Storage:
        kind, key, location, numel = storage_id(pid)
        if not isinstance(kind, Global) or kind.name not in STORAGE_DTYPES or not isinstance(location, str):
            raise UnsafePickleError("a persistent id does not describe a torch storage")
        if key not in self._storages:
            find = partial(self._file.storage_extent, StorageRef(key, STORAGE_DTYPES[kind.name], numel))
            self._storages[key] = Storage(kind, numel, location=location, find=find)
        return self._storages[key]
