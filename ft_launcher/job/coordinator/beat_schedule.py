"""When nodes beat, read the beats of others, and give up. Pure.

A beat is an addition of one to a node's counter in the job's store. The coordinator reads the counters of all nodes.
Two other members, its deputies, read the counter of the coordinator. `link/node_link.py` makes beats by `BeatSchedule`;
`link/coordinator_service.py` and `link/attempt.py` read them by `BeatReader`.

**How many operations.** Nodes leave out some beats, so that an idle job makes one store operation per node and beat in
total. A read of the store replaces a beat. The coordinator reads once in each beat and beats every second time; so does
a deputy. That is more than one operation per beat, and the other members leave out as many beats together. Where these
members are too few (`_ENOUGH`), coordinator and deputies read every second time and beat in between, and `BeatReader`
allows for the longer period. A node never leaves out two beats in a row, so it beats at least once in two periods, and
a timeout has at least six. On a slow connection no beat is left out.

**Who gives up when.** No two clocks are compared: each node counts by its own, from what it has seen itself. A node
that is cut off must end its ranks before the others go on without it. So three limits follow each other. With a beat of
1 s and a timeout of 12 s they are, in seconds after the last answered beat was sent:

    10.0    `own_limit_s`: the node itself, which checks four times a beat, gives up and ends its ranks
    10.25   `lease_s`: a timer that the node's monitors hold ends the ranks of a launcher that stands still
    10.5    the earliest time at which a reader can count the node as lost; the latest is 12.5

A reader cannot know when a new count was written, only that this was after its reading before. Hence a reader with a
longer period waits less time after the reading at which the count was new.
"""

from __future__ import annotations

from rank_monitor.contract.loss_detector import LossDetector

DEPUTIES = 2
"""Members that watch the coordinator as closely as it watches them. Two, so that the job outlives the loss of the
coordinator and of a deputy at once without a long wait."""
# Beats. Bounded, so that many operations at once do not make a node leave out beats for long afterwards.
_MAX_TO_LEAVE_OUT = 2.0
_ENOUGH = 7
"""With this many members, the four that watch nobody leave out every second beat, for what a coordinator and two
deputies make more. With fewer members they would have to leave out two beats in a row."""


def read_every(members: int) -> int:
    """Returns how often coordinator and deputies read, on a store apart from the nodes: 1 in each beat, 2 in every
    second one. `members`: how many nodes the cycle has."""
    if members >= _ENOUGH:
        return 1
    return 2


class BeatSchedule:
    """Decides which of its beats one node leaves out.

    Threads: the thread that beats calls `next_is_made`; any thread may call the other methods.
    """

    def __init__(self) -> None:
        self._share = 0.0
        """How many beats to leave out in each period, for the operations of coordinator and deputies."""
        self._to_leave_out = 0.0
        """How many beats are to be left out now; one is, once this is 1."""
        self._left_out = False
        """Whether the last beat was left out."""

    def serve(self, rank: int, members: int, deputies: int) -> None:
        """Sets the share of beats that this node leaves out for the extra operations of coordinator and deputies.

        Called when a cycle begins.

        Args:
            rank: the node rank of this node, so that the nodes take turns.
            members: how many nodes the cycle has.
            deputies: how many deputies there are; 0 if this node is one of them, or if no coordinator beats.
        """
        others = members - 1 - deputies
        too_many = deputies and read_every(members) == 1
        if too_many and others > 0:
            self._share = (1 + deputies / 2) / others
        else:
            self._share = 0.0
        if self._share:
            # Each node begins at another point, so that they do not all leave out the same beat.
            self._to_leave_out = rank / members
        else:
            self._to_leave_out = 0.0

    def note_operation(self) -> None:
        """Counts an operation other than a beat; a later beat is left out for it."""
        self._to_leave_out = min(self._to_leave_out + 1.0, _MAX_TO_LEAVE_OUT)

    def next_is_made(self, quick: bool = True) -> bool:
        """Whether to make the beat that is due now. To be called once per beat.

        Args:
            quick: whether the last beat was answered soon. If not, none is left out: the next may come late as well.
        """
        self._to_leave_out = min(self._to_leave_out + self._share, _MAX_TO_LEAVE_OUT)
        self._left_out = quick and not self._left_out and self._to_leave_out >= 1.0
        if self._left_out:
            self._to_leave_out -= 1.0
        return not self._left_out


class BeatReader(LossDetector):
    """Detects the nodes that have made no beat for too long, by readings of their counters.

    Args:
        timeout_s: a node without a beat for so many seconds is lost.
        beat_s: the period of beats (seconds).
        period_s: the period of readings (seconds), two beats at most.
    """

    def __init__(self, timeout_s: float, beat_s: float, period_s: float) -> None:
        super().__init__(reader_limit_s(timeout_s, beat_s, period_s), 2 * period_s)
        self.period_s = period_s
        self._timeout_s = timeout_s
        self._beat_s = beat_s

    def read_every(self, period_s: float) -> None:
        """Sets the period of readings (seconds), and with it `limit_s` and `longest_step_s` of the base class."""
        self.period_s = period_s
        self.limit_s = reader_limit_s(self._timeout_s, self._beat_s, period_s)
        self.longest_step_s = 2 * period_s

    def next_reading(self, now: float) -> float:
        """Returns when to read again (monotonic seconds): after a period, or as soon as a node would be lost."""
        loss = self.next_loss()
        if loss is None:
            return now + self.period_s
        return min(now + self.period_s, loss)


def own_limit_s(timeout_s: float, beat_s: float) -> float:
    """Returns after how many seconds without an answered beat a node gives up. It checks every quarter of a beat, so it
    ends its ranks a quarter of a beat later at most."""
    return timeout_s - 2 * beat_s


def reader_limit_s(timeout_s: float, beat_s: float, period_s: float) -> float:
    """Returns after how many seconds without a new count a reader takes a node for lost, from the reading at which the
    last count was new.

    A beat may have been made up to one period of readings before the reading that found it, so the period is
    subtracted. Half a beat is added, so that a reader of every second beat comes after the node itself and after its
    monitors.
    """
    return timeout_s + beat_s / 2 - period_s


def lease_s(timeout_s: float, beat_s: float) -> float:
    """Returns for how many seconds the ranks of a node may run after its last answered beat.

    A launcher that runs has given up by then. Others count the node as lost a quarter of a beat later at the earliest:
    a reader of every second beat waits `timeout_s` less one and a half beats after the last new count.
    """
    return timeout_s - 1.75 * beat_s
