"""Checkpoints on disks of the nodes: ``visibility`` says who sees which file, ``node_tags`` which tag is
the newest of all; ``peers`` opens a checkpoint of files that others see, and moves what a rank needs of them.
"""
