"""The restart machine of one rank: phase and event in, next phase and actions out. Pure.

Five state machines follow one restart: rank, monitor, agent, store, recovery level (`contract/restart_phase.py`
explains them). This one decides; the others follow its phase. A restart begins with a fault, here or on another rank.
It passes RECOVERING, FINALIZING and CLOSING, and ends with ASSIGNING of the next round.

              assigned         started          ready            returned              done
    ASSIGNING ------> ARRIVING ------> PREPARING -----> RUNNING ---------> WAITING ----------> DONE
        ^                |  |             |    | spare    |                ^  | |
        |                |  | late        |    +----------|----------------+  | | late
        |                |  v             |               |                   | v
        |                |  INTERRUPTING  |               |                   | INTERRUPTING
        |   closed       v      v         v               v                   v     v
        |                +------+------> RECOVERING: a fault here, or on another rank
        |           recovered               | interrupted: what ran here was aborted
        +--- CLOSING <------ FINALIZING <---+

From every phase to LEFT: an event that ends the call on this rank (the others go on without it).

`call.py` asks it after each event, and carries out the actions.
"""

from __future__ import annotations

from enum import Enum, auto

from rank_monitor.contract.restart_phase import RestartPhase


class RestartEvent(Enum):
    """The events of a rank. Each action ends with one."""

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
    """The call ends on this rank: by another `BaseException`, or a callback that broke its contract."""
    INTERRUPTED = auto()
    """A fault, here or elsewhere, interrupted the round, and what ran here was aborted."""
    RECOVERED = auto()
    CLOSED = auto()
    EXCLUDED = auto()
    """The round closed, and the others count this rank as lost."""
    DONE = auto()
    LATE = auto()
    """The other ranks did not arrive in time, or a part of the wrapper did not end in time."""
    LOST = auto()
    """The store is gone."""


class RestartAction(Enum):
    """The actions of a rank."""

    ASSIGN = auto()
    ARRIVE = auto()
    PREPARE = auto()
    RUN = auto()
    ANNOUNCE = auto()
    """Reports that the function returned, and waits for the others."""
    WAIT = auto()
    """Waits as a spare."""
    REPORT = auto()
    """Reports a fault of this rank to the others."""
    AWAIT_ABORT = auto()
    """Waits until what ran here was aborted, after a fault that this rank noticed before."""
    FINALIZE = auto()
    """Calls `finalize` and the health check."""
    INTERRUPT_FOR_ABSENT = auto()
    INTERRUPT_FOR_UNFINISHED = auto()
    ACCOUNT = auto()
    """Arrives at the end of a failed round, and waits for the others."""
    EXPEL = auto()
    COMPLETE = auto()
    DISCARD = auto()
    """Leaves, as all ranks expect."""
    DEPART = auto()
    """Leaves, and reports that to the others."""
    LEAVE = auto()
    """Leaves without a report: no rank is left, or all know."""


_Next = tuple[RestartPhase, tuple[RestartAction, ...]]
_RECOVER: _Next = (RestartPhase.RECOVERING, (RestartAction.AWAIT_ABORT,))
_REPORT: _Next = (RestartPhase.RECOVERING, (RestartAction.REPORT, RestartAction.AWAIT_ABORT))
_DEPART: _Next = (RestartPhase.LEFT, (RestartAction.DEPART,))
_LEAVE: _Next = (RestartPhase.LEFT, (RestartAction.LEAVE,))
_ASSIGN: _Next = (RestartPhase.ASSIGNING, (RestartAction.ASSIGN,))

ENDS = frozenset({RestartPhase.DONE, RestartPhase.LEFT})

STEPS: dict[tuple[RestartPhase, RestartEvent], _Next] = {
    (RestartPhase.ASSIGNING, RestartEvent.ASSIGNED): (RestartPhase.ARRIVING, (RestartAction.ARRIVE,)),
    (RestartPhase.ASSIGNING, RestartEvent.DISCARDED): (RestartPhase.LEFT, (RestartAction.DISCARD,)),
    (RestartPhase.ASSIGNING, RestartEvent.INTERRUPTED): _RECOVER,
    (RestartPhase.ARRIVING, RestartEvent.STARTED): (RestartPhase.PREPARING, (RestartAction.PREPARE,)),
    (RestartPhase.ARRIVING, RestartEvent.INTERRUPTED): _RECOVER,
    (RestartPhase.ARRIVING, RestartEvent.LATE): (RestartPhase.INTERRUPTING, (RestartAction.INTERRUPT_FOR_ABSENT,)),
    (RestartPhase.PREPARING, RestartEvent.READY): (RestartPhase.RUNNING, (RestartAction.RUN,)),
    (RestartPhase.PREPARING, RestartEvent.SPARE): (RestartPhase.WAITING, (RestartAction.WAIT,)),
    (RestartPhase.PREPARING, RestartEvent.FAILED): _REPORT,
    (RestartPhase.PREPARING, RestartEvent.INTERRUPTED): _RECOVER,
    (RestartPhase.RUNNING, RestartEvent.RETURNED): (RestartPhase.WAITING, (RestartAction.ANNOUNCE,)),
    (RestartPhase.RUNNING, RestartEvent.FAILED): _REPORT,
    (RestartPhase.RUNNING, RestartEvent.INTERRUPTED): _RECOVER,
    (RestartPhase.WAITING, RestartEvent.DONE): (RestartPhase.DONE, (RestartAction.COMPLETE,)),
    (RestartPhase.WAITING, RestartEvent.INTERRUPTED): _RECOVER,
    (RestartPhase.WAITING, RestartEvent.LATE): (RestartPhase.INTERRUPTING, (RestartAction.INTERRUPT_FOR_UNFINISHED,)),
    (RestartPhase.INTERRUPTING, RestartEvent.INTERRUPTED): _RECOVER,
    (RestartPhase.INTERRUPTING, RestartEvent.DONE): (RestartPhase.DONE, (RestartAction.COMPLETE,)),
    (RestartPhase.INTERRUPTING, RestartEvent.STARTED): (RestartPhase.PREPARING, (RestartAction.PREPARE,)),
    (RestartPhase.RECOVERING, RestartEvent.INTERRUPTED): (RestartPhase.FINALIZING, (RestartAction.FINALIZE,)),
    (RestartPhase.FINALIZING, RestartEvent.RECOVERED): (RestartPhase.CLOSING, (RestartAction.ACCOUNT,)),
    (RestartPhase.RECOVERING, RestartEvent.DONE): (RestartPhase.DONE, (RestartAction.COMPLETE,)),
    (RestartPhase.CLOSING, RestartEvent.CLOSED): _ASSIGN,
    (RestartPhase.CLOSING, RestartEvent.EXCLUDED): _LEAVE,
    (RestartPhase.CLOSING, RestartEvent.LATE): (RestartPhase.EXPELLING, (RestartAction.EXPEL,)),
    (RestartPhase.EXPELLING, RestartEvent.CLOSED): _ASSIGN,
    (RestartPhase.EXPELLING, RestartEvent.EXCLUDED): _LEAVE,
}
"""Phase and event -> next phase and actions. Of those that are not listed, `LOST` leaves, and all others depart."""


def step(phase: RestartPhase, event: RestartEvent) -> tuple[RestartPhase, tuple[RestartAction, ...]]:
    """The next phase, and the actions on the way in their order. In a phase of `ENDS` there are none."""
    if phase in ENDS:
        return phase, ()
    known = STEPS.get((phase, event))
    if known is not None:
        return known
    if event is RestartEvent.LOST:
        return _LEAVE
    return _DEPART
