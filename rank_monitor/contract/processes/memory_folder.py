"""Owns the folder with a job's state in memory: its lock, the record of its launcher, its removal.

The launcher of a node makes the folder and holds a lock on a file in it (`OWNER_NAME`) as long as it lives
(`ft_launcher/node/memory_files/job_folder.py`). The kernel releases the lock however the launcher ends, so a process
that gets the lock knows that the launcher is dead. The record in that file says whose the folder is, when its launcher
was last seen alive, and for how long the files may outlive the launcher.

After a launcher's death its monitors give the files that time (`rank_monitor/memory_linger.py`). A next launcher of the
same job takes the folder over, and every launcher removes the folders of other jobs whose time is over.

**Races.** Whoever removes a folder holds its lock, and renames the folder before anything in it is removed
(`OwnedFolder.set_aside`): a process that waits for the lock then finds another file, or none, under the name, and looks
again. So no process ever owns a folder that is being removed, and the lock is held for microseconds only.

Times are of CLOCK_BOOTTIME, which nobody sets, and which counts the time in suspend. Nothing here blocks but
`remove_aside`, which frees memory: a second for each 5 to 10 GiB.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import time
from dataclasses import dataclass
from pathlib import Path

from rank_monitor.contract.errors import ProtocolError
from rank_monitor.contract.memory_files import OWNER_NAME
from rank_monitor.contract.wire.foreign import parse_json
from rank_monitor.contract.wire.json_record import from_json, write_record
from rank_monitor.contract.wire.own_file import open_own

_ASIDE = ".gone-"
"""In the name of a folder that is being removed, before a random number."""
_RECORD_BYTES = 1024
"""Of the owner's file. The record is padded with spaces: one write within a page replaces it as a whole, so that a
SIGKILL cannot leave a part of it. The record of a user with a long host name has some 250 bytes."""
_LOOK_AGAIN_S = 0.02
"""Seconds after which a lock that is held is tried once more: a process that removes the folder holds it for
microseconds, a launcher for its life."""
_TRIES = 10
"""How often a folder may be removed under a name just as it is opened."""


class NotOwn(PermissionError):
    """What lies under the name of a folder is not a folder of this user alone."""


@dataclass(frozen=True)
class Owner:
    """The record of a folder's launcher.

    Attributes:
        tag: of the launcher's job: by it the processes are found that may still write into the folder.
        pid: of the launcher.
        started: when that process started, in the kernel's clock ticks since the machine did (/proc/PID/stat): a later
            process may have the same pid.
        boot: of this machine, as `proc.boot_id` returns it.
        seen_s: when the launcher was last known to live; after its death, when that was found (CLOCK_BOOTTIME).
        linger_s: for how long the files may be there after that.
        is_dead: its death was found, and a process waits to remove the folder. Of the processes that outlive a launcher
            only the first one does.
        pids: tells the pid namespace of the launcher from others (/proc/self/ns/pid): containers may share a tmpfs, and
            `pid` says something in one of them only. Empty: unknown.
    """

    tag: str
    pid: int
    started: int
    boot: str
    seen_s: float
    linger_s: float
    is_dead: bool = False
    pids: str = ""


def now_s() -> float:
    """Returns the time of the records: seconds since the machine started."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class OwnedFolder:
    """A folder whose lock this process holds.

    Args:
        path: of the folder.
        descriptor: of the owner's file, with the lock on it. Closed by `release`.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor

    def read(self) -> Owner | None:
        """Returns the record of the folder's last owner; None: there is none, or it makes no sense."""
        return _parsed(os.pread(self._descriptor, _RECORD_BYTES, 0))

    def write(self, owner: Owner) -> None:
        """Replaces the record.

        Raises:
            OSError: the tmpfs is full and the file is new.
        """
        os.pwrite(self._descriptor, write_record(owner).encode().ljust(_RECORD_BYTES), 0)

    def names(self) -> list[str]:
        """Returns the names in the folder."""
        return os.listdir(self.path)  # noqa: PTH208 - names, not paths

    def set_aside(self) -> Path:
        """Renames the folder, releases the lock, and returns the new path, for `remove_aside`.

        Raises:
            OSError: it cannot be renamed. The lock is released.
        """
        aside = self.path.with_name(f"{self.path.name}{_ASIDE}{os.urandom(4).hex()}")
        try:
            self.path.rename(aside)
        finally:
            self.release()
        return aside

    def release(self) -> None:
        """Releases the lock. The folder stays."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def make(path: Path) -> OwnedFolder | None:
    """Makes a folder for this user alone, or takes one whose launcher is dead, and locks it. Blocks for 0.02 s where
    another process owns the folder.

    Returns:
        The folder; None: a launcher that lives owns it.

    Raises:
        NotOwn: what is there is not a folder of this user alone.
        OSError: the folder cannot be made.
    """
    was_held = False
    for _ in range(_TRIES):
        try:
            path.mkdir(0o700)
        except FileExistsError:
            pass
        try:
            _must_be_own(path)
            descriptor = open_own(path / OWNER_NAME, os.O_RDWR, 0o600)
        except FileNotFoundError:  # removed meanwhile
            continue
        is_free = _lock(descriptor)
        if is_free and _is_at(path, descriptor):
            return OwnedFolder(path, descriptor)
        os.close(descriptor)
        if not is_free:
            if was_held:
                return None
            was_held = True
            time.sleep(_LOOK_AGAIN_S)
    raise OSError(errno.EAGAIN, "it is made and removed again and again", str(path))


def take(path: Path) -> OwnedFolder | None:
    """Locks a folder that is there, if it is this user's and its launcher is dead. Makes nothing. Returns None where
    that is not so."""
    try:
        _must_be_own(path)
        descriptor = os.open(path / OWNER_NAME, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    if _lock(descriptor) and _is_at(path, descriptor):
        return OwnedFolder(path, descriptor)
    os.close(descriptor)
    return None


def read_owner(path: Path) -> Owner | None:
    """Returns the record of a folder without its lock; None: there is none."""
    try:
        descriptor = os.open(path / OWNER_NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return _parsed(os.read(descriptor, _RECORD_BYTES))
    finally:
        os.close(descriptor)


def is_aside(name: str) -> bool:
    """Returns whether a folder of this name is being removed. Whoever finds it may go on with that."""
    return _ASIDE in name


def aside_of(path: Path) -> list[Path]:
    """Returns where `set_aside` has renamed the folder `path` to: what a process left that was killed as it removed
    it."""
    return list(path.parent.glob(f"{path.name}{_ASIDE}*"))


def remove_aside(path: Path) -> None:
    """Removes a folder that `set_aside` has renamed, and frees its memory. What cannot be removed is left."""
    shutil.rmtree(path, ignore_errors=True)


def _parsed(text: bytes) -> Owner | None:
    """Returns the record in the text of an owner's file; None: it is not one."""
    try:
        return from_json(Owner, parse_json(text), ignore_unknown=True)
    except (ProtocolError, ValueError):
        return None


def _lock(descriptor: int) -> bool:
    """Locks an open file, if nobody else has. Does not block."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(path: Path, descriptor: int) -> bool:
    """Returns whether an open file is still the owner's file of the folder at `path`."""
    try:
        there = (path / OWNER_NAME).lstat()
    except OSError:
        return False
    opened = os.fstat(descriptor)
    return (there.st_dev, there.st_ino) == (opened.st_dev, opened.st_ino)


def _must_be_own(path: Path) -> None:
    """Raises NotOwn unless what is at `path` is a folder, and this user's alone. Raises OSError where nothing is."""
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode):
        raise _refused(path, "a link")
    if not stat.S_ISDIR(found.st_mode):
        raise _refused(path, "no folder")
    if found.st_uid != os.geteuid():
        raise _refused(path, f"a folder of another user (uid {found.st_uid})")
    if found.st_mode & 0o077:
        raise _refused(path, f"a folder that other users may enter (mode {stat.S_IMODE(found.st_mode):04o})")


def _refused(path: Path, what: str) -> NotOwn:
    return NotOwn(errno.EPERM, f"it is {what}", str(path))
