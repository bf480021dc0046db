"""What rung 1 does next, as values: said by `rungs.py`, carried out by `in_process.py`. Pure data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True)
class Tell:
    """The others are to be told that a rank is gone. `joins`: it was not let in yet. `limit_s`: they may take so long.

    `member` and `prefix` are of its wrapper.
    """

    local_rank: int
    member: int
    prefix: str
    limit_s: float
    joins: bool


@dataclass(frozen=True)
class StartAgain:
    """This rank is to be started again, alone."""

    local_rank: int


@dataclass(frozen=True)
class StayAway:
    """This rank is not started again before the next cycle."""

    local_rank: int
    reason: str


@dataclass(frozen=True)
class Joined:
    """A rank that was started again takes part."""

    local_rank: int
    iteration: int


@dataclass(frozen=True)
class Restarted:
    """The ranks of this node run again in process, so many seconds after the first sign of the fault.

    `failed`: the iteration in which that was, of the call whose keys begin with `prefix`.
    """

    iteration: int
    took_s: float
    failed: int
    prefix: str


@dataclass(frozen=True)
class TakeOver:
    """Rung 2 is to end the cycle."""

    local_rank: int
    reason: str


@dataclass(frozen=True)
class EndRank:
    """A rank without which the others went on is to be killed."""

    local_rank: int
    reason: str


Step: TypeAlias = Tell | StartAgain | StayAway | Joined | Restarted | EndRank | TakeOver
