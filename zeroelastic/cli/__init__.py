"""The command line: ``zeroelastic VERB ...``, one file per verb."""
