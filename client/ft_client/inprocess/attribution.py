"""The record of what interrupted a round, and on which rank, as written to the store. Pure.

The wrapper of a rank writes it; where the rank is dead, its node agent or standalone agent does. Every rank reads the
records of the last round, for `CallWrapper.last_interruption`. Which rank failed first, among ranks that blame each
other, is decided by the launcher's `decide/attribution/` and not here.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Sequence
from dataclasses import dataclass

from rank_monitor.contract.rounds.escalation import COLLATERAL, TEXT
from rank_monitor.contract.wire.foreign import parse_object


class Interruption(enum.Enum):
    """Why a round ends before its function does.

    The names are NVIDIA's, for scripts that read them, but for JOINING, which is ours. Their texts are in the ranks'
    store and in the journal.
    """

    EXCEPTION = enum.auto()
    """The function, a callback before it, or a health check raised an `Exception`."""
    BASE_EXCEPTION = enum.auto()
    """The function raised a `BaseException` that is no `Exception`: this rank ends."""
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


_NO_CULPRIT = {Interruption.SOFT_TIMEOUT.name, Interruption.JOINING.name}
"""Records that name no culprit: ranks that make no progress may all wait for one other rank, and a rank that joins has
no fault."""
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
        ranks: the culprits, by the numbers at entry (RANK of the processes); empty where nobody can be named.
        text: what happened, in words.
        finding: how a launcher found the culprits of ranks that made no progress: a word of the journal's event
            `fault`, such as `behind`; empty where no launcher did.
    """

    ranks: tuple[int, ...] = ()
    text: str = ""
    finding: str = ""


@dataclass(frozen=True)
class InterruptionRecord:
    """One rank, by its number in the round, and what happened there.

    Attributes:
        rank: the rank by its number in the round.
        interruption: what happened.
        member: the rank's number at entry, if the writer knows it.
        error: of an exception: its type, where it was raised, and in which iteration of the training.
        is_collateral: the exception is the consequence of a fault on another rank.
        text: the digest of the exception's text, where no iteration of the training is reported.
    """

    rank: int
    interruption: Interruption
    member: int | None = None
    error: str = ""
    is_collateral: bool = False
    text: str = ""

    def to_json(self) -> str:
        """Returns one JSON object for the ranks' store. The node agent also writes it into its journal."""
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


def last_interruption(records: Sequence[str], culprit: str) -> LastInterruption:
    """Returns why a round ended.

    What a launcher found counts more than what the ranks wrote: the launcher has seen the stacks of all ranks. Without
    it, every rank whose own fault is recorded is a culprit, in the order of the records.

    Args:
        records: JSON of `InterruptionRecord`, in the order in which they were written.
        culprit: JSON about the ranks that held up the others (`Round.culprit`); empty: no launcher has found any.
    """
    seen = parse_object(culprit)
    named = seen.get("ranks")
    if isinstance(named, list) and named and all(isinstance(rank, int) for rank in named):
        return LastInterruption(tuple(named), str(seen.get("text", "")), str(seen.get("finding", "")))
    faults = [one for one in map(parse_object, records) if one.get("interruption") and not one.get(COLLATERAL)]
    parts, ranks = [], []
    for one in faults:
        kind, rank = str(one["interruption"]), one.get("member", one.get("rank"))
        parts.append(f"rank {rank}: {one.get('error') or _WORDS.get(kind, kind.lower())}")
        if kind not in _NO_CULPRIT and isinstance(rank, int):
            ranks.append(rank)
    return LastInterruption(tuple(dict.fromkeys(ranks)), "; ".join(dict.fromkeys(parts)))
