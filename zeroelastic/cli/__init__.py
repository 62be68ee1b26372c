"""The command line: ``zeroelastic VERB ...``.

    app        the verbs, each imported when it is used; exit codes, signals; ``reports``: the body of a verb; the
               options of several verbs
    inspect    inspect, plan        copies    reshard, export, convert
    verify     verify, diff         runs      ls, latest, prune
    doctor     doctor
    view       the view of a report: printed in the terminal, and written as the page of ``--html`` by Jinja2, with a
               figure
    terminal   text, columns and progress

A verb parses options, calls the function in ``zeroelastic.verbs`` that does the work, and shows the report.
Read ``app`` first.
"""
