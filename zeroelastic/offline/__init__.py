"""The verbs that work on files alone: inspect, verify, plan, diff, reshard and convert, a folder each.

    new_directory        a directory that appears at once, whole
    resumable_directory  a directory that several processes fill, and that a second run continues

Imports ``tags`` and below; torch only where a format needs it. Read the module that is named like the verb.
"""
