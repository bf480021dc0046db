"""Detects limits that cannot act: the user set some, and the training never calls `init_workload_monitoring()`.

Pure. Called by `hang_warnings.py`, and by `composition.py` for the limits that the user set: which options are
concerned, when to warn, and the text. Once per job and node.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ft_launcher.settings.options import flag_of
from ft_launcher.settings.sources import DEFAULT
from rank_monitor.contract.settings.config import MonitorSettings

# Heartbeats and sections count from `init_workload_monitoring()` on; every other limit acts without a client.
_NEED_A_CLIENT = (
    "initial_rank_heartbeat_timeout",
    "rank_heartbeat_timeout",
    "rank_section_timeouts",
    "rank_out_of_section_timeout",
)
# Mostly all ranks are concerned, and the warning is one line.
_MOST_NAMED = 4


def limits_set(settings: MonitorSettings, sources: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the options that were set to a limit and apply only to a watched training."""
    return tuple(
        flag_of(key) for key in _NEED_A_CLIENT if sources.get(key, DEFAULT) != DEFAULT and getattr(settings, key)
    )


class Unwatched:
    """Tracks the ranks of this node that have a process group and are not watched.

    Args:
        limits: as from `limits_set`; without any, no warning is ever due.
        wait_s: from a rank's process group to the warning; None: no warning.
    """

    def __init__(self, limits: Sequence[str], wait_s: float | None) -> None:
        self._limits, self._wait_s = limits, wait_s
        self._due: dict[int, float] = {}
        # Without limits, or with the warning turned off, there is nothing to say.
        self._is_done = not limits or wait_s is None

    def begin_cycle(self) -> None:
        """Forgets the ranks of the last cycle."""
        self._due = {}

    def made_group(self, rank: int, now: float) -> None:
        """Notes that a rank made its process group at `now`: the wait for its watch begins."""
        if self._wait_s is not None:
            # A rank may make several groups; the wait counts from the first.
            self._due.setdefault(rank, now + self._wait_s)

    def watched(self, ranks: Iterable[int]) -> None:
        """Notes that these ranks are, or were, watched in this cycle."""
        for rank in ranks:
            self._due.pop(rank, None)

    def next_check(self) -> float | None:
        """When to call `watched` and then warn of the ranks that are left (monotonic seconds); None: never."""
        if self._is_done:
            return None
        return min(self._due.values(), default=None)

    @property
    def ranks(self) -> list[int]:
        """The ranks that have a process group and were not reported as watched, sorted."""
        return sorted(self._due)

    def warning(self, ranks: Sequence[int], settings: MonitorSettings, collective: str) -> str:
        """Returns the text of the warning. No further warning is due afterwards.

        Args:
            ranks: as from `ranks`, but global ranks.
            settings: of the monitors.
            collective: the collective timeout in words.
        """
        self._is_done = True
        named = ", ".join(map(str, ranks[:_MOST_NAMED])) + (", ..." if len(ranks) > _MOST_NAMED else "")
        stall = settings.stall_warning
        if stall is None:
            log = "is off"
        else:
            log = f"warns in the log when a main thread stands still for {stall:g} s"
        return (
            f"{', '.join(self._limits)} cannot act: no init_workload_monitoring() {self._wait_s:g} s after the process "
            f"group was made (rank {named}). Add two lines to the script: `import ft_client as ft; ft.init()`, and "
            f"`for batch in ft.steps(loader):` in place of `for batch in loader:`. Until then two things see a hang: "
            f"--ft-stall-warning {log}, and {collective}"
        )
