"""Run an unchanged training script with zeroelastic installed: ``torchrun ... -m zeroelastic.run train.py ARGS``.

It takes the place of ``python``, also under ``deepspeed --module zeroelastic.run`` and ``accelerate launch -m
zeroelastic.run``. The script sees its own ``sys.argv`` and ``sys.path[0]``, as if it was started directly.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Sequence

from zeroelastic import __version__
from zeroelastic.activation import start
from zeroelastic.errors import require_torch

require_torch("zeroelastic.run", __name__)

_TIMEOUT_S = 600.0
"""As ``zeroelastic.elastic.leaving.DEFAULT_S``, which is not imported here: that imports torch."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Install zeroelastic, then run a script (``train.py ARGS``) or a module (``-m package.train ARGS``)."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    local_rank: list[str] = []
    while given and given[0].startswith("--local_rank"):  # deepspeed's launcher always puts it first
        local_rank.append(given.pop(0))
    options = _parse(given)
    _warn_of_old_addresses()
    start(options.timeout)
    sys.argv = [options.script, *local_rank, *options.args]
    if options.module:
        sys.path[0] = os.getcwd()
        runpy.run_module(options.script, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(options.script))
        runpy.run_path(options.script, run_name="__main__")


def _warn_of_old_addresses() -> None:
    """Where torchrun started this worker again, and its store is the one of the start before.

    torch 2.13 makes one store for the life of an agent. A rank that asks it for the address of another one before that
    one has come gets the address of the last start: then both wait for each other until the timeout, or fail.
    """
    again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    if again and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and os.environ.get("RANK") == "0":
        sys.stderr.write(
            "zeroelastic.run: torchrun uses the store of the last start again, in which ranks may find addresses of "
            "workers that have ended, and hang. Set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 where torchrun is started.\n"
        )


def _parse(given: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m zeroelastic.run",
        description="Run a training script with ZeRO checkpoints that resume at any world size.",
        usage="%(prog)s [-h] [--version] [--timeout SECONDS] (SCRIPT | -m MODULE) [ARGS ...]",
    )
    parser.add_argument("--version", action="version", version=f"zeroelastic {__version__}")
    parser.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=float,
        default=_TIMEOUT_S,
        help="how long ranks wait for a lost rank, in groups without a timeout of their own; 0 keeps torch's default "
        "(default: %(default)g)",
    )
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module name")
    parser.add_argument("script", metavar="SCRIPT", help="the training script, or the module with -m")
    parser.add_argument("args", nargs=argparse.REMAINDER, metavar="ARGS", help="passed to the script unchanged")
    options = parser.parse_args(given)
    if not options.module and not os.path.isfile(options.script):
        parser.error(f"no such script: {options.script}")
    if not options.timeout >= 0:
        parser.error(f"--timeout is {options.timeout}; it has to be 0 or more")
    return options


if __name__ == "__main__":
    main()
