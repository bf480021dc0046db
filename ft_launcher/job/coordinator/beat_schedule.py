"""When nodes beat, read the beats of others, and give up. Pure.

Nodes leave out some beats, so that an idle job makes one store operation per node and beat in total.

A read of the store replaces a beat. The coordinator reads at each beat and beats at every second one; so does a deputy.
The other members leave out as many beats as that is too much. Where there are too few others, coordinator and deputies
read at every second beat and beat in between, and `BeatReader` allows for it. A node never leaves out two beats in a
row, so it beats at least every two beats, and a timeout has at least six. On a slow connection no beat is left out.

A new count may have been written up to one reading earlier, hence a reader with a longer period waits less time after
it: a node is lost at most `timeout_s` and half a beat after its last beat. A node that cannot beat counts from the time
at which it sent its last answered beat, checks four times a beat, and gives up two beats before `timeout_s`. So it is
the first to do so, by at least a quarter of a beat (`own_limit_s`). Its monitors, which hold a timer, end its ranks if
it has not done so by then (`lease_s`).
"""

from __future__ import annotations

from rank_monitor.contract.loss_detector import LossDetector

DEPUTIES = 2
"""Members that watch the coordinator as closely as it watches them."""
# Bounded, so that many operations at once do not make a node leave out beats for long afterwards.
_MAX_TO_LEAVE_OUT = 2.0
_ENOUGH = 7
"""With this many members, those that watch nobody can leave out what a coordinator and two deputies make more."""


def look_every(members: int) -> int:
    """Returns in which beats coordinator and deputies read, on a store apart from the nodes: 1 all, 2 every second."""
    if members >= _ENOUGH:
        return 1
    return 2


class BeatSchedule:
    """Decides which of its beats one node leaves out."""

    def __init__(self) -> None:
        self._share = 0.0
        self._to_leave_out = 0.0
        self._left_out = False

    def serve(self, rank: int, members: int, deputies: int) -> None:
        """Sets the share of beats that this node leaves out for the extra operations of coordinator and deputies.

        Args:
            rank: its rank among the `members` of the cycle: nodes take turns.
            deputies: how many; 0 if this node is one of them, or if no coordinator beats.
        """
        others = members - 1 - deputies
        too_many = deputies and look_every(members) == 1
        if too_many and others > 0:
            self._share = (1 + deputies / 2) / others
        else:
            self._share = 0.0
        if self._share:
            # Each node begins at another point, so that they do not all leave out the same beat.
            self._to_leave_out = rank / members
        else:
            self._to_leave_out = 0.0

    def looked(self) -> None:
        """Counts an operation other than a beat; a later beat is left out for it."""
        self._to_leave_out = min(self._to_leave_out + 1.0, _MAX_TO_LEAVE_OUT)

    def next_is_made(self, quick: bool = True) -> bool:
        """Whether to make the beat that is due now. To be called once per beat. `quick`: the last was answered soon."""
        self._to_leave_out = min(self._to_leave_out + self._share, _MAX_TO_LEAVE_OUT)
        self._left_out = quick and not self._left_out and self._to_leave_out >= 1.0
        if self._left_out:
            self._to_leave_out -= 1.0
        return not self._left_out


class BeatReader(LossDetector):
    """Detects the nodes that have not beaten for too long, by readings of their counters.

    Args:
        timeout_s: a node without a beat for so long is lost.
        beat_s: the period of beats.
        period_s: that of readings, two beats at most.
    """

    def __init__(self, timeout_s: float, beat_s: float, period_s: float) -> None:
        super().__init__(timeout_s, 2 * period_s)
        self._timeout_s = timeout_s
        self._beat_s = beat_s
        self.read_every(period_s)

    def read_every(self, period_s: float) -> None:
        """Sets the period of readings. A new beat was made up to one period before the reading that found it."""
        self.period_s = period_s
        self.limit_s = self._timeout_s + self._beat_s / 2 - period_s
        self.longest_step_s = 2 * period_s

    def next_reading(self, now: float) -> float:
        """Returns when to read again: after a period, or as soon as a node would be lost."""
        loss = self.next_loss()
        if loss is None:
            return now + self.period_s
        return min(now + self.period_s, loss)


def own_limit_s(timeout_s: float, beat_s: float) -> float:
    """Returns for how many seconds a node that checks every quarter of a beat may have no answered beat."""
    return timeout_s - 2 * beat_s


def lease_s(timeout_s: float, beat_s: float) -> float:
    """Returns for how many seconds the ranks of a node may run after its last answered beat.

    A launcher that runs has given up by then. Others count the node as lost a quarter of a beat later at the earliest:
    a reader of every second beat waits `timeout_s` less one and a half beats after the last new count.
    """
    return timeout_s - 1.75 * beat_s
