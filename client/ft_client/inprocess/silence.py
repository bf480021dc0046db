"""Which nodes fell silent, by counters that they increase and by the reader's own clock. Pure."""

from __future__ import annotations

from collections.abc import Mapping


class Silence:
    """Judges nodes that beat at least once.

    Args:
        timeout_s: a node whose counter stands still this long is lost.
        longest_step_s: what counts at most from one look to the next, for a reader that was itself stopped.
    """

    def __init__(self, timeout_s: float, longest_step_s: float) -> None:
        self._timeout_s, self._longest_step_s = timeout_s, longest_step_s
        self._counters: dict[str, int] = {}
        self._silent_s: dict[str, float] = {}
        self._looked_at: float | None = None

    def look(self, counters: Mapping[str, int], now: float) -> list[str]:
        """Takes in the counters of all nodes; returns the nodes that are lost since this look, each once.

        Args:
            now: monotonic seconds.
        """
        step_s = 0.0 if self._looked_at is None else min(now - self._looked_at, self._longest_step_s)
        self._looked_at = now
        lost = []
        for node, counter in counters.items():
            if counter != self._counters.get(node, 0):
                self._counters[node], self._silent_s[node] = counter, 0.0
            elif node in self._silent_s:
                before_s = self._silent_s[node]
                self._silent_s[node] = before_s + step_s
                if before_s < self._timeout_s <= self._silent_s[node]:
                    lost.append(node)
        return lost
