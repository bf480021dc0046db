"""The events that recovery level 1 decides by, and the steps that follow, as values. Pure data.

`recovery_level.py` decides the steps, `in_process.py` carries them out, and `recovery_record.py` writes both to the
journal, where the names of the steps' fields are those in the file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from rank_monitor.contract.wire.messages import RestartReport


@dataclass(frozen=True)
class Reported:
    """The wrapper in a rank has sent a report."""

    local_rank: int
    report: RestartReport


@dataclass(frozen=True)
class Died:
    """A rank's process has ended."""

    local_rank: int
    exit_code: int


@dataclass(frozen=True)
class LossNotified:
    """A `NotifyLoss` has ended: the other ranks took note of a rank's end, or `problem` says why they may not have."""

    local_rank: int
    problem: str


@dataclass(frozen=True)
class DeadlinePassed:
    """The moment of `RecoveryLevels.next_check` has come."""


Happened: TypeAlias = Reported | Died | LossNotified | DeadlinePassed


@dataclass(frozen=True)
class NotifyLoss:
    """Notify the other ranks, through their store, that a rank is gone.

    Attributes:
        local_rank: of the rank that is gone.
        member: its rank at the entry of the wrapped call, by which the others know it.
        prefix: of the keys of that call.
        limit_s: how long the others may take to take note (seconds).
        joins: whether the rank had asked to join and was not let in yet: its request is withdrawn.
    """

    local_rank: int
    member: int
    prefix: str
    limit_s: float
    joins: bool


@dataclass(frozen=True)
class StartAgain:
    """Start this rank again, alone; the other ranks go on."""

    local_rank: int


@dataclass(frozen=True)
class StayAway:
    """Do not start this rank again before the next cycle, for this reason."""

    local_rank: int
    reason: str


@dataclass(frozen=True)
class Joined:
    """A rank that was started again takes part. `number`: of the round in which it does."""

    local_rank: int
    number: int


@dataclass(frozen=True)
class Restarted:
    """The ranks of this node run again after an in-process restart.

    Attributes:
        number: of the round that begins.
        took_s: seconds since the first sign of the fault.
        failed: number of the round that was interrupted.
        prefix: of the keys of the call.
        skipped: how many restarts came just before this one and have no step of their own.
    """

    number: int
    took_s: float
    failed: int
    prefix: str
    skipped: int = 0


@dataclass(frozen=True)
class TakeOver:
    """End the cycle: recovery level 2 takes over, for this reason."""

    local_rank: int
    reason: str


@dataclass(frozen=True)
class EndRank:
    """Kill a rank without which the others went on, and which has not noticed that in time."""

    local_rank: int
    reason: str


Step: TypeAlias = NotifyLoss | StartAgain | StayAway | Joined | Restarted | EndRank | TakeOver
