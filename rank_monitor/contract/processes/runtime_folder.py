"""Runtime folders: makes and marks the folder of a launcher, and removes those of launchers killed with all their
processes.

A runtime folder holds a launcher's sockets, stack files and error files. The launcher holds a lock on a file in it as
long as it lives. The kernel releases the lock however the launcher ends, so a process that gets the lock knows that the
folder is abandoned.

The launcher makes its folder and removes it at its end, as does the standalone agent of a rank without a launcher.
Where the launcher was killed, its monitors remove the folder (`rank_monitor/lost_launcher.py`). Where all were killed,
the template of a later launcher on this machine does (`remove_abandoned`).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from rank_monitor.contract.processes import proc

PREFIX = "ft-"
_LOCK, _NEW_LOCK = "lock", ".lock"
"""The locked file, and its name until it is locked."""
_STATE_IN_MEMORY = "state_in_memory"
"""A link to the folder with the training's state in memory, by which those find it that outlive the launcher."""
_MAX_BOOT_ID = 64
"""Bytes of the file that are read: the boot id is a UUID and a newline, 37 bytes."""


def parents(environ: Mapping[str, str]) -> list[str]:
    """Returns the folders in which temporary files may be made, best first. Some may be missing or read-only.

    The first folder is the one that `tempfile` would choose. Where the usual folders are read-only `tempfile` finds
    none; `/dev/shm` then serves, as it does in containers whose other folders are full.
    """
    import tempfile  # here: monitors need none of this, and each would pay for the import in memory

    chosen = []
    with contextlib.suppress(FileNotFoundError):
        chosen.append(environ.get("TMPDIR") or tempfile.gettempdir())
    return list(dict.fromkeys((*chosen, "/tmp", "/dev/shm")))


def make() -> tuple[Path, list[str]]:
    """Makes a folder for this user alone, in the first of `parents` that can be written.

    Returns:
        The folder, and why each of the parents before its own could not be used.

    Raises:
        OSError: no folder can be written.
    """
    import tempfile

    refused: list[str] = []
    for parent in parents(os.environ):
        try:
            return Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent)).resolve(), refused
        except OSError as error:
            refused.append(f"{parent}: {error.strerror}")
    raise OSError(f"no temporary folder can be made ({'; '.join(refused)})")


def claim(folder: Path) -> int | None:
    """Locks the folder for this process. Returns the descriptor that holds the lock; the caller closes it at its end.

    None where the file system has no locks: the folder is then never taken for abandoned.
    """
    descriptor = None
    try:
        descriptor = os.open(folder / _NEW_LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(descriptor, proc.boot_id())
        # Renamed once it is locked: no other template ever finds the file without its lock.
        (folder / _NEW_LOCK).rename(folder / _LOCK)
    except OSError:
        if descriptor is not None:
            os.close(descriptor)
        return None
    return descriptor


def link_state_in_memory(folder: Path, state: Path) -> None:
    """Notes in a runtime folder where the training's state in memory is.

    Raises:
        OSError: the link cannot be made.
    """
    (folder / _STATE_IN_MEMORY).symlink_to(state)


def state_in_memory(folder: Path) -> Path | None:
    """Returns where the training's state in memory is; None: the launcher keeps none, or the runtime folder is gone."""
    try:
        return (folder / _STATE_IN_MEMORY).readlink()
    except OSError:
        return None


def remove_abandoned(parent: Path) -> list[Path]:
    """Removes this user's runtime folders in `parent` whose launchers are dead. Returns these folders.

    Only folders count that were made on this machine since its last boot (the lock file holds the boot id): a lock on a
    file server may be known on one machine only.
    """
    removed = []
    with contextlib.suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            if entry.name.startswith(PREFIX) and _is_abandoned(Path(entry.path)):
                remove(Path(entry.path))
                removed.append(Path(entry.path))
    return removed


def remove(folder: Path) -> None:
    """Removes a folder and its content. What cannot be removed is left; nothing is raised."""
    import shutil  # here: a monitor needs it only when its launcher was killed, and would pay for it in memory

    shutil.rmtree(folder, ignore_errors=True)


def _is_abandoned(folder: Path) -> bool:
    """Whether a folder is this user's, private, of this boot, and its lock is free."""
    try:
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            return False
        descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode) or os.read(descriptor, _MAX_BOOT_ID) != proc.boot_id():
            return False
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # its launcher lives
        return False
    finally:
        os.close(descriptor)
    return True
