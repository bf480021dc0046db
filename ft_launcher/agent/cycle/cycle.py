"""One cycle on this node, from the start of its ranks until it ends: events in, the phase out. Pure.

A cycle is RUNNING until the first event that ends it. The phase then says how it ended, and never changes again: later
events are evidence for the fault, and are no other end. `agent/node_agent.py: run_cycle` feeds the events, and the
membership decides by the phase what follows.

    event                             phase after it
    a rank ended with 0, all have     SUCCEEDED
    a rank ended with another code    FAILED
    a condemned rank ended            FAILED, whatever its exit code
    a rank was lost, none is left     SUCCEEDED if another rank has ended with 0, else FAILED
    the coordinator ended the cycle   by the reason of the end (`_PHASES_ELSEWHERE`)
    any other ending (`CyclePhase`)   that one

A lost rank is one whose end in-process restart deals with: its process has ended, and the other ranks go on. It does
not count as running until it takes part again (`TakesPart`), so the cycle succeeds when all others are done.
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
    """The other nodes may have gone on because this launcher stood still (its lease ran out). The monitors of this node
    end the ranks, or have ended them already."""


@dataclass(frozen=True)
class RankEnded:
    """A rank's process ended."""

    local_rank: int
    exit_code: int


@dataclass(frozen=True)
class Condemned:
    """A monitor has found that its rank exceeds a limit, and is about to kill it."""

    local_rank: int


@dataclass(frozen=True)
class RankLost:
    """A rank's process ended, and the other ranks restart in process without it."""

    local_rank: int


@dataclass(frozen=True)
class TakesPart:
    """A rank that was lost and started again takes part from now on."""

    local_rank: int


@dataclass(frozen=True)
class EndedElsewhere:
    """The coordinator has ended the cycle for all nodes. `end`: why, and whether the job ends with it."""

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
    """The state of one cycle.

    Args:
        ranks: number of ranks of this node.
    """

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
        """Ends the cycle when no rank counts any more: as a success if at least one rank was done."""
        if not self._running:
            self._end(CyclePhase.SUCCEEDED if self._is_any_done else CyclePhase.FAILED)

    def _end(self, phase: CyclePhase) -> None:
        """Ends the cycle, unless it has ended: the first end stands."""
        if self.phase is CyclePhase.RUNNING:
            self.phase = phase


def _phase_of(end: CycleEnd) -> CyclePhase:
    """Returns the phase in which a node ends its part in a cycle that the coordinator has ended for all nodes.

    An end with an exit code ends the job. A preemption goes before that: the ranks have to save, also where the job
    ends.
    """
    if end.exit_code is not None and end.reason is not EndReason.PREEMPTED:
        return CyclePhase.JOB_ENDED
    return _PHASES_ELSEWHERE[end.reason]
