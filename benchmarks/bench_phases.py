"""Where the time of a save and of a load goes, phase by phase and rank by rank.

    python benchmarks/bench_phases.py --out benchmarks/results           # 200M parameters, 4 -> 3 ranks
    python benchmarks/bench_phases.py --small --repeats 1 --out /tmp/x   # a few million, to try it out

Real engines save and load (those of bench_load and bench_save, in the page cache); the functions of ``PHASES`` are
timed, each without those that it calls. Writes phases.json and phases.md.
"""

from __future__ import annotations

import functools
import gc
import importlib
import os
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import Any
from unittest import mock

import torch.distributed as dist
from load_systems import TAG, Job, Run, fill_with_noise, job_arguments, params_of, temporary_job
from meter import touch_free_memory
from report import describe, machine, table, write_results

from zeroelastic.testing import RankPool

_TIMEOUT_S = 1800.0
REST = "everything else, DeepSpeed's own part included"
WAITING = "waiting for other ranks"

PHASES: Mapping[str, Sequence[str]] = {
    WAITING: (
        "torch.distributed:all_reduce",
        "torch.distributed:all_gather",
        "torch.distributed:gather",
        "torch.distributed:broadcast",
        "torch.distributed:barrier",
        "torch.distributed:broadcast_object_list",
        "torch.distributed:all_gather_into_tensor",
        "deepspeed.comm.comm:barrier",
        "deepspeed.comm.comm:all_reduce",
        "zeroelastic.deepspeed.save.barrier:SaveBarrier.wait",
        "zeroelastic.deepspeed.save.save:require_partners",
        "zeroelastic.deepspeed.load.load:require_partners",
    ),
    "payload: written": ("zeroelastic.torch_file.save:write_segments",),
    "payload: read": ("zeroelastic.deepspeed.fill:read_segments",),
    "files reserved and completed": (
        "zeroelastic.torch_file.save:reserve",
        "zeroelastic.torch_file.save:_complete",
    ),
    "headers: made and written": ("zeroelastic.torch_file.save:write_skeleton",),
    "headers: read and checked": (
        "zeroelastic.checkpoint.open:read_optimizer_file",
        "zeroelastic.checkpoint.open:shard_of",
        "zeroelastic.checkpoint.open:model_states_of",
        "zeroelastic.checkpoint.open:read_torch_file",
    ),
    "headers: read back before the commit": ("zeroelastic.deepspeed.save.directory:read_back",),
    "digests of what no file or read had": (
        "zeroelastic.deepspeed.live.digests:digest_pieces",
        "zeroelastic.deepspeed.live.digests:whole_contents",
        "zeroelastic.deepspeed.save.save:whole_contents",
    ),
    "the commit record": (
        "zeroelastic.deepspeed.save.directory:Directory._write_record",
        "zeroelastic.deepspeed.node_local.visibility:read_record",
    ),
    "the tag and latest": (
        "zeroelastic.deepspeed.save.directory:Directory._publish",
        "zeroelastic.deepspeed.save.directory:Directory.point_latest",
        "zeroelastic.deepspeed.save.directory:Directory.begin",
        "zeroelastic.deepspeed.load.load:choose_tag",
    ),
    "the live state looked at": (
        "zeroelastic.deepspeed.save.save:covered_live",
        "zeroelastic.deepspeed.save.save:replicated_facts",
        "zeroelastic.deepspeed.save.save:live_streams",
        "zeroelastic.deepspeed.load.load:read_covered",
    ),
    "the plan": (
        "zeroelastic.deepspeed.load.preflight:make_plan",
        "zeroelastic.deepspeed.load.preflight:check_plan",
        "zeroelastic.deepspeed.fill:extent_windows",
    ),
    "checksums of what has no digest": ("zeroelastic.deepspeed.load.preflight:check_archive",),
    "live state compared with the record": ("zeroelastic.deepspeed.load.load:verify",),
    "16-bit weights and hyper-parameters": ("zeroelastic.deepspeed.load.restore:_complete",),
    "module states, by DeepSpeed": ("zeroelastic.deepspeed.load.load:_load_module",),
    "state dict, by DeepSpeed": (
        "deepspeed.runtime.engine:DeepSpeedEngine._common_checkpoint_state",
        "deepspeed.runtime.engine:DeepSpeedEngine.module_state_dict",
    ),
    "script copied, by DeepSpeed": ("deepspeed.runtime.engine:DeepSpeedEngine._copy_recovery_script",),
    "persistent parameters gathered, by DeepSpeed": (
        "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3.checkpoint_event_epilogue",
    ),
}


