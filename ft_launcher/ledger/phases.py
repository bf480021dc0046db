"""The phases of a recovery on a line of time. Pure.

The report's trace and the spans of a running job lay them out by it; how long a phase took, `job_ledger.py` knows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

_BEFORE = ("detection", "stop", "backoff", "health", "rendezvous")
_AFTER = ("start", "first_step")


def laid_out(recovery: Mapping[str, float], started: float) -> Iterator[tuple[str, float, float]]:
    """Yields name, begin and length of each phase of the recovery that led into a cycle.

    The ledger has the lengths only. They are laid before and after the moment at which the cycle's ranks were
    `started`, and have its unit and origin; a phase that took no time is left out.
    """
    moment = started - sum(recovery.get(phase, 0.0) for phase in _BEFORE)
    for phase in (*_BEFORE, *_AFTER):
        length_s = recovery.get(phase, 0.0)
        if length_s > 0:
            yield phase, moment, length_s
        moment += length_s
