"""Train a small GPT on 4 ranks, resume it on 3, 2 and 6, and show that training goes on as if nothing had happened.

Four things are shown, and the exit status is 1 when one of them fails:

* every resumed run holds the state that was saved: its content root equals the one in the checkpoint's commit record;
* every rank reads about as many bytes as it owns;
* the losses follow the uninterrupted 4-rank run within TOLERANCE;
* TOLERANCE means something: a control run that resumes the weights but not the optimizer's moments leaves it.

    python examples/demo.py --out demo             # 5 launches of torchrun; a few minutes on 2 cores
    python examples/demo.py --out demo --quick     # a smaller model, resumed on 3 ranks

Writes demo.json, loss.png, the checkpoint and one log per run below --out. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import matplotlib
import psutil  # type: ignore[import-untyped]
from rich.console import Console
from rich.table import Table

matplotlib.use("Agg")
import matplotlib.pyplot as plt

EXAMPLES = Path(__file__).resolve().parent
SAVED_WORLD_SIZE = 4
CONTROL_WORLD_SIZE = 2
LAUNCH_SECONDS = 300
LOG_TAIL_LINES = 40
ABORT_AT_EXIT = "terminate called without an active exception"

# How far a resumed loss may be from the uninterrupted one, in nats per byte. The state is the same bit for bit, but at
# another world size the gradients are summed in another order and rounded to bf16 elsewhere. Measured: 2.9e-4 at most
# over 30 steps on 2, 3 and 6 ranks with three seeds. The control, which loses the moments, drifts by 4e-2 or more.
TOLERANCE = 1e-3

# Payload a rank may read per byte of state that it owns.
READ_RATIO = 1.01


@dataclass(frozen=True, slots=True)
class Plan:
    """The training of the demo; `model` are the command-line options of train_gpt.py for the size of the model."""

    steps: int
    save_at: int
    global_batch: int
    resumed_world_sizes: tuple[int, ...]
    model: tuple[str, ...]


FULL = Plan(steps=60, save_at=30, global_batch=24, resumed_world_sizes=(3, 2, 6), model=())
QUICK = Plan(
    steps=20,
    save_at=12,
    global_batch=12,
    resumed_world_sizes=(3,),
    model=("--width", "80", "--depth", "2", "--context", "64"),
)


@dataclass(frozen=True, slots=True)
class Report:
    """The part of a resume report that the demo shows; bytes and files are those of the worst rank."""

    format: str
    saved_world_size: int
    world_size: int
    bytes_owned: int
    bytes_read: int
    header_bytes: int
    files_opened: int
    seconds: float
    saved_root: str | None
    loaded_root: str | None
    root_matches: bool | None


@dataclass(frozen=True, slots=True)
class Run:
    """One finished launch: the loss of every step it trained, and the report where it resumed."""

    name: str
    world_size: int
    num_params: int
    losses: dict[int, float]
    report: Report | None
    seconds: float


class LaunchError(RuntimeError):
    """A launch that failed or ran out of time; the message ends with the tail of its log."""


def stop(launched: subprocess.Popen[bytes]) -> None:
    """End a launch and all its workers; torchrun puts each in a session of its own, so they are found by parentage."""
    if launched.poll() is not None:
        return
    family = psutil.Process(launched.pid).children(recursive=True)
    launched.terminate()
    with suppress(subprocess.TimeoutExpired):
        launched.wait(timeout=10)
    for process in family:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    with suppress(ProcessLookupError):
        os.killpg(launched.pid, signal.SIGKILL)
    launched.wait()


def child_environment() -> dict[str, str]:
    """The workers' environment: CPU, one thread each, and this checkout's package where none is installed."""
    env = {
        **os.environ,
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore::FutureWarning,ignore::DeprecationWarning",
    }
    if importlib.util.find_spec("zeroelastic") is None:
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(EXAMPLES.parent), env.get("PYTHONPATH"))))
    return env


def account_of_failure(text: str) -> list[str]:
    """The end of the first traceback in a log, of the worker that wrote it; the end of the log where there is none."""
    lines = text.splitlines()
    for i, line in enumerate(lines):
        worker, traceback, _ = line.partition("Traceback (most recent call last)")
        if traceback:
            if not worker:  # before torch.distributed marks the ranks' lines
                return lines[i : i + LOG_TAIL_LINES]
            lines = [line for line in lines[i:] if line.startswith(worker)]
            break
    return lines[-LOG_TAIL_LINES:]


def launch(arguments: Sequence[str], *, world_size: int, log: Path) -> None:
    """Run train_gpt.py under torchrun and wait for it; raises LaunchError."""
    command = [
        sys.executable,
        *("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(world_size)),
        str(EXAMPLES / "train_gpt.py"),
        *arguments,
    ]
    with log.open("wb") as output:
        launched = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=child_environment(), start_new_session=True
        )
        try:
            status: int | None = launched.wait(timeout=LAUNCH_SECONDS)
            written = log.read_text(errors="replace")
        except subprocess.TimeoutExpired:
            status = None
            written = log.read_text(errors="replace")  # before stop() adds to it
        finally:
            stop(launched)
    if status != 0:
        outcome = f"ran longer than {LAUNCH_SECONDS} s" if status is None else f"ended with status {status}"
        raise LaunchError("\n".join((f"{' '.join(command)}\n{outcome}; from {log}:", *account_of_failure(written))))


def train(plan: Plan, out: Path, name: str, *, world_size: int, options: Sequence[str]) -> Run:
    """One launch of the training script, with its metrics read back."""
    metrics_path = out / "metrics" / f"{name}.json"
    arguments = [
        *("--steps", str(plan.steps), "--global-batch", str(plan.global_batch)),
        *("--checkpoint-dir", str(out / "checkpoint"), "--metrics", str(metrics_path)),
        *plan.model,
        *options,
    ]
    metrics_path.unlink(missing_ok=True)
    log = out / "logs" / f"{name}.log"
    started = time.perf_counter()
    try:
        launch(arguments, world_size=world_size, log=log)
    except LaunchError:
        # The metrics are the last thing that the script writes. A gloo thread that still holds a tensor when the
        # interpreter has ended aborts its process, with or without zeroelastic: nothing of the run is missing.
        if not metrics_path.exists() or ABORT_AT_EXIT not in log.read_text(errors="replace"):
            raise
    seconds = time.perf_counter() - started
    metrics = json.loads(metrics_path.read_text())
    report = metrics["report"]
    return Run(
        name=name,
        world_size=metrics["world_size"],
        num_params=metrics["num_params"],
        losses={step: loss for step, loss in metrics["losses"]},
        report=report and Report(**{field: report[field] for field in Report.__dataclass_fields__}),
        seconds=seconds,
    )


def drift(run: Run, reference: Run) -> float:
    """The largest difference of a loss from the reference run's, over the steps it trained; NaN counts as inf."""
    gaps = [abs(loss - reference.losses[step]) for step, loss in run.losses.items()]
    return max(gap if math.isfinite(gap) else math.inf for gap in gaps)


