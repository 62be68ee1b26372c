"""Checkpoints on disks of the nodes: ``visibility`` says who sees which file, ``payload`` moves what others need."""
