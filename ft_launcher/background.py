"""Processes that a rank started on purpose to outlive it: in a session of their own, as an upload of a checkpoint.

Says which of a cycle's processes these are, and what they run. Signals nothing, and knows neither the cycle's end nor
how long they may go on.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rank_monitor.contract.sweep import environ_of

_LOCAL_RANK = "LOCAL_RANK"
_COMMAND_LENGTH = 200


@dataclass(frozen=True)
class Background:
    """Tells background processes of ranks that succeeded from all others.

    `sessions` are those of the ranks. `succeeded_since` has an entry for each local rank that failed and went on in
    process: when the process that succeeded began, in ticks since boot; infinity: none did. What the failed one
    started is not left alone.
    """

    sessions: Collection[int]
    succeeded_since: Mapping[str, float] = field(default_factory=dict)

    def has(self, pid: int, session: int) -> bool:
        """Whether a process of the cycle is one of these."""
        if session in self.sessions or session == os.getsid(0):
            return False
        if not self.succeeded_since:
            return True
        since = self.succeeded_since.get(environ_of(pid).get(_LOCAL_RANK, ""), 0.0)
        return start_ticks(pid) >= since


def start_ticks(pid: int) -> float:
    """When a process started, in ticks since boot; infinity when it is gone."""
    try:
        return float(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return float("inf")


def command_of(pid: int) -> str:
    """What a process runs, on one line and cut to a bearable length; its name when it has no arguments."""
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes() or Path(f"/proc/{pid}/comm").read_bytes()
    except OSError:
        return "gone"
    text = " ".join(raw.replace(b"\0", b" ").decode(errors="replace").split())
    text = "".join(letter if letter.isprintable() else "?" for letter in text)
    return text if len(text) <= _COMMAND_LENGTH else text[: _COMMAND_LENGTH - 3] + "..."
