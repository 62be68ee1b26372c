"""Refuse that this process writes to, moves or removes a checkpoint by Python's own functions (an audit hook).

The hook does not see other writers (torch.save to a path, other programs), so a caller also compares the files before
and after.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
# Audit event -> the indices of its arguments that are paths it changes.
_CHANGES = {
    "os.chmod": (0,),
    "os.chown": (0,),
    "os.link": (1,),
    "os.mkdir": (0,),
    "os.remove": (0,),
    "os.rename": (0, 1),
    "os.rmdir": (0,),
    "os.symlink": (1,),
    "os.truncate": (0,),
    "os.utime": (0,),
    "shutil.move": (0,),
    "shutil.rmtree": (0,),
}
# Those that affect everything below the path.
_WITH_CONTENTS = ("os.remove", "os.rename", "os.rmdir", "shutil.move", "shutil.rmtree")


def forbid_writes(protected: Iterable[str]) -> None:
    """Refuse changes at or below these paths, in this process and its forks, until they end.

    The code that tries gets a PermissionError.
    """
    places = tuple(os.path.realpath(path) for path in protected)

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event == "open":
            flags = arguments[2]
            paths = arguments[:1] if isinstance(flags, int) and flags & _WRITES else ()
        elif event in _CHANGES:
            paths = tuple(arguments[index] for index in _CHANGES[event])
        else:
            return
        for path in paths:
            if isinstance(path, (str, bytes, os.PathLike)) and _touches(
                os.fsdecode(path), places, from_above=event in _WITH_CONTENTS
            ):
                raise PermissionError(
                    f"{os.fsdecode(path)}: belongs to the checkpoint that is being proved, which the script must not "
                    "change. Let it write elsewhere."
                )

    sys.addaudithook(hook)


def _touches(path: str, places: tuple[str, ...], *, from_above: bool) -> bool:
    """Whether a path is one of the places, below one or, ``from_above``, one that a place is below."""
    parent, name = os.path.split(os.path.abspath(path))
    real = os.path.join(os.path.realpath(parent), name)  # a link itself may be removed; what it names stays
    return any(
        real == place or real.startswith(place + os.sep) or (from_above and place.startswith(real + os.sep))
        for place in places
    )
