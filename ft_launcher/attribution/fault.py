"""The fault that ended a cycle: a value that policy, journal and console read. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ft_launcher.attribution.fault_class import FaultClass
from rank_monitor.contract.wire.messages import NO_ITERATION, ResultInDoubt


class FaultKind(Enum):
    """What happened to the rank that failed first."""

    HANG = "hang"
    EXCEPTION = "exception"
    EXIT = "exit"
    SIGNAL = "signal"


@dataclass(frozen=True)
class Fault:
    """Which rank failed first, how and where, and the likely cause with its evidence.

    Attributes:
        collateral: the failure is the consequence of another rank's.
        error: type and place of an exception of the program; equal whenever the same line raises the same type.
        doubt: the suspect result because of which all ranks agreed to exit.
        failed: all ranks of the node that failed by themselves, without those that the launcher ended.
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
