"""The systems that bench_load compares, and the ranks on which they run: real ZeRO engines on the CPU.

A system that loads an engine gets a new process for each sample, whose engine has not stepped: the first load is what
a resumed job waits for. Other systems fill tensors of the same size in memory that is new each time. A second load of
the same follows, into memory that is there. After both every tensor is digested and compared with what was saved,
outside the measured time.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from meter import Cost, Meter, cool_down, files_below, link_tree, touch_free_memory, warm_up
from report import benchmark_arguments

import zeroelastic
from zeroelastic.checkpoint.commit_record import CommitRecord, read_record
from zeroelastic.core.digest import stream_seed
from zeroelastic.executors.dispatch import digest_range

KEYS = ("fp32", "exp_avg", "exp_avg_sq")
TAG = "global_step1"
FEW_ROUNDS = 3  # of what is long, and of loads from a disk
_CEILING_BLOCK = 1 << 20
_GARBAGE = 1.5


@dataclass(frozen=True)
class Job:
    """One benchmark: the model, where its checkpoints are, the two world sizes, the ZeRO stage; picklable."""

    hidden: int
    num_layers: int
    vocabulary: int
    directory: Path
    save_ranks: int
    load_ranks: int
    ceiling_threads: int = 1
    stage: int = 3

    def checkpoint(self, name: str) -> Path:
        """Directory of one of the saved forms: elastic, rigid, dcp or universal."""
        return self.directory / name

    @property
    def model(self) -> dict[str, int]:
        """The shape of the model."""
        return {"hidden": self.hidden, "num_layers": self.num_layers, "vocabulary": self.vocabulary}


def job_arguments(description: str | None) -> argparse.ArgumentParser:
    """What every benchmark of a ``Job`` takes."""
    parser = benchmark_arguments(description)
    parser.add_argument("--params", type=int, default=200_000_000, help="parameters of the model, about")
    parser.add_argument("--repeats", type=int, default=5)
    return parser


def params_of(arguments: argparse.Namespace) -> int:
    """About how many parameters the model has."""
    return 5_000_000 if arguments.small else int(arguments.params)


@contextmanager
def temporary_job(
    name: str, arguments: argparse.Namespace, save_ranks: int, load_ranks: int, **options: int
) -> Iterator[Job]:
    """A job with the model that the command line asks for, in a directory that is removed at the end."""
    with tempfile.TemporaryDirectory(prefix=f"{name}-", dir=arguments.directory) as directory:
        shape = shape_of(params_of(arguments))
        yield Job(*shape, Path(directory).resolve(), save_ranks, load_ranks, **options)


def shape_of(params: int) -> tuple[int, int, int]:
    """Hidden size, layers and vocabulary of a GPT-like model of about this number of parameters.

    The sizes do not divide by 3, so that resharding 4 -> 3 leaves source and destination misaligned to each other.
    """
    hidden, vocabulary = (256, 5003) if params < 20_000_000 else (1024, 50257) if params < 10**9 else (2048, 50257)
    return hidden, max(1, round((params - hidden * vocabulary) / (12 * hidden**2 + 13 * hidden))), vocabulary


def filesystem(path: Path) -> str:
    """The type of the file system that holds a directory."""
    with open("/proc/mounts") as lines:
        mounts = [line.split()[1:3] for line in lines]
    holding = [(mount, kind) for mount, kind in mounts if path.is_relative_to(mount)]
    return max(holding, key=lambda mount: len(mount[0]))[1] if holding else "unknown file system"


@dataclass(frozen=True)
class Sample:
    """One load on one rank; ``wrong`` names what was not loaded right.

    ``first`` tells the first load of a process, or into new memory, from later ones. ``reported`` are the seconds of
    zeroelastic's report, if there is one, ``call_seconds`` those of a clock around the call alone: the cost has those
    of a barrier after it, too, in which a rank may wait for a processor.
    """

    system: str
    cache: str
    first: bool
    round: int
    cost: Cost
    owned_bytes: int
    wrong: tuple[str, ...]
    reported: float | None = None
    call_seconds: float | None = None


class Block(torch.nn.Module):
    """The parameters of a transformer layer, each used once; attention itself would only cost time."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.ln_1 = torch.nn.LayerNorm(hidden)
        self.qkv = _linear(hidden, 3 * hidden)
        self.proj = _linear(hidden, hidden)
        self.ln_2 = torch.nn.LayerNorm(hidden)
        self.fc = _linear(hidden, 4 * hidden)
        self.out = _linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.proj(self.qkv(self.ln_1(x))[..., : x.shape[-1]])
        return x + self.out(self.fc(self.ln_2(x)))


