"""Whether a checkpoint is what was saved: ``verify`` runs ``checkpoint.checker`` and ``payload_scan``.

``findings`` makes the ``report`` of what these say.
"""
