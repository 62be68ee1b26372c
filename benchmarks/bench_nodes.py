"""What a rank computes and receives where each node has a memory or a disk of its own, at 64 to 16,384 ranks.

    python benchmarks/bench_nodes.py --out benchmarks/results

One rank of many runs the real code; what the others would send is made beforehand, as it is for a small model on nodes
of 8 ranks. Timed, on the first rank of a node, which does more than the others, and on another:

* a resume: which generations are in memory (``MemoryTier``), and which rank sees which file (``gather_visibility``);
* a checkpoint in memory: from the digests of its own files to the commit record, without copies of files.

And what it takes to send one header of a saved rank to every new rank of a job that is twice as large as the save, and
in how many rounds payload is sent where a quarter of the ranks are gone and no rank sees what it needs.

Writes nodes.json and nodes.md. *Received* are the bytes of collectives, and do not depend on the machine.
"""

from __future__ import annotations

import argparse
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import report
import torch
import torch.distributed as dist

from zeroelastic.checkpoint.commit_record import RECORD_NAME, CommitRecord, read_record, record_text
from zeroelastic.checkpoint.tensor_parallel import NO_TENSOR_PARALLEL
from zeroelastic.deepspeed.node_local import visibility
from zeroelastic.deepspeed.save import commit as save_commit
from zeroelastic.deepspeed.save.commit import Written
from zeroelastic.distributed import exchange, multicast
from zeroelastic.memory import resume
from zeroelastic.memory.checkpoints import _on_other_nodes
from zeroelastic.memory.generation import NOTE_NAME, MemoryNote, RunPlace, tag_of
from zeroelastic.memory.placement import Placement
from zeroelastic.memory.protect import protect
from zeroelastic.testing.sample import write_sample

WORLD_SIZES = (64, 512, 4096, 16_384)
NODE, ROUNDS = 8, 3
HEADER, PAYLOAD = 1 << 20, 1 << 30
TAG = tag_of(1, "0" * 32)
WHOSE = {NODE: "the first rank of a node", NODE + 1: "another rank"}


def names_of(rank: int) -> tuple[str, str]:
    """The files of a rank: module states and optimizer."""
    return f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt", f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