class Model(torch.nn.Module):
    def __init__(self, job: Job) -> None:
        super().__init__()
        self.embedding = torch.nn.utils.skip_init(torch.nn.Embedding, job.vocabulary, job.hidden)
        self.layers = torch.nn.Sequential(*(Block(job.hidden) for _ in range(job.num_layers)))
        self.norm = torch.nn.LayerNorm(job.hidden)
        with torch.no_grad():
            for param in self.parameters():
                param.fill_(0.01)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layers(self.embedding(tokens))).float().pow(2).mean()


def _linear(fan_in: int, fan_out: int) -> torch.nn.Linear:
    return torch.nn.utils.skip_init(torch.nn.Linear, fan_in, fan_out)


def use_tcp_store() -> None:
    """Give the process group a store as a job has it: requests of the pool's, a file, take 10 ms when they wait."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    server = dist.TCPStore("127.0.0.1", 0, world_size, is_master=True, wait_for_workers=False) if rank == 0 else None
    port = [server.port if server is not None else 0]
    dist.broadcast_object_list(port)
    store = server or dist.TCPStore("127.0.0.1", port[0], world_size, wait_for_workers=False)
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)


class Run:
    """An engine of one world size, after one training step or before, with what systems need to know of it.

    ``new_tensors`` are filled in place of the live ones by systems that load no engine, and are compared.
    """

    def __init__(self, job: Job, *, step: bool = True) -> None:
        import deepspeed

        use_tcp_store()
        self.job, self.rank, self.world_size = job, dist.get_rank(), dist.get_world_size()
        zeroelastic.install()
        model = Model(job)
        batch = int(np.lcm(job.save_ranks, job.load_ranks))
        config = {
            "train_batch_size": batch,
            "bf16": {"enabled": True},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": {"stage": job.stage, "elastic_checkpoint": job.stage == 3, "sub_group_size": 10**12},
            "zeroelastic": {"verify": "full"},
        }
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.engine: Any = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
        self.new_tensors: dict[str, torch.Tensor] | None = None
        if step:
            tokens = torch.zeros(batch // self.world_size, 1, dtype=torch.long)
            self.engine.backward(self.engine(tokens))
            self.engine.step()

    def live(self) -> Any:
        """The layout and the tensors of the live optimizer, as they are now."""
        from zeroelastic.deepspeed.live.kinds import read_live

        live = read_live(self.engine.optimizer, self.engine.param_names)
        assert live.layout.num_sub_groups == 1
        return live

    def tensors(self) -> dict[str, torch.Tensor]:
        """This rank's flat tensor of every state key; its parameters are where ``live().layout`` says."""
        if self.new_tensors is not None:
            return self.new_tensors
        live = self.live()
        return {"fp32": live.fp32(0)} | live.split_state(0)[0]

    def low(self) -> torch.Tensor:
        """The 16-bit weights that this rank has in one buffer: its part at stage 3, else those of all ranks."""
        optimizer = self.engine.optimizer
        low = optimizer.fp16_partitioned_groups_flat if self.job.stage == 3 else optimizer.bit16_groups_flat
        return cast(torch.Tensor, low[0])

    def rounded(self) -> torch.Tensor:
        """What ``low`` is when it is made from the master weights. Collective at stages 1 and 2."""
        part, low = self.tensors()["fp32"].to(self.low().dtype), torch.empty_like(self.low())
        if self.job.stage == 3:
            return part
        dist.all_gather_into_tensor(low.view(torch.uint8), part.view(torch.uint8))
        return low

    def use_new_memory(self) -> None:
        """From here on the tensors are new ones, which nothing has touched."""
        self.new_tensors = {key: torch.empty_like(self.live().fp32(0)) for key in KEYS}

    def use_zeroelastic(self, verify: str) -> None:
        """From here on the engine is one of a run with zeroelastic, at stage 3 with ``"elastic_checkpoint": true``."""
        zeroelastic.install()
        self.engine._config.zero_config.elastic_checkpoint = self.job.stage == 3
        self.engine._config.load_universal_checkpoint = False
        self.engine._config._param_dict["zeroelastic"] = {"verify": verify}

    def use_stock(self, *, load_universal: bool = False) -> None:
        """From here on the engine is DeepSpeed's own; the elastic flag would make every rank load every file."""
        zeroelastic.uninstall()
        self.engine._config.zero_config.elastic_checkpoint = False
        self.engine._config.load_universal_checkpoint = load_universal

    def owned_bytes(self) -> int:
        return 4 * len(KEYS) * int(self.live().layout.owned(self.rank)[1].sum())

    def overwrite(self) -> None:
        """Put garbage in place of everything that a load restores, and that is there."""
        for tensor in self.tensors().values():
            tensor.fill_(_GARBAGE)
        if (step := self.live().state(0).get("step")) is not None:
            step.fill_(77.0)
        self.low().fill_(-_GARBAGE)

    def differences(self, *, whole_engine: bool, record: CommitRecord | None = None) -> tuple[str, ...]:
        """What is not as it was saved: digests over all ranks against a commit record, that of the elastic save.

        With ``whole_engine`` the step and the 16-bit weights as well. Collective.
        """
        record = record or read_record(self.job.checkpoint("elastic") / TAG)
        assert record is not None
        saved = {(c.param.name, key): digest for c in record.contents() for key, (_, digest) in c.tensors.items()}
        found: dict[tuple[str, str], int] = {}
        for key, tensor in self.tensors().items():
            for name, _, offset, start, owned in owned_params(self):
                data = tensor[offset : offset + owned].view(torch.uint8).numpy()
                found[name, key] = digest_range(data, tensor.element_size(), seed=stream_seed(name, key), start=start)
        table = torch.from_numpy(np.array(list(found.values()), dtype=np.uint64).view(np.int64))
        dist.all_reduce(table)
        loaded = dict(zip(found, table.numpy().view(np.uint64).tolist(), strict=True))
        assert loaded.keys() == saved.keys()
        wrong = [f"{key} of {name}" for (name, key), digest in saved.items() if loaded[name, key] != digest]
        if whole_engine:
            if not torch.equal(self.low().view(torch.int16), self.rounded().view(torch.int16)):
                wrong.append("16-bit weights")
            if float(self.live().state(0)["step"]) != 1:
                wrong.append("step")
        return tuple(wrong)


