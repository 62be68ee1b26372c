"""Saving: ``save`` from the call to the commit, which is made at once, by a thread, or at a later step.

    save                        checks, the choice of a destination, and the class of one save
    directory                   the steps of a commit
    shard_writer, engine_proxy  what a rank writes, and how DeepSpeed's save is redirected
    commit                      files read back, what each rank wrote, the commit record
    barrier                     barriers that name the ranks which do not arrive
    pending, background         saves that go on
    after_save                  what follows a commit

Read ``save``, then ``directory``.
"""
