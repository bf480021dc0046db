"""Stands for the class that is injected: what it can do does not matter to who gets it."""

from __future__ import annotations


class CallWrapper:
    """Any class of this name."""
