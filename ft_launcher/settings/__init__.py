"""Turns command line, YAML, environment and keywords into settings and a `Job`. Starts nothing, and connects to
nothing.

The order of a launch: `prescan.py` before torch is imported; `command_line.py` parses; `sources.py` merges our
settings; `job_settings.py` checks torch's options and makes the `Job`. `options.py` has all names,
`rendezvous_check.py`, `rank_program.py` and `line_pattern.py` each check one thing.
"""
