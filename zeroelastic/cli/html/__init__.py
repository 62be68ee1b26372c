"""Reports to look at: the document of a verb as one HTML file that needs nothing beside it, not even a network.

    report_file  what ``--html`` does: check the name, write the file
    pages        what the report of each verb says: documents in, pages out
    page         the model of a page: a sentence, facts, sections of figures and tables
    figures      drawings as SVG: a matrix, bars, strips, lines, a map of ranks
    render       a page as text, with the style, the script and the data in it
    embed        the data in a page, shortened where it is large
    markup       elements as a tree; the one place where text is escaped

One direction: document -> page -> markup -> text. Read ``pages`` first, and ``page`` with it.
"""
