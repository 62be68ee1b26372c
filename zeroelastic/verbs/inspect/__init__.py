"""What a checkpoint holds: ``model`` is the result, ``inspect`` fills it from headers alone."""
