"""``python -m zeroelastic``: the command line."""

from __future__ import annotations

from zeroelastic.cli.app import main

if __name__ == "__main__":
    main()
