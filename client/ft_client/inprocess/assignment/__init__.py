"""Rank assignment: which ranks take part in an iteration, in which order. Pure but for `gather`."""
