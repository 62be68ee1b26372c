"""Other formats: safetensors, torch DCP and Universal Checkpoint, and back from the last.

convert                                                 the verbs ``convert`` and ``export``
to_safetensors, to_dcp, to_universal, from_universal    one format each
"""
