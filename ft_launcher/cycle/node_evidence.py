"""Reads what the node itself shows about a death: memory kills of our cgroup, and free space in /dev/shm.

Called by `agent/ranks.py` and `in_process.py`, when ranks start and when one has died. What cannot be read is None;
nothing here raises.
"""

from __future__ import annotations

import os
from pathlib import Path

from ft_launcher.attribution.hints import NodeEvidence

# Where version 2 is mounted, and below it the controllers of version 1.
_CGROUPS = Path("/sys/fs/cgroup")


def oom_kills() -> int | None:
    """Returns how many processes of this process' cgroup were killed for lack of memory so far (v2, else v1)."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        # `HIERARCHY:CONTROLLERS:PATH`, cgroups(7). The line of version 2 has no controllers.
        _, controllers, path = line.split(":", 2)
        if not controllers:
            counter = _CGROUPS / path.lstrip("/") / "memory.events"
        elif "memory" in controllers.split(","):
            counter = _CGROUPS / "memory" / path.lstrip("/") / "memory.oom_control"
        else:
            continue
        found = _read_counter(counter)
        if found is not None:
            return found
    return None


def _read_counter(path: Path) -> int | None:
    try:
        for line in path.read_text().splitlines():
            name, _, value = line.partition(" ")
            # The same name in memory.events (version 2) and in memory.oom_control (version 1).
            if name == "oom_kill":
                return int(value)
    except (OSError, ValueError):
        pass
    return None


def since(oom_kills_before: int | None) -> NodeEvidence:
    """Returns the evidence of this node; `oom_kills_before` is an earlier reading of `oom_kills`."""
    now = oom_kills()
    try:
        shm = os.statvfs("/dev/shm")
        # `f_bavail` and not `f_bfree`: what a user without privileges can still write.
        shm_free: int | None = shm.f_bavail * shm.f_frsize
    except OSError:
        shm_free = None
    if now is not None and oom_kills_before is not None:
        kills = now - oom_kills_before
    else:
        kills = None
    return NodeEvidence(oom_kills=kills, shm_free=shm_free)
