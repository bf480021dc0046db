"""What an in-process wrapper said of one rank: what it does, since when, and what it owes. Pure.

Knows no limits of heartbeats and sections, no deadlines and no alarm. What is older than the iteration is of a former
one: so it makes no difference in which order a rank that came back tells its state.
"""

from __future__ import annotations

from rank_monitor.contract.errors import ProtocolError
from rank_monitor.contract.messages import Guard
from rank_monitor.limits import nanoseconds

RUNNING, UNGUARDED, FINALIZING, RESTARTING, OVER = "running", "unguarded", "finalizing", "restarting", "over"
PHASES = (RUNNING, UNGUARDED, FINALIZING, RESTARTING, OVER)
MAIN_THREAD, PING = "progress of the main thread", "ping()"
END_OF_FINALIZE = "end of finalize and health_check"
_LONGEST_S = 1e9


class Wrapper:
    """The wrapper of a rank, as far as its monitor knows; at first there is none."""

    def __init__(self) -> None:
        self.said = Guard(OVER, 0.0, 0.0, 0.0)
        self.began_ns = 0
        """When the iteration began, or the restart."""
        self.since_ns = 0
        """When the present phase began."""
        self._ping_ns = 0

    @property
    def is_there(self) -> bool:
        """Whether the rank can restart in process."""
        return self.said.phase != OVER

    @property
    def is_restarting(self) -> bool:
        """Whether it waits with deadlines of its own: nothing is judged."""
        return self.said.phase == RESTARTING

    @property
    def is_finalizing(self) -> bool:
        """Whether what is called after the interruption runs: nothing but its end is owed."""
        return self.said.phase == FINALIZING

    @property
    def patience_ns(self) -> int:
        """From asking it to restart to the kill; 0 if there is none to ask."""
        return nanoseconds(self.said.hard_timeout_s - self.said.soft_timeout_s) if self.is_there else 0

    def greet(self, is_there: bool) -> None:
        """The rank connected, and will say more next if a wrapper is there."""
        if is_there != self.is_there:
            self.said = Guard(RESTARTING if is_there else OVER, 0.0, 0.0, 0.0)

    def note(self, message: Guard, sent_ns: int) -> bool:
        """Takes its word; returns whether another iteration or a restart began.

        Raises:
            ProtocolError: the values make no sense; nothing changed.
        """
        _check(message)
        goes_on = {message.phase, self.said.phase} <= {RUNNING, UNGUARDED}
        self.said, self.since_ns = message, sent_ns
        if not goes_on:
            self.began_ns = sent_ns
        return not goes_on and self.is_there

    def ping(self, sent_ns: int) -> None:
        """The training reports progress by itself."""
        self._ping_ns = max(self._ping_ns, sent_ns)

    def owed(self, has_stamps: bool, stamp_ns: int) -> list[tuple[str, int]]:
        """The signs of progress that are expected now, each with the moment it was last there.

        Args:
            has_stamps: stamps of the main thread can be expected.
            stamp_ns: when it last executed bytecode, as far as known.
        """
        if self.said.phase != RUNNING:
            return []
        signs = [(MAIN_THREAD, max(stamp_ns, self.since_ns))] if has_stamps else []
        if self._ping_ns > self.began_ns:
            signs.append((PING, max(self._ping_ns, self.since_ns)))
        return signs


def _check(message: Guard) -> None:
    if message.phase not in PHASES:
        raise ProtocolError(f"guard: phase {message.phase!r} is none of {', '.join(PHASES)}")
    soft_s, hard_s, grace_s = message.soft_timeout_s, message.hard_timeout_s, message.grace_s
    if not (0 < soft_s < hard_s <= _LONGEST_S and 0 <= grace_s <= _LONGEST_S):
        raise ProtocolError(f"guard: soft {soft_s!r} s, hard {hard_s!r} s and grace {grace_s!r} s do not fit")
