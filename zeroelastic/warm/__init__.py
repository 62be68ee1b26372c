"""Workers that start warm: one process per node has imported torch and DeepSpeed, and forks each worker.

``client`` takes a worker's place among the launcher's processes and asks for the fork, ``server`` imports and forks,
``messages`` is what the two say to each other. No module here imports torch.
"""

LAUNCHER = "ZEROELASTIC_LAUNCHER"
"""An environment variable of a worker that was forked from a warm process: its launcher's process id, and its own."""
