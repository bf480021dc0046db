"""The known facts of the in-process wrapper of one rank, and the signs of progress that it makes expected. Pure.

`watch.py` passes messages in, and makes deadlines of the signs. Moments are as there. What is older than the wrapper's
iteration belongs to a former one, so the order in which a reconnected rank reports its state makes no difference. Apart
from the facts of the rank: few ranks have a wrapper, and its phases are a noun of their own.
"""

from __future__ import annotations

from rank_monitor.contract.errors import ProtocolError
from rank_monitor.contract.wire.messages import Guard, WrapperPhase
from rank_monitor.limits import LONGEST_S, nanoseconds

_MOST_NAME = 100
"""Characters of the name of a callback: the wrapper's are shorter."""
MAIN_THREAD, PING = "progress of the main thread", "ping()"


class WatchedWrapper:
    """The wrapper of a rank as the monitor knows it. At first there is none."""

    def __init__(self) -> None:
        self.message = Guard(WrapperPhase.OVER, 0.0, 0.0, 0.0)
        self.began_ns = 0
        """When the iteration began, or the restart."""
        self.since_ns = 0
        """When the present phase began."""
        self._ping_ns = 0

    @property
    def is_there(self) -> bool:
        """Whether the rank can restart in process."""
        return self.message.phase != WrapperPhase.OVER

    @property
    def is_restarting(self) -> bool:
        """Whether the wrapper is restarting: it has deadlines of its own, and nothing is judged."""
        return self.message.phase == WrapperPhase.RESTARTING

    @property
    def is_finalizing(self) -> bool:
        """Whether a callback runs outside of the function, as finalize does: only its end is expected."""
        return self.message.phase == WrapperPhase.FINALIZING

    @property
    def expected_end(self) -> str:
        """The words for the sign that is expected while a callback runs."""
        return f"end of {self.message.callback[:_MOST_NAME] or 'a callback'}"

    @property
    def slack_ns(self) -> int:
        """Nanoseconds from asking the wrapper to restart to the kill; 0 if there is no wrapper."""
        if self.is_there:
            return nanoseconds(self.message.hard_timeout_s - self.message.soft_timeout_s)
        return 0

    def greet(self, is_there: bool) -> None:
        """Handles a hello. If a wrapper `is_there`, its state follows in the next message; until then it restarts."""
        if is_there != self.is_there:
            if is_there:
                phase = WrapperPhase.RESTARTING
            else:
                phase = WrapperPhase.OVER
            self.message = Guard(phase, 0.0, 0.0, 0.0)

    def note(self, message: Guard, sent_ns: int) -> bool:
        """Takes over the state in `message`. Returns whether another iteration or a restart began.

        Raises:
            ProtocolError: the values make no sense; nothing changed.
        """
        _check(message)
        goes_on = {message.phase, self.message.phase} <= {WrapperPhase.RUNNING, WrapperPhase.UNGUARDED}
        self.message, self.since_ns = message, sent_ns
        if not goes_on:
            self.began_ns = sent_ns
        return not goes_on and self.is_there

    def ping(self, sent_ns: int) -> None:
        """Handles a call of `ping()` by the training."""
        self._ping_ns = max(self._ping_ns, sent_ns)

    def expected_signs(self, has_stamps: bool, stamp_ns: int) -> list[tuple[str, int]]:
        """The signs of progress that are expected now, each with the moment of the last one.

        Args:
            has_stamps: whether stamps of the main thread can be expected.
            stamp_ns: when the main thread last executed bytecode, as far as known.
        """
        if self.message.phase != WrapperPhase.RUNNING:
            return []
        if has_stamps:
            signs = [(MAIN_THREAD, max(stamp_ns, self.since_ns))]
        else:
            signs = []
        if self._ping_ns > self.began_ns:
            signs.append((PING, max(self._ping_ns, self.since_ns)))
        return signs


def _check(message: Guard) -> None:
    if message.phase not in tuple(WrapperPhase):
        raise ProtocolError(f"guard: phase {message.phase!r} must be one of {', '.join(WrapperPhase)}")
    soft_s, hard_s, grace_s = message.soft_timeout_s, message.hard_timeout_s, message.grace_s
    if not (0 < soft_s < hard_s <= LONGEST_S and 0 <= grace_s <= LONGEST_S):
        raise ProtocolError(f"guard: soft {soft_s!r} s, hard {hard_s!r} s and grace {grace_s!r} s do not fit")
