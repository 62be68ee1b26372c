"""A pickle looked at opcode by opcode before anything unpickles it: what would take memory or time out of proportion.

A few bytes can ask an unpickler for gigabytes (a memo slot, a counted string, thousands of empty sets) or for hours
(the hash of a tuple that holds itself twice, thirty levels deep; integers that all have one hash). ``check_opcodes``
follows a pickle as the unpickler would, with sizes in place of objects, and refuses those; honest files pass.

Source: pickletools of Python 3.11, and Modules/_pickle.c for what is allocated when.
"""

from __future__ import annotations

from zeroelastic.errors import CheckpointError, UnsafePickleError

MOST_NESTED = 100
"""Containers within containers that a header may have."""

_MOST_INT_BYTES = 512
_MOST_LONG_INTS = 4096
_LONG_INT_BYTES = 9  # integers of fewer bytes cannot share a hash in great numbers: it is taken modulo 2^61 - 1
_MOST_WEIGHT = 1 << 62
_FREE_OBJECTS = 1 << 17
_BYTES_PER_OBJECT = 6  # of the pickle, for each object that takes some hundred bytes of memory
_FREE_HASHES = 1 << 20
_HASHES_PER_BYTE = 16

_COUNTED = {b"X": 4, b"\x8c": 1, b"\x8d": 8, b"B": 4, b"C": 1, b"\x8e": 8}
_PLAIN = {b"J": 5, b"K": 2, b"M": 3, b"G": 9, b"N": 1, b"\x88": 1, b"\x89": 1, b")": 1}
_EMPTY = b"]}\x8f"
_TUPLES = {0x85: 1, 0x86: 2, 0x87: 3}


def _table(values: dict[bytes, int]) -> list[int]:
    table = [0] * 256
    for code, value in values.items():
        table[code[0]] = value
    return table


_COUNT_BYTES, _PLAIN_BYTES = _table(_COUNTED), _table(_PLAIN)


def check_opcodes(data: bytes) -> None:
    """Refuse what Python 3 does not write at protocol 2 to 4, and what claims more than the pickle's bytes are worth.

    Raises UnsafePickleError for such opcodes, CheckpointError for a truncated or damaged pickle and for one that would
    take memory or time out of proportion.
    """
    try:
        _check(data)
    except IndexError:  # of the stack, the memo's marks or the bytes
        raise CheckpointError("the pickle takes what it has not made. The file is damaged.") from None


