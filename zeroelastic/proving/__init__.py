"""The proof of a resume: run one training script at two world sizes, record both runs, compare, write a report.

    records   the description of a run, and what it recorded
    rank      the process of one rank: ``python -m zeroelastic.proving.rank RUN.json train.py ARGS``
    recorder  hooks in DeepSpeed's engine, on the ranks of a run
    driver    the order of the runs, each under torchrun
    checks    comparisons of the records
    report    the document, its digest and its Markdown

Importing this imports neither torch nor deepspeed.
"""
