"""The history of a job that the restart policy decides by, as one value. Pure.

Knows no process, clock or store; `restart_policy.py` reads it. As a record it contains ages instead of times, so that
another node, whose clock differs, can take it over.
"""

from __future__ import annotations

import builtins
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from ft_launcher.decide.attribution import Fault, FaultClass
from rank_monitor.contract.errors import ProtocolError
from rank_monitor.contract.exit_codes import ExitCode
from rank_monitor.contract.same_error import comparable
from rank_monitor.contract.settings.config import RestartSettings
from rank_monitor.contract.wire.json_record import from_json
from rank_monitor.contract.wire.messages import NO_ITERATION

YOUNG = 2.0
"""A cycle died young when its ranks ran for less than this times the longest wait. Kubernetes' kubelet has the same
factor."""

EARLY_S = 60.0
"""A cycle that fails below this, before any process group, has trained nothing: imports of a large program and its
arguments take less."""
BRIEF_S = 600.0
"""A cycle that fails below this has hardly trained. With the default limit of three, half an hour is lost at most."""


@dataclass(frozen=True)
class CycleLife:
    """Seconds that a cycle's ranks ran, and their iteration: NO_ITERATION when none was reported, None if unknown."""

    lived_s: float = 0.0
    iteration: int | None = NO_ITERATION


def _is_of_program(fault: Fault) -> bool:
    """Whether the exception of a fault would be raised on any node, at any time.

    What the system says of files, but for one that is not there, may pass: an OSError that the program raises itself
    is of class `user error` too.
    """
    kind = getattr(builtins, fault.error.partition(" at ")[0], None)
    of_system = isinstance(kind, type) and issubclass(kind, OSError) and not issubclass(kind, FileNotFoundError)
    return fault.fault_class is FaultClass.USER_ERROR and not of_system


def _in_a_row(count: int, again: bool) -> int:
    """Returns a count of cycles in a row with one more; 0 where the row ends."""
    if again:
        return count + 1
    return 0


@dataclass(frozen=True)
class History:
    """The failed cycles of a job so far.

    Attributes:
        charged: times (monotonic seconds) of the restarts that the budget still counts.
        mark: the iteration that the last cycle with progress reached; None until one is reported.
        no_progress: failed cycles in a row that did not get beyond the mark.
        error: type and place of the exception that ended the last cycle, `error_text` the digest of its text, and
            `error_iteration`; empty: none did, or none that counts.
        same_errors: how many times in a row it was that one.
        early_errors: how many times in a row it was that one, before any process group and within `EARLY_S`.
        moves: cycles in a row that ended with exit code 16.
        young: cycles in a row that died young.
        fault_class: of the fault that ended the last cycle; empty before the first.
        same_class: how many times in a row it was that one.
    """

    charged: tuple[float, ...] = ()
    mark: int | None = None
    no_progress: int = 0
    error: str = ""
    error_text: str = ""
    error_iteration: int = NO_ITERATION
    same_errors: int = 0
    early_errors: int = 0
    moves: int = 0
    young: int = 0
    fault_class: str = ""
    same_class: int = 0

    def ended(self, fault: Fault, life: CycleLife, settings: RestartSettings, now: float) -> History:
        """Returns the history with one more failed cycle, before the decision about it.

        Args:
            fault: what ended the cycle.
            life: of that cycle.
            settings: the policy.
            now: monotonic seconds.
        """
        relocates = fault.exit_code == ExitCode.RESUME_TO_DISAMBIGUATE
        is_ignored = relocates or fault.fault_class is FaultClass.PREEMPTION
        measured = self._measured(life.iteration, max(1, settings.min_progress_iterations), is_ignored)
        same_class = fault.fault_class.value == self.fault_class
        return replace(
            measured._with_error(fault, life.lived_s, has_progressed=measured.mark != self.mark),
            charged=measured.within(settings.restart_window, now),
            moves=_in_a_row(self.moves, relocates),
            young=_in_a_row(self.young, life.lived_s < YOUNG * settings.backoff[1]),
            fault_class=fault.fault_class.value,
            same_class=max(1, _in_a_row(self.same_class, same_class)),
        )

    def _with_error(self, fault: Fault, lived_s: float, has_progressed: bool) -> History:
        """Counts the same error in a row: at the same iteration, or where none is reported with the same text.

        Without an iteration only what a restart cannot mend counts, and only where the cycle was short: after long work
        the same error may be a rare one that comes twice.
        """
        has_iteration = fault.iteration != NO_ITERATION
        counts = has_iteration or (lived_s < BRIEF_S and _is_of_program(fault))
        if not fault.error or not counts:
            return replace(self, error="", error_text="", error_iteration=NO_ITERATION, same_errors=0, early_errors=0)
        same = comparable(fault.error) == comparable(self.error) and fault.iteration == self.error_iteration
        if not has_iteration:
            same = same and fault.error_text == self.error_text and not has_progressed
        early = 0
        if fault.before_group and not has_iteration and lived_s < EARLY_S:
            early = max(1, _in_a_row(self.early_errors, same))
        return replace(
            self,
            error=fault.error,
            error_text=fault.error_text,
            error_iteration=fault.iteration,
            same_errors=max(1, _in_a_row(self.same_errors, same)),
            early_errors=early,
        )

    def _measured(self, iteration: int | None, least: int, is_ignored: bool) -> History:
        """Restores the budget after progress. A cycle without progress is not counted where `is_ignored`."""
        if iteration is None or (self.mark is None and iteration == NO_ITERATION):
            return self
        if self.mark is None or iteration >= self.mark + least:
            return replace(self, mark=iteration, no_progress=0, charged=())
        if is_ignored:
            return self
        return replace(self, no_progress=self.no_progress + 1)

    def within(self, window_s: float | None, now: float) -> tuple[float, ...]:
        """Returns the charged restarts of the last `window_s` seconds; with None, those of the whole job."""
        return tuple(at for at in self.charged if window_s is None or at > now - window_s)

    def to_record(self, now: float) -> dict[str, Any]:
        """Returns JSON values, with ages in seconds instead of times."""
        return asdict(self) | {"charged": [now - at for at in self.charged]}

    @classmethod
    def from_record(cls, record: Mapping[str, Any], now: float) -> History:
        """Reads a record of `to_record`; a missing field gets its default.

        Raises:
            ProtocolError: it is no such record.
        """
        fields = dict(record)
        ages = fields.pop("charged", [])
        # Python's JSON reads NaN and Infinity; the two comparisons refuse both. `type` refuses true and false.
        if not isinstance(ages, list) or not all(type(age) in (int, float) and 0 <= age < 1e12 for age in ages):
            raise ProtocolError("History: field 'charged' does not fit")
        return replace(from_json(cls, fields), charged=tuple(now - age for age in ages))
