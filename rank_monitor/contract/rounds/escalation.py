"""Decides when restarts in process end because another would not help: records in, a reason out. Pure.

The history of a call's restarts (`CountedRestarts`) is in the ranks' store, so that every rank can go on with it. The
last rank that arrives at the start of a round adds the round before, asks `reason_to_give_up`, and decides for all
ranks (`inprocess/restart/escalating.py` does so). If another restart would not help, the call ends on all ranks: the
launcher then starts fresh processes, and a program without a launcher fails.

Three things are counted, each in a row: the same error on the same rank, restarts without progress of the training, and
hangs right after a restart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rank_monitor.contract.errors import ProtocolError
from rank_monitor.contract.restart_history import EndedRun, History
from rank_monitor.contract.wire.foreign import parse_object
from rank_monitor.contract.wire.json_record import read_record

SOFT_TIMEOUT, JOINING, COLLATERAL = "SOFT_TIMEOUT", "JOINING", "collateral"
TEXT = "text"
"""A key of an exception's record where no iteration is reported: the digest of the exception's text."""
_NO_ERRORS = frozenset({SOFT_TIMEOUT, "HARD_TIMEOUT", "UNRESPONSIVE"})
"""Interruptions without an error of the program. Hangs are counted apart from errors."""
_HANGS = "hangs in a row right after a restart"
_HUNG_AGAIN = "a hang right after a restart"
"""The class of such a hang in the history. Other interruptions have their name in `Interruption` as their class."""
_RIGHT_AFTER = 2.0
"""A hang within so many soft timeouts is right after a restart. Without any progress before it a hang is found after
one soft timeout."""


@dataclass(frozen=True)
class EscalationLimits:
    """How often each of these may happen in a row; 0: any number of times.

    Attributes:
        same_error: the same error on the same rank.
        no_progress: restarts without progress of the training.
        soft_timeouts: hangs right after a restart.
        least_progress: how many iterations of the training count as progress.
    """

    same_error: int = 0
    no_progress: int = 0
    soft_timeouts: int = 0
    least_progress: int = 1


@dataclass(frozen=True)
class LimitsSet:
    """The limits that the user has set for the job, by an option, a variable or a file, as in `EscalationLimits`.

    None: the user has not, and the wrapper's default holds. The launcher passes these limits to its ranks
    (`env.IN_PROCESS_LIMITS`).
    """

    same_error: int | None = None
    no_progress: int | None = None
    soft_timeouts: int | None = None
    least_progress: int | None = None

    def over(self, defaults: EscalationLimits) -> EscalationLimits:
        """Returns the defaults, each replaced by what the user has set."""
        return replace(defaults, **{name: limit for name, limit in vars(self).items() if limit is not None})


@dataclass(frozen=True)
class RunLife:
    """What one rank, the last to arrive, observed of the round before.

    Attributes:
        ran_s: how many seconds the function ran on this rank.
        pinged: the function called `ping()`.
        reached: the training's iteration that was reported last; NO_ITERATION: none was reported.
        soft_s: the soft timeout in seconds.
    """

    ran_s: float
    pinged: bool
    reached: int
    soft_s: float


@dataclass(frozen=True)
class CountedRestarts:
    """The history of a call's restarts, as the ranks' store keeps it.

    `last`: the number of the last round that is counted; -1: none is. A rank that counts a round again, after a death
    in between, changes nothing.
    """

    last: int = -1
    history: History = field(default_factory=History)

    @classmethod
    def read(cls, text: str | bytes) -> CountedRestarts:
        """Reads the text that `write_record` made. Returns the history before the first restart for any other text."""
        try:
            return read_record(cls, text)
        except ProtocolError:
            return cls()

    def after(self, number: int, records: Sequence[str], life: RunLife | None, least_progress: int) -> CountedRestarts:
        """Returns the history after an interrupted round.

        Args:
            number: of the round; one that is counted already changes nothing.
            records: the reasons for the interruption, as ranks and agents wrote them.
            life: what the asking rank observed; None: the function did not run on this rank.
            least_progress: as in `EscalationLimits`.
        """
        if number <= self.last:
            return self
        fault = _fault_of(records)
        if fault.get("interruption") == JOINING:
            return replace(self, last=number)
        run = _ended_run(fault, life, is_first=number == 0)
        return CountedRestarts(number, self.history.ended(run, least_progress))


def reason_to_give_up(history: History, limits: EscalationLimits) -> str:
    """Returns why there is to be no further restart; empty if there is one. The text goes to console and journal."""
    if 0 < limits.same_error <= history.same_errors:
        return f"the same fault {history.same_errors} times in a row: {history.error}"
    if history.fault_class == _HUNG_AGAIN and 0 < limits.soft_timeouts <= history.same_class:
        return f"{history.same_class} {_HANGS}"
    if 0 < limits.no_progress <= history.no_progress:
        return f"{history.no_progress} restarts in a row without progress"
    return ""


def is_about_hangs(reason: str) -> bool:
    """Returns whether a reason of `reason_to_give_up` is that hangs came again right after each restart.

    The rank that hung then ends its call by `HungAgain`.
    """
    return reason.endswith(_HANGS)


def _ended_run(fault: Mapping[str, Any], life: RunLife | None, is_first: bool) -> EndedRun:
    """Returns what the history needs to know of a round that `fault` interrupted."""
    kind = str(fault.get("interruption", ""))
    ran_s, reached, pinged = 0.0, None, False
    if life is not None:
        ran_s, reached, pinged = life.ran_s, life.reached, life.pinged
        if kind == SOFT_TIMEOUT and not is_first and ran_s <= _RIGHT_AFTER * life.soft_s:
            kind = _HUNG_AGAIN
    return EndedRun(
        _name(fault),
        str(fault.get(TEXT, "")),
        # Where an iteration is reported, `error` of a record names it, so it is compared with the error.
        compares_text=TEXT in fault,
        fault_class=kind,
        lived_s=ran_s,
        reached=reached,
        pinged=pinged,
    )


def _fault_of(records: Sequence[str]) -> Mapping[str, Any]:
    """Returns the first record that is not a consequence of another fault; empty where there is none."""
    found = map(parse_object, records)
    return next((fault for fault in found if fault and not fault.get(COLLATERAL)), {})


def _name(fault: Mapping[str, Any]) -> str:
    """Returns error and rank of a record in words; empty where the record is not about an error of the program."""
    kind = fault.get("interruption")
    if not isinstance(kind, str) or kind in _NO_ERRORS:
        return ""
    what = fault.get("error")
    if not isinstance(what, str):
        what = kind
    return f"{what} on rank {fault.get('member', fault.get('rank'))}"
