"""The directory of a run: its tags, their names and order, ``latest``, and what may be deleted.

    run_store      ``RunStore``: lists the tags, writes ``latest``, removes tags and what saves have left
    tags           ``Tag``, read from a directory; their order, the one rule for the newest, and the save that the
                   files of a framework next to a tag belong to
    names          which names a tag may have, and the reader of ``latest``
    tag_directory  the hidden directory in which a save is made, and its publication as the tag
    locate         the checkpoint that a path means, and messages where there is none
    verdicts       which tags are whole, and which can be removed

Imports ``checkpoint`` and what that imports. Read ``tags`` first, then ``run_store``.
"""
