"""Other formats: safetensors and FSDP2, and back from FSDP2 and Universal Checkpoint.

convert                                                    the verbs ``convert`` and ``export``
to_safetensors, to_fsdp2, from_fsdp2, from_universal       one format each
"""
