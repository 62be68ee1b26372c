"""The command line: ``zeroelastic VERB ...``.

    app        the verbs, each imported when it is used; options, exit codes, signals; ``reports``: the body of a verb
    inspect    inspect, show        copies    reshard, export, convert
    verify     verify, diff         runs      ls, latest, prune
    plan       plan                 doctor    doctor
    tables     what the verbs show, as data
    terminal   text, tables and progress, files beside the output
    pages      the pages of ``--html``, by the Jinja2 ``templates``
    documents  the documents of ``--json`` and their schemas

A verb parses options, calls the function in ``zeroelastic.verbs`` that does the work, and shows the report.
Read ``app`` first.
"""
