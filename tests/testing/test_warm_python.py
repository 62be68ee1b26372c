"""tests/warm_python.py: what it runs begins and ends as under ``python``, which the tests of pages rely on."""

from __future__ import annotations

import signal
import subprocess

import pytest
from programs import is_running, wait_for
from warm_python import executable


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("raise SystemExit(3)", 3),
        ("raise SystemExit('why')", 1),
        ("1 / 0", 1),
        ("import os; os._exit(7)", 7),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
    ],
)
def test_a_process_that_fails_is_a_command_that_fails(code: str, status: int) -> None:
    done = subprocess.run([executable(), "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == status
    assert ("ZeroDivisionError" in done.stderr) == ("1 / 0" in code) and ("why" in done.stderr) == ("why" in code)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGKILL])
def test_signals_reach_the_process_and_it_does_not_outlive_the_command(number: signal.Signals) -> None:
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(100)"
    with subprocess.Popen([executable(), "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.send_signal(number)
        assert process.wait(60) == -number
    wait_for(lambda: not is_running(pid), "the process is still there")


def test_zeroelastic_is_not_imported_before_the_fork_and_torch_is() -> None:
    code = "from sys import modules; print([n for n in modules if n.startswith('zeroelastic')], 'deepspeed' in modules)"
    done = subprocess.run([executable(), "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "[] True\n"
