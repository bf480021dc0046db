"""Who has been silent for too long: counters of beats and the time they were read in, nodes that are lost out. Pure.

Counters are compared with counters and the reader's own clock with itself: clocks of two hosts never meet. A counter
read as new may have been written up to one reading earlier, hence whoever reads seldom waits less long afterwards: in
all a node is lost at most `timeout_s` and half a beat after its last beat. A node that cannot beat counts from the
moment it sent its last beat that was answered, asks itself four times a beat, and gives up two beats before
`timeout_s`: so it is the first of the two, by a quarter of a beat at least (`own_limit_s`). Its monitors, which need
not ask, end its ranks where it has not by then (`lease_s`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping


def own_limit_s(timeout_s: float, beat_s: float) -> float:
    """How long a node, asking itself every quarter of a beat, may be without an answered beat."""
    return timeout_s - 2 * beat_s


def lease_s(timeout_s: float, beat_s: float) -> float:
    """How long the ranks of a node may run after its last answered beat, whatever has become of its launcher.

    That one has given up by then if it could. Others count the node as lost a quarter of a beat later at the earliest:
    whoever reads every second beat waits one and a half beats less than `timeout_s` after its last news.
    """
    return timeout_s - 1.75 * beat_s


class Silence:
    """Watches the counters of some nodes. Time in which nobody read, because the reader slept too, counts for nobody.

    Args:
        timeout_s: a node silent for so long is lost.
        beat_s: the period of beats.
        period_s: that of readings, two beats at most; by default each beat. It may be set anew.
    """

    def __init__(self, timeout_s: float, beat_s: float, period_s: float | None = None) -> None:
        self._timeout_s, self._beat_s = timeout_s, beat_s
        self.period_s = beat_s if period_s is None else period_s
        self._last: dict[str, tuple[int | None, float]] = {}
        self._read_at: float | None = None

    def watch(self, nodes: Iterable[str], now: float) -> None:
        """Watches exactly these from now on; those already watched keep their news."""
        self._last = {node: self._last.get(node, (None, now)) for node in nodes}

    @property
    def nodes(self) -> list[str]:
        """Who is watched."""
        return list(self._last)

    def next_reading(self, now: float) -> float:
        """When to read again: after a period, or as soon as a node would be lost."""
        return min([now + self.period_s, *(since + self._limit_s for _, since in self._last.values())])

    @property
    def _limit_s(self) -> float:
        return self._timeout_s + self._beat_s / 2 - self.period_s

    def read(self, counters: Mapping[str, int | None], now: float) -> list[str]:
        """Takes a reading of counters; returns the nodes that are lost, which are watched no more."""
        overslept = 0.0 if self._read_at is None else max(0.0, now - self._read_at - 2 * self.period_s)
        self._read_at = now
        lost = []
        for node, (last, since) in list(self._last.items()):
            counter = counters.get(node)
            new = counter is not None and counter != last
            self._last[node] = (counter, now) if new else (last, since + overslept)
            if now - self._last[node][1] >= self._limit_s:
                lost.append(node)
                del self._last[node]
        return lost
