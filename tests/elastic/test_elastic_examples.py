"""The Slurm script runs, with stand-ins for Slurm's commands, and the Kubernetes manifest says what torchrun takes."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from places import ROOT
from torch.distributed.run import get_args_parser

EXAMPLES = ROOT / "examples" / "elastic"

SLURM = {
    # Two nodes, each one torchrun, as `srun` starts one task on each; its status is the worst of theirs.
    "srun": """
        while [[ $1 != torchrun ]]; do shift; done
        for node in 1 2; do "$@" >"$OUT/node$node.log" 2>&1 & echo $! >>"$OUT/tasks"; done
        status=0
        for task in $(cat "$OUT/tasks"); do wait "$task" || status=$?; done
        exit "$status"
    """,
    "scancel": 'echo "scancel $*" >>"$OUT/slurm"; kill -"${1#--signal=}" $(cat "$OUT/tasks")',
    "scontrol": 'echo "scontrol $*" >>"$OUT/slurm"',
    "hostname": "echo 127.0.0.1",
}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """The environment of a batch script on its first node."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, text in SLURM.items():
        path = commands / name
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return {
        **os.environ,
        "PATH": os.pathsep.join([str(commands), str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": str(ROOT),
        "OUT": str(tmp_path),
        "RDZV_PORT": str(free_port()),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NUM_NODES": "2",
        "OMP_NUM_THREADS": "1",
    }


@pytest.mark.extended
@pytest.mark.timeout(300)
def test_the_slurm_script_stops_saves_and_queues_the_job_again(slurm: dict[str, str], tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    script = [
        "-m",
        "zeroelastic.run",
        str(EXAMPLES / "train.py"),
        "--ckpt",
        str(tmp_path / "ckpt"),
        "--trace",
        str(log),
        "--steps",
        "5000",
    ]
    command = ["bash", str(EXAMPLES / "elastic.sbatch"), *script, "--step-seconds", "0.05"]
    with subprocess.Popen(command, env=slurm, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as batch:
        try:
            until = time.monotonic() + 200
            while '"step": 3' not in (log.read_text() if log.exists() else ""):
                assert batch.poll() is None and time.monotonic() < until, nodes(tmp_path)
                time.sleep(0.2)
            batch.send_signal(signal.SIGUSR1)
            output, _ = batch.communicate(timeout=90)
        except BaseException:
            batch.kill()
            for task in (tmp_path / "tasks").read_text().split():
                os.kill(int(task), signal.SIGTERM)
            raise
    assert batch.returncode == 0, output
    assert (tmp_path / "slurm").read_text().splitlines() == ["scancel --signal=TERM 7.0", "scontrol requeue 7"]
    events = [json.loads(line) for line in log.read_text().splitlines()]
    ends = [event for event in events if event["event"] == "end"]
    assert len(ends) == 2 and all(end["stopped"] for end in ends) and len({end["step"] for end in ends}) == 1
    assert (tmp_path / "ckpt" / "latest").read_text() == f"global_step{ends[0]['step']}"
    assert {event["world_size"] for event in events if event["event"] == "step"} == {2}


def nodes(tmp_path: Path) -> str:
    return "\n".join(path.read_text()[-2000:] for path in sorted(tmp_path.glob("node*.log")))


def test_the_kubernetes_manifest_starts_what_is_there() -> None:
    objects = {
        (one["kind"], one["metadata"]["name"]): one["spec"]
        for one in yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text())
    }
    job = objects["Job", "elastic"]
    pod = job["template"]
    (train,) = pod["spec"]["containers"]
    options = get_args_parser().parse_args(train["args"])
    assert (options.nnodes, options.max_restarts, options.rdzv_backend) == ("1:4", 100, "c10d")
    assert job["completionMode"] == "Indexed" and job["completions"] == job["parallelism"] == 4
    assert "--ckpt" in (ROOT / options.training_script).read_text() and options.training_script_args == [
        "--ckpt=/shared/ckpt"
    ]
    environment = {one["name"]: one.get("value") for one in train["env"]}
    assert environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    assert pod["spec"]["terminationGracePeriodSeconds"] > int(environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"])
    assert pod["spec"]["restartPolicy"] == "Never"  # what a podFailurePolicy asks for
    # the rendezvous endpoint is the service of the store, and the Job's subdomain a service of its own pods
    host, _, port = options.rdzv_endpoint.partition(":")
    assert objects["Service", host]["ports"][0]["port"] == int(port)
    store = objects["Deployment", objects["Service", host]["selector"]["app"]]
    (server,) = store["template"]["spec"]["containers"]
    assert server["command"][-1] == port and (ROOT / server["command"][1]).is_file()
    assert objects["Service", pod["spec"]["subdomain"]]["clusterIP"] == "None"
    assert objects["Service", pod["spec"]["subdomain"]]["selector"] == pod["metadata"]["labels"]
