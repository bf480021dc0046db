"""How a tool ends the training on all ranks: each saves, then leaves with an exit code. Only checks what was given."""

from __future__ import annotations


def check_ending(save: object, exit_code: object) -> None:
    """Nothing where `save` is a function or None, and `exit_code` one that a process can have, or None.

    Raises:
        ValueError: naming the argument.
    """
    if save is not None and not callable(save):
        raise ValueError(f"save={save!r} must be a function without arguments, or None")
    is_number = isinstance(exit_code, int) and not isinstance(exit_code, bool) and 0 <= exit_code <= 255
    if exit_code is not None and not is_number:
        raise ValueError(f"exit_code={exit_code!r} must be a whole number from 0 to 255")
