"""How long tests wait for what must happen. A deadline ends a test that hangs; it measures nothing.

`FT_TEST_PATIENCE` multiplies every deadline: 1 on a calm machine, 3 in CI, where others may use the same cores.
What a test gives the product to keep (a section's limit, a node timeout) stays as it is.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TypeVar

PATIENCE = float(os.environ.get("FT_TEST_PATIENCE", "1"))
_LOOK_AGAIN_S = 0.005
_T = TypeVar("_T")


def patient(seconds: float) -> float:
    """The deadline for what takes so many seconds at most on a calm machine."""
    return seconds * PATIENCE


def until(
    condition: Callable[[], _T | None], what: str | Callable[[], str] = "what is awaited", limit_s: float = 60.0
) -> _T:
    """Waits until a condition is true; returns its value. The test fails when time is up.

    Args:
        condition: is looked at again and again.
        what: what the test waits for, for the failure; a function is called only then.
        limit_s: the deadline on a calm machine (seconds).
    """
    deadline = time.monotonic() + patient(limit_s)
    while True:
        found = condition()
        if found:
            return found
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {patient(limit_s):g} s: {what() if callable(what) else what}")
        time.sleep(_LOOK_AGAIN_S)
