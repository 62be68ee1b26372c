"""What differs between two checkpoints: ``compare`` puts together ``tensors`` (by ``element_stats``) and ``values``."""
