"""Check a pickle opcode by opcode before it is unpickled: refuse what takes memory or time out of proportion.

A few bytes can ask an unpickler for gigabytes (a memo slot, a counted string, thousands of empty sets) or for hours
(the hash of a tuple that holds itself twice, thirty levels deep; integers that all have one hash). ``check_opcodes``
follows a pickle as the unpickler would, with sizes in place of objects, and refuses those; honest files pass.

Source: pickletools of Python 3.11, and Modules/_pickle.c for its allocations.
"""

from __future__ import annotations

from zeroelastic.errors import CheckpointError, UnsafePickleError

MOST_NESTED = 100
"""Containers within containers that a header may have."""

_MAX_INT_BYTES = 512
_MAX_LONG_INTS = 4096
_LONG_INT_BYTES = 9  # integers of fewer bytes cannot share a hash in great numbers: it is taken modulo 2^61 - 1
_MAX_WEIGHT = 1 << 62
_FREE_OBJECTS = 1 << 17
_BYTES_PER_OBJECT = 6  # of the pickle, for each object that takes some hundred bytes of memory
_FREE_HASHES = 1 << 20
_HASHES_PER_BYTE = 16

_COUNTED = {0x58: 4, 0x8C: 1, 0x8D: 8, 0x42: 4, 0x43: 1, 0x8E: 8}  # text and bytes behind their length
_PLAIN = {0x4A: 5, 0x4B: 2, 0x4D: 3, 0x47: 9, 0x4E: 1, 0x88: 1, 0x89: 1, 0x29: 1}  # numbers, None, booleans, ()

# What an opcode takes from the stack: some values, or all down to the last mark. What it leaves: nothing, the container
# below, or a value that is pushed or replaces the one on top: of weight 1, or 1 more than the sum of what was taken.
_TO_MARK = -1
_NOTHING, _BELOW, _PUSH, _TOP = range(4)
_ONE, _SUM = False, True
# What is hashed: nothing, the keys of pairs, or all that was taken.
_NO_HASH, _KEYS, _ALL = range(3)
_EFFECTS = {
    0x85: (1, _PUSH, _SUM, _NO_HASH, 0),  # TUPLE1 to 3, TUPLE
    0x86: (2, _PUSH, _SUM, _NO_HASH, 0),
    0x87: (3, _PUSH, _SUM, _NO_HASH, 0),
    0x74: (_TO_MARK, _PUSH, _SUM, _NO_HASH, 0),
    0x52: (1, _TOP, _SUM, _NO_HASH, 1),  # REDUCE, NEWOBJ, NEWOBJ_EX
    0x81: (1, _TOP, _SUM, _NO_HASH, 1),
    0x92: (2, _TOP, _SUM, _NO_HASH, 1),
    0x51: (0, _TOP, _ONE, _NO_HASH, 1),  # BINPERSID
    0x93: (1, _TOP, _ONE, _NO_HASH, 0),  # STACK_GLOBAL
    0x5D: (0, _PUSH, _ONE, _NO_HASH, 1),  # EMPTY_LIST, EMPTY_DICT, EMPTY_SET
    0x7D: (0, _PUSH, _ONE, _NO_HASH, 1),
    0x8F: (0, _PUSH, _ONE, _NO_HASH, 1),
    0x61: (1, _BELOW, _ONE, _NO_HASH, 0),  # APPEND, APPENDS, BUILD
    0x65: (_TO_MARK, _BELOW, _ONE, _NO_HASH, 0),
    0x62: (1, _BELOW, _ONE, _NO_HASH, 0),
    0x73: (2, _BELOW, _ONE, _KEYS, 0),  # SETITEM, SETITEMS
    0x75: (_TO_MARK, _BELOW, _ONE, _KEYS, 0),
    0x90: (_TO_MARK, _BELOW, _SUM, _ALL, 0),  # ADDITEMS, FROZENSET
    0x91: (_TO_MARK, _PUSH, _SUM, _ALL, 0),
    0x31: (_TO_MARK, _NOTHING, _ONE, _NO_HASH, 0),  # POP_MARK
}
"""By opcode: what it takes, what it leaves, the weight of that, what it hashes, and the objects that it makes."""

_COUNT_BYTES, _PLAIN_BYTES = ([table.get(op, 0) for op in range(256)] for table in (_COUNTED, _PLAIN))


def check_opcodes(data: bytes) -> None:
    """Refuse opcodes that Python 3 does not write at protocol 2 to 4, and pickles out of proportion to their bytes.

    Raises UnsafePickleError for such opcodes, CheckpointError for a truncated or damaged pickle and for one that would
    take memory or time out of proportion.
    """
    try:
        _check(data)
    except IndexError:  # of the stack, the memo's marks or the bytes
        raise CheckpointError("the pickle takes an object that it has not made. The file is damaged.") from None


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
        elif op == 0x72:  # r: LONG_BINPUT; the unpickler allocates up to the highest slot, 16 bytes each
            slot = int.from_bytes(data[at + 1 : at + 5], "little")
            if slot > at:
                raise CheckpointError("the pickle names a memo slot that it cannot have filled. The file is damaged.")
            memo[slot] = stack[-1]
            at += 5
        elif op == 0x94:  # MEMOIZE
            memo[len(memo)] = stack[-1]
            at += 1
        elif op in _EFFECTS:
            taken, leaves, sums, hashes, made = _EFFECTS[op]
            begin = marks.pop() if taken == _TO_MARK else len(stack) - taken
            if begin < 0:
                raise IndexError
            weight = 1 + sum(stack[begin:]) if sums else 1
            if hashes:
                hashed += weight if hashes == _ALL else sum(stack[begin::2])
            if taken:
                del stack[begin:]
            if leaves == _PUSH:
                push(weight if weight < _MAX_WEIGHT else _MAX_WEIGHT)
            elif leaves == _TOP:
                stack[-1] = weight if weight < _MAX_WEIGHT else _MAX_WEIGHT
            elif leaves == _BELOW:
                stack[-1]
            objects += made
            at += 1
        elif op == 0x63:  # c: GLOBAL
            module_end = data.find(b"\n", at)
            name_end = data.find(b"\n", module_end + 1)
            if module_end < 0 or name_end < 0:
                raise CheckpointError("the pickle ends inside a name. The file is damaged.")
            push(1)
            at = name_end + 1
        elif op == 0x8A or op == 0x8B:  # LONG1, LONG4
            width = 1 if op == 0x8A else 4
            size = int.from_bytes(data[at + 1 : at + 1 + width], "little")
            long_ints += size > _LONG_INT_BYTES
            if size > _MAX_INT_BYTES or long_ints > _MAX_LONG_INTS:
                raise CheckpointError("the pickle has longer integers than a checkpoint. The file is damaged.")
            push(1)
            at += 1 + width + size
        elif op == 0x80 or op == 0x95:  # PROTO, FRAME
            at += 2 if op == 0x80 else 9
        elif op == 0x30:  # 0: POP, of an object or of a mark
            if marks and marks[-1] == len(stack):
                marks.pop()
            else:
                pop()
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
