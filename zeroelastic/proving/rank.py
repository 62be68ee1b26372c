"""One rank of a proof's run: ``python -m zeroelastic.proving.rank RUN.json (train.py | -m package.train) ARGS``."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from zeroelastic import install
from zeroelastic.proving.records import Failure, RunSpec, read_run
from zeroelastic.proving.write_protection import forbid_writes
from zeroelastic.run import main as run_script

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Run the script under the recorder. Does not return when the recorder stopped it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a killed torchrun leaves no rank behind
    run, script = read_run(Path(sys.argv[1])), sys.argv[2:]
    if recorded(run, lambda: run_script(script)):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # the script was stopped in the middle: its exit handlers must not run


def recorded(run: RunSpec, script: Callable[[], object]) -> bool:
    """Run a script under the recorder. Returns whether it was stopped after its steps, with the record written.

    A script that ends by itself leaves a record that is not ``finished``; its exception is recorded and raised.
    """
    from zeroelastic.proving.recorder import Recorder, Stop

    install()  # before the hooks, which must be outermost
    recorder = Recorder(run)
    recorder.hook()
    forbid_writes(run.protected)
    try:
        script()
    except Stop:
        return True
    except BaseException as error:
        if not isinstance(error, SystemExit) or error.code not in (None, 0):
            rank = int(os.environ.get("RANK", "0"))
            failure = Failure(rank, f"{type(error).__name__}: {error}", traceback.format_exc())
            run.failure_path(rank).write_text(json.dumps(asdict(failure)))
        raise
    finally:
        recorder.leave()
    return False


if __name__ == "__main__":
    main()
