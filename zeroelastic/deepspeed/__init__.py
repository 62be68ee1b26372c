"""Everything that knows DeepSpeed: the only folder that imports it.

    seams        which methods are wrapped, checked and put back; ``wrappers`` has the functions in their place
    live/        the running optimizer as a layout
    load/        load_checkpoint: choose a tag, check it, fill the engine, verify, report
    save/        save_checkpoint: waited for, in the background
    node_local/  checkpoints on disks that not all ranks see
    options      the ``"zeroelastic"`` block of the configuration

Imports ``checkpoint``, ``runs`` and below. Read ``seams``, then ``load/restore``.
"""
