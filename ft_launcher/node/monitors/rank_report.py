"""What the monitor of one rank reported in a cycle, each message with its time: the rank's part of the evidence.

`NodeMonitors.begin_rank` makes a `RankReport` for each process of a rank, and passes the monitor's messages to `note`,
on the agent's thread. Messages about another process of the rank, and warnings about another cycle, never reach `note`
(`NodeMonitors._drain`, `_note`). Two fields come from no message: `NodeMonitors` itself sets `at_decision` and
`stood_still`, to snapshots that it got before. These read a report, all on the agent's thread:

- The cycle loop (`agent/ranks.py`) acts on the messages that `note` returns, at once.
- While ranks run, `agent/hang_watch.py` reads standstills and snapshots, `agent/hang_warnings.py` snapshots and whether
  a client is attached, `agent/in_process/culprit_exchange.py` and `tools/status/status_feed.py` the readings that they
  have asked for.
- After the end of the cycle `agent/cycle/evidence.py` reads the fields, and the search for the first failure compares
  the moments of all ranks.

This file judges nothing. The monitor has judged, and the launcher decides what follows.
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
    StateLoaded,
)
from rank_monitor.contract.wire.rank_times import RankTimes, rank_times

logger = logging.getLogger(__name__)
_complaints = Complaints(logger.warning)

_NO_TEXT = "(its text could not be made: str() of it did not return)"
"""In the place of the message of an exception whose class and traceback are known."""


@dataclass(frozen=True)
class Replaced:
    """A monitor was lost and another took its place. `reason`: what was lost with it, in words, such as "it died"."""

    reason: str


@dataclass
class RankReport:
    """What one rank's monitor reported in this cycle. Moments (`..._at`) are monotonic seconds; None: nothing came.

    Attributes:
        start: which process of the rank this is about; None: no rank was started yet.
        suspected_at: when the rank was last about to exceed a limit.
        standstills: how often the monitor has found that the rank stands still.
        verdict: the limit that the rank exceeded and is ended for. Until there is one, the first warning of a stall,
            after which the rank runs on.
        verdict_at: when the verdict arrived.
        exception: the first exception by which the program ended: later ones are of the clean-up.
        exception_at: when it arrived.
        failed: the program has ended with an error. Arrives before the exception, of which the text may take long to
            make, or for ever.
        failed_at: when it arrived.
        last_output: what the rank printed last. Where no exception is known, it is the only trace of the error.
        before_group: the rank had certainly made no process group when it sent `last_output`.
        returned_at: when the rank returned from its program: when the message was sent, not when it arrived.
        suspect_result: the unexpected result that the rank reported.
        loaded: what the rank's last look for state in memory came to; None: it has not looked, or not yet.
        snapshot: the last answer to `NodeMonitors.snapshots`: where the rank was.
        at_decision: the snapshot by which the launcher decided that the job hangs. After that the rank may have lost
            the rank that is ended for the hang, and would be taken for a failed one.
        stood_still: the snapshot of the last check for hangs at which this rank stood still. Where another node
            decides about the hang, this node knows no other moment.
        stood_still_at: when that check was.
        was_attached: whether the client in the rank has ever connected to this monitor.
        client_pid: the process that connected as the rank; 0: none.
        times: the rank's time ledger, as it was sent last.
        reading: the last answer to `NodeMonitors.ask_readings`, for the status page and for `culprit_exchange.py`. Kept
            apart from `snapshot`: a finding about the end of a rank must not take it for one.
        reading_at: when it arrived.
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
    loaded: StateLoaded | None = None
    snapshot: Snapshot | None = None
    at_decision: Snapshot | None = None
    stood_still: Snapshot | None = None
    stood_still_at: float | None = None
    was_attached: bool = False
    client_pid: int = 0
    times: RankTimes | None = None
    reading: Snapshot | None = None
    reading_at: float | None = None

    def note(self, message: Message, sent_ns: int, now: float) -> Message | None:
        """Notes a message of this cycle; returns it if the launcher must act on it or record it, else None.

        Args:
            message: of the monitor, or of the rank, passed on by the monitor.
            sent_ns: when the message was sent (monotonic nanoseconds).
            now: when it was received (monotonic seconds).
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
                self._note_times(message)
            case Verdict():
                return self._note_verdict(message, now)
            case RankException():
                self.note_exception(message, now)
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
            case StateLoaded():
                self.loaded = message
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

    def incomplete_exception(self) -> RankException | None:
        """Returns the exception of a program where only its class and traceback arrived; None: it arrived whole, or
        there is none.

        The client sends these first (`ProgramFailed`), then makes the text: `str()` of an exception is code of the
        user, which may block.
        """
        if self.exception is not None or self.failed is None or not self.failed.type:
            return None
        return RankException(self.failed.type, _NO_TEXT, self.failed.traceback, self.failed.wall_time)

    def note_exception(self, exception: RankException, now: float) -> None:
        """Notes why the rank failed, at `now` (monotonic seconds).

        The first exception is the cause; later ones are of the clean-up, and are dropped. `NodeMonitors.fail` calls
        this, too, with an exception that the launcher has made.
        """
        if self.exception is None:
            self.exception, self.exception_at = exception, now

    def _note_times(self, message: Times) -> None:
        """Keeps the time ledger that a monitor sent, unless it is about another process or cannot be read."""
        # The monitor may have sent it before this process of the rank was started, or after the cycle's end.
        if self.start is None or (message.cycle, message.pid) != (self.start.cycle, self.start.rank_pid):
            return
        try:
            self.times = rank_times(message.times)
        except ProtocolError as error:
            _complaints.about("times", f"a monitor sent what is no time ledger: {error}")

    def _note_verdict(self, message: Verdict, now: float) -> Verdict | None:
        """Keeps a verdict of this cycle, and returns it for the cycle loop; None: it is about another cycle."""
        # A verdict may cross the end of its cycle on the way, and then still explains why the rank died. After the
        # start of the next cycle it explains nothing.
        if self.start is None or message.cycle != self.start.cycle:
            return None
        if message.condemned or (message.limit == STALL and self.verdict is None):
            self.verdict, self.verdict_at = message, now
        return message


def has_left_its_wait(before: Snapshot, now: Snapshot) -> bool:
    """Returns whether a rank that waited in a collective is in none any more, and has entered no other one.

    Either the collective is finished, or its wait has failed: torch's flight recorder shows both as finished.

    Args:
        before: an earlier state of the rank.
        now: its present state.
    """
    if before.groups.keys() != now.groups.keys():
        return False
    counts = [(before.groups[name], now.groups[name]) for name in before.groups]
    entered_none = all(earlier.get("entered") == later.get("entered") for earlier, later in counts)
    waited = any(earlier.get("entered") != earlier.get("finished") for earlier, _ in counts)
    waits = any(later.get("entered") != later.get("finished") for _, later in counts)
    return entered_none and waited and not waits
