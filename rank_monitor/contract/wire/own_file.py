"""Opens files to write to, in folders that other users may write to as well.

Another user can put a link, a FIFO or a file of that user's own where this user is about to write. Our text would then
go to a file of somebody else's choice, and that file's mode would be changed. So a new file is made exclusively, and no
link is followed. A file that exists must be a regular one, with one name, and of this user.

A file system may show another number for this user than the process has: a file server may map root to nobody, and a
container has users of its own. So where the numbers differ, a file is made beside the one in question, and the owner
that the file system shows for it is compared.

Journals, the job's store in a folder and the copy of a monitor's log are opened by it.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

_TRIES = 10
"""How often a file may appear and vanish before that is an error: other launchers make and remove files of the same
name."""


def open_own(path: str | os.PathLike[str], flags: int, mode: int) -> int:
    """Opens a file of this user for writing, made if it is missing. Does not block. Returns the descriptor.

    Args:
        path: of the file.
        flags: how to open the file: `O_WRONLY` or `O_RDWR`, with `O_APPEND` or `O_TRUNC`.
        mode: of a new file, before the umask.

    Raises:
        OSError: the file cannot be opened, or is not a file of this user: a link, a FIFO, another user's file.
    """
    path = os.fspath(path)
    open_flags = flags & ~(os.O_CREAT | os.O_TRUNC) | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    for _ in range(_TRIES):
        try:
            return os.open(path, open_flags | os.O_CREAT | os.O_EXCL, mode)
        except FileExistsError:
            pass
        try:
            descriptor = os.open(path, open_flags)
        except FileNotFoundError:  # the file was removed between the two calls
            continue
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO):
                raise _refused(path, "a link or a FIFO; only a regular file is written") from None
            raise
        try:
            _must_be_own(path, descriptor)
            if flags & os.O_TRUNC:
                os.ftruncate(descriptor, 0)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor
    raise _refused(path, "made and removed again and again")


def _must_be_own(path: str, descriptor: int) -> None:
    """Raises OSError unless an open file is a regular one, with one name, of this user."""
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        raise _refused(path, "not a regular file")
    if found.st_nlink > 1:
        # A user can give another user's file a second name in a folder of the own.
        raise _refused(path, f"a file with {found.st_nlink} names (hard links); it may be meant for something else")
    if found.st_uid != os.geteuid() and found.st_uid != _shown_uid(Path(path).parent):
        raise _refused(path, f"a file of another user (uid {found.st_uid})")


def _shown_uid(folder: Path) -> int:
    """Returns the user that the file system shows for a file that this process makes in `folder`.

    Raises:
        OSError: no file can be made there.
    """
    probe = folder / f".ft-{os.urandom(8).hex()}"
    descriptor = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        return os.fstat(descriptor).st_uid
    finally:
        os.close(descriptor)
        probe.unlink()


def _refused(path: str, what: str) -> OSError:
    return PermissionError(errno.EPERM, f"it is {what}", path)
