"""One cycle, from the start of its ranks until it ends: events in, what happens next out. Pure.

            RankEnded(0), all done            -> SUCCEEDED
    RUNNING RankEnded(other)                  -> FAILED
            Condemned, then RankEnded         -> FAILED, whatever the code
            Lost, none is left                -> SUCCEEDED if one is done, else FAILED
            RungTwo, AllZombies               -> FAILED
            ToldToEnd                         -> TOLD_TO_END
            MembersWait, EndedElsewhere       -> REFORM
            CutOff                            -> CUT_OFF
            Asked                             -> ASKED

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
    TOLD_TO_END = auto()
    REFORM = auto()
    ASKED = auto()
    CUT_OFF = auto()


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


@dataclass(frozen=True)
class RungTwo:
    """The restart in process failed."""

    local_rank: int


@dataclass(frozen=True)
class AllZombies:
    """No rank runs, and no end of one will be told."""


@dataclass(frozen=True)
class ToldToEnd:
    """The launcher got a signal that ends it."""

    signal_number: int


@dataclass(frozen=True)
class MembersWait:
    """Other nodes wait to take part, or to start again."""

    count: int


@dataclass(frozen=True)
class Asked:
    """A rank asked for what ends the cycle: a restart, the end of the job, the exclusion of this node."""

    local_rank: int


@dataclass(frozen=True)
class EndedElsewhere:
    """The cycle has ended for all nodes."""


@dataclass(frozen=True)
class CutOff:
    """The other nodes may have gone on without this one."""


Event: TypeAlias = (
    RankEnded
    | Condemned
    | Lost
    | TakesPart
    | RungTwo
    | AllZombies
    | ToldToEnd
    | MembersWait
    | Asked
    | EndedElsewhere
    | CutOff
)


class Cycle:
    """The state of one cycle of `ranks` local ranks."""

    def __init__(self, ranks: int) -> None:
        self.phase = Phase.RUNNING
        self._running = set(range(ranks))
        self._condemned: set[int] = set()
        self._is_any_done = False

    def on(self, event: Event) -> Phase:
        """Takes one event; returns the phase after it."""
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
            case RungTwo() | AllZombies():
                self._end(Phase.FAILED)
            case ToldToEnd():
                self._end(Phase.TOLD_TO_END)
            case MembersWait():
                if event.count > 0:
                    self._end(Phase.REFORM)
            case Asked():
                self._end(Phase.ASKED)
            case EndedElsewhere():
                self._end(Phase.REFORM)
            case CutOff():
                self._end(Phase.CUT_OFF)
        return self.phase

    def _end_if_none_runs(self) -> None:
        if not self._running:
            self._end(Phase.SUCCEEDED if self._is_any_done else Phase.FAILED)

    def _end(self, phase: Phase) -> None:
        if self.phase is Phase.RUNNING:
            self.phase = phase
