"""The verbs of the command line as functions, and a checkpoint as a read-only mapping of tensors.

    inspect, verify, reshard, convert (and export), a folder each
    plan, diff, prune, tags (ls and latest)    a module each
    view, tensor               ``zeroelastic.open``: a mapping from names to tensors, which are read when asked for
    interface                  what all verbs have in common: options, progress, and reports, which ``--json`` prints
    new_directory              a directory that appears at once, whole; several processes fill it, a second run goes on
    model_tensors, reading     the tensors of the saved model, and how they are read and compared
    new_files                  files that are filled with saved tensors

Imports ``runs`` and below; torch only where a format needs it, or a tensor is asked for as one. Read the module that is
named like the verb. The functions are imported from ``zeroelastic``, which imports each module when it is first used.
"""
