"""Decisions about restarts: history and fault in, decision out. The files here decide; the agent acts."""
