"""Drawings as SVG that fills the width it gets: positions across are in percent, heights and text in pixels.

    plot      the frame of a drawing: labels of rows at the left, the marks, labels of columns below
    scale     round numbers for axes
    matrix    how many bytes go from where to where
    bars      numbers side by side
    strips    pieces end to end: buffers of ranks, bytes of files, phases of a job
    lines     losses by step
    rank_map  which of many ranks have a problem

Each mark has a text that the script of the page shows when one points at it, taps it or reaches it with the arrow keys.
What is in a drawing is in a table of the page, too.
"""
