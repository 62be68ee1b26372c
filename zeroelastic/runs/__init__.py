"""The directory of a run: its tags, their names and order, ``latest``, and what may be deleted.

    run_store      the directory on a disk: tags removed, ``latest`` written, what saves have left
    names          which names a tag may have, and the reader of ``latest``
    tag_directory  the hidden directory in which a save is made, and its publication as the tag
    order          which tag was committed after which, and which run it is of
    candidates     the tags of a run, newest first, and the newest that is whole
    latest         finds, repairs and sets ``latest``
    framework_files  which save of a tag the files are of that a framework writes beside it
    locate         the checkpoint that a path means, and messages where there is none
    prune          which tags can be removed

Imports ``checkpoint`` and what that imports. Read ``candidates`` first.
"""
