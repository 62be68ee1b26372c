"""The documentation as a site: ``build_site.py build`` and ``build_site.py serve`` (`make docs`, `make docs-serve`)."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from stage import DOCS, PLACES, REPOSITORY, stage

PAGES = REPOSITORY / "build" / "pages"
"""Where zensical.toml looks for the pages."""

POLL_S = 1.0


def build() -> int:
    """Build the site into site/; a warning is an error. Returns the exit status."""
    stage(PAGES)
    return generator("build", "--strict", "--clean")


def serve() -> int:
    """Serve the site on this machine, built again whenever a page changes, until Ctrl-C."""
    stage(PAGES)
    threading.Thread(target=follow, daemon=True).start()
    try:
        return generator("serve")
    except KeyboardInterrupt:
        return 0


def generator(*arguments: str) -> int:
    """Run zensical of this interpreter's environment."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-m", "zensical", *arguments]
    return subprocess.run(command, cwd=REPOSITORY, env=environment, check=False).returncode


def follow() -> None:
    """Stage the pages again when one of them has changed."""
    seen = newest()
    waiting = threading.Event()
    while not waiting.wait(POLL_S):
        if newest() != seen:
            seen = newest()
            try:
                stage(PAGES)
            except Exception as error:  # a page that is half edited; the next change is tried again
                sys.stderr.write(f"not built: {error}\n")


def newest() -> float:
    """The time of the last change of a page or of what it is made of."""
    sources = [*DOCS.rglob("*"), *(REPOSITORY / name for name in PLACES)]
    return max(path.stat().st_mtime for path in sources if path.is_file())


if __name__ == "__main__":
    sys.exit({"build": build, "serve": serve}[sys.argv[1]]())
