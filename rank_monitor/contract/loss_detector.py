"""Finds lost nodes by counters that the nodes increase and by the reader's own clock. Pure.

The coordinator reads the counters of all nodes by it (`job/coordinator/beat_schedule.py`), and the standalone agent of
a rank without a launcher those of the other members of the call.

A counter is compared with its last value, and the reader's clock with itself: clocks of two hosts are never compared.
Any other value than the last one is a sign of life, a smaller one too: a store that was restarted counts from the
beginning again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping


class LossDetector:
    """Watches the counters of some nodes.

    Args:
        limit_s: a node is lost when its counter has stood still for so many seconds. May be changed at any time.
        longest_step_s: from one reading to the next no more than this counts: a reader that was itself stopped has
            missed what the nodes did meanwhile. May be changed at any time.
    """

    def __init__(self, limit_s: float, longest_step_s: float) -> None:
        self.limit_s = limit_s
        self.longest_step_s = longest_step_s
        self._last: dict[str, tuple[int | None, float]] = {}
        self._read_at: float | None = None

    @property
    def nodes(self) -> list[str]:
        """The nodes that are watched."""
        return list(self._last)

    def watch(self, nodes: Iterable[str], now: float) -> None:
        """Watches exactly these nodes from now on. A new node has the whole limit; the time of the others goes on."""
        self._last = {node: self._last.get(node, (None, now)) for node in nodes}

    def next_loss(self) -> float | None:
        """Returns when the first node is lost if no counter changes (monotonic seconds); None: no node is watched."""
        return min((since + self.limit_s for _, since in self._last.values()), default=None)

    def read(self, counters: Mapping[str, int | None], now: float) -> list[str]:
        """Processes a reading of the counters. Returns the nodes that are lost, and stops watching them.

        Args:
            counters: by node; a counter that is missing or None counts as unchanged.
            now: monotonic seconds.
        """
        overslept_s = 0.0
        if self._read_at is not None:
            overslept_s = max(0.0, now - self._read_at - self.longest_step_s)
        self._read_at = now
        lost = []
        for node, (last, since) in list(self._last.items()):
            counter = counters.get(node)
            if counter is not None and counter != last:
                self._last[node] = (counter, now)
            elif now - since - overslept_s >= self.limit_s:
                lost.append(node)
                del self._last[node]
            else:
                self._last[node] = (last, since + overslept_s)
        return lost
