"""What differs between two checkpoints: ``diff`` puts together ``tensors`` (by ``element_stats``) and ``values``."""
