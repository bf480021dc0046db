"""The phase of a rank in an in-process restart, and what monitor and agent derive from it. Pure data.

Five state machines follow one restart. The first decides; the second, third and fifth derive their state from its
phase: the rank reports each change that means something to one of them (`RestartReport`).

1. **The rank** (`client/ft_client/inprocess/restart/machine.py`) decides what it does next: event in, phase and actions
   out. A call of a wrapped function is a sequence of rounds: ASSIGNING (its number in the round), ARRIVING (the start,
   for which all ranks wait), PREPARING and RUNNING (callbacks and the function), WAITING (the function has returned
   here). A restart begins when a fault, on any rank, is written to the ranks' store. Each rank is interrupted
   (INTERRUPTING), waits until its collectives are aborted (RECOVERING), calls `finalize` and the health check
   (FINALIZING), and waits for the others at the end of the round (CLOSING). ASSIGNING of the next round follows. The
   call ends with COMPLETING and DONE on all ranks; or on this one with LEAVING, then LEFT or GAVE_UP.
2. **The monitor** (`rank_monitor/watched_wrapper.py`) judges by `JUDGED`: progress while the function runs, the end of
   a callback, nothing while the rank waits for other ranks, or what it judges of a rank without a wrapper.
3. **The agent** (`ft_launcher/agent/in_process/recovery_level.py`) knows by `AT_WORK`, `RESTARTING` and `GONE` what the
   death of the rank means, and until when a restart must have come to its end.
4. **The store's keys** (`rank_monitor/contract/rounds/`) hold what all ranks have agreed on: whether a round has
   started, how it ended, and who takes part in the next. A rank's machine gets its events from them.
5. **The recovery level** of the node is 1 while ranks restart in process. It is 2, a new cycle with new processes, when
   the agent finds that they cannot, or did not in time.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto


class RestartPhase(str, Enum):
    """The phase of a rank in a call of a wrapped function. Sent as text."""

    NONE = "none"
    """No call is under way."""
    JOINING = "joining"
    """The rank was started again alone, and the other ranks have not let it in yet."""
    ASSIGNING = "assigning"
    """The rank assignment runs, for the round that comes."""
    ARRIVING = "arriving"
    """The rank waits for the others at the start of the round."""
    PREPARING = "preparing"
    """`initialize` and the health check before the function."""
    RUNNING = "running"
    """The function runs. Reported already when PREPARING begins: both are judged alike."""
    WAITING = "waiting"
    """The rank waits for the others: the function returned here, or this rank is a spare."""
    INTERRUPTING = "interrupting"
    """The function was interrupted and has not ended yet; or other ranks did not arrive at a barrier in time, and this
    rank interrupted the round."""
    RECOVERING = "recovering"
    """The main thread is free, and waits until it is known that the collectives that ran here were aborted."""
    FINALIZING = "finalizing"
    """`finalize` and the health check after an interruption."""
    CLOSING = "closing"
    """The rank waits for the others at the end of an interrupted round."""
    EXPELLING = "expelling"
    """Other ranks did not arrive at the end of the round in time: this rank has reported them as lost."""
    COMPLETING = "completing"
    """The callback `completion`: the function is done on all ranks."""
    DONE = "done"
    """The call has ended on all ranks."""
    LEAVING = "leaving"
    """The callback `terminate`: this rank leaves the call."""
    LEFT = "left"
    """This rank has left, and has reported that to the others."""
    GAVE_UP = "gave_up"
    """This rank has left since no further restart would help."""

    __str__ = str.__str__


class Judged(Enum):
    """What a monitor judges of a rank."""

    SOFT = auto()
    """Progress of the main thread, sections and heartbeats. The rank is asked to restart before it is killed."""
    HARD = auto()
    """A callback must end within `hard_timeout_s` of the report, else the rank is killed."""
    NOTHING = auto()
    """Nothing: the rank waits for other ranks, with deadlines of its own. Open sections are closed."""
    AS_WITHOUT = auto()
    """What is judged of a rank that has no wrapper."""


JUDGED: Mapping[RestartPhase, Judged] = {
    RestartPhase.NONE: Judged.AS_WITHOUT,
    RestartPhase.JOINING: Judged.NOTHING,
    RestartPhase.ASSIGNING: Judged.HARD,
    RestartPhase.ARRIVING: Judged.NOTHING,
    RestartPhase.PREPARING: Judged.SOFT,
    RestartPhase.RUNNING: Judged.SOFT,
    RestartPhase.WAITING: Judged.NOTHING,
    RestartPhase.INTERRUPTING: Judged.HARD,
    RestartPhase.RECOVERING: Judged.NOTHING,
    RestartPhase.FINALIZING: Judged.HARD,
    RestartPhase.CLOSING: Judged.NOTHING,
    RestartPhase.EXPELLING: Judged.NOTHING,
    RestartPhase.COMPLETING: Judged.HARD,
    RestartPhase.DONE: Judged.AS_WITHOUT,
    RestartPhase.LEAVING: Judged.HARD,
    RestartPhase.LEFT: Judged.AS_WITHOUT,
    RestartPhase.GAVE_UP: Judged.AS_WITHOUT,
}
"""The monitor's table: what is judged in each phase."""

RESTARTING = frozenset({RestartPhase.RECOVERING, RestartPhase.FINALIZING, RestartPhase.CLOSING, RestartPhase.EXPELLING})
"""A table of the agent's: the rank deals with a fault, and must run again within the limit of the restart."""
GONE = frozenset({RestartPhase.LEFT, RestartPhase.GAVE_UP})
"""A table of the agent's: the rank leaves by itself, and no other rank waits for it."""
AT_WORK = frozenset(RestartPhase) - GONE - {RestartPhase.NONE, RestartPhase.JOINING, RestartPhase.DONE}
"""A table of the agent's: the rank is inside the wrapped function, or on its way back into it. If the rank dies, the
others restart."""
ENTERING = frozenset({RestartPhase.JOINING, RestartPhase.ASSIGNING, RestartPhase.ARRIVING})
"""A table of the agent's: the first phases of a call, before its function can have run. The agent begins to serve the
stores of a call's rounds when a rank reports one of them."""
