"""Processes that work together: collectives that fail on every rank alike, and who is still alive.

    collective        gather, agree and raise the same error on every rank
    exchange          bytes between ranks, in rounds of bounded size
    peer_memory       the memory of other processes of this machine, copied by the kernel
    multicast         what one rank has read, to all that ask for it
    partners          the processes of a training job, and whether each still runs
    process_identity  whether a process that a file names is still the same process

Imports ``core`` and ``errors``. Read ``collective`` first.
"""
