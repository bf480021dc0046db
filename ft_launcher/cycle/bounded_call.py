"""Calls what may hang for ever, as reading a file of storage that is gone does, for a limited time.

`evidence.py` and `source_lines.py` call it, in the agent's thread. What hangs is left in a thread that nobody joins.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")


def call_within(timeout_s: float, function: Callable[[], _T], name: str) -> _T | None:
    """Returns what `function` returns in a thread called `name`; None: it has not ended in time, and goes on there."""
    found: list[_T] = []
    thread = threading.Thread(target=lambda: found.append(function()), daemon=True, name=name)
    thread.start()
    thread.join(timeout_s)
    if found:
        return found[0]
    return None
