"""Loading a checkpoint into a running engine.

    load                one load from beginning to end
    tag_choice          which tag is loaded; ``fallback`` walks back to the newest tag that loads
    preflight           everything that is checked before a tensor is touched; its result is a ``LoadPlan``
    load_plan           the save and the run compared, and what each rank reads from where
    saved_copies        whether copies of tensor parallel ranks agree, where no commit record says it
    stock               which loads DeepSpeed does alone; ``arrangement`` checks that such a load would go right
    restore             fills the live engine
    module_states       the module states file: checked, and read by DeepSpeed's own load
    verify              digests of the live state against the commit record
    notes               what a load notes for its report where it arises
    report              the report and its log line

Read ``load`` first.
"""
