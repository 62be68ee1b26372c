"""Checkpoints in the memory of the nodes: taken every few steps, found again after a loss of nodes, at any size.

    place        the job's directory in shared memory, and the checkpoints that a node has there
    reaper       the process that removes it
    memory_file  files in shared memory whose pages are used again
    copies       which node keeps what for which other, and how that is sent
    checkpoints  ``MemoryCheckpoints``: the state is copied, completed and kept on other nodes, every few steps
    resume       ``MemoryTier``: the newest generation that loads

A generation is a checkpoint as nodes with disks of their own would have it, so that ``deepspeed.load`` loads it as any
other. Read ``place``, then ``checkpoints``.
"""
