"""What the monitor of one rank reported in a cycle, each message with its time: the rank's part of the evidence.

`monitors.py` makes one for each process of a rank, and gives it every message; `agent/cycle/evidence.py` and others
read it. Judges nothing: the monitor did, and the launcher acts by what `take` returns.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from rank_monitor.contract.errors import ProtocolError
from rank_monitor.contract.wire.complaints import Complaints
from rank_monitor.contract.wire.launcher_messages import (
    STALL,
    Connected,
    CycleStart,
    Ready,
    Snapshot,
    StandsStill,
    Suspected,
    Times,
    Verdict,
)
from rank_monitor.contract.wire.messages import (
    LastOutput,
    Message,
    ProgramFailed,
    RankException,
    ResultInDoubt,
    Returned,
)
from rank_monitor.contract.wire.rank_times import RankTimes, rank_times

logger = logging.getLogger(__name__)
_complaints = Complaints(logger.warning)

_NO_TEXT = "(its text could not be made: str() of it did not return)"


@dataclass(frozen=True)
class Replaced:
    """A monitor was lost and another took its place."""

    why: str


@dataclass
class RankReport:
    """What one rank's monitor reported in this cycle, with the time of each message (monotonic seconds).

    `start` says which process of the rank it is about, `client_pid` which process connected as the rank (0: none),
    and `times` is the last time ledger of it. `reading` is the last answer to `NodeMonitors.ask_readings`: a
    finding about the end of a rank must not take it for one. `suspected_at` is when it was last about to exceed a
    limit, `returned_at` when it returned from its program, and `standstills` how often its monitor has found that
    it stands still. `failed` says that its program has ended with an error: before the exception, which comes next
    if it can be told. `before_group`: the rank that sent `last_output` had certainly made no process group.
    `at_decision` is the snapshot of the look by which the launcher decided that the job hangs: after it the rank
    may have lost the one that is ended for the hang. `stood_still` is the snapshot of the last look at which this
    rank stood still, at `stood_still_at`: where another node decides, this node knows no other moment.
    """

    start: CycleStart | None = None

    suspected_at: float | None = None
    standstills: int = 0
    verdict: Verdict | None = None
    verdict_at: float | None = None
    exception: RankException | None = None
    exception_at: float | None = None
    failed: ProgramFailed | None = None
    failed_at: float | None = None
    last_output: str = ""
    before_group: bool = False
    returned_at: float | None = None
    suspect_result: ResultInDoubt | None = None
    snapshot: Snapshot | None = None
    at_decision: Snapshot | None = None
    stood_still: Snapshot | None = None
    stood_still_at: float | None = None
    was_attached: bool = False
    client_pid: int = 0
    times: RankTimes | None = None
    reading: Snapshot | None = None
    reading_at: float | None = None

    def take(self, message: Message, sent_ns: int, now: float) -> Message | None:
        """Notes a message of this cycle; returns it if the launcher must act on it or record it.

        Args:
            sent_ns: when it was sent; as `now`, by the monotonic clock.
        """
        match message:
            case Connected():
                self.was_attached |= message.attached
                self.client_pid = message.pid
            case Snapshot() if message.token < 0:
                self.reading, self.reading_at = message, now
            case Snapshot():
                self.snapshot = message
            case Times():
                self._take_times(message)
            case Verdict():
                return self._take_verdict(message, now)
            case RankException():
                self.take_exception(message, now)
                return message
            case ProgramFailed():
                self.failed, self.failed_at = message, now
                return message
            case LastOutput():
                self.last_output, self.before_group = message.text, message.before_group
            case Returned():
                self.returned_at = sent_ns / 1e9
            case ResultInDoubt():
                self.suspect_result = message
                return message
            case Suspected():
                self.suspected_at = now
                return message
            case StandsStill():
                self.standstills += 1
            case Ready():
                pass
            case _:
                return message
        return None

    def untold(self) -> RankException | None:
        """Returns the exception of a program whose text never came; None: it came, or there is none."""
        if self.exception is not None or self.failed is None or not self.failed.type:
            return None
        return RankException(self.failed.type, _NO_TEXT, self.failed.traceback, self.failed.wall_time)

    def take_exception(self, exception: RankException, now: float) -> None:
        """Notes why the rank failed. The first exception is the cause; later ones are of the clean-up."""
        if self.exception is None:
            self.exception, self.exception_at = exception, now

    def _take_times(self, message: Times) -> None:
        # It may have been sent before this process of the rank was started, or after the cycle's end.
        if self.start is None or (message.cycle, message.pid) != (self.start.cycle, self.start.rank_pid):
            return
        try:
            self.times = rank_times(message.times)
        except ProtocolError as error:
            _complaints.about("times", f"a monitor sent what is no time ledger: {error}")

    def _take_verdict(self, message: Verdict, now: float) -> Verdict | None:
        # It may cross the end of its cycle on the way, and then still explains why its rank died; but not the start of
        # the next cycle.
        if self.start is None or message.cycle != self.start.cycle:
            return None
        if message.condemned or (message.limit == STALL and self.verdict is None):
            self.verdict, self.verdict_at = message, now
        return message
