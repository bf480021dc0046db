"""Decisions about restarts: history and fault in, decision out. The policies decide, and the agent acts."""
