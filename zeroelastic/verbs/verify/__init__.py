"""Check that a checkpoint is what its save left: ``verify`` runs ``checkpoint.checker`` and ``payload_scan``.

``findings`` makes the report of what these say.
"""
