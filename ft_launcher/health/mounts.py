"""Checks that network mounts answer: Lustre's own health state, then each mount's size and first entry.

`look` runs in a process of its own; if a mount hangs, it is the last one that the process named. `parse` and `is_local`
run in the agent: they read the kernel's table and access no file system.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from ft_launcher.health.check import Answer, Finding, Task

# Names of file systems as in /proc/self/mountinfo whose data is on a server.
NETWORK = frozenset(
    {"nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "wekafs", "panfs", "pvfs2", "fuse.glusterfs"}
)
_LUSTRE_HEALTH = ("/sys/fs/lustre/health_check", "/proc/fs/lustre/health_check")


class Mount(NamedTuple):
    """A line of the kernel's table."""

    point: str
    kind: str
    source: str


def parse(mountinfo: str) -> list[Mount]:
    """The mounts of a text in the form of /proc/self/mountinfo, as proc(5) has it."""
    mounts = []
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        fields = before.split()
        what = after.split()
        if len(fields) > 4 and len(what) > 1:
            # The kernel writes spaces, tabs, newlines and backslashes as three octal digits.
            point = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), fields[4])
            mounts.append(Mount(point, what[0], what[1]))
    return mounts


def is_local(path: str, mounts: Iterable[Mount]) -> bool:
    """Whether the path, as written, lies on no network mount and on no FUSE; asks no file system."""
    path = os.path.abspath(path) + "/"  # noqa: PTH100 - resolve() would ask
    over = [mount for mount in mounts if path.startswith(mount.point.rstrip("/") + "/")]
    if over:
        kind = max(over, key=lambda mount: len(mount.point)).kind
    else:
        kind = ""
    return kind not in NETWORK and not kind.startswith("fuse.")


def look(task: Task) -> Answer:
    """One finding per mount of `task.work["mounts"]` (point, kind, source), and one for Lustre where it is."""
    findings = [finding for finding in map(_lustre, _LUSTRE_HEALTH) if finding is not None][:1]
    for point, kind, source in task.work["mounts"]:
        name = f"{point} ({kind} from {source})"
        task.say(name)
        findings.append(_answers(point, name))
    return findings, {}


def _lustre(path: str) -> Finding | None:
    try:
        state = Path(path).read_text().strip()
    except OSError:
        return None
    if state == "healthy":
        return "ok", ""
    return "unhealthy", f"{path} says {state!r}"


def _answers(point: str, name: str) -> Finding:
    try:
        os.statvfs(point)
        with os.scandir(point) as entries:
            next(entries, None)
    except (PermissionError, FileNotFoundError) as error:  # not ours to see, or hidden by another mount
        return "unknown", f"{name}: {error.strerror}"
    except OSError as error:
        return "unhealthy", f"{name}: {error.strerror}"
    return "ok", ""
