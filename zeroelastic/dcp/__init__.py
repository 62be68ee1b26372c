"""Directories of ``torch.distributed.checkpoint`` (DCP), read without torch: FSDP2's checkpoints, and accelerate's.

``metadata`` reads the table ``.metadata`` through the allow-listed unpickler, ``chunks`` finds the payload of each
chunk in its file, ``names`` sorts tensors of the model from tensors of the optimizer, ``saved`` is the whole as layouts
and extents, with the notes that a conversion left in it. Read ``metadata`` first. Imports ``checkpoint`` and the
packages below it.
"""
