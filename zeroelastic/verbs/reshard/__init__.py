"""A checkpoint for another world size, written as DeepSpeed would have.

reshard            the verb: plan, write, verify, publish
plan               the plan of it
source             the saved tensors and trees, of any ZeRO stage
slicing            which slices the ranks of a run have
new_run            the run that is asked for: its options and its slices
sink               the layout of the new ranks and the contents of their files; stage 3, and in ``stage_1_2``
                   the others
rank_writer        fills the files of the new ranks
sidecar_files      the other files of front ends
"""
