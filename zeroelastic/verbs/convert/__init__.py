"""Other formats: safetensors, torch DCP and Universal Checkpoint, and back from the last.

to_safetensors, to_dcp, to_universal, from_universal    one format each
model_tensors                                           the model's weights by name
copy_tensors                                            tensors from checkpoint files into new files
"""
