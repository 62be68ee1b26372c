"""Saving: from the call to the commit, which is made at once or by a thread.

    save_checkpoint  the call: who commits, where, and when
    checks           the checks before anything is written, also of a module that changed
    save             ``Save``: one save, written now or as a snapshot; how DeepSpeed's own is redirected
    directory        the steps of a commit
    shard_writer     what a rank writes
    commit           files read back, what each rank wrote, the commit record
    barrier          barriers that name the ranks which do not arrive
    background       saves that go on
    after_commit     copies in a store, and old tags that go

Read ``save``, then ``directory``.
"""
