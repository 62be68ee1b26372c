"""A proof: verify the checkpoint, run it at its own size and at another, save there, load that back.

Each run is the script under torchrun on this machine, within a time limit.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeroelastic._version import __version__
from zeroelastic.checkpoint.commit_record import read_record as read_commit_record
from zeroelastic.errors import CheckpointError, RemoteRankError, UsageError, counted
from zeroelastic.proving.checks import BACK, CONTROL, OTHER, REPEAT, check_records, tolerance_of
from zeroelastic.proving.records import Failure, Role, RunRecord, RunSpec, read_record, write_run
from zeroelastic.proving.report import DIGEST, ContentRoots, Machine, Prove, ProvedSource, Run, report_digest
from zeroelastic.runs.locate import Source
from zeroelastic.runs.names import LATEST
from zeroelastic.verbs.verify.report import VerifyReport
from zeroelastic.verbs.verify.verify import verify_checkpoint

_PROCESSES_PER_CORE = 8
_END_SECONDS = 40.0
_BEAT_SECONDS = 10.0
_TAIL_LINES = 15

PACKAGE_PARENT = Path(__file__).parents[2]
SAVED_TAG = "proof"
_OURS = ("runs", "checkpoint")


def command(run: RunSpec, script: Sequence[str]) -> list[str]:
    """The command line of a run: torchrun, with ``zeroelastic.proving.rank`` in front of the script."""
    return [
        sys.executable,
        *("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(run.world_size)),
        *("-m", "zeroelastic.proving.rank", str(Path(run.folder) / "run.json"), *script),
    ]


def launch(
    run: RunSpec,
    script: Sequence[str],
    *,
    time_limit_s: float,
    env: dict[str, str],
    waiting: Callable[[float], None] = lambda seconds: None,
) -> int | None:
    """Run a script on ``run.world_size`` ranks and wait; returns torchrun's status, None after the time limit.

    ``waiting`` is called every 10 s with the seconds since the start.
    """
    write_run(Path(run.folder) / "run.json", run)
    with run.log_path.open("wb") as log:
        started = subprocess.Popen(
            command(run, script), stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=env
        )
        began = time.monotonic()
        try:
            while (seconds := time.monotonic() - began) < time_limit_s:
                with suppress(subprocess.TimeoutExpired):
                    return started.wait(timeout=min(_BEAT_SECONDS, time_limit_s - seconds))
                waiting(time.monotonic() - began)
            return None
        finally:
            _stop(started)


def _stop(started: subprocess.Popen[bytes]) -> None:
    """Terminate torchrun, which ends its ranks; kill it after a while, and its ranks die with it."""
    if started.poll() is None:
        started.terminate()
        with suppress(subprocess.TimeoutExpired):
            started.wait(timeout=_END_SECONDS)
    if started.poll() is None:
        started.kill()
        started.wait()


def environment(num_processes: int, state_nbytes: int) -> tuple[dict[str, str], str]:
    """The environment of the runs, and their device: "cuda" or "cpu".

    They use GPUs where there is one for each process, and the CPU where the user set DS_ACCELERATOR=cpu. Raises
    UsageError where the processes, or on the CPU the state of one run, do not fit.
    """
    env = dict(os.environ)
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(PACKAGE_PARENT), env.get("PYTHONPATH"))))
    num_gpus = 0 if env.get("DS_ACCELERATOR") == "cpu" else _num_gpus()
    if num_gpus >= num_processes:
        return env, "cuda"
    if num_gpus:
        raise UsageError(
            f"{num_processes} processes need {num_processes} GPUs; this machine has {num_gpus}. Choose smaller sizes "
            "(--world-size, --from-world-size), or set DS_ACCELERATOR=cpu to prove it on the CPU."
        )
    cores = len(os.sched_getaffinity(0))
    if num_processes > cores * _PROCESSES_PER_CORE:
        raise UsageError(
            f"{num_processes} processes are too many for the {cores} cores of this machine. Choose smaller sizes "
            "(--world-size, --from-world-size)."
        )
    free = _free_memory_nbytes()
    if state_nbytes > free:
        raise UsageError(
            f"the checkpoint's {state_nbytes:,} bytes of state do not fit into the {free:,} bytes of free "
            "memory of this machine. Run the proof on a machine with more memory, or with GPUs."
        )
    env["DS_ACCELERATOR"] = "cpu"
    return env, "cpu"


def _free_memory_nbytes() -> int:
    with open("/proc/meminfo") as lines:
        return 1024 * int(next(line for line in lines if line.startswith("MemAvailable")).split()[1])


def _num_gpus() -> int:
    """The number of GPUs, counted in another process so that this one does not initialise CUDA."""
    code = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    return int(done.stdout) if done.returncode == 0 else 0


def failure_of(run: RunSpec) -> str:
    """Why a run failed: the error of its first rank that failed with one, or the end of its log."""
    failures = [Failure(**json.loads(path.read_text())) for path in Path(run.folder).glob("failure-*.json")]
    if failures:
        first = min(failures, key=lambda failure: failure.rank)
        return f"rank {first.rank}: {first.error}"
    if not run.log_path.exists():
        return "there is no log"
    return "\n".join(run.log_path.read_text(errors="replace").splitlines()[-_TAIL_LINES:])


Launch = Callable[[RunSpec], str | None]
"""Runs the script on the ranks of a run; returns the reason of a failure, None on success."""


@dataclass(frozen=True, slots=True)
class ProofRequest:
    """What to prove: ``steps`` optimizer steps at both sizes; ``repeat`` runs the first size twice, to see its noise.

    ``from_world_size`` is the size to compare with. ``out`` is a directory for this proof alone. ``tolerance`` of
    losses is relative; None: by precision. ``script``, ``command`` and ``signed_off_by`` are text for the report.
    """

    found: Source
    world_size: int
    from_world_size: int
    steps: int
    out: Path
    repeat: bool = True
    tolerance: float | None = None
    keep: bool = False
    device: str = "cpu"
    script: Sequence[str] = ()
    command: Sequence[str] = ()
    signed_off_by: str | None = None


def check_sizes(world_size: int, from_world_size: int) -> None:
    """Raise UsageError where the two world sizes are equal, or one is below 1."""
    if min(from_world_size, world_size) < 1:
        raise UsageError("a run needs at least one rank. Give 1 or more with --world-size and --from-world-size.")
    if from_world_size == world_size:
        raise UsageError(
            f"both runs would have {counted(world_size, 'rank')}. Give --world-size another size than that of the "
            "first run."
        )


def verify_source(found: Source, *, progress: Callable[[int], None] | None = None) -> VerifyReport:
    """Read every byte of the checkpoint. Raises UsageError for a URL, CheckpointError for a damaged checkpoint."""
    if not isinstance(found.tag_dir, Path):
        raise UsageError(
            f"{found.tag_dir}: is not on this machine, where the script would load it from. Copy it here first."
        )
    verified = verify_checkpoint(found.tag_dir, progress=progress)
    if not verified.valid:
        more = len(verified.problems) - 1
        raise CheckpointError(
            f"{found.tag_dir}: is damaged: {verified.problems[0].sentence}"
            + (f" (and {more} more; zeroelastic verify lists them)" if more else "")
        )
    if verified.content_root is None:
        raise CheckpointError(f"{found.tag_dir}: its content root cannot be computed; zeroelastic verify says why.")
    return verified


def prove(
    request: ProofRequest, verified: VerifyReport, launch: Launch, *, log: Callable[[str], None] = lambda text: None
) -> Prove:
    """Run the script at both sizes, check what the runs recorded, and report.

    ``log`` gets a line for each step as it begins. A run that fails ends the proof with a failed check. Raises
    UsageError when the script never loads the checkpoint, or ends before the steps are done, and RemoteRankError when
    it fails at the size to compare with.
    """
    first, second = request.from_world_size, request.world_size
    tag_dir = Path(verified.path)
    protected = _protected(request.found)
    before = _listing(tag_dir)
    runs_folder, scratch = (request.out / name for name in _OURS)
    back = (str(scratch), SAVED_TAG)
    records: dict[Role, RunRecord] = {}
    failures: dict[Role, str] = {}
    runs: list[Run] = []

    def carry_out(role: Role, world_size: int, steps: int, **tags: tuple[str, str]) -> bool:
        folder = runs_folder / role.replace(" ", "-")
        folder.mkdir(parents=True)
        run = RunSpec(role, world_size, steps, str(tag_dir), str(folder), protected, **tags)
        what = f"{counted(steps, 'step')} of the script" if steps else "loading that save"
        log(f"{role}: {what} on {counted(world_size, 'rank')}; its output is in {run.log_path}")
        began = time.monotonic()
        failure = launch(run)
        seconds = time.monotonic() - began
        record = read_record(run.record_path) if run.record_path.exists() else None
        finished = record is not None and record.finished
        if record is not None and finished:
            records[role] = record
        elif failure is None:
            raise UsageError(_unfinished(record, run))
        elif role == CONTROL:
            raise RemoteRankError(
                f"the script fails at the size to compare with, {counted(world_size, 'rank')}; {_log(run)}\n{failure}"
            )
        else:
            failures[role] = failure
        runs.append(_described(run, records.get(role), round(seconds, 3), request.out))
        return finished

    try:
        _ = (
            carry_out(CONTROL, first, request.steps)
            and (not request.repeat or carry_out(REPEAT, first, request.steps))
            and carry_out(OTHER, second, request.steps, save_to=back)
            and carry_out(BACK, first, 0, instead=back)
        )
        saved_root = None
        if OTHER in records:
            log(f"verifying what the {OTHER} saved, and comparing the runs")
            saved_root = verify_checkpoint(scratch / SAVED_TAG).content_root
    finally:
        if not request.keep:
            shutil.rmtree(scratch, ignore_errors=True)
    own = read_commit_record(tag_dir)
    step = None if own is None else own.global_steps
    checks = check_records(
        verified,
        step,
        records,
        saved_root=saved_root,
        tolerance=request.tolerance,
        changed_files=_changes(before, _listing(tag_dir)),
        failures=failures,
    )
    reasons = [check.sentence for check in checks if check.ok is False]
    control = records[CONTROL]
    if step is None and control.loaded is not None:  # from the loaded state
        found = control.loaded["engine/global_steps"]
        step = found if isinstance(found, int) else None
    roots = {role: (record.report or {}).get("loaded_root") for role, record in records.items()}
    report = Prove(
        ok=not reasons,
        verdict="NOT PROVED" if reasons else "PROVED",
        reasons=reasons,
        checks=checks,
        source=ProvedSource(
            path=verified.path,
            format=verified.format,
            world_size=verified.world_size,
            step=step,
            num_files=verified.num_files,
            num_params=verified.num_params,
            num_tensors=verified.num_tensors,
            bytes_read=verified.bytes_read,
        ),
        content_roots=ContentRoots(
            recorded=verified.recorded_root,
            files=verified.content_root,
            loaded_at_reference_size=roots.get(CONTROL),
            loaded_at_other_size=roots.get(OTHER),
            saved_at_other_size=saved_root,
            loaded_back=roots.get(BACK),
        ),
        steps=request.steps,
        tolerance=tolerance_of(control.precision) if request.tolerance is None else request.tolerance,
        losses={role: [*records[role].losses] for role in (CONTROL, REPEAT, OTHER) if role in records},
        runs=runs,
        script=list(request.script),
        command=list(request.command),
        versions={"zeroelastic": __version__, **control.versions},
        machine=Machine(
            host=platform.node(),
            kernel=platform.release(),
            cores=len(os.sched_getaffinity(0)),
            device=request.device,
        ),
        written=time.strftime("%Y-%m-%d %H:%M:%S %z"),
        signed_off_by=request.signed_off_by,
    )
    return report.model_copy(update={DIGEST: report_digest(report.to_json())})


def _described(run: RunSpec, record: RunRecord | None, seconds: float, out: Path) -> Run:
    """One run in the report."""
    path = run.record_path
    known: dict[str, Any] = {"saves_skipped": 0}
    if record is not None:
        names = ("saves_skipped", "precision", "device", "global_batch", "accumulation", "samples", "loads")
        known = {name: getattr(record, name) for name in names} | {"resume_report": record.report}
    return Run(
        role=run.role,
        world_size=run.world_size,
        seconds=seconds,
        finished=record is not None,
        record=os.path.relpath(path, out),
        record_sha256=hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else None,
        **known,
    )


def _protected(found: Source) -> tuple[str, ...]:
    """The tag and ``latest``; where a framework has a folder for each checkpoint, that folder."""
    if found.framework == "deepspeed":
        return str(found.tag_dir), str(found.root / LATEST)
    return (str(found.root),)


def _unfinished(record: RunRecord | None, run: RunSpec) -> str:
    if record is None:
        return f"the script ended and never built a DeepSpeed engine; {_log(run)}"
    if record.loaded is None and not record.loads:
        return (
            "the script ended and never called engine.load_checkpoint. Give it the arguments that make it resume from "
            f"{run.source}; {_log(run)}"
        )
    if record.loaded is None:
        asked = ", ".join(dict.fromkeys(record.loads))
        return (
            f"the script loaded {asked}, not {run.source}. Give prove what it loads, or let it load this; {_log(run)}"
        )
    return (
        f"the script ended {len(record.losses)} optimizer steps after the load; {run.steps} are to be compared. Let it "
        f"train for longer, or give --steps; {_log(run)}"
    )


def _log(run: RunSpec) -> str:
    return f"its output is in {run.log_path}"


def _listing(tag_dir: Path) -> dict[str, tuple[int, int, int]]:
    """Size, modification time and inode of every file below a tag, and of ``latest`` beside it."""
    paths = [Path(folder) / name for folder, _, names in os.walk(tag_dir) for name in names]
    paths += [path for path in (tag_dir.parent / LATEST,) if path.exists()]
    stats = {os.path.relpath(path, tag_dir): path.stat() for path in paths}
    return {name: (stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in stats.items()}


def _changes(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    return (
        [f"{name}: is gone" for name in before if name not in after]
        + [f"{name}: is new" for name in after if name not in before]
        + [f"{name}: has changed" for name in before if name in after and before[name] != after[name]]
    )


def prepare(out: Path) -> Path:
    """Make the proof's directory; remove what an earlier proof without a report left there.

    Raises UsageError where the directory holds anything else.
    """
    if out.exists() and (not out.is_dir() or any(path.name not in _OURS for path in out.iterdir())):
        raise UsageError(f"{out}: exists. Give another --out, or remove it.")
    for name in _OURS:
        shutil.rmtree(out / name, ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)
    return out.resolve()
