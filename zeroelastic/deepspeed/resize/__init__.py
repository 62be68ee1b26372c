"""A change of size between two steps: the state of one world's engine becomes that of the next, memory to memory.

    run_state   what is alike on all ranks: layouts, hyper-parameters, counters, scheduler, buffers
    move        the tensors of this rank, and their exchange: flatten, send in rounds, unflatten
    restore     the next engine, filled, and compared with the one before by the content root

Members that leave hold and send; members that come receive; those that stay do both, and move only what is not theirs
already. Read ``restore``.
"""
