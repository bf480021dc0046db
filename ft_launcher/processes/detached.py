"""Processes that a rank started to outlive it: those in a session of their own, for instance an upload.

`agent/results.py` and `ranks/rank_context.py` ask which processes of a cycle these are, and what they run. Sends no
signal; how long they may go on (`--ft-linger`)
is the caller's.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rank_monitor.contract.processes.sweep import environ_of

_LOCAL_RANK = "LOCAL_RANK"
# Characters; a command line can have megabytes, and this is part of one log line.
_COMMAND_LENGTH = 200


@dataclass(frozen=True)
class Background:
    """Distinguishes background processes of ranks that succeeded from all others.

    `sessions` are those of the ranks. `succeeded_since` has an entry for each local rank that failed and was started
    again: when the process that succeeded began, in ticks since boot; infinity if none did. What a failed process
    started is not a background process.
    """

    sessions: Collection[int]
    succeeded_since: Mapping[str, float] = field(default_factory=dict)

    def has(self, pid: int, session: int) -> bool:
        """Whether a process of the cycle is a background process."""
        if session in self.sessions or session == os.getsid(0):
            return False
        if not self.succeeded_since:
            return True
        since = self.succeeded_since.get(environ_of(pid).get(_LOCAL_RANK, ""), 0.0)
        return start_ticks(pid) >= since


def start_ticks(pid: int) -> float:
    """When a process started, in ticks since boot; infinity when it is gone."""
    # Field 22 of proc(5). The text after the name begins with field 3; a name may contain spaces and parentheses.
    try:
        return float(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return float("inf")


def command_of(pid: int) -> str:
    """Returns the command line of a process as one line, cut to 200 characters; its name when it has none."""
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes() or Path(f"/proc/{pid}/comm").read_bytes()
    except OSError:
        return "gone"
    text = " ".join(raw.replace(b"\0", b" ").decode(errors="replace").split())
    text = "".join(letter if letter.isprintable() else "?" for letter in text)
    if len(text) <= _COMMAND_LENGTH:
        return text
    return text[: _COMMAND_LENGTH - 3] + "..."
