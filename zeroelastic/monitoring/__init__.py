"""The report of ``zeroelastic timeline`` (``job_report``)."""
