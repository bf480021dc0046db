"""How a tool ends the training on all ranks: each saves, then leaves with an exit code. Only checks what was given."""

from __future__ import annotations


def check_save(save: object) -> None:
    """Nothing for a function, or None.

    Raises:
        ValueError: naming the argument.
    """
    if save is not None and not callable(save):
        raise ValueError(f"save={save!r} must be a function without arguments, or None")


def check_exit_code(exit_code: object) -> None:
    """Nothing for an exit code that a process can have.

    Raises:
        ValueError: naming the argument.
    """
    if isinstance(exit_code, bool) or not isinstance(exit_code, int) or not 0 <= exit_code <= 255:
        raise ValueError(f"exit_code={exit_code!r} must be a whole number from 0 to 255")
