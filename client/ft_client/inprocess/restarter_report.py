"""The way on which the states of in-process restart leave this process: one sink, set by the link to the monitor.

Knows neither the states nor who listens.
"""

from __future__ import annotations

from collections.abc import Callable

_sink: Callable[[str], None] | None = None


def send_to(sink: Callable[[str], None] | None) -> None:
    """From now on every reported state goes to `sink`; None: to nobody, as at the start."""
    global _sink
    _sink = sink


def report(state: str) -> None:
    """Hands `state` to the sink, if there is one.

    Raises:
        Exception: whatever the sink raises.
    """
    if _sink is not None:
        _sink(state)
