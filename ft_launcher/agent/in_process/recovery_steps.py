"""What level 1 goes by, and the steps that follow, as values. Pure data.

`recovery_level.py` decides the steps, `in_process.py` carries them out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from rank_monitor.contract.wire.messages import RestartReport


@dataclass(frozen=True)
class Heard:
    """A report of a rank's wrapper."""

    local_rank: int
    report: RestartReport


@dataclass(frozen=True)
class Died:
    """The end of a rank's process."""

    local_rank: int
    exit_code: int


@dataclass(frozen=True)
class LossNotified:
    """The other ranks took note of a rank's end; or `problem` says why they may not have."""

    local_rank: int
    problem: str


@dataclass(frozen=True)
class DeadlinePassed:
    """The time of `RecoveryLevels.next_check` has come."""


Happened: TypeAlias = Heard | Died | LossNotified | DeadlinePassed


@dataclass(frozen=True)
class NotifyLoss:
    """Notify the others that a rank is gone. `joins`: it was not let in yet. `limit_s`: how long they may take.

    `member` is its rank at entry of the wrapped call, `prefix` that of the call's keys.
    """

    local_rank: int
    member: int
    prefix: str
    limit_s: float
    joins: bool


@dataclass(frozen=True)
class StartAgain:
    """Start this rank again, alone."""

    local_rank: int


@dataclass(frozen=True)
class StayAway:
    """Do not start this rank again before the next cycle."""

    local_rank: int
    reason: str


@dataclass(frozen=True)
class Joined:
    """A rank that was started again takes part."""

    local_rank: int
    number: int
    """Of the round."""


@dataclass(frozen=True)
class Restarted:
    """The ranks of this node run again in process, `took_s` seconds after the first sign of the fault.

    `number`: of the round that begins. `failed`: the round that was interrupted, of the call whose keys begin with
    `prefix`. `skipped`: how many restarts came just before this one and have no step of their own.
    """

    number: int
    took_s: float
    failed: int
    prefix: str
    skipped: int = 0


@dataclass(frozen=True)
class TakeOver:
    """End the cycle: level 2 takes over."""

    local_rank: int
    reason: str


@dataclass(frozen=True)
class EndRank:
    """Kill a rank without which the others went on."""

    local_rank: int
    reason: str


Step: TypeAlias = NotifyLoss | StartAgain | StayAway | Joined | Restarted | EndRank | TakeOver