Load = Callable[[], object]


@dataclass(frozen=True)
class System:
    """A way to load. ``prepare`` returns the measured part; ``whole_engine`` says that it restores an engine, not only
    its tensors; ``long`` that it takes long, and is measured less often and never a second time in a process;
    ``stages`` at which ZeRO stages there is one."""

    name: str
    title: str
    checkpoint: str
    prepare: Callable[[Run, Path], Load]
    whole_engine: bool = False
    long: bool = False
    stages: tuple[int, ...] = (1, 2, 3)


def load_engine(verify: str) -> Callable[[Run, Path], Load]:
    """``engine.load_checkpoint`` with zeroelastic."""

    def prepare(run: Run, path: Path) -> Load:
        run.use_zeroelastic(verify)
        return lambda: _load_checkpoint(run, path)

    return prepare


def load_stock(run: Run, path: Path) -> Load:
    """``engine.load_checkpoint`` of DeepSpeed alone."""
    run.use_stock()
    return lambda: _load_checkpoint(run, path)


def load_universal(run: Run, path: Path) -> Load:
    """``engine.load_checkpoint`` of DeepSpeed alone with ``"checkpoint": {"load_universal": true}``."""
    run.use_stock(load_universal=True)
    return lambda: _load_checkpoint(run, path)


