"""Reads the steps of a training from what its ranks print (`--ft-watch-log`). Only `log_watch.py` and `log_feed.py`
act.

The way of a printed line: a rank writes to its output file; `log_watch.py` reads the file in a thread; `rank_log.py`
divides the bytes into lines and has `presets.py` read each; what follows from them (a step, an overdue step, a bad
loss) goes to `log_feed.py`, which the agent's thread runs. No rank has to import anything for this.
"""
