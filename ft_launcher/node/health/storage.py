"""Checks of storage: network mounts and paths that must answer, and free space in the folders that are written to.

- Mounts (`check_mounts`): Lustre's own health state, then the size and the first entry of each network mount.
- Paths (`check`): a small file is written to a folder and read back; a file is read.
- Space (`check_space`, `free_space`): in /dev/shm, which the training needs, and in the temporary folder and the folder
  of logs, which only the launcher needs.

Network file systems may hang, so their checks run in a process of their own (`decide/health/check.py`). What hangs is
the last path that the process has named. The agent itself asks local file systems for their free space, which costs
microseconds and cannot hang. Which ones are local is read from the kernel's table of mounts (`mounts_of`, `is_local`),
and no file system is accessed for that.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from ft_launcher.decide.health.check import Answer, Finding, State, Task

_BYTES = 4096
"""What is written and read of a path: one page, enough to have the storage answer."""
_MIB = 1 << 20
NETWORK = frozenset(
    {"nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "wekafs", "panfs", "pvfs2", "fuse.glusterfs"}
)
"""Names of file systems, as in /proc/self/mountinfo, whose data is on a server."""
_LUSTRE_HEALTH = ("/sys/fs/lustre/health_check", "/proc/fs/lustre/health_check")
"""Where Lustre's client says how it is: the second path is of older releases."""


class Mount(NamedTuple):
    """A line of the kernel's table of mounts.

    Attributes:
        point: the folder at which the file system is mounted.
        kind: the kind of file system, such as "nfs4".
        source: the device or the server.
    """

    point: str
    kind: str
    source: str


def mounts_of(mountinfo: str) -> list[Mount]:
    """Returns the mounts in a text that has the form of /proc/self/mountinfo (proc(5))."""
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
    """Returns whether a path, as written, is on no network mount and on no FUSE. Asks no file system.

    Symbolic links are not followed, since that would ask the file systems on the way.
    """
    path = os.path.abspath(path) + "/"  # noqa: PTH100 - resolve() would ask
    over = [mount for mount in mounts if path.startswith(mount.point.rstrip("/") + "/")]
    if over:
        kind = max(over, key=lambda mount: len(mount.point)).kind
    else:
        kind = ""
    return kind not in NETWORK and not kind.startswith("fuse")


def check(task: Task) -> Answer:
    """Returns one finding for each path of `task.work["paths"]`. The check "storage".

    The paths are tried in order, so the first one that hangs hides those after it.
    """
    findings = []
    for path in task.work["paths"]:
        task.say(path)
        findings.append(_try(Path(path)))
    return findings, {}


def check_mounts(task: Task) -> Answer:
    """Returns one finding for each mount of `task.work["mounts"]`, and one for Lustre where it is. The check
    "mounts"."""
    findings = [finding for finding in map(_lustre, _LUSTRE_HEALTH) if finding is not None][:1]
    for point, kind, source in task.work["mounts"]:
        name = f"{point} ({kind} from {source})"
        task.say(name)
        findings.append(_answers(point, name))
    return findings, {}


def check_space(task: Task) -> Answer:
    """Returns one finding for each folder of `task.work["folders"]`, none of which the training needs. The check
    "space"."""
    findings = []
    for folder in task.work["folders"]:
        task.say(folder)
        findings.append(free_space(folder, needed=False))
    return findings, {}


def free_space(folder: str, needed: bool) -> Finding:
    """Returns the finding on the free space of a folder.

    Full: less than a MiB and less than 1 % is free, or no inode is. A full folder is a reason to leave the job if the
    training needs the folder. A full disk of logs is none: checkpoints are elsewhere, and another node would often
    write to the same disk of logs.

    Args:
        folder: its path.
        needed: whether the training needs it.
    """
    full: State = "unhealthy" if needed else "warning"
    try:
        found = os.statvfs(folder)
    except FileNotFoundError:
        return "not present", f"{folder} is not there"
    except OSError as error:
        return "unknown", f"{folder}: {error.strerror}"
    # Blocks that are reserved for root count as free for root only.
    free = found.f_frsize * (found.f_bfree if os.geteuid() == 0 else found.f_bavail)
    if free < _MIB and free * 100 < found.f_frsize * found.f_blocks:
        return full, f"{folder} is full: {free} bytes are free"
    if found.f_files and not found.f_favail:
        return full, f"{folder} is full: no inode is free"
    return "ok", f"{folder} has {free // _MIB} MiB free"


def _try(path: Path) -> Finding:
    """Returns the finding on one path: a folder is written to, a file is read."""
    try:
        mode = path.stat().st_mode
        if stat.S_ISFIFO(mode):
            return "unhealthy", f"{path} is a FIFO, and no file or folder of storage"
        if not stat.S_ISDIR(mode):
            with path.open("rb") as file:
                file.read(_BYTES)
            return "ok", ""
        if _gives_back(path):
            return ("ok", "")
        return ("unhealthy", f"{path}: what was read is not what was written")
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EROFS):
            hint = " (name a file in it to have it only read)"
        else:
            hint = ""
        return "unhealthy", f"{path}: {error.strerror}{hint}"


def _gives_back(folder: Path) -> bool:
    """Writes, reads and removes a file in the folder. Returns whether the same bytes were read."""
    path = folder / f".ft_health_{os.urandom(8).hex()}"
    written = os.urandom(_BYTES)
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.write(file, written)
        # Pages that are not written yet cannot be dropped from the cache.
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)  # else the page cache would answer
        return os.pread(file, _BYTES, 0) == written
    finally:
        os.close(file)
        path.unlink()


def _lustre(path: str) -> Finding | None:
    """Returns the finding on Lustre's own health state in a file; None: there is no such file."""
    try:
        state = Path(path).read_text().strip()
    except OSError:
        return None
    if state == "healthy":
        return "ok", ""
    return "unhealthy", f"{path} says {state!r}"


def _answers(point: str, name: str) -> Finding:
    """Returns the finding on one mount: whether its size and its first entry can be read. `name`: for the reason."""
    try:
        os.statvfs(point)
        with os.scandir(point) as entries:
            next(entries, None)
    except (PermissionError, FileNotFoundError) as error:
        # The mount is not this user's to see, or is hidden by another mount.
        return "unknown", f"{name}: {error.strerror}"
    except OSError as error:
        return "unhealthy", f"{name}: {error.strerror}"
    return "ok", ""
