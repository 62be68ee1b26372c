"""Loading a checkpoint into a running engine.

    load                one load from beginning to end
    tag_choice          which tag is loaded; ``load_newest`` walks back to the newest that loads
    stock               which loads DeepSpeed does alone; ``arrangement`` checks that such a load would go right
    preflight           all checks before a tensor is touched, on all ranks together; its result is a ``LoadPlan``
    load_plan           the bytes that each rank reads; ``compare`` compares save and run before
    saved_copies        whether copies of tensor parallel ranks agree, where no commit record says it
    restore             fills the live engine
    module_states       the module states file, read by DeepSpeed's own load
    verify              digests of the live state against the commit record
    notes               the facts that a load notes for its report where they arise
    report              the report and its log line

Read ``load`` first.
"""
