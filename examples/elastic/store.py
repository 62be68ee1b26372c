"""The rendezvous store in a process of its own, so that any node of the job may be lost.

    python examples/elastic/store.py 29400

It is torch's own TCPStore. Agents reach it with --rdzv-endpoint=HOST:29400 --rdzv-conf=is_host=0.
"""

from __future__ import annotations

import signal
import sys

from torch.distributed import TCPStore


def main() -> None:
    store = TCPStore("127.0.0.1", int(sys.argv[1]), is_master=True, wait_for_workers=False)  # listens everywhere
    print(f"ready on port {store.port}", flush=True)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    main()
