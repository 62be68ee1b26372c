"""The resume report: the result of a load, its cost on the worst rank, and whether the state is the saved one."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Literal

from zeroelastic.byte_sizes import format_size


@dataclass(frozen=True, slots=True)
class ResumeReport:
    """The outcome of one load; the same on every rank, except for ``seconds``, which no comparison counts.

    Bytes and files are those of the worst rank. ``bytes_owned`` counts the state that the rank owns and loaded, padding
    excluded; ``bytes_read`` the payload read for it; ``header_bytes`` everything else that was read (zip directories,
    pickles, scalars, the module states file, the commit record). ``seconds`` are the time of the whole call of
    ``load_checkpoint`` by this rank's clock; observers and the log line have the seconds until they get the report.
    ``saved_root`` is None without a commit record. ``root_matches`` is None when the root was not verified, with the
    reason in ``notes``, and never False: a difference is an error. ``changed`` names what the save and the run do not
    have in common, and how it was loaded. Where files are on node-local disks, ``bytes_read`` includes what the rank
    read for others, and ``bytes_sent`` and ``bytes_received`` count the payload and the module states sent between
    ranks. ``batch_changed``: the run's global batch is not that of the save. ``verify`` is the option of that name, as
    this load used it. ``topology`` are the data, tensor and expert parallel sizes of the save and of the run, as text;
    None where neither has slices of tensors.
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
    seconds: float = field(compare=False)
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
    batch_changed: bool = False
    verify: str = "read"
    topology: str | None = None

    def to_dict(self) -> dict[str, object]:
        """The report as plain JSON values, without ``topology`` where there is none."""
        values = {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}
        if self.topology is None:
            del values["topology"]
        return values

    def text(self) -> str:
        """The report as the lines that rank 0 logs."""
        if self.root_matches:
            proof = f"content root {str(self.loaded_root)[:12]} is the saved one (verify: {self.verify})"
        elif self.loaded_root is not None:
            proof = f"content root {self.loaded_root[:12]} (not compared)"
        else:
            proof = "content not verified"
        lines = [
            f"resumed {self.path} ({self.format}): {self.saved_world_size} -> {self.world_size} ranks in "
            f"{self.seconds:.2f} s; {proof}",
            f"  worst rank: owns {format_size(self.bytes_owned)}, read {format_size(self.bytes_read)} "
            f"+ {format_size(self.header_bytes)} of headers from {self.files_opened} files",
        ]
        if self.topology is not None:
            lines.append(f"  {self.topology}")
        if self.bytes_sent:
            lines.append(
                f"  between ranks, worst rank: sent {format_size(self.bytes_sent)}, "
                f"received {format_size(self.bytes_received)}"
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
