"""Saving: from the call to the commit, which is made at once or by a thread.

    save_checkpoint             the call: who commits, where, and when
    checks                      the checks before anything is written
    save                        ``Save``: one save, written now or as a snapshot
    directory                   the steps of a commit
    shard_writer, engine_proxy  what a rank writes, and how DeepSpeed's save is redirected
    commit                      files read back, what each rank wrote, the commit record
    barrier                     barriers that name the ranks which do not arrive
    background                  saves that go on
    retention, upload           old tags that go, and copies in a store, after a commit

Read ``save``, then ``directory``.
"""
