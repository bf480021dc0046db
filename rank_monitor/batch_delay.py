"""How long a rank that sends many heartbeats may be left unread. Pure.

`rank_socket.py` calls it. To wake a sleeping monitor costs the rank five times what the message itself costs, and the
monitor a wake-up each. A heartbeat carries its moment, so it can be read later, together with others, as long as that
is well before any limit. Neither messages nor limits are known here.
"""

from __future__ import annotations

# A verdict is not delayed by it: the monitor reads everything before it judges. What a rank sends to the launcher is.
LONGEST_NS = 250_000_000
# Heartbeats so close that `_BEATS` of them take less than this are a burst: each is read as it arrives.
_SHORTEST_NS = 4_000_000
# Heartbeats that may wait unread. A connection holds about two hundred; what does not fit is lost.
_BEATS = 16


def batch_delay_ns(beats: int, passed_ns: int, longest_delay_ns: int) -> int:
    """Nanoseconds until the rank's messages need to be read again; 0: each is to be read as it arrives.

    Args:
        beats: number of heartbeats that were just read.
        passed_ns: time since the previous reading.
        longest_delay_ns: upper limit of the result.
    """
    if beats == 0:
        return 0
    interval_ns = passed_ns // beats
    delay_ns = min(_BEATS * interval_ns, longest_delay_ns)
    if delay_ns >= max(_SHORTEST_NS, interval_ns * 3 // 2):
        return delay_ns
    return 0
