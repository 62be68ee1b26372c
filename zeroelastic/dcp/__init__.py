"""Directories of ``torch.distributed.checkpoint`` (DCP), read without torch: FSDP2's checkpoints, and accelerate's.

``metadata`` reads the table ``.metadata`` through the allow-listed unpickler, ``chunks`` finds the payload of each
chunk in its file, ``names`` sorts tensors of the model from tensors of the optimizer, ``saved`` is the whole as layouts
and extents. ``native`` is what it is to a run of ZeRO, and ``notes`` what a conversion kept of one. Read ``metadata``
first. Imports ``checkpoint`` and the packages below it.
"""
