"""A checkpoint for another world size, written as DeepSpeed would have.

reshard        the verb: plan, write, verify, publish
rank_writer    fills the files of the new ranks
source         the saved tensors and graphs, of any ZeRO stage
rank_files     the contents of DeepSpeed's files at a world size
sidecar_files  the other files of front ends beside them
"""