def _check(data: bytes) -> None:
    """Follow a pickle; an object is represented by the number of values that its hash would visit."""
    stack: list[int] = []
    marks: list[int] = []
    memo: dict[int, int] = {}
    end = len(data)
    at = hashed = objects = long_ints = 0
    push, pop = stack.append, stack.pop
    while at < end:
        op = data[at]
        size = _COUNT_BYTES[op]
        if size:
            at += 1 + size + int.from_bytes(data[at + 1 : at + 1 + size], "little")
            push(1)
        elif _PLAIN_BYTES[op]:
            at += _PLAIN_BYTES[op]
            push(1)
        elif op == 0x71:  # q: BINPUT
            memo[data[at + 1]] = stack[-1]
            at += 2
        elif op == 0x72:  # r: LONG_BINPUT; the unpickler allocates up to the highest slot, 16 bytes each
            slot = int.from_bytes(data[at + 1 : at + 5], "little")
            if slot > at:
                raise CheckpointError("the pickle names a memo slot that it cannot have filled. The file is damaged.")
            memo[slot] = stack[-1]
            at += 5
        elif op == 0x68 or op == 0x6A:  # h, j: BINGET, LONG_BINGET
            width = 1 if op == 0x68 else 4
            weight = memo.get(int.from_bytes(data[at + 1 : at + 1 + width], "little"), 0)
            if not weight:
                raise CheckpointError("the pickle takes a memo slot that it has not filled. The file is damaged.")
            push(weight)
            at += 1 + width
        elif op == 0x28:  # (
            marks.append(len(stack))
            at += 1
        elif op in _TUPLES:
            weight = 1
            for _ in range(_TUPLES[op]):
                weight += pop()
            push(weight if weight < _MOST_WEIGHT else _MOST_WEIGHT)
            at += 1
        elif op == 0x74:  # t: TUPLE
            begin = marks.pop()
            weight = 1 + sum(stack[begin:])
            del stack[begin:]
            push(weight if weight < _MOST_WEIGHT else _MOST_WEIGHT)
            at += 1
        elif op == 0x52 or op == 0x81 or op == 0x92:  # R, NEWOBJ, NEWOBJ_EX
            weight = 1 + pop()
            if op == 0x92:
                weight += pop()
            stack[-1] = weight if weight < _MOST_WEIGHT else _MOST_WEIGHT
            objects += 1
            at += 1
        elif op == 0x51:  # Q: BINPERSID
            stack[-1] = 1
            objects += 1
            at += 1
        elif op in _EMPTY:
            push(1)
            objects += 1
            at += 1
        elif op == 0x75:  # u: SETITEMS
            begin = marks.pop()
            hashed += sum(stack[begin::2])
            del stack[begin:]
            stack[-1]
            at += 1
        elif op == 0x65:  # e: APPENDS
            del stack[marks.pop() :]
            stack[-1]
            at += 1
        elif op == 0x73:  # s: SETITEM
            pop()
            hashed += pop()
            stack[-1]
            at += 1
        elif op == 0x61 or op == 0x62:  # a, b: APPEND, BUILD
            pop()
            stack[-1]
            at += 1
        elif op == 0x63:  # c: GLOBAL
            module_end = data.find(b"\n", at)
            name_end = data.find(b"\n", module_end + 1)
            if module_end < 0 or name_end < 0:
                raise CheckpointError("the pickle ends inside a name. The file is damaged.")
            push(1)
            at = name_end + 1
        elif op == 0x94:  # MEMOIZE
            memo[len(memo)] = stack[-1]
            at += 1
        elif op == 0x93:  # STACK_GLOBAL
            pop()
            stack[-1] = 1
            at += 1
        elif op == 0x8A or op == 0x8B:  # LONG1, LONG4
            width = 1 if op == 0x8A else 4
            size = int.from_bytes(data[at + 1 : at + 1 + width], "little")
            long_ints += size > _LONG_INT_BYTES
            if size > _MOST_INT_BYTES or long_ints > _MOST_LONG_INTS:
                raise CheckpointError("the pickle has longer integers than a checkpoint. The file is damaged.")
            push(1)
            at += 1 + width + size
        elif op == 0x80:  # PROTO
            at += 2
        elif op == 0x95:  # FRAME
            at += 9
        elif op == 0x90 or op == 0x91:  # ADDITEMS, FROZENSET
            begin = marks.pop()
            weight = 1 + sum(stack[begin:])
            hashed += weight
            del stack[begin:]
            if op == 0x91:
                push(weight if weight < _MOST_WEIGHT else _MOST_WEIGHT)
            stack[-1]
            at += 1
        elif op == 0x30:  # 0: POP, of an object or of a mark
            if marks and marks[-1] == len(stack):
                marks.pop()
            else:
                pop()
            at += 1
        elif op == 0x31:  # 1: POP_MARK
            del stack[marks.pop() :]
            at += 1
        elif op == 0x2E:  # .: STOP
            break
        else:
            raise UnsafePickleError(f"the pickle uses opcode {data[at : at + 1]!r}, which torch.save does not write")
    else:
        raise CheckpointError("the pickle has no end. The file is truncated.")
    if hashed > _FREE_HASHES + _HASHES_PER_BYTE * end:
        raise CheckpointError("the pickle's keys hold one another too often to be looked up. The file is damaged.")
    if objects > _FREE_OBJECTS + end // _BYTES_PER_OBJECT:
        raise CheckpointError("the pickle has more objects than a checkpoint of its size. The file is damaged.")
