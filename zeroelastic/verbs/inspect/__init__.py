"""Describe a checkpoint: ``inspect`` makes the ``report`` from headers alone, ``contents`` the tables in it."""