def _load_checkpoint(run: Run, path: Path) -> None:
    loaded, _ = run.engine.load_checkpoint(os.fspath(path))
    assert loaded is not None, f"{path}: nothing was loaded"


def load_tensors(run: Run, path: Path) -> Load:
    """Plan and read of zeroelastic alone: headers, layout, plan, payload into the tensors; no engine."""
    from zeroelastic.checkpoint.open import open_checkpoint
    from zeroelastic.core.plan import check_plan, make_plan, source_ranks
    from zeroelastic.deepspeed.fill import Target, fill
    from zeroelastic.io.large_pages import ask_for_large_pages

    layout = run.live().layout
    targets = [Target(key, 0, tensor, "float32") for key, tensor in run.tensors().items()]

    def load() -> None:
        for target in targets:
            ask_for_large_pages(target.tensor.data_ptr(), target.tensor.nbytes)  # as a load into an engine does
        checkpoint = open_checkpoint(path / (path / "latest").read_text().strip(), near_rank=run.rank)
        saved = checkpoint.world_size
        sources = source_ranks(layout.numel.tolist(), saved_world_size=saved, world_size=run.world_size, rank=run.rank)
        shards = {source: checkpoint.shard(source) for source in sources}
        plan = make_plan(shards[sources[0]].layout, layout, run.rank)
        check_plan(plan)
        fill(plan, {source: shard.extents for source, shard in shards.items()}, targets)

    return load


