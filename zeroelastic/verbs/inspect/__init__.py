"""What a checkpoint holds: ``inspect`` makes the ``report`` from headers alone."""
