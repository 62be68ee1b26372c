"""The directory of a run: its tags, their names and order, ``latest``, and what may be deleted.

    names            which names a tag may have, and the reader of ``latest``
    commit_order     which tag was committed after which
    candidates       the tags of a run, newest first, and the newest that is whole
    tag_directory    the hidden directory in which a save is made, and its publication
    locate           the checkpoint that a path on the command line means
    other_formats    recognises directories in the formats of others
    latest           finds, repairs and sets ``latest``
    prune            which tags can be removed
    store_prune      the same in an object store; ``store_leftovers`` are those of saves there
    leftovers        leftovers of interrupted saves; ``directory_owner`` notes their process
    absent           messages where there is no checkpoint

Imports ``checkpoint`` and what that imports. Read ``candidates`` first.
"""
