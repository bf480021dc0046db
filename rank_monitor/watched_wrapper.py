"""The known facts of the in-process wrapper of one rank, and the signs of progress that it makes expected. Pure.

`watch.py` passes messages in, and makes deadlines of the signs. Moments are those of `watch.py`.

The last `RestartReport` says in which phase the wrapper is, and since when; the table `JUDGED` in
`contract/restart_phase.py` says what is judged in each phase. In the phases judged `SOFT` two signs are expected:
progress of the main thread, and `ping()` once the function has called it in this call. In the phases judged `HARD` a
callback must end.

What the rank reported before the present call of the function belongs to an earlier call. So the order in which a
reconnected rank reports its state makes no difference.
"""

from __future__ import annotations

from collections.abc import Mapping

from rank_monitor.contract.errors import ProtocolError
from rank_monitor.contract.restart_phase import JUDGED, Judged, RestartPhase
from rank_monitor.contract.wire.messages import RestartReport
from rank_monitor.limits import MAX_LIMIT_S, nanoseconds

MAIN_THREAD, PING = "progress of the main thread", "ping()"
"""The words for the two expected signs, as they appear in verdicts."""
_ENDS: Mapping[RestartPhase, str] = {
    RestartPhase.ASSIGNING: "rank_assignment",
    RestartPhase.INTERRUPTING: "the function after its interruption",
    RestartPhase.FINALIZING: "finalize and health_check",
    RestartPhase.COMPLETING: "completion",
    RestartPhase.LEAVING: "terminate",
}
"""What must end in each phase that is judged `HARD`, in the words of verdicts."""
_NONE = RestartReport(
    phase=RestartPhase.NONE,
    round=0,
    began_ns=0,
    is_timed=False,
    soft_timeout_s=0.0,
    hard_timeout_s=0.0,
    grace_s=0.0,
    entry_rank=0,
    call_prefix="",
    limit_s=0.0,
)
"""In the place of a report, of a rank without a wrapper."""


class WatchedWrapper:
    """The wrapper of a rank as the monitor knows it. At first the rank has none."""

    def __init__(self) -> None:
        self.report = _NONE
        """The last report."""
        self.began_ns = 0
        """When the present call of the function began, or the phase without a call that goes on now."""
        self.since_ns = 0
        """When the present phase began."""
        self._ping_ns = 0
        """When the function last called `ping()`; 0: never."""

    @property
    def judged(self) -> Judged:
        """What is judged now."""
        return JUDGED[self.report.phase]

    @property
    def is_there(self) -> bool:
        """Whether the rank can restart in process: such a rank is asked to before it is killed."""
        return self.judged is not Judged.AS_WITHOUT

    @property
    def expected_end(self) -> str:
        """The words for the sign that is expected while a callback runs."""
        return f"end of {_ENDS[self.report.phase]}"

    @property
    def slack_ns(self) -> int:
        """Nanoseconds from the request to restart to the kill, which are the wrapper's; 0 if there is no wrapper."""
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
        """Stores a report that was checked. Returns whether the rank reports another call of the function than before,
        and a wrapper at all: what the rank reported of the earlier call is then to be discarded.

        Args:
            began_ns: `began_ns` of the report, limited as all moments of a rank are.
            since_ns: when the phase of the report began.
        """
        is_anew = report.began_ns != self.report.began_ns
        self.report, self.began_ns, self.since_ns = report, began_ns, since_ns
        return is_anew and self.is_there

    def note_none(self) -> None:
        """Notes that the rank has no wrapper, or none any more: the process may have become another program (exec)."""
        self.report = _NONE

    def ping(self, sent_ns: int) -> None:
        """Notes a call of `ping()` by the training. An older one, which arrives late, changes nothing."""
        self._ping_ns = max(self._ping_ns, sent_ns)

    def expected_signs(self, has_stamps: bool, stamp_ns: int) -> list[tuple[str, int]]:
        """Returns the signs of progress that are expected now, each with the moment of the last one.

        Nothing is expected outside of the function, or while the training has switched its hang protection off
        (`is_timed`). Each sign counts from the beginning of the phase at the earliest.

        Args:
            has_stamps: whether stamps of the main thread can be expected.
            stamp_ns: when the main thread last executed bytecode, as far as is known.
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
