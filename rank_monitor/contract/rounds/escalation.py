"""Decides when restarts in process end because another would not help: records in, a reason out. Pure.

The counts are kept in the ranks' store, so that every rank can go on with them; the last rank that arrives at the start
of an iteration decides for all. Then the launcher starts fresh ranks; a call that has no launcher ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rank_monitor.contract.errors import ProtocolError
from rank_monitor.contract.same_error import comparable
from rank_monitor.contract.wire.foreign import parse_object
from rank_monitor.contract.wire.json_record import read_record
from rank_monitor.contract.wire.messages import NO_ITERATION

SOFT_TIMEOUT, JOINING, COLLATERAL = "SOFT_TIMEOUT", "JOINING", "collateral"
TEXT = "text"
"""In the record of an exception where no iteration is reported: the digest of the exception's text."""
_NO_ERRORS = frozenset({SOFT_TIMEOUT, "HARD_TIMEOUT", "UNRESPONSIVE"})
"""Interruptions without an error of the program. A hang is counted by itself."""
_HANGS = "hangs in a row right after a restart"
_RIGHT_AFTER = 2.0
"""Multiple of the soft timeout: a hang without any progress before it is found after one soft timeout."""


@dataclass(frozen=True)
class EscalationLimits:
    """How often each may happen in a row; 0: any number of times.

    `same_error`: the same error on the same rank. `no_progress`: restarts without progress. `soft_timeouts`: hangs
    right after a restart. `least_progress`: iterations of the training that count as progress.
    """

    same_error: int = 0
    no_progress: int = 0
    soft_timeouts: int = 0
    least_progress: int = 1


@dataclass(frozen=True)
class LimitsSet:
    """The limits that somebody has set for the job, by an option, a variable or a file, as in `EscalationLimits`.

    None: nobody has, and the wrapper's default holds. The launcher passes them to its ranks.
    """

    same_error: int | None = None
    no_progress: int | None = None
    soft_timeouts: int | None = None
    least_progress: int | None = None

    def over(self, defaults: EscalationLimits) -> EscalationLimits:
        """Returns the defaults with what is set in their place."""
        return replace(defaults, **{name: limit for name, limit in vars(self).items() if limit is not None})


@dataclass(frozen=True)
class Life:
    """What one rank observed of an iteration.

    Attributes:
        ran_s: how long the function ran there.
        pinged: it called `ping()`.
        reached: the training's iteration that was reported last; NO_ITERATION: none was reported.
        soft_s: the soft timeout.
    """

    ran_s: float
    pinged: bool
    reached: int
    soft_s: float


@dataclass(frozen=True)
class Restarts:
    """The counts over the restarts of one call.

    Attributes:
        counted: the last iteration that is counted.
        fault: rank and error of the last fault, in words; empty: it had no error.
        compared: by what this fault is the same as another one.
        same: how many times in a row this fault occurred.
        without_progress: iterations in a row without progress.
        soft_timeouts: hangs in a row, each right after a restart.
        mark: how far the training came, by its own report.
        tells: the training has reported progress before, by an iteration or a ping; only then a lack of it counts.
    """

    counted: int = -1
    fault: str = ""
    compared: str = ""
    same: int = 0
    without_progress: int = 0
    soft_timeouts: int = 0
    mark: int = NO_ITERATION
    tells: bool = False

    @classmethod
    def read(cls, text: str | bytes) -> Restarts:
        """Reads the text that `write_record` made. For any other text, the counts before the first restart."""
        try:
            return read_record(cls, text)
        except ProtocolError:
            return cls()

    def after(self, iteration: int, records: Sequence[str], life: Life | None, limits: EscalationLimits) -> Restarts:
        """The counts after an interrupted iteration.

        Args:
            iteration: its number; one that is counted already changes nothing.
            records: the reasons for the interruption, as ranks, agents and companions wrote them.
            life: what one rank observed; None: the function did not run there.
            limits: for `least_progress`.
        """
        if iteration <= self.counted:
            return self
        fault = _fault_of(records)
        kind = fault.get("interruption", "")
        if kind == JOINING:
            return replace(self, counted=iteration)
        name = _name(fault)
        compared = f"{comparable(name)} {fault.get(TEXT, '')}"
        right_after = iteration > 0 and life is not None and life.ran_s <= _RIGHT_AFTER * life.soft_s
        before = self
        if life is not None:
            before = self._progressed(life, max(1, limits.least_progress))
        same = 0
        if name:
            same = 1
            if compared == self.compared:
                same += self.same
        return replace(
            before,
            counted=iteration,
            fault=name,
            compared=compared,
            same=same,
            soft_timeouts=self.soft_timeouts + 1 if kind == SOFT_TIMEOUT and right_after else 0,
        )

    def _progressed(self, life: Life, least: int) -> Restarts:
        if life.reached != NO_ITERATION:
            if self.mark == NO_ITERATION or life.reached >= self.mark + least:
                return replace(self, mark=life.reached, without_progress=0, tells=True)
        elif life.pinged:
            return replace(self, without_progress=0, tells=True)
        if self.tells:
            return replace(self, without_progress=self.without_progress + 1)
        return self

    def why_end(self, limits: EscalationLimits) -> str:
        """The reason why there is no further restart; empty if there is one."""
        if 0 < limits.same_error <= self.same:
            return f"the same fault {self.same} times in a row: {self.fault}"
        if 0 < limits.soft_timeouts <= self.soft_timeouts:
            return f"{self.soft_timeouts} {_HANGS}"
        if 0 < limits.no_progress <= self.without_progress:
            return f"{self.without_progress} restarts in a row without progress"
        return ""


def is_about_hangs(reason: str) -> bool:
    """Whether a reason of `why_end` is that hangs came again right after each restart."""
    return reason.endswith(_HANGS)


def _fault_of(records: Sequence[str]) -> Mapping[str, Any]:
    """The first record that is not a consequence of another fault; empty where there is none."""
    found = map(parse_object, records)
    return next((fault for fault in found if fault and not fault.get(COLLATERAL)), {})


def _name(fault: Mapping[str, Any]) -> str:
    """Error and rank in words; empty if it is not an error of the program."""
    kind = fault.get("interruption")
    if not isinstance(kind, str) or kind in _NO_ERRORS:
        return ""
    what = fault.get("error")
    if not isinstance(what, str):
        what = kind
    return f"{what} on rank {fault.get('member', fault.get('rank'))}"
