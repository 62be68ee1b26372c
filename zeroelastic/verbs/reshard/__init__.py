"""A checkpoint for another world size, written as DeepSpeed would have.

reshard        the verb: plan, write, verify, publish
source         the saved tensors and graphs, of any ZeRO stage, and the whole weights of the module
slicing        which slices the ranks of a saved run and of the new one have; ``slice_tables`` as files list them
target         what is asked for, and the layout of the new ranks, at any ZeRO stage
files          the contents of DeepSpeed's files of one rank
rank_writer    fills the files of the new ranks
sidecar_files  the other files of front ends beside them
"""
