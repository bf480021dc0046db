"""Decisions about restarts: history and fault in, decision out. The policies decide, `progress.py` only reads, and the
agent acts.
"""
