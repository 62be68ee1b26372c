"""What is on disk, read with nothing of the package: tags by their commit records, ``latest``, left-overs."""

from __future__ import annotations

import json
import os
import re
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

RECORD = "zeroelastic.json"
_HIDDEN = re.compile(r"\..+\.[0-9a-f]{32}\.(tmp|old|gone)", re.DOTALL)
"""What the next save removes where its process is gone. A temporary ``latest``, which names no process, stays a day."""


@dataclass
class Seen:
    """One directory: save ids by tag, what ``latest`` holds, what crashes left, and a listing."""

    ids: dict[str, str] = field(default_factory=dict)
    latest: str | None = None
    hidden: set[str] = field(default_factory=set)
    listing: dict[str, tuple[int, int, int]] = field(default_factory=dict)


def _is_bare(path: Path) -> bool:
    """Whether a hidden directory was made and holds nothing yet: a kill may come before its maker is noted in it."""
    return path.is_dir() and not any(found.stat().st_size for found in path.iterdir())


def look(root: Path) -> Seen:
    """A directory as it is now; an empty one where there is none."""
    seen = Seen()
    for folder, folders, files in os.walk(root):
        for name in [*folders, *files]:
            if _HIDDEN.fullmatch(name) and not _is_bare(Path(folder, name)):
                seen.hidden.add(os.path.relpath(os.path.join(folder, name), root))
        folders[:] = sorted(name for name in folders if not _HIDDEN.fullmatch(name))
        tag = os.path.relpath(folder, root)
        if RECORD in files:
            seen.ids[tag] = json.loads(Path(folder, RECORD).read_bytes())["save_id"]
        for name in files:
            if name != "latest" and not name.startswith("."):
                path = os.path.join(folder, name)
                found = os.stat(path)
                seen.listing[os.path.relpath(path, root)] = (found.st_ino, found.st_size, found.st_mtime_ns)
    latest = root / "latest"
    if latest.exists():
        seen.latest = latest.read_text()
    return seen


def damage(tag_dir: Path, kind: str) -> Path:
    """Damage one file of a tag: flip a bit of its largest entry, cut it in half, or remove it."""
    path = sorted(tag_dir.glob("*_optim_states.pt"))[-1]
    if kind == "remove":
        path.unlink()
    elif kind == "truncate":
        os.truncate(path, path.stat().st_size // 2)
    else:
        flip(path)
    return path


def flip(path: Path, within: str = "") -> None:
    """Flip a bit of the largest entry of a file; with ``within`` "/data/", of its largest tensor."""
    with zipfile.ZipFile(path) as archive:
        entries = [info for info in archive.infolist() if within in info.filename]
        largest = max(entries, key=lambda info: info.file_size)
    with open(path, "r+b") as file:
        file.seek(largest.header_offset + 26)
        name, extra = (int.from_bytes(file.read(2), "little") for _ in range(2))
        offset = largest.header_offset + 30 + name + extra + largest.file_size // 3
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x40]))
