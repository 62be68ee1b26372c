"""Whether a checkpoint is what was saved: ``verify`` runs ``header_check`` and ``payload_scan``.

``findings`` makes the ``report`` of what these say.
"""
