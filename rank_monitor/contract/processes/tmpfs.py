"""Reads what file system a folder is in, and how much memory the files in a folder of a tmpfs take.

The launcher asks when it makes and removes folders with the training's state. Nothing blocks: the kind of a file system
is read from the kernel's table of mounts.
"""

from __future__ import annotations

import os
from pathlib import Path

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
