"""The fault that ended a cycle, as policy, journal and console take it: a value. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ft_launcher.fault_class import FaultClass
from rank_monitor.contract.messages import NO_ITERATION, ResultInDoubt


class FaultKind(Enum):
    """What happened to the rank that failed first."""

    HANG = "hang"
    EXCEPTION = "exception"
    EXIT = "exit"
    SIGNAL = "signal"


@dataclass(frozen=True)
class Fault:
    """Who failed first (`rank`), what, where, and the likely cause with its evidence; `collateral`: by another's.

    `error` names an error of the program by type and place, the same whenever the same line raises it.
    `doubt`: the result for whose sake all ranks agreed to exit. `failed`: all ranks of the node that failed by
    themselves, without those that the launcher ended because of them.
    """

    kind: FaultKind
    rank: int
    local_rank: int
    pid: int
    exit_code: int
    what: str
    where: str
    hint: str
    iteration: int = NO_ITERATION
    limit: str = ""
    learned_limit: bool = False
    detail: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    agreed_exit_code: int | None = None
    error: str = ""
    collateral: bool = False
    fault_class: FaultClass = FaultClass.UNKNOWN
    doubt: ResultInDoubt | None = None
    failed: tuple[int, ...] = ()