def sharded_tensors(run: Run) -> dict[str, Any]:
    """The live tensors as DTensors, sharded along their only dimension like ZeRO-3: what torch DCP saves and fills."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (run.world_size,))
    return {
        f"{name}/{key}": DTensor.from_local(
            tensor[offset : offset + owned], mesh, [Shard(0)], run_check=False, shape=torch.Size([numel]), stride=(1,)
        )
        for key, tensor in run.tensors().items()
        for name, numel, offset, _, owned in owned_params(run)
    }


def owned_params(run: Run) -> list[tuple[str, int, int, int, int]]:
    """Name, size, offset in the flat tensor, first element and number of elements of every parameter of this rank."""
    layout = run.live().layout
    start, owned = layout.owned(run.rank)
    columns = (layout.numel.tolist(), layout.buffer_offset(run.rank).tolist(), start.tolist(), owned.tolist())
    return list(zip([param.name for param in layout.params], *columns, strict=True))


def load_dcp(run: Run, path: Path) -> Load:
    """``torch.distributed.checkpoint.load`` into existing sharded tensors."""
    import torch.distributed.checkpoint as dcp

    state = sharded_tensors(run)
    return lambda: dcp.load(state, checkpoint_id=path)


def read_plain(run: Run, path: Path) -> Load:
    """The ceiling: all optimizer files read by ``pread`` on rank 0, and nothing else.

    The first time into new memory, for which numpy asks for pages of 2 MiB, then into the same.
    """
    if run.rank != 0:
        return lambda: None
    files = [file for file in files_below(path) if file.name.endswith("_optim_states.pt")]
    buffers = [np.empty(file.stat().st_size, dtype=np.uint8) for file in files]
    blocks = [(i, at) for i, buffer in enumerate(buffers) for at in range(0, len(buffer), _CEILING_BLOCK)]
    threads = run.job.ceiling_threads
    share = -(-len(blocks) // threads)

    def read(mine: Sequence[tuple[int, int]], descriptors: Sequence[int]) -> None:
        for i, at in mine:
            block = memoryview(buffers[i])[at : at + _CEILING_BLOCK]
            assert os.preadv(descriptors[i], [block], at) == len(block)

    def load() -> object:
        descriptors = [os.open(file, os.O_RDONLY) for file in files]
        workers = [
            threading.Thread(target=read, args=(blocks[t * share : (t + 1) * share], descriptors))
            for t in range(threads)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        for descriptor in descriptors:
            os.close(descriptor)
        return dict(zip(files, buffers, strict=True))

    return load


RESHARDED = (
    System("ceiling", "plain pread of the same bytes (ceiling)", "elastic", read_plain),
    System("tensors", "zeroelastic, tensors only", "elastic", load_tensors),
    System("elastic-quick", 'zeroelastic, elastic, verify "quick"', "elastic", load_engine("quick"), True),
    System("elastic-read", 'zeroelastic, elastic, verify "read"', "elastic", load_engine("read"), True),
    System("elastic", 'zeroelastic, elastic, verify "full"', "elastic", load_engine("full"), True),
    System("rigid-quick", 'zeroelastic, rigid, verify "quick"', "rigid", load_engine("quick"), True),
    System("rigid-read", 'zeroelastic, rigid, verify "read"', "rigid", load_engine("read"), True),
    System("rigid", 'zeroelastic, rigid, verify "full"', "rigid", load_engine("full"), True),
    System("dcp", "torch DCP load with resharding", "dcp", load_dcp, stages=(3,)),
    System("universal-load", "Universal Checkpoint, load", "universal", load_universal, True, long=True, stages=(3,)),
)
"""Loads at another world size."""

SAME_SIZE = (
    System("stock", "stock DeepSpeed, same size (floor)", "rigid", load_stock, True),
    System("same-quick", 'zeroelastic, same size, verify "quick"', "elastic", load_engine("quick"), True),
    System("same-read", 'zeroelastic, same size, verify "read"', "elastic", load_engine("read"), True),
    System("same", 'zeroelastic, same size, verify "full"', "elastic", load_engine("full"), True),
    System("same-rigid", 'zeroelastic, same size, rigid, verify "full"', "rigid", load_engine("full"), True),
)
"""Loads at the world size that saved."""


def fill_with_noise(run: Run) -> None:
    """Random master weights and moments, as after training; the 16-bit weights are theirs."""
    generator = torch.Generator().manual_seed(run.rank)
    for key, tensor in run.tensors().items():
        if key == "exp_avg_sq":
            tensor.uniform_(1e-12, 1e-4, generator=generator)
        else:
            tensor.normal_(std=0.02, generator=generator)
    run.low().copy_(run.rounded())


def save_all(job: Job, forms: Collection[str]) -> dict[str, Any]:
    """Save one state in the elastic form, and in others that are asked for, on the ranks of the saving world.

    Returns seconds, sizes and the content root.
    """
    import torch.distributed.checkpoint as dcp

    run = Run(job)
    fill_with_noise(run)

    def save(directory: Path) -> None:
        run.engine.save_checkpoint(os.fspath(directory), tag=TAG)

    seconds = {"elastic": _timed(lambda: save(job.checkpoint("elastic")), job.checkpoint("elastic"))}
    run.use_stock()
    seconds["rigid"] = _timed(lambda: save(job.checkpoint("rigid")), job.checkpoint("rigid"))
    if "dcp" in forms:
        state = sharded_tensors(run)
        seconds["dcp"] = _timed(lambda: dcp.save(state, checkpoint_id=job.checkpoint("dcp")), job.checkpoint("dcp"))
    record = read_record(job.checkpoint("elastic") / TAG)
    assert record is not None
    layout = run.live().layout
    return {
        "content_root": record.content_root,
        "num_params": layout.num_params,
        "numel": int(layout.numel.sum()),
        "state_bytes": 4 * len(KEYS) * int(layout.numel.sum()),
        "save_seconds": seconds,
        "file_bytes": {
            name: sum(file.stat().st_size for file in files_below(job.checkpoint(name))) for name in seconds
        },
    }


def _timed(action: Callable[[], object], directory: Path) -> float:
    directory.mkdir(parents=True, exist_ok=True)
    meter = Meter(directory)
    dist.barrier()
    meter.start()
    action()
    dist.barrier()
    return meter.stop().seconds


def convert(job: Job, cache: str, rounds: int) -> list[Sample]:
    """``ds_to_universal`` of the rigid checkpoint with its default workers, in a process that has imported it.

    Leaves the last result. Nothing is verified here: the load that follows is.
    """
    from argparse import Namespace

    from deepspeed.checkpoint import ds_to_universal

    source, target = job.checkpoint("rigid"), job.checkpoint("universal")
    samples = []
    for number in range(1, rounds + 1):
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        os.sync()
        _set_cache(cache, source)
        meter = Meter(source)
        arguments = Namespace(
            input_folder=os.fspath(source / TAG),
            output_folder=os.fspath(target / f"{TAG}_universal"),
            num_extract_workers=4,
            num_merge_workers=2,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=False,
        )
        meter.start()
        ds_to_universal.main(arguments)
        samples.append(Sample("universal-convert", cache, True, number, meter.stop(), 0, ()))
    (target / "latest_universal").write_text(f"{TAG}_universal")
    return samples


def _set_cache(cache: str, directory: Path) -> None:
    (warm_up if cache == "warm" else cool_down)(files_below(directory))


def link_views(job: Job, ranks: int) -> None:
    """Hard links to the files: a view for each rank, and one for all, as on a file system that they share."""
    for name in {system.checkpoint for system in (*RESHARDED, *SAME_SIZE)}:
        if job.checkpoint(name).exists():
            for view in ("shared", *(f"rank{rank}" for rank in range(ranks))):
                link_tree(job.checkpoint(name), job.directory / "views" / view / name)
    os.sync()  # nothing that was written before is written out while loads are measured


def measure(job: Job, names: Sequence[str], cache: str, number: int) -> list[Sample]:
    """This rank's samples, in one round, of one system that loads an engine, or of several that do not.

    Each loads twice, long ones once. In the first round it then loads once more from a view of its own of the files,
    which shows what it opens; long ones always do.
    """
    run = Run(job, step=False)
    samples: list[Sample] = []
    for system in (system for system in (*RESHARDED, *SAME_SIZE) if system.name in names):
        own, shared = (job.directory / "views" / view / system.checkpoint for view in (f"rank{run.rank}", "shared"))
        if not system.whole_engine:
            run.use_new_memory()
        load = system.prepare(run, own if system.long else shared)
        meet = _Measured(run, system, cache, number)
        found = [meet(load, own if system.long else shared, first=True)]
        if not system.long:
            found.append(meet(load, shared, first=False))
        if number == 1 and not system.long:
            del load
            files = meet(system.prepare(run, own), own, first=False).cost.files
            found = [replace(sample, cost=replace(sample.cost, files=files)) for sample in found]
        samples += found
        run.new_tensors = load = None
    return samples


def num_rounds(system: System, cache: str, rounds: int) -> int:
    """How often a system is measured."""
    if system.long:
        return min(rounds, FEW_ROUNDS) if cache == "warm" else 1
    return rounds if cache == "warm" else min(rounds, FEW_ROUNDS)


@dataclass(frozen=True)
class _Measured:
    """Measures the loads of one system in one round; in the first round it compares what was loaded."""

    run: Run
    system: System
    cache: str
    number: int

    def __call__(self, load: Load, view: Path, *, first: bool) -> Sample:
        run, system, checked = self.run, self.system, self.number == 1
        if checked and (system.whole_engine or not first) and system.name != "ceiling":
            run.overwrite()  # memory that is new stays untouched
        if run.rank == 0:
            _set_cache(self.cache, run.job.checkpoint(system.checkpoint))
            if first:
                touch_free_memory((run.world_size + 1) * run.owned_bytes())
        meter = Meter(view)
        dist.barrier()
        meter.start()
        began = time.perf_counter()
        loaded = load()
        call_seconds = time.perf_counter() - began
        dist.barrier()
        cost = meter.stop()
        wrong: tuple[str, ...] = ()
        if checked and system.name == "ceiling":
            wrong = _unlike_files(loaded)
        elif checked:
            wrong = run.differences(whole_engine=system.whole_engine)
        dist.barrier()
        report = getattr(run.engine, "zeroelastic_report", None)
        reported = None if report is None else report.seconds
        figures = (cost, run.owned_bytes(), wrong, reported, call_seconds)
        return Sample(system.name, self.cache, first, self.number, *figures)


def _unlike_files(loaded: object) -> tuple[str, ...]:
    """The files with another content than the ceiling has read."""
    if not isinstance(loaded, dict):
        return ()
    return tuple(
        f"{file} was not read right"
        for file, buffer in loaded.items()
        if not np.array_equal(np.memmap(file, dtype=np.uint8, mode="r"), buffer)
    )
