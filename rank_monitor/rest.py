"""How long a rank that sends heartbeat after heartbeat may be left unread. Pure.

To wake a sleeping monitor costs the rank five times what the message itself costs, and the monitor a wake-up each. A
heartbeat carries its moment, so it makes no difference to read it later, with others, as long as that is well before
any limit. Knows neither messages nor limits.
"""

from __future__ import annotations

LONGEST_NS = 250_000_000
_SHORTEST_NS = 4_000_000
_BEATS = 16  # that few wait unread: a connection holds some two hundred


def rest_ns(beats: int, passed_ns: int, patience_ns: int) -> int:
    """Nanoseconds until the rank's messages need to be read again; 0: from now on each as it comes.

    Args:
        beats: heartbeats that were read just now.
        passed_ns: since the reading before.
        patience_ns: what no rest may be longer than.
    """
    if beats == 0:
        return 0
    interval_ns = passed_ns // beats
    rest = min(_BEATS * interval_ns, patience_ns)
    return rest if rest >= max(_SHORTEST_NS, interval_ns * 3 // 2) else 0
