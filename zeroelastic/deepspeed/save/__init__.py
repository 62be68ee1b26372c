"""Saving: ``save`` from beginning to end, ``elastic_state`` what a rank writes, ``commit`` and ``barrier`` with all."""
