"""Every dtype of torch: read, digested, compared, written anew and exported, or refused by its name."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from synthetic import SAVED_DTYPES, filled, raw

from zeroelastic.core.digest import combine, stream_seed
from zeroelastic.errors import UnsupportedError
from zeroelastic.executors.dispatch import digest_range
from zeroelastic.torch_file.archive import Archive, write_tree
from zeroelastic.torch_file.header import DTYPE_BYTES, TensorRef, read_torch_file, read_tree
from zeroelastic.torch_file.tree import new_storage, tensor
from zeroelastic.verbs.diff import compare_bytes
from zeroelastic.verbs.tensor import bits_of, values_of

pytestmark = pytest.mark.filterwarnings("ignore:B?Complex(Half|32) support")
ALL = {str(d).removeprefix("torch.") for d in vars(torch).values() if isinstance(d, torch.dtype)}


def test_every_dtype_that_torch_saves_is_known_with_its_size() -> None:
    assert {dtype: getattr(torch, dtype).itemsize for dtype in SAVED_DTYPES} == {
        dtype: size for dtype, size in DTYPE_BYTES.items() if dtype in ALL
    }
    for dtype in ALL - {*SAVED_DTYPES}:
        with pytest.raises(UnsupportedError, match=dtype):
            new_storage(dtype, 1)


@pytest.mark.parametrize("dtype", SAVED_DTYPES)
def test_a_file_is_read_and_rewritten_with_the_same_bytes(tmp_path: Path, dtype: str) -> None:
    saved = filled(dtype, (7, 3))
    torch.save({"t": saved, "part": saved[2:4]}, tmp_path / "saved.pt")
    file = read_torch_file(tmp_path / "saved.pt")
    assert isinstance(file.root, dict)
    for name, expected in (("t", saved), ("part", saved[2:4])):
        ref = file.root[name]
        assert isinstance(ref, TensorRef) and (ref.dtype, ref.shape) == (dtype, tuple(expected.shape))
        assert file.read(ref).tobytes() == raw(expected)
    storage = new_storage(dtype, saved.numel())
    assert (storage.dtype, storage.nbytes) == (dtype, len(raw(saved)))
    archive = Archive(tmp_path / "made.pt", {"t": tensor(storage, 0, (7, 3)), "part": tensor(storage, 6, (2, 3))})
    with open(archive.path, "r+b") as made_file:
        made_file.seek(archive.offsets[storage])
        made_file.write(raw(saved))
    archive.finish({storage: zlib.crc32(raw(saved))})
    made = torch.load(tmp_path / "made.pt", weights_only=True)
    assert made["t"].dtype == saved.dtype
    for name, expected in (("t", saved), ("part", saved[2:4])):
        assert raw(made[name]) == raw(expected)
    assert made["t"].untyped_storage().data_ptr() == made["part"].untyped_storage().data_ptr()
    # Read to be written again, the storage is bytes, and is written as it was.
    pickled, storages = write_tree(read_tree(tmp_path / "saved.pt"))
    assert b"torch" in pickled and [found.nbytes for found in storages] == [len(raw(saved))]


@pytest.mark.parametrize("dtype", SAVED_DTYPES)
def test_digests_of_parts_add_up_and_values_are_those_of_torch(dtype: str) -> None:
    saved, size = filled(dtype, (50,)), DTYPE_BYTES[dtype]
    data, seed = np.frombuffer(raw(saved), dtype=np.uint8), stream_seed("t", "frozen")
    whole = digest_range(data, size, seed=seed, start=0)
    parts = [digest_range(data[a * size : b * size], size, seed=seed, start=a) for a, b in ((0, 13), (13, 50))]
    assert combine(*parts) == whole
    swapped = np.concatenate([data[size : 2 * size], data[:size], data[2 * size :]])
    assert (digest_range(swapped, size, seed=seed, start=0) == whole) == (bytes(swapped) == bytes(data))
    assert compare_bytes(data, data, dtype)[0] == 0
    flipped = data.copy()
    flipped[:size] ^= 1
    assert compare_bytes(data, flipped, dtype)[0] in (1, 2)
    if dtype.startswith(("float", "complex", "bcomplex")) and dtype != "float4_e2m1fn_x2":
        real = torch.view_as_real(saved) if saved.is_complex() else saved
        np.testing.assert_array_equal(values_of(bits_of(data, dtype), dtype), real.to(torch.float64).reshape(-1))


def test_bits_that_are_signaling_nans_are_values_without_a_warning() -> None:
    assert np.isnan(values_of(bits_of(np.array([0x81, 0x7F], dtype=np.uint8), "bfloat16"), "bfloat16")).all()
