"""Makes what a bundle contains: only facts that may be passed on, and a page to read first. Pure.

`allowed.py` is the one gate through which events and answers of a job pass; `incident.py` adds up what has passed, and
writes the page. `tools/commands/bundle.py` reads and writes the files.
"""
