"""Files of ``torch.save``, read and written without unpickling anything that is not on an allow-list.

    header          the tree of a file as plain objects, its tensors as byte ranges
    safe_unpickler  the allow-listed unpickler, and the limits that a pickle keeps before it runs
    tree            the objects of a tree; ``allow_list`` has the one that takes the place of each global
    archive         writes a file of a tree
    zip_directory   the structures of the zip format, and the directory of an archive in columns
    zip_check       where each record is, and whether the file agrees with itself
    save            writes the file of torch.save with its digests; ``image`` makes one in memory

Imports ``executors``, ``io`` and ``core``. Read ``header`` first.
"""
