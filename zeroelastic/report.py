"""The resume report: what a load did, what it cost on the worst rank, and whether the state is the saved one."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class ResumeReport:
    """What one load did; the same object on every rank.

    Bytes and files are those of the worst rank. ``bytes_owned`` counts the state that the rank owns and loaded,
    padding excluded; ``bytes_read`` the payload read for it; ``header_bytes`` what was read besides (zip directories,
    pickles, scalars, the module states file, the commit record). ``saved_root`` is None without a commit record and
    ``root_matches`` is None when it was not verified, with the reason in ``notes``, and never False: a
    difference is an error. ``changed`` names what the save and the run do not have in common, and what became of it.
    Where files are on node-local disks, ``bytes_read`` has in it what the rank read for others, and ``bytes_sent`` and
    ``bytes_received`` are the payload and the module states that went from rank to rank.
    """

    path: str
    format: Literal["elastic", "rigid"]
    saved_world_size: int
    world_size: int
    bytes_owned: int
    bytes_read: int
    header_bytes: int
    files_opened: int
    total_bytes_read: int
    seconds: float
    saved_root: str | None
    loaded_root: str | None
    root_matches: bool | None
    exact: tuple[str, ...]
    rederived: tuple[str, ...]
    reset: tuple[str, ...]
    notes: tuple[str, ...]
    changed: tuple[str, ...] = ()
    bytes_sent: int = 0
    bytes_received: int = 0

    def to_dict(self) -> dict[str, object]:
        """The report as plain JSON values."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}

    def text(self) -> str:
        """The report as the few lines that rank 0 logs."""
        if self.root_matches:
            proof = f"content root {str(self.loaded_root)[:12]} is the saved one"
        elif self.loaded_root is not None:
            proof = f"content root {self.loaded_root[:12]} (not compared)"
        else:
            proof = "content not verified"
        lines = [
            f"resumed {self.path} ({self.format}): {self.saved_world_size} -> {self.world_size} ranks in "
            f"{self.seconds:.2f} s; {proof}",
            f"  worst rank: owns {_size(self.bytes_owned)}, read {_size(self.bytes_read)} + {_size(self.header_bytes)} "
            f"of headers from {self.files_opened} files",
        ]
        if self.bytes_sent:
            lines.append(
                f"  between ranks, worst rank: sent {_size(self.bytes_sent)}, received {_size(self.bytes_received)}"
            )
        for title, items in (
            ("exact", self.exact),
            ("re-derived", self.rederived),
            ("not restored", self.reset),
            ("changed since the save", self.changed),
            ("note", self.notes),
        ):
            if items:
                lines.append(f"  {title}: " + "; ".join(items))
        return "\n".join(lines)


def _size(nbytes: int) -> str:
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
