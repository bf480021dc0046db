"""The steps of rung 1 as values: decided by `rungs.py`, carried out by `in_process.py`. Pure data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


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
    iteration: int


@dataclass(frozen=True)
class Restarted:
    """The ranks of this node run again in process, `took_s` seconds after the first sign of the fault.

    `failed`: the iteration that was interrupted, of the call whose keys begin with `prefix`.
    """

    iteration: int
    took_s: float
    failed: int
    prefix: str


@dataclass(frozen=True)
class TakeOver:
    """End the cycle: rung 2 takes over."""

    local_rank: int
    reason: str


@dataclass(frozen=True)
class EndRank:
    """Kill a rank without which the others went on."""

    local_rank: int
    reason: str


Step: TypeAlias = NotifyLoss | StartAgain | StayAway | Joined | Restarted | EndRank | TakeOver
