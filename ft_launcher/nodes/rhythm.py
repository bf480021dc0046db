"""Which beats a node leaves out, so that an idle job makes one store operation per node and beat, all in all. Pure.

A look at the store takes the place of a beat. The coordinator reads at each beat and beats at every second one; so
does a deputy. What these make too many, the other members leave out among them. Where those are too few for that,
coordinator and deputies read at every second beat and beat in between; `silence.py` makes up for it. Never are two
beats left out in a row, so that a node is heard every two beats, of the six at least that a timeout is long. On a slow
line all beats are made.
"""

from __future__ import annotations

_MOST_OWED = 2.0
_ENOUGH = 7
"""From so many members on, those that watch nobody are enough to make up for a coordinator and two deputies."""


def look_every(members: int) -> int:
    """At which beat coordinator and deputies look, on a store apart from the nodes: each, or every second."""
    return 1 if members >= _ENOUGH else 2


class Rhythm:
    """Of one node."""

    def __init__(self) -> None:
        self._share = self._owed = 0.0
        self._left_out = False

    def serve(self, rank: int, members: int, deputies: int) -> None:
        """From now on this node leaves out its share of what coordinator and deputies make too many, if they do.

        Args:
            rank: its place among the `members` of the cycle: nodes take turns.
            deputies: how many; 0 with this node being one of them, or without a coordinator that beats.
        """
        others = members - 1 - deputies
        too_many = deputies and look_every(members) == 1
        self._share = (1 + deputies / 2) / others if too_many and others > 0 else 0.0
        self._owed = rank / members if self._share else 0.0

    def looked(self) -> None:
        """An operation was made that was no beat."""
        self._owed = min(self._owed + 1.0, _MOST_OWED)

    def next_is_made(self, quick: bool = True) -> bool:
        """Whether the beat that is due now is made; to be asked once for each. `quick`: the last was answered soon."""
        self._owed = min(self._owed + self._share, _MOST_OWED)
        self._left_out = quick and not self._left_out and self._owed >= 1.0
        self._owed -= self._left_out
        return not self._left_out
