"""Other formats: safetensors, FSDP2 and torch DCP, and back from FSDP2 and Universal Checkpoint.

convert                                                            the verbs ``convert`` and ``export``
to_safetensors, to_dcp, to_fsdp2, from_fsdp2, from_universal       one format each
"""