def problems_of(run: Run, reference: Run, *, plan: Plan, saved_root: str) -> list[str]:
    """What is wrong with a resumed run; empty when all is well."""
    report = run.report
    if report is None:
        return [f"{run.name}: no resume report"]
    problems = []
    if (report.format, report.saved_world_size, report.world_size) != ("elastic", SAVED_WORLD_SIZE, run.world_size):
        problems.append(
            f"{run.name}: resumed {report.format} {report.saved_world_size} -> {report.world_size}, "
            f"expected elastic {SAVED_WORLD_SIZE} -> {run.world_size}"
        )
    if not report.root_matches or report.saved_root != saved_root or report.loaded_root != saved_root:
        problems.append(
            f"{run.name}: content root {report.loaded_root}, saved {report.saved_root}, "
            f"commit record {saved_root}; verified: {report.root_matches}"
        )
    if report.bytes_read > READ_RATIO * report.bytes_owned:
        problems.append(f"{run.name}: a rank read {report.bytes_read} bytes for the {report.bytes_owned} it owns")
    if sorted(run.losses) != list(range(plan.save_at, plan.steps)):
        problems.append(f"{run.name}: trained steps {sorted(run.losses)}, not {plan.save_at} to {plan.steps - 1}")
    elif drift(run, reference) > TOLERANCE:
        problems.append(f"{run.name}: the loss drifts by {drift(run, reference):.2e}, more than {TOLERANCE:.0e}")
    return problems


