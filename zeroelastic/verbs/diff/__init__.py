"""What differs between two checkpoints: ``diff`` compares values, and ``tensors`` (by ``element_stats``) tensors."""
