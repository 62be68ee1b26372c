"""Saving: ``save`` from the call to the choice of a mode, ``mode`` from the first file to the commit.

    plain, background, decoupled, store   one mode each; ``plain`` and ``store`` also have the two destinations
    shard_writer, engine_proxy            what a rank writes, and how DeepSpeed's save is redirected
    local_files                           what a rank writes, without a collective
    commit                                files read back, what each rank wrote, the commit record
    barrier                               barriers that name the ranks which do not arrive
    pending, after_save                   saves that go on, and what follows a commit

Read ``save``, then ``mode``.
"""
