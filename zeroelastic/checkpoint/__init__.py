"""The files of one checkpoint: opened, checked and described; nothing here knows a running engine.

    open              opens a tag directory; ``inventory`` says which files it has, which ranks read which, and what the
                      record says
    checker           checks all files of a tag and lists every problem, in ``tag_headers``; ``contradictions`` has the
                      sentences
    tag_files         the names of ranks' files, all files of a directory by what they are, and the mark of an upload
    model_states      the model states file of one rank
    optimizer_file    the optimizer file of one rank as data, and its values; ``optimizer_reader`` reads it;
                      ``rank_layout``: how its flat buffers are cut, and the table of them in elastic ones
    topology          how ranks are grouped, and which slices of tensors they have, by DeepSpeed's maps
    saved_layout      the layout over all ranks of a save with slices, and that of frozen experts
    commit_record     ``zeroelastic.json``: sizes, parameters, digests and the content root; ``one_save``: all that is
                      read of a tag is of one save
    saved_state       all ranks' optimizer files as one state
    extents           where the bytes of a plan are in files
    param_changes     parameters that one side has and the other has not

Imports ``torch_file``, ``executors``, ``io`` and ``core``. Read ``open`` first.
"""