class Stopwatch:
    """Seconds of each phase, without those of phases within it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inner = [0.0]

    def timed(self, phase: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def timing(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            self._inner.append(0.0)
            try:
                return call(*args, **kwargs)
            finally:
                took = time.perf_counter() - began
                self.seconds[phase] += took - self._inner.pop()
                self._inner[-1] += took

        return timing

    @contextmanager
    def running(self) -> Iterator[None]:
        """Within, the functions of ``PHASES`` are timed, and what is left over counts as ``REST``."""
        with ExitStack() as stack:
            for phase, places in PHASES.items():
                for place in places:
                    owner, name = _find(place)
                    stack.enter_context(mock.patch.object(owner, name, self.timed(phase, getattr(owner, name))))
            yield


def _find(place: str) -> tuple[Any, str]:
    module, _, path = place.partition(":")
    owner = importlib.import_module(module)
    *inside, name = path.split(".")
    for part in inside:
        owner = getattr(owner, part)
    return owner, name


def _measured(action: Callable[[], object]) -> dict[str, float]:
    watch = Stopwatch()
    gc.collect()
    dist.barrier()
    with watch.running():
        watch.timed(REST, action)()
    return dict(watch.seconds)


def save_rounds(job: Job, repeats: int) -> list[dict[str, float]]:
    """The phases of saves by this rank, after one that is not counted; the last one stays, for loads."""
    run = Run(job)
    fill_with_noise(run)
    run.use_zeroelastic("full")
    run.engine._config._param_dict["zeroelastic"] = {"fsync": False}
    rounds = []
    for number in range(repeats + 1):
        if run.rank == 0:
            shutil.rmtree(job.checkpoint("elastic"), ignore_errors=True)
            os.sync()
        touch_free_memory(2 * run.owned_bytes())
        dist.barrier()
        seconds = _measured(lambda: run.engine.save_checkpoint(os.fspath(job.checkpoint("elastic")), tag=TAG))
        rounds += [seconds] if number else []
    return rounds


def load_rounds(job: Job, verify: str) -> tuple[dict[str, float], dict[str, float]]:
    """The phases, on this rank, of the first load of its process, whose engine has not stepped, and of a later one."""
    run = Run(job, step=False)
    run.use_zeroelastic(verify)
    touch_free_memory(run.owned_bytes())

    def load() -> dict[str, float]:
        return _measured(lambda: run.engine.load_checkpoint(os.fspath(job.checkpoint("elastic")), tag=TAG))

    return load(), load()


def phase_table(ranks: Sequence[Sequence[Mapping[str, float]]]) -> list[str]:
    """Milliseconds of each phase, the median of all rounds, of each rank; the largest first."""
    phases = [*PHASES, REST]
    cells = {
        phase: [median(1e3 * seconds.get(phase, 0.0) for seconds in rounds) for rounds in ranks] for phase in phases
    }
    shown = sorted((phase for phase in phases if max(cells[phase]) >= 0.05), key=lambda phase: -max(cells[phase]))
    totals = [median(1e3 * sum(seconds.values()) for seconds in rounds) for rounds in ranks]
    rows = [(phase, cells[phase]) for phase in shown] + [("**all**", totals)]
    head = ["ms, median", *(f"rank {rank}" for rank in range(len(ranks)))]
    return table(head, [[name, *(f"{value:.1f}" for value in values)] for name, values in rows])


def markdown(document: Mapping[str, Any]) -> str:
    """The page."""
    about, model = document["machine"], document["model"]
    lines = [
        "# Where the time of a save and a load goes",
        "",
        *describe(about),
        "",
        f"About {model['params'] / 1e6:.0f} million parameters, page cache, {document['repeats']} rounds.",
        "",
        "Each phase is without the phases that it calls (`benchmarks/bench_phases.py` names the functions). Ranks",
        "share the cores: the time of a rank contains that in which others ran.",
    ]
    for title, ranks in document["parts"].items():
        lines += ["", f"## {title}", "", *phase_table(ranks)]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = job_arguments(__doc__)
    parser.add_argument("--save-ranks", type=int, default=4)
    parser.add_argument("--load-ranks", type=int, default=3)
    arguments = parser.parse_args()
    about = machine()
    ranks = arguments.save_ranks, arguments.load_ranks
    with temporary_job("bench-phases", arguments, *ranks) as job, RankPool(max(ranks), store="tcp") as pool:
        parts = {
            f"A save on {job.save_ranks} ranks": pool.run(
                save_rounds, job.save_ranks, job, arguments.repeats, timeout=_TIMEOUT_S
            )
        }
        for verify in ("full", "read"):
            rounds = [
                pool.run(load_rounds, job.load_ranks, job, verify, timeout=_TIMEOUT_S) for _ in range(arguments.repeats)
            ]
            for which, title in enumerate(("The first load of a process", "A later load of the same engine")):
                parts[f'{title}, {job.save_ranks} -> {job.load_ranks}, `"verify": "{verify}"`'] = [
                    [by_rank[rank][which] for by_rank in rounds] for rank in range(job.load_ranks)
                ]
    document = {
        "machine": about | {"load_average_after": os.getloadavg()[0]},
        "model": {"params": params_of(arguments), **job.model},
        "repeats": arguments.repeats,
        "parts": parts,
    }
    write_results(arguments.out, "phases", document, markdown(document))


if __name__ == "__main__":
    main()
