"""``zeroelastic.run --warm SCRIPT ARGS`` without what it imports ahead: a warm process that starts in milliseconds.

The launcher is the process that the variable LAUNCHER names, or the parent.
"""

from __future__ import annotations

import os
import runpy
import sys

from zeroelastic.warm.client import run_warm
from zeroelastic.warm.messages import Request
from zeroelastic.warm.server import serve_until_worker


def main() -> None:
    given = sys.argv[1:]
    if given[0] == "--warm-process":
        request = serve_until_worker(int(given[1]), int(given[2]), always=())
        if request is None:
            os._exit(0)
        given = request.arguments
    else:
        command = [sys.executable, os.path.abspath(__file__), "--warm-process"]
        request = Request.of_this_process(given, given[0], is_module=False)
        why = run_warm(request, command, int(os.environ.get("LAUNCHER") or os.getppid()))
        print("cold:", why)
    sys.argv = given
    sys.path[0] = os.path.dirname(os.path.abspath(given[0]))
    runpy.run_path(given[0], run_name="__main__")


if __name__ == "__main__":
    main()
