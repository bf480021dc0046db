"""Rank assignment: which ranks take part in an iteration, and in which order. Only `gather` does I/O."""
