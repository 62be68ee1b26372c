"""Files of ``torch.save``, read and written without unpickling anything that is not on an allow-list.

    header             the pickle of a file as plain objects, its tensors as byte ranges
    records            where the records of an archive lie, by name
    safe_unpickler     the allow-listed unpickler; ``pickle_limits`` bounds it before it runs
    packed_pickle      the same checks in the native engine, which makes long lists and dictionaries ``columns``
    rebuild_functions  the allow-list; ``inert_objects`` are what it makes
    pickle_graph       a pickle as a graph that can be changed; ``graph_reader`` and ``graph_writer`` read and write it
    zip_format         the structures of the zip format, and an archive's directory in columns
    zip_reader         where each record is, and whether the file agrees with itself; ``zip_writer`` writes an archive
    skeleton           a file of torch.save without its tensors
    save               writes such a file; ``image`` makes one in memory
    host_memory        memory that tensors are copied to, pinned where they are on a GPU
    integrity          checks the structure of a file before it is trusted

Imports ``executors``, ``io`` and ``core``. Read ``header`` first.
"""
