"""Checkpoints on disks of the nodes: ``visibility`` says who sees which file, ``peer_checkpoint`` opens them as one
checkpoint, ``payload`` moves what others need.
"""
