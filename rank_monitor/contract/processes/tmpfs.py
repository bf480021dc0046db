"""Reads how much room a node has for files in a tmpfs: of the mount, and of the cgroup that its pages count against.

A launcher reads it when it makes the job's folder, and a rank before it writes the training's state there
(`contract/memory_room.py` decides). Nothing blocks: a tmpfs is memory, and the kind of another file system is read from
the kernel's table of mounts.
"""

from __future__ import annotations

import os
from pathlib import Path

from rank_monitor.contract.memory_room import Room
from rank_monitor.contract.processes.cgroup import memory_room

KIND = "tmpfs"
_MOUNTS = Path("/proc/self/mountinfo")
_BLOCK = 512
"""Bytes of a block of `st_blocks` (stat(2))."""


def kind_of(folder: str) -> str:
    """Returns the kind of file system that a folder is in, such as "tmpfs" or "ext4"; empty: the table of mounts does
    not say.

    Raises:
        OSError: there is no such folder, or it may not be looked at.
    """
    device = os.stat(folder).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = _MOUNTS.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    for line in lines:
        # `ID PARENT MAJOR:MINOR ROOT POINT OPTIONS... - KIND SOURCE ...` (proc(5)).
        before, _, after = line.partition(" - ")
        if before.split()[2:3] == [wanted]:
            return after.partition(" ")[0]
    return ""


def look(folder: str, limit: int) -> Room:
    """Returns the room that a node has for the files in a folder.

    Args:
        folder: the job's folder in a tmpfs.
        limit: bytes, of `--ft-memory-limit`.

    Raises:
        OSError: the folder is gone.
    """
    mount = os.statvfs(folder)
    return Room(
        folder=folder,
        limit=limit,
        held=bytes_in(folder),
        tmpfs_size=mount.f_blocks * mount.f_frsize,
        # `f_bavail` and not `f_bfree`: what a user without privileges can still write.
        tmpfs_free=mount.f_bavail * mount.f_frsize,
        memory=memory_room(),
    )


def bytes_in(folder: str) -> int:
    """Returns how much memory the files in a folder of a tmpfs take, in bytes, with all folders below. What vanishes
    meanwhile counts as nothing."""
    found = 0
    for top, _, names in os.walk(folder):
        for name in names:
            try:
                found += os.lstat(os.path.join(top, name)).st_blocks * _BLOCK  # noqa: PTH118 - text is enough
            except OSError:
                continue
    return found
