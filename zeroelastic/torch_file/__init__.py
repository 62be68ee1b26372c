"""Files of ``torch.save``, read and written without unpickling anything that is not on an allow-list.

    header          the pickle of a file as plain objects, its tensors as byte ranges
    records         where the records of an archive lie, by name
    safe_unpickler  the allow-listed unpickler, and the limits that a pickle keeps before it runs
    inert_objects   the allow-list and what it makes; ``columns`` are long lists and dictionaries as arrays
    pickle_graph    a pickle as a graph that can be changed; ``graph_writer`` writes it into a file
    zip_format      the structures of the zip format, and an archive's directory in columns
    zip_reader      where each record is, and whether the file agrees with itself
    skeleton        a file of torch.save without its tensors
    save            writes such a file; ``image`` makes one in memory

Imports ``executors``, ``io`` and ``core``. Read ``header`` first.
"""
