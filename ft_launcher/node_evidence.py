"""What the node itself can tell of a death: memory kills of our cgroup, room in /dev/shm.

What cannot be read is unknown.
"""

from __future__ import annotations

import os
from pathlib import Path

from ft_launcher.hints import NodeEvidence

_CGROUPS = Path("/sys/fs/cgroup")


def oom_kills() -> int | None:
    """Kills for lack of memory counted so far by this process' cgroup (v2, else v1); None when that is unknown."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            counter = _CGROUPS / path.lstrip("/") / "memory.events"
        elif "memory" in controllers.split(","):
            counter = _CGROUPS / "memory" / path.lstrip("/") / "memory.oom_control"
        else:
            continue
        if (found := _read_counter(counter)) is not None:
            return found
    return None


def _read_counter(path: Path) -> int | None:
    try:
        for line in path.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
    except (OSError, ValueError):
        pass
    return None


def since(oom_kills_before: int | None) -> NodeEvidence:
    """The evidence of this node, with memory kills counted from an earlier reading."""
    now = oom_kills()
    try:
        shm = os.statvfs("/dev/shm")
        shm_free: int | None = shm.f_bavail * shm.f_frsize
    except OSError:
        shm_free = None
    kills = now - oom_kills_before if now is not None and oom_kills_before is not None else None
    return NodeEvidence(oom_kills=kills, shm_free=shm_free)
