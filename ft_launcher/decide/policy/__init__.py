"""Decisions about restarts: a fault and the history in, a decision with its reason out. The agent carries it out."""
