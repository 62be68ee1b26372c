"""The command line: ``zeroelastic VERB ...``.

    app        the verbs, each imported when it is used; exit codes, signals; ``reports``: the body of a verb
    options    the options of several verbs
    inspect    inspect              copies    reshard, export, convert
    verify     verify, diff         runs      ls, latest, prune
    plan       plan                 doctor    doctor
    tables     what a verb shows of its report, as data: the terminal prints it, and
    page       writes it as the page of ``--html`` by Jinja2, with one of the two ``figures``
    terminal   text, columns and progress, files beside the output
    documents  the documents of ``--json`` and their schemas

A verb parses options, calls the function in ``zeroelastic.verbs`` that does the work, and shows the report.
Read ``app`` first.
"""
