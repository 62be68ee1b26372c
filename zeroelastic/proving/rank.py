"""One rank of a proof's run: ``python -m zeroelastic.proving.rank RUN.json (train.py | -m package.train) ARGS``.

The script may not write to the checkpoint: an audit hook refuses it to Python's own functions. The hook does not see
other writers (torch.save to a path, other programs), so the driver also compares the files before and after.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path

from zeroelastic import install
from zeroelastic.proving.records import Failure, RunSpec, read_run
from zeroelastic.run import main as run_script

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
# Audit event -> the indices of its arguments that are paths it changes.
_CHANGES = {
    "os.chmod": (0,),
    "os.chown": (0,),
    "os.link": (1,),
    "os.mkdir": (0,),
    "os.remove": (0,),
    "os.rename": (0, 1),
    "os.rmdir": (0,),
    "os.symlink": (1,),
    "os.truncate": (0,),
    "os.utime": (0,),
    "shutil.move": (0,),
    "shutil.rmtree": (0,),
}
# Those that affect everything below the path.
_WITH_CONTENTS = ("os.remove", "os.rename", "os.rmdir", "shutil.move", "shutil.rmtree")
_PR_SET_PDEATHSIG = 1


def forbid_writes(protected: Iterable[str]) -> None:
    """Refuse changes at or below these paths, in this process and its forks, until they end.

    The code that tries gets a PermissionError.
    """
    places = tuple(os.path.realpath(path) for path in protected)

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event == "open":
            flags = arguments[2]
            paths = arguments[:1] if isinstance(flags, int) and flags & _WRITES else ()
        elif event in _CHANGES:
            paths = tuple(arguments[index] for index in _CHANGES[event])
        else:
            return
        for path in paths:
            if isinstance(path, (str, bytes, os.PathLike)) and _touches(
                os.fsdecode(path), places, from_above=event in _WITH_CONTENTS
            ):
                raise PermissionError(
                    f"{os.fsdecode(path)}: belongs to the checkpoint that is being proved, which the script must not "
                    "change. Let it write elsewhere."
                )

    sys.addaudithook(hook)


def _touches(path: str, places: tuple[str, ...], *, from_above: bool) -> bool:
    """Whether a path is one of the places, below one or, ``from_above``, one that a place is below."""
    parent, name = os.path.split(os.path.abspath(path))
    real = os.path.join(os.path.realpath(parent), name)  # a link itself may be removed; what it names stays
    return any(
        real == place or real.startswith(place + os.sep) or (from_above and place.startswith(real + os.sep))
        for place in places
    )


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
