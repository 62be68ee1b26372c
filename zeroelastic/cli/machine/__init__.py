"""Checks of this machine for ``doctor`` and ``plan``: disk speed, engines, the installed DeepSpeed."""
