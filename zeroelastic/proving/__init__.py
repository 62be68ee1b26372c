"""The proof of a resume: one training script run at two world sizes, recorded from within, compared and written down.

    records    what a run is told and what it recorded
    recorder   hooks in DeepSpeed's engine, on the ranks of a run
    guard      writes to the checkpoint being proved are refused there
    rank       the process of one rank: ``python -m zeroelastic.proving.rank RUN.json train.py ARGS``
    launcher   the ranks of a run, under torchrun
    driver     which runs there are, in which order
    judge      what the records say, check by check
    report     the document, its digest and its Markdown

Importing this imports neither torch nor deepspeed.
"""
