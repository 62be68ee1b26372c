"""The mathematics of a checkpoint: who holds which elements, how they move, and how their content is summed up.

    layout        the part of each parameter that each rank holds
    slices        parts of whole tensors that some ranks share, and which are copies
    plan          the segments that turn one layout into another; ``slice_plan`` between slices
    digest        the content digest of tensors, independent of how they are cut, and the keys of digests
    world_size    the sizes that divide a global batch, and the seeds of ranks, at another world size

Pure numpy; imports only ``zeroelastic.errors``. Read ``layout`` first.
"""
