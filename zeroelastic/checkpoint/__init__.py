"""The files of one checkpoint: opened, checked and described; nothing here knows a running engine.

    open            opens a tag directory
    model_states    the model states file of one rank
    tensor_parallel which of several checkpoints in one directory
    file_names      the names of rank files
    optimizer_file  the optimizer file of one rank as data; ``optimizer_reader`` reads it, rigid or elastic
    elastic_table   the table in an elastic file, written and read; ``values`` checks what is read
    commit_record   ``zeroelastic.json``: sizes, digests and the content root; ``param_table`` is its parameters
    saved_state     all ranks' optimizer files as one state
    extents         where the bytes of a plan lie in files
    param_changes   parameters that one side has and the other has not
    listing         the files of a tag directory by what they are
    quarantine      the mark on a tag that proved damaged
    unfinished      the mark on a tag in an object store whose save or removal did not finish
    one_save        everything that is read belongs to one save
    rng_files       the random generators of front ends

Imports ``torch_file``, ``executors``, ``io`` and ``core``. Read ``open`` first.
"""
