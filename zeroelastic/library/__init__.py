"""The verbs of the command line as functions, and a checkpoint as a read-only mapping of tensors.

    view        ``zeroelastic.open``: a checkpoint as a mapping from names to tensors
    tensor      a tensor of a checkpoint, read when it is asked for
    places      where the files have a tensor
    inspect, show, verify, plan, reshard, diff, export, convert, ls, latest, prune
                one verb each: ``zeroelastic.inspect`` and so on, and what it returns
    bandwidth   how fast the disk of a checkpoint is, for ``plan``
    options     options that several verbs have

Imports ``offline``, ``tags`` and below; torch only where a tensor is asked for as one. Read ``view`` first. The names
are imported from ``zeroelastic``, which imports each module when it is used for the first time.
"""
