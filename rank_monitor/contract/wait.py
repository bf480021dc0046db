"""Waiting for descriptors, whatever their number. Decides nothing."""

from __future__ import annotations

import math
import select
from collections.abc import Iterable


def readable(descriptors: Iterable[int], timeout_s: float | None = 0.0) -> set[int]:
    """The descriptors that can be read or are closed at the other end.

    Args:
        timeout_s: how long to wait for the first; None: for ever; 0: not at all.
    """
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    timeout_ms = None if timeout_s is None else math.ceil(max(0.0, timeout_s) * 1000)
    return {descriptor for descriptor, _ in poll.poll(timeout_ms)}
