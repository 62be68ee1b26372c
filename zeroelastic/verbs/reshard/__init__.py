"""A checkpoint for another world size, written as DeepSpeed would have.

reshard            the verb: plan, write, verify, publish
plan               the plan of it, with its ``options``
source             the saved tensors and trees, of any ZeRO stage
slicing            which slices the ranks of a run have; ``new_slicing`` for a new run
sink               the layout of the new ranks and the contents of their files; ``stage_3`` and ``stage_1_2``
rank_writer        fills the files of the new ranks
sidecar_files      the other files of front ends
"""
