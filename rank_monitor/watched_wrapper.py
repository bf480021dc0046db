"""The known facts of the in-process wrapper of one rank, and the signs of progress that it makes expected. Pure.

`watch.py` passes messages in, and makes deadlines of the signs. Moments are as there. What is judged in which phase
says `contract/restart_phase.py: JUDGED`. What is older than the present call of the function belongs to an earlier one,
so the order in which a reconnected rank reports its state makes no difference. Apart from the facts of the rank: few
ranks have a wrapper, and its phases are a noun of their own.
"""

from __future__ import annotations

from collections.abc import Mapping

from rank_monitor.contract.errors import ProtocolError
from rank_monitor.contract.restart_phase import JUDGED, Judged, RestartPhase
from rank_monitor.contract.wire.messages import RestartReport
from rank_monitor.limits import MAX_LIMIT_S, nanoseconds

MAIN_THREAD, PING = "progress of the main thread", "ping()"
_ENDS: Mapping[RestartPhase, str] = {
    RestartPhase.ASSIGNING: "rank_assignment",
    RestartPhase.INTERRUPTING: "the function after its interruption",
    RestartPhase.FINALIZING: "finalize and health_check",
    RestartPhase.COMPLETING: "completion",
    RestartPhase.LEAVING: "terminate",
}
"""Of the phases that are judged `HARD`: what must end."""
_NONE = RestartReport(RestartPhase.NONE, 0, 0, False, 0.0, 0.0, 0.0, 0, "", 0.0)


class WatchedWrapper:
    """The wrapper of a rank as the monitor knows it. At first there is none."""

    def __init__(self) -> None:
        self.report = _NONE
        """The last one."""
        self.began_ns = 0
        """When the present call of the function began, or another phase."""
        self.since_ns = 0
        """When the present phase began."""
        self._ping_ns = 0

    @property
    def judged(self) -> Judged:
        """What is judged now."""
        return JUDGED[self.report.phase]

    @property
    def is_there(self) -> bool:
        """Whether the rank can restart in process."""
        return self.judged is not Judged.AS_WITHOUT

    @property
    def expected_end(self) -> str:
        """The words for the sign that is expected while a callback runs."""
        return f"end of {_ENDS[self.report.phase]}"

    @property
    def slack_ns(self) -> int:
        """Nanoseconds from asking the wrapper to restart to the kill; 0 if there is no wrapper."""
        if self.is_there:
            return nanoseconds(self.report.hard_timeout_s - self.report.soft_timeout_s)
        return 0

    def check(self, report: RestartReport) -> None:
        """Checks the values of a report.

        Raises:
            ProtocolError: the values make no sense.
        """
        soft_s, hard_s, grace_s = report.soft_timeout_s, report.hard_timeout_s, report.grace_s
        if not (0 < soft_s < hard_s <= MAX_LIMIT_S and 0 <= grace_s <= MAX_LIMIT_S):
            raise ProtocolError(f"restart: soft {soft_s!r} s, hard {hard_s!r} s and grace {grace_s!r} s do not fit")

    def note(self, report: RestartReport, began_ns: int, since_ns: int) -> bool:
        """Takes over a report that was checked. Returns whether another call of the function or another phase began.

        Args:
            began_ns: that of the report, limited as all moments are.
            since_ns: when the phase of the report began.
        """
        is_anew = report.began_ns != self.report.began_ns
        self.report, self.began_ns, self.since_ns = report, began_ns, since_ns
        return is_anew and self.is_there

    def note_none(self) -> None:
        """Notes that the rank has no wrapper, or has no more: it may have become another program."""
        self.report = _NONE

    def ping(self, sent_ns: int) -> None:
        """Handles a call of `ping()` by the training."""
        self._ping_ns = max(self._ping_ns, sent_ns)

    def expected_signs(self, has_stamps: bool, stamp_ns: int) -> list[tuple[str, int]]:
        """The signs of progress that are expected now, each with the moment of the last one.

        Args:
            has_stamps: whether stamps of the main thread can be expected.
            stamp_ns: when the main thread last executed bytecode, as far as known.
        """
        if self.judged is not Judged.SOFT or not self.report.is_timed:
            return []
        if has_stamps:
            signs = [(MAIN_THREAD, max(stamp_ns, self.since_ns))]
        else:
            signs = []
        if self._ping_ns > self.began_ns:
            signs.append((PING, max(self._ping_ns, self.since_ns)))
        return signs
