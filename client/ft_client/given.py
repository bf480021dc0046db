"""What a caller gives to a tool, checked before anything is done with it. Every error names the argument."""

from __future__ import annotations

import math


def check_count(name: str, value: object, least: int = 0, most: float = math.inf) -> None:
    """Raises ValueError for what is no whole number from `least` to `most`."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        limits = f"of at least {least}" if most == math.inf else f"from {least} to {most:g}"
        raise ValueError(f"{name}={value!r} must be a whole number {limits}")


def check_seconds(name: str, value: object) -> None:
    """Raises ValueError for what is no finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ValueError(f"{name}={value!r} must be a number of seconds above 0")


def check_exit_code(exit_code: object) -> None:
    """Raises ValueError for what no process can exit with."""
    check_count("exit_code", exit_code, most=255)


def check_save(save: object) -> None:
    """Raises ValueError for what is neither a function nor None."""
    if save is not None and not callable(save):
        raise ValueError(f"save={save!r} must be a function without arguments, or None")
