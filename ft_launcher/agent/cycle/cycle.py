"""One cycle, from the start of its ranks until it ends: events in, what happens next out. Pure.

            RankEnded(0), all done            -> SUCCEEDED
    RUNNING RankEnded(other)                  -> FAILED
            Condemned, then RankEnded         -> FAILED, whatever the code
            Lost, none is left                -> SUCCEEDED if one is done, else FAILED
            EndedElsewhere                    -> by the reason of the end (`_PHASES_ELSEWHERE`)
            an ending that is not the ranks'  -> that one

Called by `agent/node_agent.py`. The first ending stands; later events are evidence only. A lost rank does not count,
also when it was started again, until it takes part: the cycle succeeds when all others are done.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import TypeAlias

from ft_launcher.job.coordinator.node_messages import CycleEnd, EndReason


class CyclePhase(Enum):
    """Where a cycle is. All but RUNNING are endings."""

    RUNNING = auto()

    SUCCEEDED = auto()

    FAILED = auto()
    """A rank failed, or the restart in process did, or all ranks are zombies whose end will not be reported."""

    SIGNALLED = auto()
    """The launcher got a signal that ends it."""

    FAILED_ELSEWHERE = auto()
    """The cycle failed on another node, or that node is lost."""

    PREEMPTED_ELSEWHERE = auto()
    """Another node got a signal to end: the ranks of all nodes save, then end."""

    REGROUP = auto()
    """The next cycle has other nodes, or a rank of another node asked for a restart: nothing failed."""

    JOB_ENDED = auto()
    """The job is over for all nodes."""

    ASKED = auto()
    """A rank asked for what ends the cycle: a restart, the end of the job, the exclusion of this node."""

    CUT_OFF = auto()
    """The other nodes may have gone on without this one."""

    FENCED = auto()
    """The same, since this launcher stood still; its monitors end the ranks, or have."""


@dataclass(frozen=True)
class RankEnded:
    """A rank's process ended."""

    local_rank: int
    exit_code: int


@dataclass(frozen=True)
class Condemned:
    """A monitor condemned its rank and is about to kill it."""

    local_rank: int


@dataclass(frozen=True)
class RankLost:
    """A rank's process ended, and the others restart in process for it."""

    local_rank: int


@dataclass(frozen=True)
class TakesPart:
    """A rank that was lost and started again takes part."""

    local_rank: int


@dataclass(frozen=True)
class EndedElsewhere:
    """The coordinator has ended the cycle for all nodes."""

    end: CycleEnd


_PHASES_ELSEWHERE = {
    EndReason.FAILED: CyclePhase.FAILED_ELSEWHERE,
    EndReason.HUNG: CyclePhase.FAILED_ELSEWHERE,
    EndReason.STOOD_STILL: CyclePhase.FAILED_ELSEWHERE,
    EndReason.AGREED: CyclePhase.FAILED_ELSEWHERE,
    EndReason.LOST: CyclePhase.FAILED_ELSEWHERE,
    EndReason.PREEMPTED: CyclePhase.PREEMPTED_ELSEWHERE,
    EndReason.GREW: CyclePhase.REGROUP,
    EndReason.LEFT: CyclePhase.REGROUP,
    EndReason.RESTART: CyclePhase.REGROUP,
    EndReason.ASKED: CyclePhase.REGROUP,
    EndReason.STOP: CyclePhase.JOB_ENDED,
    EndReason.SUCCEEDED: CyclePhase.JOB_ENDED,
}


Event: TypeAlias = RankEnded | Condemned | RankLost | TakesPart | EndedElsewhere | CyclePhase
"""What happened to a rank, or an ending of the cycle that has another reason."""


class Cycle:
    """The state of one cycle of `ranks` local ranks."""

    def __init__(self, ranks: int) -> None:
        self.phase = CyclePhase.RUNNING
        self._running = set(range(ranks))
        self._condemned: set[int] = set()
        self._is_any_done = False

    def on(self, event: Event) -> None:
        """Applies one event to `phase`."""
        match event:
            case RankEnded():
                self._running.discard(event.local_rank)
                # A condemned rank may exit with 0 after the first signal: it has failed all the same.
                if event.exit_code != 0 or event.local_rank in self._condemned:
                    self._end(CyclePhase.FAILED)
                self._is_any_done = True
                self._end_if_none_runs()
            case Condemned():
                self._condemned.add(event.local_rank)
            case RankLost():
                self._running.discard(event.local_rank)
                # The verdict was about the process that ended, not about the one that is started in its place.
                self._condemned.discard(event.local_rank)
                self._end_if_none_runs()
            case TakesPart():
                self._running.add(event.local_rank)
            case EndedElsewhere():
                self._end(_phase_of(event.end))
            case CyclePhase():
                self._end(event)

    def _end_if_none_runs(self) -> None:
        if not self._running:
            self._end(CyclePhase.SUCCEEDED if self._is_any_done else CyclePhase.FAILED)

    def _end(self, phase: CyclePhase) -> None:
        if self.phase is CyclePhase.RUNNING:
            self.phase = phase


def _phase_of(end: CycleEnd) -> CyclePhase:
    """Returns the phase by which a node ends its part in a cycle that has ended for all nodes.

    An end with an exit code ends the job. A preemption comes first: its ranks have to save also where the job ends.
    """
    if end.exit_code is not None and end.reason is not EndReason.PREEMPTED:
        return CyclePhase.JOB_ENDED
    return _PHASES_ELSEWHERE[end.reason]