class OneOfMany:
    """Rank ``rank`` of ``world_size``, whose collectives give what the others would; counts what it receives."""

    def __init__(self, world_size: int, rank: int, record: CommitRecord) -> None:
        self.world_size, self.rank, self.received = world_size, rank, 0
        ranks = range(world_size)
        self.nodes = tuple(tuple(range(first, first + NODE)) for first in ranks[::NODE])
        self.placement = Placement(self.nodes, ("",) * len(self.nodes), copies=1)
        self.written = [
            Written(dict(zip(names_of(rank), (10_000, 10**9 + rank), strict=True)), self._directories(rank), None, 1.0)
            for rank in ranks
        ]
        self.shared = _on_other_nodes(self.written)
        sizes = {name: size for files in self.shared for name, size in files.items()}
        directories = {name: digest for own in self.written for name, digest in own.directories.items()}
        self.record = record.model_copy(update={"files": sizes, "directories": directories, "world_size": world_size})
        self.note = MemoryNote(
            step=1,
            save_id="0" * 32,
            committed_at=1.0,
            parent=None,
            world_size=world_size,
            content_root=record.content_root,
            files=tuple(self.shared),
        )
        self.on_node = {members[0]: self._on_node(members) for members in self.nodes}

    def _directories(self, rank: int) -> dict[str, str]:
        return dict.fromkeys(names_of(rank), f"{rank:064x}")

    def _on_node(self, members: Sequence[int]) -> dict[str, int]:
        ranks = [*members, *(kept for rank in members for kept in self.placement.kept(rank))]
        files = {name: size for rank in ranks for name, size in self.shared[rank].items()}
        return {**files, RECORD_NAME: 10, NOTE_NAME: 10}

    def gathered(self, values: Sequence[Sequence[Any]]) -> Callable[[Any], Any]:
        """An ``all_gather`` that gives one of the values after the other."""
        left, sizes = iter(values), iter([sum(len(pickle.dumps(one)) for one in every) for every in values])

        def all_gather(value: Any) -> Any:
            self.received += 8 * self.world_size + next(sizes)
            return next(left)

        return all_gather

    def first(self, value_of: Callable[[int], Any], others: Any) -> list[Any]:
        """By rank, a value for the first rank of each node, and one for the others."""
        return [value_of(rank) if rank % NODE == 0 else others for rank in range(self.world_size)]

    def memory_tier(self) -> Callable[[], object]:
        """Which generations are in memory."""
        text = self.note.model_dump_json()
        hashed = resume._hash(self.note)
        gathered = [
            [f"node {rank // NODE}" for rank in range(self.world_size)],
            self.first(lambda rank: [(TAG, hashed, self.on_node[rank], 0)], []),
            [{TAG: self.note} if rank == 0 else {} for rank in range(self.world_size)],
        ]
        own = {
            "tags": lambda place: [TAG],
            "note": lambda place, tag: MemoryNote.model_validate_json(text),
            "files": lambda place, tag: self.on_node[self.rank // NODE * NODE],
        }

        def run() -> object:
            tier = resume.MemoryTier(Path("ckpt"), "params")
            assert tier.generations[0].problem is None
            return tier

        def prepared() -> object:
            with ExitStack() as stack:
                for name, replacement in own.items():
                    stack.enter_context(mock.patch.object(RunPlace, name, replacement))
                stack.enter_context(mock.patch.object(resume, "all_gather", self.gathered(gathered)))
                return timed(run)

        return prepared

    def visible(self) -> Callable[[], object]:
        """Which rank sees which file."""
        save = visibility._save_of(self.record)
        nothing = visibility._LocalSave(None, None, {})
        gathered = [
            self.first(lambda rank: self.on_node[rank], None),
            self.first(lambda rank: visibility._LocalSave(save, None, {}), nothing),
            [self.record if rank == 0 else None for rank in range(self.world_size)],
        ]
        text = record_text(self.record)
        replaced: dict[str, Any] = {
            "all_gather_alike": lambda value: [(rank // NODE, 0, 0) for rank in range(self.world_size)],
            "all_or_raise": lambda action: action(),
            "_list": lambda path: self.on_node[self.rank // NODE * NODE],
        }

        def prepared() -> object:
            with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
                (Path(directory) / RECORD_NAME).write_bytes(text)
                for name, replacement in {**replaced, "all_gather": self.gathered(gathered)}.items():
                    stack.enter_context(mock.patch.object(visibility, name, replacement))
                return timed(lambda: visibility.gather_visibility(Path(directory), self.rank, NO_TENSOR_PARALLEL))

        return prepared

    def checkpoint(self, record: CommitRecord) -> Callable[[], object]:
        """A checkpoint in memory: what each rank has written, what it sends and keeps, the record and the note."""
        packed = [save_commit._pack(own, names_of(rank)) for rank, own in enumerate(self.written)]
        own = self.written[self.rank]
        group: Any = None  # the transfers are listed and not run

        def gather_bytes(data: bytes, *, to_all: bool) -> list[bytes | None]:
            self.received += len(data) * self.world_size
            return packed

        def run() -> None:
            _, _, written = save_commit.gather_written(own, names_of(self.rank), to_all=True)
            shared = _on_other_nodes(written)
            nothing = torch.empty(0, dtype=torch.uint8)
            protect(shared, self.placement, {}, lambda name, nbytes: nothing, group)
            if self.rank % NODE == 0:
                files = {name: size for each in written for name, size in sorted(each.sizes.items())}
                directories = {name: text for each in written for name, text in sorted(each.directories.items())}
                text = record_text(record.model_copy(update={"files": files, "directories": directories}))
                note = self.note.model_dump()
                assert text and MemoryNote(**{**note, "files": tuple(shared)}).model_dump_json()

        def prepared() -> object:
            with (
                mock.patch.object(save_commit, "gather_bytes", gather_bytes),
                mock.patch.object(save_commit, "maximum", lambda values: values),
            ):
                return timed(run)

        return prepared


class Followed:
    """Rank ``rank`` of a job twice as large as the save, among peers that all do what ``multicast`` says.

    Each new rank asks for one header of ``HEADER`` bytes, of rank 0; what comes to this rank is what was sent.
    """

    def __init__(self, world_size: int, rank: int) -> None:
        self.rank, self.size, self.device = rank, world_size, torch.device("cpu")
        self.request = multicast.Request(0, "header")
        self.requests = [() if other < world_size // 2 else (self.request,) for other in range(world_size)]
        askers = {self.request: list(range(world_size // 2, world_size))}
        self.steps = list(multicast.tree_steps(askers, multicast.FAN_OUT))
        self.copies = [0] * world_size
        for hops in self.steps:
            for hop in hops:
                self.copies[hop.src] += 1
        self.rounds = self.received = 0
        self.left = iter(self.steps)

    def all_gather(self, sizes: dict[int, int]) -> list[dict[int, int]]:
        """What each rank sends in this step."""
        every: list[dict[int, int]] = [{} for _ in range(self.size)]
        for hop in next(self.left):
            every[hop.src][hop.dst] = HEADER
        assert every[self.rank] == sizes, "the rank sends what the tree says"
        self.received += 8 * self.size + sum(len(pickle.dumps(row)) for row in every)
        return every

    def all_to_all(
        self, received: torch.Tensor, sent: torch.Tensor, received_numel: Sequence[int], sent_numel: Sequence[int]
    ) -> Followed:
        """One round."""
        received.fill_(1)
        self.received += len(received)
        self.rounds += 1
        return self

    def wait(self) -> None:
        """Nothing: a round is over when it has begun."""

    def run(self) -> float:
        """Seconds of this rank."""

        def gathered(values: list[Any]) -> list[Any]:
            self.received += 8 * self.size + sum(len(pickle.dumps(one)) for one in values)
            return values

        def read_and_gather(action: Callable[[], Any], part: Callable[[Any], Any]) -> tuple[Any, list[Any]]:
            return action(), gathered([{self.request.name: HEADER}, *({} for _ in range(1, self.size))])

        def read(names: Sequence[str]) -> dict[str, bytes]:
            return dict.fromkeys(names, bytes([1]) * HEADER)

        with (
            mock.patch.object(dist, "get_rank", lambda group=None: self.rank),
            mock.patch.object(multicast, "all_gather", lambda value: gathered(self.requests)),
            mock.patch.object(multicast, "all_gather_of_or_raise", read_and_gather),
            mock.patch.object(multicast, "all_or_raise", lambda action: action()),
            mock.patch.object(exchange, "DefaultPeers", lambda: self),
        ):
            return timed(lambda: self.check(multicast.multicast(self.requests[self.rank], read)))

    def check(self, answers: multicast.Answers) -> None:
        """This rank got what it asked for."""
        wanted = {request.name: HEADER for request in self.requests[self.rank]}
        assert {name: data.count(1) for name, data in answers.content.items()} == wanted


def headers_sent(world_size: int) -> dict[str, Any]:
    """What one header for every new rank costs the rank that reads it, and the first that it comes to."""
    seconds, received = {}, {}
    for whose, rank in (("reader", 0), ("first", world_size // 2)):
        runs = [Followed(world_size, rank) for _ in range(ROUNDS)]
        seconds[whose] = [run.run() for run in runs]
        received[whose] = runs[0].received
    return {
        "world_size": world_size,
        "steps": len(runs[0].steps),
        "rounds": runs[0].rounds,
        "most_copies": max(runs[0].copies),
        "header_bytes": HEADER,
        "seconds": seconds,
        "received": received,
    }


def payload_rounds(world_size: int) -> dict[str, Any]:
    """The rounds in which each of three quarters of the ranks gets ``PAYLOAD`` bytes from each of two others."""
    table = {(dst * 4 // 3 + one, dst): PAYLOAD for dst in range(world_size * 3 // 4) for one in (0, 1)}
    rank, rounds = world_size // 2, 0

    def run() -> None:
        nonlocal rounds
        rounds = 0
        for messages in exchange._rounds(table, world_size):
            rounds += 1
            for src in (False, True):
                exchange._pieces(messages, rank, src=src)

    seconds = [timed(run) for _ in range(ROUNDS)]
    return {"world_size": world_size, "payload_bytes": PAYLOAD, "rounds": rounds, "seconds": seconds}


def timed(action: Callable[[], object]) -> float:
    """Seconds of processor time of this thread."""
    began = time.thread_time()
    action()
    return time.thread_time() - began


def measure(world_size: int, record: CommitRecord) -> Iterator[dict[str, Any]]:
    """Seconds and received bytes of each part, on the two kinds of ranks."""
    for rank in WHOSE:
        one = OneOfMany(world_size, rank, record)
        with (
            mock.patch.object(dist, "get_rank", lambda group=None, rank=rank: rank),
            mock.patch.object(dist, "get_world_size", lambda group=None: world_size),
        ):
            parts = {"memory": one.memory_tier(), "files": one.visible(), "checkpoint": one.checkpoint(record)}
            for part, action in parts.items():
                one.received = 0
                seconds = [action() for _ in range(ROUNDS)]
                yield {
                    "world_size": world_size,
                    "rank": WHOSE[rank],
                    "part": part,
                    "seconds": seconds,
                    "received": one.received // ROUNDS,
                }


def page(rows: Sequence[dict[str, Any]], headers: Sequence[dict[str, Any]], payload: Sequence[dict[str, Any]]) -> str:
    """The results as Markdown."""
    lines = [
        "# What a rank computes and receives where each node has a memory or a disk of its own",
        "",
        "One rank of many runs the real code, on what the others would send (`benchmarks/bench_nodes.py`); nodes of 8",
        "ranks. The shortest of three times, of one thread. A resume does both of its parts once, a checkpoint in",
        "memory its part in a thread, beside training.",
        "",
        "| ranks | of | a resume: generations in memory | a resume: who sees which file | a checkpoint in memory |",
        "|--:|---|--:|--:|--:|",
    ]
    for world_size in sorted({row["world_size"] for row in rows}):
        for whose in WHOSE.values():
            found = {row["part"]: row for row in rows if (row["world_size"], row["rank"]) == (world_size, whose)}
            cells = [
                f"{1e3 * min(found[part]['seconds']):,.1f} ms, {found[part]['received']:,} bytes"
                for part in ("memory", "files", "checkpoint")
            ]
            lines.append(f"| {world_size:,} | {whose} | {' | '.join(cells)} |")
    lines += [
        "",
        f"A job twice as large as its save: each new rank asks for one header, of {HEADER >> 20} MiB, that one rank "
        "reads. *Copies* are those",
        "that the rank which sends most sends; before, the reader sent all. Seconds are of one thread, the shortest of "
        "three.",
        "",
        "| ranks | steps | rounds | copies | the rank that reads it | the first that gets it |",
        "|--:|--:|--:|--:|--:|--:|",
    ]
    for row in headers:
        cells = [
            f"{1e3 * min(row['seconds'][whose]):,.1f} ms, {row['received'][whose]:,} bytes"
            for whose in ("reader", "first")
        ]
        lines.append(
            f"| {row['world_size']:,} | {row['steps']} | {row['rounds']} | {row['most_copies']} | {' | '.join(cells)} |"
        )
    lines += [
        "",
        f"A quarter of the ranks is gone, and each that is left gets {PAYLOAD >> 30} GiB from each of two others, in "
        f"rounds of {exchange.ROUND_BYTES >> 20} MiB;",
        "before, peers far apart in number had rounds of their own, 8,320 for 16,384 ranks.",
        "",
        "| ranks | rounds | what a rank computes for them |",
        "|--:|--:|--:|",
    ]
    lines += [f"| {row['world_size']:,} | {row['rounds']} | {1e3 * min(row['seconds']):,.1f} ms |" for row in payload]
    return "\n".join([*lines, ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--world-sizes", type=int, nargs="+", default=list(WORLD_SIZES))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        write_sample(Path(directory), world_size=2, steps=(1,), hidden=8, layers=1)
        record = read_record(Path(directory) / "global_step1")
    assert record is not None
    rows = [row for world_size in arguments.world_sizes for row in measure(world_size, record)]
    headers = [headers_sent(world_size) for world_size in arguments.world_sizes]
    payload = [payload_rounds(world_size) for world_size in arguments.world_sizes]
    document = {"machine": report.machine(), "rows": rows, "headers": headers, "payload": payload}
    report.write_results(arguments.out, "nodes", document, page(rows, headers, payload))
    return 0


if __name__ == "__main__":
    sys.exit(main())
