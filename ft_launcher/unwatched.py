"""Limits that cannot act: the user gave some, and a training that never calls `init_workload_monitoring()`.

Pure. Which options that concerns, when it is certain, and what the user is told. Once per job and node.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ft_launcher.config import DEFAULT
from ft_launcher.options import flag_of
from rank_monitor.contract.config import MonitorSettings

_NEED_A_CLIENT = (
    "initial_rank_heartbeat_timeout",
    "rank_heartbeat_timeout",
    "rank_section_timeouts",
    "rank_out_of_section_timeout",
)
_MOST_NAMED = 4


def limits_given(settings: MonitorSettings, sources: Mapping[str, str]) -> tuple[str, ...]:
    """The options of limits that somebody set, and that apply to a watched training only."""
    return tuple(
        flag_of(key) for key in _NEED_A_CLIENT if sources.get(key, DEFAULT) != DEFAULT and getattr(settings, key)
    )


class Unwatched:
    """The ranks of this node that have a process group and are not watched.

    Args:
        limits: as from `limits_given`; without any, nothing is ever due.
        wait_s: from a rank's process group to the warning; None: no warning.
    """

    def __init__(self, limits: Sequence[str], wait_s: float | None) -> None:
        self._limits, self._wait_s = limits, wait_s
        self._due: dict[int, float] = {}
        self._said = not limits or wait_s is None

    def begin_cycle(self) -> None:
        """All ranks are new."""
        self._due = {}

    def made_group(self, rank: int, now: float) -> None:
        """A rank made its process group."""
        if self._wait_s is not None:
            self._due.setdefault(rank, now + self._wait_s)

    def watched(self, ranks: Iterable[int]) -> None:
        """These ranks are, or were, watched in this cycle."""
        for rank in ranks:
            self._due.pop(rank, None)

    def next_check(self) -> float | None:
        """When somebody should look which of the ranks are watched, and have a warning for the others (monotonic)."""
        return None if self._said else min(self._due.values(), default=None)

    @property
    def ranks(self) -> list[int]:
        """Those that have a process group, and of which nobody said that they are watched."""
        return sorted(self._due)

    def warning(self, ranks: Sequence[int], settings: MonitorSettings, collective: str) -> str:
        """What the user should know, once; nothing is due afterwards.

        Args:
            ranks: as from `ranks`, by the numbers that the user knows.
            settings: of the monitors.
            collective: the collective timeout in words.
        """
        self._said = True
        named = ", ".join(map(str, ranks[:_MOST_NAMED])) + (", ..." if len(ranks) > _MOST_NAMED else "")
        stall = settings.stall_warning
        log = "is off" if stall is None else f"warns in the log when a main thread stands still for {stall:g} s"
        return (
            f"{', '.join(self._limits)} cannot act: no init_workload_monitoring() {self._wait_s:g} s after the process "
            f"group was made (rank {named}). Add two lines to the script: `import ft_client as ft; ft.init()`, and "
            f"`for batch in ft.steps(loader):` in place of `for batch in loader:`. Until then two things see a hang: "
            f"--ft-stall-warning {log}, and {collective}"
        )
