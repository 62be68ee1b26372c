"""Checkpoints in the memory of the nodes, so that a lost node costs one step at most and no disk is read.

    checkpoints  makes one every few steps, while training goes on
    save         what the ordinary save does otherwise in memory: the directory of a node, and copies for others
    memory_file  files in shared memory whose pages are used again
    resume       ``MemoryTier``: the tags in memory that follow a save on the disk
    place        the directory of a job in a node's shared memory; ``reaper`` removes it when the job ends

A checkpoint is a tag as nodes with disks of their own would have it, so that ``deepspeed.load`` loads it as any
other. Read ``checkpoints``, then ``save``.
"""
