"""Rank assignment: which ranks take part in a round, and in which order. Only `gather` does I/O."""
