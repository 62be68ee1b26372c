"""Files of ``torch.save``, read and written without unpickling anything that is not on an allow-list.

    header          the pickle of a file as plain objects, its tensors as byte ranges
    safe_unpickler  the allow-listed unpickler, and the limits that a pickle keeps before it runs
    inert_objects   the allow-list and what it makes; ``columns`` are long lists and dictionaries as arrays
    graph           a pickle as a graph that can be changed, and the file that is written of it
    zip_directory   the structures of the zip format, and the directory of an archive in columns
    zip_check       where each record is, and whether the file agrees with itself
    save            writes the file of torch.save with its digests; ``image`` makes one in memory

Imports ``executors``, ``io`` and ``core``. Read ``header`` first.
"""
