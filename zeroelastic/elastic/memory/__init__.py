"""Checkpoints in the memory of the nodes: taken every few steps, found again after a loss of nodes, at any size.

    launcher     the process whose end is the end of the job on this node
    place        the job's directory in shared memory
    reaper       the process that removes it
    placement    which node keeps what for which other (pure)
    memory_file  files in shared memory whose pages are used again
    generation   the checkpoints that a node has, complete or in the making
    capture      the state of this rank, copied between two steps
    protect      copies for other nodes, sent from rank to rank
    checkpoints  ``MemoryCheckpoints``: all of it, every few steps
    resume       ``MemoryTier``: the newest generation that loads

A generation is a checkpoint as nodes with disks of their own would have it, so that ``deepspeed.load`` loads it as any
other. Read ``generation``, then ``checkpoints``.
"""
