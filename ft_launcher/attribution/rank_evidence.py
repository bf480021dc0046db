"""What is known of one rank of a cycle that failed: a value, and what it says by itself. Pure; compares no ranks."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from ft_launcher.attribution.scene import Scene
from rank_monitor.contract.launcher_messages import Snapshot, Verdict
from rank_monitor.contract.messages import NO_ITERATION, RankException


@dataclass(frozen=True)
class RankEvidence:
    """What is known of one rank. Moments are seconds of this node's monotonic clock; `exit_code` as from subprocess."""

    rank: int
    local_rank: int
    pid: int
    exit_code: int | None = None
    died_at: float | None = None
    verdict: Verdict | None = None
    verdict_at: float | None = None
    exception: RankException | None = None
    exception_at: float | None = None
    snapshot: Snapshot | None = None
    was_stopped: bool = False
    killed_by_us: bool = False

    @property
    def failed_at(self) -> float | None:
        """The first sign of its failure; None while there is none."""
        died_badly = self.died_at if self.exit_code not in (0, None) else None
        condemned_at = self.verdict_at if self.condemned else None
        signs = [at for at in (died_badly, condemned_at, self.exception_at) if at is not None]
        return min(signs, default=None)

    @property
    def condemned(self) -> bool:
        """Whether its monitor found that it hangs."""
        return self.verdict is not None and self.verdict.condemned

    @property
    def scene(self) -> Scene:
        """Where it was: by the verdict that condemned it, else as found before the ranks were stopped."""
        if self.condemned and self.verdict is not None:
            return Scene(self.rank, self.verdict.frames, self.verdict.process)
        if self.snapshot is not None:
            return Scene(self.rank, self.snapshot.frames, self.snapshot.process)
        return Scene(self.rank)

    @property
    def signal_number(self) -> int:
        """The signal that it died of; 0: of none."""
        return max(0, -(self.exit_code or 0))


def where(rank: RankEvidence) -> str:
    """In which sections and at which iteration the rank was, in words; empty when nothing is known."""
    told, parts = rank.verdict or rank.snapshot, []
    if told and told.sections:
        parts.append("in section " + ", ".join(f"{name} ({age:.1f} s)" for name, age in told.sections.items()))
    if iteration(rank) != NO_ITERATION:
        parts.append(f"at iteration {iteration(rank)}")
    return " ".join(parts)


def iteration(rank: RankEvidence) -> int:
    """The last iteration that the rank reported in this cycle; NO_ITERATION when it reported none."""
    if rank.verdict and rank.verdict.iteration != NO_ITERATION:
        return rank.verdict.iteration
    return rank.snapshot.iteration if rank.snapshot else NO_ITERATION


def state(rank: RankEvidence) -> str:
    """What became of the rank, and where, in one line."""
    if rank.exit_code is None:
        became = "was running"
    elif rank.exit_code == 0:
        became = "had finished"
    elif rank.exit_code < 0:
        became = f"ended by {signal_name(rank.signal_number)}"
    else:
        became = f"ended with code {rank.exit_code}"
    frame = "" if rank.exception else rank.scene.own_frame
    return f"rank {rank.rank} {became} {where(rank)}".rstrip() + (f", at {frame}" if frame else "")


def signal_name(number: int) -> str:
    """SIGKILL for 9; `signal 41` for one without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
