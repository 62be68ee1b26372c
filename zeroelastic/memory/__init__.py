"""Checkpoints in the memory of the nodes."""
