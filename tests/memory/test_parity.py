"""zeroelastic.memory.parity: any one member of a set is what the XOR of the others' chunks and parity says."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from zeroelastic.memory.parity import Stripes, largest, pieces, total


def chunk(data: bytes, offset: int, nbytes: int) -> np.ndarray:
    return np.frombuffer(data[offset : offset + nbytes].ljust(nbytes, b"\0"), dtype=np.uint8)


@given(st.lists(st.binary(max_size=700), min_size=2, max_size=6))
def test_a_lost_member_is_made_again_from_the_others(datas: list[bytes]) -> None:
    stripes = Stripes(len(datas), max(map(len, datas)))
    parity = [
        np.bitwise_xor.reduce(
            [chunk(datas[m], stripes.begin(m, s), stripes.chunk) for m in stripes.others(s)], axis=0
        ) if stripes.chunk else np.zeros(0, dtype=np.uint8)
        for s in range(len(datas))
    ]  # fmt: skip
    for lost, data in enumerate(datas):
        made = bytearray(stripes.chunk * (len(datas) - 1))
        for s in range(len(datas)):
            if s == lost:
                continue
            rest = [chunk(datas[m], stripes.begin(m, s), stripes.chunk) for m in stripes.others(s) if m != lost]
            begin = stripes.begin(lost, s)
            made[begin : begin + stripes.chunk] = np.bitwise_xor.reduce([parity[s], *rest], axis=0).tobytes()
        assert bytes(made[: len(data)]) == data
        assert not any(made[len(data) :])


@given(st.lists(st.integers(0, 90), max_size=5), st.integers(0, 300), st.integers(0, 300))
def test_pieces_are_the_range_of_the_files_one_after_the_other(lengths: list[int], offset: int, nbytes: int) -> None:
    files = {f"f{i}": bytes([i + 1]) * length for i, length in enumerate(lengths)}
    sizes = {name: len(data) for name, data in files.items()}
    whole = b"".join(files.values())
    got = bytearray(min(nbytes, max(0, len(whole) - offset)))
    for name, at, count, place in pieces(sizes, offset, nbytes):
        assert count > 0
        got[place : place + count] = files[name][at : at + count]
    assert bytes(got) == whole[offset : offset + nbytes]
    assert total(sizes) == len(whole) == largest([sizes, {}])
