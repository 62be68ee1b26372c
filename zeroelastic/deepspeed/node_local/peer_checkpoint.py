"""A checkpoint whose files are not all seen here: headers that this rank needs come from ranks that see the files.

A rank that sees a file parses its header and sends what parsing read; the rank that asked parses the same from that.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from zeroelastic.checkpoint.file_names import parse_rank_file
from zeroelastic.checkpoint.open import Checkpoint, Listing, open_checkpoint
from zeroelastic.checkpoint.tensor_parallel import TensorParallel
from zeroelastic.core.layout import Layout
from zeroelastic.core.plan import make_plan, source_ranks
from zeroelastic.deepspeed.live.live_optimizer import LiveOptimizer
from zeroelastic.deepspeed.node_local.headers import Ranges, ReceivedFile, RecordedFile
from zeroelastic.deepspeed.node_local.multicast import Request, multicast
from zeroelastic.deepspeed.node_local.visibility import FileVisibility
from zeroelastic.distributed.collective import all_or_raise


@dataclass(slots=True)
class _Headers:
    """The headers of a checkpoint that this rank reads, for itself and for others, each once; by file name.

    ``checkpoints`` are by tensor parallel rank: this rank's own, and those of which it has read a header for others.
    """

    visibility: FileVisibility
    listing: Listing
    tp_size: int
    checkpoints: dict[int, Checkpoint]
    compare_directories: bool
    recorded: dict[str, tuple[int, Ranges]] = field(default_factory=dict)

    def read(self, name: str) -> None:
        """Parse a header now, wherever the file is, in such a way that it can be sent to others. Collective."""
        all_or_raise(partial(self.record, [name] if name not in self.listing.remote_files else []))
        self.fetch([name])

    def fetch(self, wanted: Iterable[str]) -> None:
        """Parse the wanted headers of files that other ranks see, and send theirs to other ranks. Collective."""
        remote = [name for name in wanted if name in self.listing.remote_files]
        requests = [Request(self.visibility.reader(name), name) for name in remote]
        answers = multicast(requests, self.content)
        all_or_raise(partial(self.take, answers.content))

    def content(self, names: Sequence[str]) -> dict[str, bytes]:
        """What parsing these headers reads, by file name, for ranks that do not see the files."""
        self.record(names)
        return {name: pickle.dumps(self.recorded[name]) for name in names}

    def record(self, names: Iterable[str]) -> None:
        """Read the headers, not read before, of files that this rank sees."""
        for name in dict.fromkeys(names):
            if name in self.recorded:
                continue
            path = self.visibility.tag_dir / name
            file = RecordedFile(path, self.visibility.sizes.get(name))
            try:
                with self.visibility.named_in_errors(path):
                    self.parse(name, file)
            finally:
                file.close()
            self.recorded[name] = (file.size, file.ranges)

    def take(self, answers: Mapping[str, bytes | bytearray]) -> None:
        """Parse headers that others have read."""
        for name, content in answers.items():
            size, ranges = pickle.loads(content)
            self.parse(name, ReceivedFile(self.visibility.tag_dir / name, size, ranges))

    def parse(self, name: str, through: RecordedFile | ReceivedFile) -> None:
        file = parse_rank_file(name)
        assert file is not None
        if file.tp_rank not in self.checkpoints:
            tp = TensorParallel(file.tp_rank, self.tp_size)
            self.checkpoints[file.tp_rank] = open_checkpoint(
                self.visibility.tag_dir, tp=tp, listing=self.listing, compare_directories=self.compare_directories
            )
        checkpoint = self.checkpoints[file.tp_rank]
        if file.kind != "optimizer":
            checkpoint.model_states(file.rank, through=through)
            return
        model = checkpoint.model_file(file.rank).name
        if not checkpoint.has_models and model not in self.listing.remote_files:
            self.record([model])  # rigid optimizer files do not name their parameters
        checkpoint.shard(file.rank, through=through)


def open_with_peers(visibility: FileVisibility, live: LiveOptimizer, *, compare_directories: bool = True) -> Checkpoint:
    """The checkpoint, with every header that this rank needs and does not see from one that does. Collective.

    ``compare_directories`` is that of ``open_checkpoint``.
    Raises on every rank what ``open_checkpoint`` and the parsing of headers raise on any.
    """
    listing = visibility.listing
    checkpoint = all_or_raise(
        lambda: open_checkpoint(
            visibility.tag_dir, tp=live.tp, listing=listing, compare_directories=compare_directories
        )
    )
    headers = _Headers(visibility, listing, live.tp.size, {live.tp.rank: checkpoint}, compare_directories)
    saved, rank = checkpoint.world_size, live.rank
    own, nearest = rank if rank < saved else 0, min(rank, saved - 1)
    headers.read(checkpoint.model_file(own).name)
    if live.per_param and not checkpoint.whole_model:
        numels = [*live.layout.numel.tolist(), *live.frozen.numel.tolist()]
        needed = {nearest}
        needed.update(source_ranks(numels, saved_world_size=saved, world_size=live.layout.world_size, rank=rank))
        optim = models = needed
    else:  # a group's layout is in the headers
        headers.read(checkpoint.optim_files[nearest].name)
        optim, models = all_or_raise(lambda: _sources(checkpoint, live, own=own, nearest=nearest))
    wanted = [checkpoint.optim_files[source].name for source in sorted(optim)]
    if checkpoint.model_states(own).frozen is not None and not checkpoint.whole_model:
        wanted += [checkpoint.model_files[source].name for source in sorted(models - {own})]
    headers.fetch(wanted)
    return checkpoint


def _sources(checkpoint: Checkpoint, live: LiveOptimizer, *, own: int, nearest: int) -> tuple[set[int], set[int]]:
    """The saved ranks whose optimizer files, and those whose model states files, have something that this rank needs.

    The headers of the model states file of rank ``own`` and of the optimizer file of rank ``nearest`` are here.
    """
    trained, frozen = checkpoint.shard(nearest).layout, checkpoint.model_states(own).frozen
    optim, models = {nearest}, set[int]()
    for target in (live.layout, live.frozen):
        optim |= _holders(trained, target, live.rank)
        if frozen is not None:
            models |= _holders(frozen, target, live.rank)
    return optim, models


def _holders(src: Layout, dst: Layout, rank: int) -> set[int]:
    """The ranks of ``src`` that have something of what ``rank`` has of the parameters that are in both layouts."""
    shapes = {param.name: param.shape for param in src.params}
    both = dst.only({param.name for param in dst.params if shapes.get(param.name) == param.shape})
    return set(make_plan(src, both, rank).source_ranks) if both.numel.any() else set()
