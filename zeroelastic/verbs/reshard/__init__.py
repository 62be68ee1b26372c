"""A checkpoint for another world size, written as DeepSpeed would have.

reshard        the verb: plan, write, verify, publish
report         what it did, or would do
options        what it is asked for
rank_writer    fills the files of the new ranks
source         the saved tensors and graphs, of any ZeRO stage, and the whole weights of the module
target         the layout of the new ranks, at any ZeRO stage
rank_files     the contents of DeepSpeed's files of stage 3
group_files    the contents of DeepSpeed's files of stages 1 and 2
whole_file     the contents of DeepSpeed's file of stage 0
sidecar_files  the other files of front ends beside them
"""
