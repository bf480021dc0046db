"""One cycle, from the start of its ranks until it ends: events in, what happens next out. Pure.

            RankEnded(0), all done            -> SUCCEEDED
    RUNNING RankEnded(other)                  -> FAILED
            Condemned, then RankEnded         -> FAILED, whatever the code
            Lost, none is left                -> SUCCEEDED if one is done, else FAILED
            an ending that is not the ranks'  -> that one

The first ending stands; what comes later is evidence, not a change of mind. A rank that is lost no longer counts, also
when it was started again, until it takes part: the cycle succeeds when all others are done.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import TypeAlias


class Phase(Enum):
    """Where a cycle is. All but RUNNING are endings."""

    RUNNING = auto()

    SUCCEEDED = auto()

    FAILED = auto()
    """A rank failed, the restart in process did, or no rank runs and no end of one will be told."""

    TOLD_TO_END = auto()
    """The launcher got a signal that ends it."""

    REFORM = auto()
    """Other nodes wait to take part, or the cycle has ended for all nodes."""

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
class Lost:
    """A rank's process ended, and the others deal with it in process."""

    local_rank: int


@dataclass(frozen=True)
class TakesPart:
    """A rank that was lost and started again takes part."""

    local_rank: int


Event: TypeAlias = RankEnded | Condemned | Lost | TakesPart | Phase
"""What happened to a rank, or the ending that something else makes of the cycle."""


class Cycle:
    """The state of one cycle of `ranks` local ranks."""

    def __init__(self, ranks: int) -> None:
        self.phase = Phase.RUNNING
        self._running = set(range(ranks))
        self._condemned: set[int] = set()
        self._is_any_done = False

    def on(self, event: Event) -> None:
        """Takes one event; `phase` says what the cycle is then."""
        match event:
            case RankEnded():
                self._running.discard(event.local_rank)
                if event.exit_code != 0 or event.local_rank in self._condemned:
                    self._end(Phase.FAILED)
                self._is_any_done = True
                self._end_if_none_runs()
            case Condemned():
                self._condemned.add(event.local_rank)
            case Lost():
                self._running.discard(event.local_rank)
                self._condemned.discard(event.local_rank)
                self._end_if_none_runs()
            case TakesPart():
                self._running.add(event.local_rank)
            case Phase():
                self._end(event)

    def _end_if_none_runs(self) -> None:
        if not self._running:
            self._end(Phase.SUCCEEDED if self._is_any_done else Phase.FAILED)

    def _end(self, phase: Phase) -> None:
        if self.phase is Phase.RUNNING:
            self.phase = phase
