"""The part of a journal that fits into a bundle: its first lines, and the latest ones. Pure."""

from __future__ import annotations

from collections import deque

_SHARE_OF_HEAD = 8
"""One part of so many is for the begin of the journal: the start of the job and of its first cycles."""


class Slice:
    """Takes the lines of a journal in their order, and keeps at most `most` bytes of them.

    Attributes:
        left_out: how many lines are missing between the first and the latest ones.
    """

    def __init__(self, most: int) -> None:
        self.left_out = 0
        self._head: list[bytes] = []
        self._tail: deque[bytes] = deque()
        self._head_room = most // _SHARE_OF_HEAD
        self._tail_room = most - self._head_room

    def add(self, line: bytes) -> None:
        """Takes the next line."""
        if not self._tail and len(line) <= self._head_room:
            self._head_room -= len(line)
            self._head.append(line)
            return
        self._tail.append(line)
        self._tail_room -= len(line)
        while self._tail_room < 0:
            self._tail_room += len(self._tail.popleft())
            self.left_out += 1

    def lines(self) -> list[bytes]:
        """Returns what was kept."""
        return [*self._head, *self._tail]
