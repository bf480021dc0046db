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

From every phase to LEFT: an event that ends the call on this rank (the other ranks go on without it).

`call.py` asks `step` after each event, and carries out the actions one by one. The diagram leaves three things out:

- In INTERRUPTING this rank has interrupted the round because other ranks are missing. The last missing rank may have
  arrived at the same moment: then the round starts (STARTED), or is done (DONE), after all.
- An action can be cut off by the watcher's interruption. Its event is then INTERRUPTED, whatever it was about to do.
- EXPELLING follows CLOSING when ranks do not arrive at the end of the round: they are reported as lost, so that the
  round can close without them.
"""

from __future__ import annotations

from enum import Enum, auto

from rank_monitor.contract.restart_phase import RestartPhase


class RestartEvent(Enum):
    """What happened to a rank. Each action ends with exactly one event, which is the input of the next `step`.

    STARTED, ENDED, INTERRUPTED, CLOSED, DONE and LOST may also come from the store's watcher (`store_watcher.py`): they
    concern all ranks.
    """

    ASSIGNED = auto()
    """The rank has its numbers for the next round."""
    DISCARDED = auto()
    """The rank assignment has no place for this rank."""
    STARTED = auto()
    """Every rank has arrived at the start of the round."""
    READY = auto()
    """The callbacks before the function succeeded, and this rank is active: it calls the function."""
    SPARE = auto()
    """The callbacks before the function succeeded, and this rank is a spare: it waits."""
    RETURNED = auto()
    """The function returned on this rank."""
    FAILED = auto()
    """The function or a callback before it raised an `Exception` on this rank: a fault, which restarts."""
    ENDED = auto()
    """The call ends on this rank. The function raised a `BaseException` that is no `Exception`, a callback broke its
    contract, or the last rank at the start decided that no further restart helps."""
    INTERRUPTED = auto()
    """A fault, on this rank or another, interrupted the round. What ran on this rank was aborted."""
    RECOVERED = auto()
    """`finalize` and the health check succeeded after an interruption."""
    CLOSED = auto()
    """The interrupted round has closed: it is known who takes part in the next round, and this rank does."""
    EXCLUDED = auto()
    """The interrupted round has closed, and the other ranks count this rank as lost."""
    DONE = auto()
    """The function has returned on every active rank."""
    LATE = auto()
    """The other ranks did not arrive in time, or a part of the wrapper did not end in time."""
    LOST = auto()
    """The store does not answer, or holds an invalid value."""


class RestartAction(Enum):
    """What a rank does next. `call.py: _ACTIONS` has what carries out each."""

    ASSIGN = auto()
    """Calls the rank assignment, which gives this rank its numbers in the next round."""
    ARRIVE = auto()
    """Enters the barrier at the start of the round, and waits for the other ranks."""
    PREPARE = auto()
    """Calls `initialize` and the health check."""
    RUN = auto()
    """Calls the user's function."""
    ANNOUNCE = auto()
    """Reports that the function returned, and waits for the other ranks."""
    WAIT = auto()
    """Waits as a spare."""
    REPORT = auto()
    """Writes a fault of this rank to the store, which interrupts the round on every rank."""
    AWAIT_ABORT = auto()
    """Waits until what ran on this rank was aborted. A rank whose function failed by itself comes here before its
    watcher has read the fault in the store, and must not call `finalize` while collectives are still being aborted."""
    FINALIZE = auto()
    """Calls `finalize` and the health check."""
    INTERRUPT_FOR_ABSENT = auto()
    """Interrupts the round because ranks have not arrived at its start, and reports these ranks as lost."""
    INTERRUPT_FOR_UNFINISHED = auto()
    """Interrupts the round because the function has not returned on all active ranks within `completion_timeout`. Those
    ranks are not reported as lost: the restart may free them."""
    ACCOUNT = auto()
    """Enters the barrier at the end of an interrupted round, and waits for the other ranks."""
    EXPEL = auto()
    """Reports the ranks that have not arrived at the end of the round as lost."""
    COMPLETE = auto()
    """Calls `completion`: the call has succeeded on all ranks."""
    DISCARD = auto()
    """Leaves after the rank assignment had no place for this rank. Every rank computed the same assignment, so no other
    rank waits for this one."""
    DEPART = auto()
    """Leaves, and reports the departure to the other ranks, which restart without this rank."""
    LEAVE = auto()
    """Leaves without a report: the store is gone, or the other ranks have excluded this rank already."""


_Next = tuple[RestartPhase, tuple[RestartAction, ...]]
_RECOVER: _Next = (RestartPhase.RECOVERING, (RestartAction.AWAIT_ABORT,))
_REPORT: _Next = (RestartPhase.RECOVERING, (RestartAction.REPORT, RestartAction.AWAIT_ABORT))
_DEPART: _Next = (RestartPhase.LEFT, (RestartAction.DEPART,))
_LEAVE: _Next = (RestartPhase.LEFT, (RestartAction.LEAVE,))
_ASSIGN: _Next = (RestartPhase.ASSIGNING, (RestartAction.ASSIGN,))

ENDS = frozenset({RestartPhase.DONE, RestartPhase.LEFT})
"""The phases after which the call is over on this rank."""

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
"""Phase and event -> next phase and actions.

A pair that is not listed ends the call on this rank. LOST leaves without a report: there is no store to write one to.
Every other event departs, which reports the departure."""


def step(phase: RestartPhase, event: RestartEvent) -> tuple[RestartPhase, tuple[RestartAction, ...]]:
    """Returns the next phase, and the actions that lead into it, in their order.

    The caller carries out one action after the other, and passes the event of the last one to the next `step`. If an
    action ends with ENDED or LOST, the actions after it are skipped. In a phase of `ENDS` there are no actions.
    """
    if phase in ENDS:
        return phase, ()
    known = STEPS.get((phase, event))
    if known is not None:
        return known
    if event is RestartEvent.LOST:
        return _LEAVE
    return _DEPART
