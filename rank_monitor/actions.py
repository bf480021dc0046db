"""What the detector can ask for: one frozen dataclass each. Performed by `server.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from rank_monitor.contract.launcher_messages import Verdict


@dataclass(frozen=True)
class DumpStacks:
    """Ask the rank for its stacks."""


@dataclass(frozen=True)
class SendVerdict:
    """Tell the agent; the server adds process, frames and pid. Comes before the signal."""

    verdict: Verdict


@dataclass(frozen=True)
class Interrupt:
    """Ask the in-process wrapper to restart; killed if that does not help in time."""

    verdict: Verdict


@dataclass(frozen=True)
class Signal:
    """SIGCONT, then `number`."""

    number: int


@dataclass(frozen=True)
class Kill:
    """SIGKILL."""


@dataclass(frozen=True)
class Note:
    """A line for the log."""

    text: str


Action: TypeAlias = DumpStacks | SendVerdict | Interrupt | Signal | Kill | Note
