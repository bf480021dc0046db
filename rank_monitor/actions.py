"""The actions that `HangDetector` returns: one frozen dataclass each. `server.py` performs them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from rank_monitor.contract.wire.launcher_messages import Verdict


@dataclass(frozen=True)
class DumpStacks:
    """Ask the rank for its stacks."""


@dataclass(frozen=True)
class SendVerdict:
    """Send a verdict to the agent; the server adds process, frames and pid. Precedes the signal to the rank."""

    verdict: Verdict


@dataclass(frozen=True)
class Interrupt:
    """Ask the in-process wrapper to restart. The rank is killed if it does not restart in time."""

    verdict: Verdict


@dataclass(frozen=True)
class Signal:
    """Send SIGCONT, then `number`: a stopped process handles no other signal than SIGKILL."""

    number: int


@dataclass(frozen=True)
class Kill:
    """Send SIGKILL."""


@dataclass(frozen=True)
class Note:
    """Write a line to the log."""

    text: str


Action: TypeAlias = DumpStacks | SendVerdict | Interrupt | Signal | Kill | Note
