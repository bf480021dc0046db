"""Finds out from journals what a job's time went to, what its faults cost, and what to change. Only `picture.py` acts.

The way of an event: `collection.py` keeps what a report needs of it; `findings.py`, `section_durations.py` and
`spares.py` judge; the result is one `JobFindings` (`job_findings.py`), from which `advice.py` makes suggestions. Text,
page, picture, trace and JSON are forms of the same findings. `save_intervals.py` uses the findings while a job runs.
"""
