"""Processes that work together: collectives that fail on every rank alike, and who is still alive.

    collective        gather, agree and raise the same error on every rank
    exchange          bytes between ranks, in rounds of bounded size
    spreading         what one or some ranks have, to all that need it: along a tree, or copied by the kernel
    partners          the processes of a training job, and whether each still runs
    process_identity  whether a process that a file names is still the same process

Imports ``core`` and ``errors``. Read ``collective`` first.
"""
