"""What the report of each verb says: ``VERB_page.VERB_page`` makes a page of the document of ``--json``.

saved_layout  the buffers of ranks as a drawing, for ``inspect``
damage        the files of ranks with damage at its place, for ``verify``
"""
