"""The command line: ``zeroelastic VERB ...``.

    app        the verbs, each imported when it is used
    inspect    inspect, show        copies    reshard, export, convert
    verify     verify, diff         runs      ls, latest, prune
    plan       plan                 jobs      prove, timeline
    doctor     doctor, which looks at this ``machine``
    command    options, exit codes, signals
    terminal   text, tables and progress
    pages      the pages of ``--html``, by the Jinja2 ``templates``
    plots      the pictures of ``--plot``, by matplotlib
    documents  the documents of ``--json`` and their schemas

A verb parses options, calls the function in ``zeroelastic.verbs`` that does the work, and shows the report.
Read ``app`` first.
"""
