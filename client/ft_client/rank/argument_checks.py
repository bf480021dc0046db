"""Checks of the arguments that a caller gives to a tool. Every error names the argument.

The tools of this package call them first, so that a wrong value raises in the call that brought it, and not in a step
hours later.
"""

from __future__ import annotations

import math


def check_count(name: str, value: object, least: int = 0, most: float = math.inf) -> None:
    """Raises ValueError unless `value` is a whole number from `least` to `most`."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        if most == math.inf:
            limits = f"of at least {least}"
        else:
            limits = f"from {least} to {most:g}"
        raise ValueError(f"{name}={value!r} must be a whole number {limits}")


def check_seconds(name: str, value: object) -> None:
    """Raises ValueError unless `value` is a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ValueError(f"{name}={value!r} must be a number of seconds above 0")


def check_exit_code(exit_code: object) -> None:
    """Raises ValueError unless a process can exit with this code: 0 to 255, since the kernel keeps 8 bits of it."""
    check_count("exit_code", exit_code, most=255)


def check_save(save: object) -> None:
    """Raises ValueError unless `save` is callable or None."""
    if save is not None and not callable(save):
        raise ValueError(f"save={save!r} must be a function without arguments, or None")
