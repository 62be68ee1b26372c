"""Reports to look at: the document of a verb as one HTML file that needs nothing beside it, not even a network.

    render    what ``--html`` does: check the name, write the page; the Jinja2 environment that escapes every value
    saved     what the templates of ``inspect`` and ``verify`` need beside the document: figures, rows of tables
    compared  the same for ``plan`` and ``diff``
    jobs      the same for ``prove`` and ``timeline``
    figures   figures and tables as data

The templates are in ``cli/templates``: one for each verb, ``page.html`` around it, ``blocks.html`` for facts, lists
and tables, ``figures.html`` for drawings. Read the template of a verb first.
"""
