"""The output of verbs: tables, styled lines, progress bars, exit codes."""
