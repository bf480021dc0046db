"""Complaints about what others sent: each kind is said once, and then counted.

A rank, a node or a stranger may send what nobody can read as often as it likes; neither the console nor a log may be
filled by it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

_AGAIN = 1000
"""The count is said when it has grown so many times: 129,585 complaints in 5 s, as were seen, make two lines."""


class Complaints:
    """Counts complaints by kind, and says the first of each. For one thread.

    Args:
        say: gets the line.
    """

    def __init__(self, say: Callable[[str], object]) -> None:
        self._say = say
        self._counts: Counter[str] = Counter()
        self._said: dict[str, int] = {}

    def about(self, kind: str, text: str) -> None:
        """Says or counts one complaint.

        Args:
            kind: what it is about, in words of ours: there are as many counters as kinds.
            text: the complaint.
        """
        self._counts[kind] += 1
        count = self._counts[kind]
        if count == 1:
            self._said[kind] = count
            self._say(f"{text} (said once)")
        elif count >= self._said[kind] * _AGAIN:
            self._said[kind] = count
            self._say(f"{text} ({count} of this kind so far)")
