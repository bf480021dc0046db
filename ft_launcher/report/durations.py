"""Durations and counts as people write them. Pure.

Every form of the report uses it. Exact figures stay in the report's JSON.
"""

from __future__ import annotations


def as_text(seconds: float) -> str:
    """Returns a duration in its two largest units: `3 h 12 min`, `14 min 5 s`, `4.2 s`, `31 ms`."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return _pair(*divmod(whole, 60), "min", "s")
    minutes = round(seconds / 60)
    if minutes < 24 * 60:
        return _pair(*divmod(minutes, 60), "h", "min")
    return _pair(*divmod(round(seconds / 3600), 24), "d", "h")


def counted(number: int, noun: str) -> str:
    """Returns a number with its noun."""
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {noun}s"


def _pair(large: int, small: int, of_large: str, of_small: str) -> str:
    if small:
        return f"{large} {of_large} {small} {of_small}"
    return f"{large} {of_large}"
