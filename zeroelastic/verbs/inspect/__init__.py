"""What a checkpoint holds: ``inspect`` makes the ``report``, which ``inspector`` fills from headers alone."""