def loss_table(reference: Run, resumed: Sequence[Run], control: Run, *, plan: Plan) -> Table:
    """Losses side by side at a few steps before and after the resume."""
    after = plan.steps - plan.save_at
    steps = [0, plan.save_at - 1, *(plan.save_at + after * i // 5 for i in range(5)), plan.steps - 1]
    table = Table(title=f"Loss (nats per byte); saved on {SAVED_WORLD_SIZE} ranks after {plan.save_at} steps")
    table.add_column("step", justify="right")
    table.add_column(f"{reference.world_size} ranks, uninterrupted", justify="right")
    for run in resumed:
        table.add_column(f"resumed on {run.world_size}", justify="right")
    table.add_column(f"control on {control.world_size}: no moments", justify="right", style="dim")
    for step in dict.fromkeys(steps):
        runs = (reference, *resumed, control)
        cells = (f"{run.losses[step]:.6f}" if step in run.losses else "" for run in runs)
        table.add_row(str(step), *cells, end_section=step == plan.save_at - 1)
    drifts = (f"{drift(run, reference):.1e}" for run in (*resumed, control))
    table.add_section()
    table.add_row("drift", f"tolerance {TOLERANCE:.0e}", *drifts)
    return table


def report_table(resumed: Sequence[Run], *, saved_root: str) -> Table:
    """The bytes read and the time of each resume, and whether the state is the saved one."""
    table = Table(title=f"Resumes; the commit record's content root is {saved_root[:12]}")
    table.add_column("ranks")
    for title in ("bytes owned", "bytes read", "headers", "files", "seconds", "content root", "matches"):
        table.add_column(title, justify="right")
    for run in resumed:
        report = run.report
        if report is None:
            continue
        table.add_row(
            f"{report.saved_world_size} -> {report.world_size}",
            f"{report.bytes_owned:,}",
            f"{report.bytes_read:,}",
            f"{report.header_bytes:,}",
            str(report.files_opened),
            f"{report.seconds:.2f}",
            (report.loaded_root or "none")[:12],
            "yes" if report.root_matches and report.loaded_root == saved_root else "NO",
        )
    return table


def draw(path: Path, reference: Run, resumed: Sequence[Run], control: Run, *, plan: Plan) -> None:
    """The loss curves above, their distance from the uninterrupted run below on a logarithmic scale."""
    figure, (curves, distance) = plt.subplots(
        2, 1, figsize=(8, 6.5), sharex=True, height_ratios=(2, 1), layout="constrained"
    )
    curves.plot(
        list(reference.losses),
        list(reference.losses.values()),
        color="0.75",
        linewidth=6,
        label=f"{reference.world_size} ranks, uninterrupted",
    )
    smallest = 1e-7  # about what float32 can show of a loss; equal losses are drawn here
    for run, style in zip((*resumed, control), ("-", "--", "-.", ":")[-len(resumed) - 1 :], strict=True):
        label = f"resumed on {run.world_size}" + (" without the moments (control)" if run is control else "")
        steps = list(run.losses)
        curves.plot(steps, list(run.losses.values()), style, color="k" if run is control else None, label=label)
        gaps = [max(smallest, abs(loss - reference.losses[step])) for step, loss in run.losses.items()]
        distance.plot(steps, gaps, style, color="k" if run is control else None)
    distance.axhline(TOLERANCE, color="C3", linewidth=1)
    distance.annotate("tolerance", (0, TOLERANCE), color="C3", va="bottom")
    for panel in (curves, distance):
        panel.axvline(plan.save_at, color="0.5", linewidth=1)
    middle = (plan.save_at, 0.5)
    curves.annotate("saved, resumed ", middle, xycoords=curves.get_xaxis_transform(), ha="right")
    curves.set_ylabel("loss (nats per byte)")
    curves.set_title(
        f"{reference.num_params / 1e6:.1f} M parameters, ZeRO-3, global batch {plan.global_batch}: "
        f"{SAVED_WORLD_SIZE} ranks, then {', '.join(str(run.world_size) for run in resumed)}"
    )
    curves.legend(loc="upper right")
    distance.set_yscale("log")
    distance.set_ylabel("|difference|")
    distance.set_xlabel("step")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder for the results")
    parser.add_argument("--quick", action="store_true", help="a smaller model and fewer launches")
    return parser.parse_args()


def main() -> int:
    """Run the demo; 0 when everything that it shows holds, 1 otherwise."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that stop() runs
    args = parse_args()
    plan, out = (QUICK if args.quick else FULL), args.out.resolve()
    results, progress = Console(width=None if sys.stdout.isatty() else 120), Console(stderr=True)
    started = time.perf_counter()
    for folder in ("checkpoint", "metrics", "logs"):
        shutil.rmtree(out / folder, ignore_errors=True)
        (out / folder).mkdir(parents=True)

    def run(name: str, world_size: int, *options: str) -> Run:
        progress.print(f"{name}: {world_size} ranks ...", end=" ")
        finished = train(plan, out, name, world_size=world_size, options=options)
        progress.print(f"{finished.seconds:.0f} s")
        return finished

    try:
        reference = run("uninterrupted", SAVED_WORLD_SIZE, "--save-at", str(plan.save_at))
        resumed = [run(f"resumed-on-{n}", n, "--resume") for n in plan.resumed_world_sizes]
        control = run("control", CONTROL_WORLD_SIZE, "--resume", "--drop-moments")
    except LaunchError as error:
        progress.print(f"failed\n{error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 1

    tag = (out / "checkpoint" / "latest").read_text().strip()
    saved_root = json.loads((out / "checkpoint" / tag / "zeroelastic.json").read_text())["content_root"]
    problems = [
        problem for each in resumed for problem in problems_of(each, reference, plan=plan, saved_root=saved_root)
    ]
    if drift(control, reference) <= TOLERANCE:
        problems.append(
            f"control: without the moments the loss drifts by {drift(control, reference):.2e} only; "
            f"a tolerance of {TOLERANCE:.0e} would not notice that they are lost"
        )

    seconds = time.perf_counter() - started
    everything = {
        "plan": asdict(plan),
        "tolerance": TOLERANCE,
        "content_root": saved_root,
        "runs": [
            {**asdict(each), "drift": None if each is reference else drift(each, reference)}
            for each in (reference, *resumed, control)
        ],
        "problems": problems,
        "seconds": seconds,
        "machine": {"cpus": os.cpu_count(), "platform": platform.platform(), "python": platform.python_version()},
        "versions": {package: version(package) for package in ("torch", "deepspeed")},
    }
    (out / "demo.json").write_text(json.dumps(everything, indent=1) + "\n")
    draw(out / "loss.png", reference, resumed, control, plan=plan)

    results.print(loss_table(reference, resumed, control, plan=plan))
    results.print(report_table(resumed, saved_root=saved_root))
    for problem in problems:
        results.print(problem, style="red", markup=False, highlight=False)
    if not problems:
        results.print(f"Every content root is the saved one and every loss is within tolerance; {seconds:.0f} s.")
    results.print(f"{out / 'loss.png'}\n{out / 'demo.json'}", highlight=False, soft_wrap=True)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
