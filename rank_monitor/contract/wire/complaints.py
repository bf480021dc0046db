"""Complaints about what others sent: the first of each kind is printed, and the others are counted.

A rank, a node or a stranger may send what nobody can read, and as often as it likes. Neither the console nor a log may
be filled by that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

_AGAIN = 1000
"""The count is printed when it has become so many times what was printed last. 129,585 complaints in 5 s, as were seen,
make two lines."""


class Complaints:
    """Counts complaints by kind, and prints the first of each. For one thread.

    Args:
        say: called with each line to be printed.
    """

    def __init__(self, say: Callable[[str], object]) -> None:
        self._say = say
        self._counts: Counter[str] = Counter()
        self._said: dict[str, int] = {}

    def about(self, kind: str, text: str) -> None:
        """Prints or counts one complaint.

        Args:
            kind: what the complaint is about, in words of ours and not of the sender: each kind costs a counter.
            text: the line.
        """
        self._counts[kind] += 1
        count = self._counts[kind]
        if count == 1:
            self._said[kind] = count
            self._say(f"{text} (said once)")
        elif count >= self._said[kind] * _AGAIN:
            self._said[kind] = count
            self._say(f"{text} ({count} of this kind so far)")
