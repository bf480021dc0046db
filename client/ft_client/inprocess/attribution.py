"""The record of what interrupted a round, and on which rank, as written to the store. Pure.

The wrapper of a rank writes it, or its companion where the rank is dead. Which rank failed first is decided by the
launcher's `decide/attribution/`, not here.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Sequence
from dataclasses import dataclass

from rank_monitor.contract.rounds.escalation import COLLATERAL, TEXT
from rank_monitor.contract.wire.foreign import parse_object


class Interruption(enum.Enum):
    """Why a round ends before its function does."""

    EXCEPTION = enum.auto()
    """The function, a callback before it, or a health check raised an `Exception`."""
    BASE_EXCEPTION = enum.auto()
    """The function raised another `BaseException`: this rank ends."""
    SOFT_TIMEOUT = enum.auto()
    """No progress: the main thread was to be interrupted."""
    HARD_TIMEOUT = enum.auto()
    """No progress still: the process was to be killed."""
    TERMINATED = enum.auto()
    """The process has ended."""
    UNRESPONSIVE = enum.auto()
    """Its heartbeat stopped."""
    MONITOR_PROCESS_EXCEPTION = enum.auto()
    """Its monitor process failed."""
    JOINING = enum.auto()
    """No fault: it was started again, and is to take part at once."""


_NOT_TO_BLAME = {Interruption.SOFT_TIMEOUT.name, Interruption.JOINING.name}
"""Ranks that make no progress may all wait for one that is not among them."""
_WORDS = {
    Interruption.SOFT_TIMEOUT.name: "no progress within soft_timeout",
    Interruption.HARD_TIMEOUT.name: "no progress within hard_timeout",
    Interruption.TERMINATED.name: "its process has ended",
    Interruption.UNRESPONSIVE.name: "its heartbeat stopped",
    Interruption.JOINING.name: "it was started again",
}


@dataclass(frozen=True)
class LastInterruption:
    """Why the function is called again.

    Attributes:
        ranks: who is to blame, by the numbers at entry (RANK of the processes); empty where nobody can be named.
        text: what happened, in words.
        finding: for ranks that made no progress and a launcher that saw who held them up: as in the journal's event
            `fault`, `behind` for instance; else empty.
    """

    ranks: tuple[int, ...] = ()
    text: str = ""
    finding: str = ""


@dataclass(frozen=True)
class InterruptionRecord:
    """One rank, by its number in the round, and what happened there.

    Attributes:
        member: its number at entry, if the writer knows it.
        error: of an exception: its type, where it was raised, and in which iteration of the training.
        is_collateral: it is the consequence of a fault elsewhere.
        text: the digest of its text, where no iteration of the training is reported.
    """

    rank: int
    interruption: Interruption
    member: int | None = None
    error: str = ""
    is_collateral: bool = False
    text: str = ""

    def to_json(self) -> str:
        """One JSON object, which the node agent writes into its journal."""
        known: dict[str, object] = {"rank": self.rank, "interruption": self.interruption.name}
        if self.member is not None:
            known["member"] = self.member
        if self.error:
            known["error"] = self.error
        if self.is_collateral:
            known[COLLATERAL] = True
        if self.text:
            known[TEXT] = self.text
        return json.dumps(known)


def last_interruption(records: Sequence[str], blame: str) -> LastInterruption:
    """Returns why a round ended, of what the ranks wrote, and of what the launcher did: it has seen all of them.

    Args:
        records: JSON of `InterruptionRecord`, in the order in which they were written.
        blame: JSON of who held up the others; empty: no launcher has seen it.
    """
    seen = parse_object(blame)
    named = seen.get("ranks")
    if isinstance(named, list) and named and all(isinstance(rank, int) for rank in named):
        return LastInterruption(tuple(named), str(seen.get("text", "")), str(seen.get("finding", "")))
    faults = [one for one in map(parse_object, records) if one.get("interruption") and not one.get(COLLATERAL)]
    parts, ranks = [], []
    for one in faults:
        kind, rank = str(one["interruption"]), one.get("member", one.get("rank"))
        parts.append(f"rank {rank}: {one.get('error') or _WORDS.get(kind, kind.lower())}")
        if kind not in _NOT_TO_BLAME and isinstance(rank, int):
            ranks.append(rank)
    return LastInterruption(tuple(dict.fromkeys(ranks)), "; ".join(dict.fromkeys(parts)))
