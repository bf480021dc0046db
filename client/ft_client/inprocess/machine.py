"""The restart machine of one rank: what happened in, what to do next out. Pure.

              assigned         started          ready            returned              done
    ASSIGNING ------> ARRIVING ------> PREPARING -----> RUNNING ---------> RETURNED ---------> DONE
        ^                |  |             |    \\ spare    |                   | |                ^
        |                |  | late        |     +---------|---> SPARE --------|-|----------------+
        |                |  v             |               |       |           | v late
        |                |  INTERRUPTING  |               |       |           | INTERRUPTING
        |   closed       v      v         v               v       v           v     v
        +----------- CLOSING <------------ RECOVERING: a fault here, or on another rank

From every phase LEFT: what ends this rank's part (the others go on without it).
"""

from __future__ import annotations

from enum import Enum, auto


class Phase(Enum):
    """Where a rank is in its iteration."""

    ASSIGNING = auto()
    ARRIVING = auto()
    PREPARING = auto()
    RUNNING = auto()
    RETURNED = auto()
    SPARE = auto()
    INTERRUPTING = auto()
    """Others did not come to a barrier in time: this rank interrupted the iteration."""
    RECOVERING = auto()
    CLOSING = auto()
    EXPELLING = auto()
    """Others did not come to the iteration's end in time: this rank told that they are lost."""
    DONE = auto()
    LEFT = auto()


class Event(Enum):
    """What can happen to a rank. An action ends with the event that it brought about."""

    ASSIGNED = auto()
    DISCARDED = auto()
    """The rank assignment has no place for this rank."""
    STARTED = auto()
    READY = auto()
    """Callbacks before the function went well; this rank is active."""
    SPARE = auto()
    """The same; this rank is not active."""
    RETURNED = auto()
    FAILED = auto()
    """An `Exception` here."""
    ENDED = auto()
    """What is to end this rank: another `BaseException`, a callback that broke its contract."""
    INTERRUPTED = auto()
    """A fault, here or elsewhere, interrupted the iteration."""
    RECOVERED = auto()
    CLOSED = auto()
    EXCLUDED = auto()
    """The iteration closed, and the others count this rank as lost."""
    DONE = auto()
    LATE = auto()
    """The others did not come in time, or a part of the wrapper did not end in time."""
    LOST = auto()
    """The store is gone."""


class Action(Enum):
    """What a rank does next."""

    ASSIGN = auto()
    ARRIVE = auto()
    PREPARE = auto()
    RUN = auto()
    ANNOUNCE = auto()
    """Tells that the function returned, and waits for the others."""
    WAIT = auto()
    """Waits as a spare."""
    REPORT = auto()
    """Tells the others of a fault here."""
    RECOVER = auto()
    INTERRUPT_FOR_ABSENT = auto()
    INTERRUPT_FOR_UNFINISHED = auto()
    ACCOUNT = auto()
    """Comes to the end of a failed iteration, and waits for the others."""
    EXPEL = auto()
    COMPLETE = auto()
    DISCARD = auto()
    """Leaves, as all expect."""
    DEPART = auto()
    """Leaves, and tells the others."""
    LEAVE = auto()
    """Leaves; there is nobody to tell, or all know."""


_Next = tuple[Phase, tuple[Action, ...]]
_RECOVER: _Next = (Phase.RECOVERING, (Action.RECOVER,))
_REPORT: _Next = (Phase.RECOVERING, (Action.REPORT, Action.RECOVER))
_DEPART: _Next = (Phase.LEFT, (Action.DEPART,))
_LEAVE: _Next = (Phase.LEFT, (Action.LEAVE,))
_ASSIGN: _Next = (Phase.ASSIGNING, (Action.ASSIGN,))

ENDS = frozenset({Phase.DONE, Phase.LEFT})

STEPS: dict[tuple[Phase, Event], _Next] = {
    (Phase.ASSIGNING, Event.ASSIGNED): (Phase.ARRIVING, (Action.ARRIVE,)),
    (Phase.ASSIGNING, Event.DISCARDED): (Phase.LEFT, (Action.DISCARD,)),
    (Phase.ASSIGNING, Event.INTERRUPTED): _RECOVER,
    (Phase.ARRIVING, Event.STARTED): (Phase.PREPARING, (Action.PREPARE,)),
    (Phase.ARRIVING, Event.INTERRUPTED): _RECOVER,
    (Phase.ARRIVING, Event.LATE): (Phase.INTERRUPTING, (Action.INTERRUPT_FOR_ABSENT,)),
    (Phase.PREPARING, Event.READY): (Phase.RUNNING, (Action.RUN,)),
    (Phase.PREPARING, Event.SPARE): (Phase.SPARE, (Action.WAIT,)),
    (Phase.PREPARING, Event.FAILED): _REPORT,
    (Phase.PREPARING, Event.INTERRUPTED): _RECOVER,
    (Phase.RUNNING, Event.RETURNED): (Phase.RETURNED, (Action.ANNOUNCE,)),
    (Phase.RUNNING, Event.FAILED): _REPORT,
    (Phase.RUNNING, Event.INTERRUPTED): _RECOVER,
    (Phase.RETURNED, Event.DONE): (Phase.DONE, (Action.COMPLETE,)),
    (Phase.RETURNED, Event.INTERRUPTED): _RECOVER,
    (Phase.RETURNED, Event.LATE): (Phase.INTERRUPTING, (Action.INTERRUPT_FOR_UNFINISHED,)),
    (Phase.SPARE, Event.DONE): (Phase.DONE, (Action.COMPLETE,)),
    (Phase.SPARE, Event.INTERRUPTED): _RECOVER,
    (Phase.INTERRUPTING, Event.INTERRUPTED): _RECOVER,
    (Phase.INTERRUPTING, Event.DONE): (Phase.DONE, (Action.COMPLETE,)),
    (Phase.INTERRUPTING, Event.STARTED): (Phase.PREPARING, (Action.PREPARE,)),
    (Phase.RECOVERING, Event.RECOVERED): (Phase.CLOSING, (Action.ACCOUNT,)),
    (Phase.RECOVERING, Event.FAILED): _DEPART,
    (Phase.RECOVERING, Event.DONE): (Phase.DONE, (Action.COMPLETE,)),
    (Phase.CLOSING, Event.CLOSED): _ASSIGN,
    (Phase.CLOSING, Event.EXCLUDED): _LEAVE,
    (Phase.CLOSING, Event.LATE): (Phase.EXPELLING, (Action.EXPEL,)),
    (Phase.EXPELLING, Event.CLOSED): _ASSIGN,
    (Phase.EXPELLING, Event.EXCLUDED): _LEAVE,
}
"""What is not listed: `LOST` leaves, everything else departs."""


def step(phase: Phase, event: Event) -> tuple[Phase, tuple[Action, ...]]:
    """The next phase, and what to do on the way, in this order. In `ENDS` nothing happens any more."""
    if phase in ENDS:
        return phase, ()
    if (known := STEPS.get((phase, event))) is not None:
        return known
    return _LEAVE if event is Event.LOST else _DEPART
