"""Whether a checkpoint is what was saved: ``header_check``, then ``payload_scan``; ``verify`` runs both."""
