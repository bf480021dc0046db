"""Moves our descriptors to high numbers, so that a script gets the same numbers as without us; copies of sockets.

The client moves its socket, its stack file and its companion's, the zygote the channel of a rank. In-process restart
looks at the sockets of this process by copies. For files of ours only: a number that is moved is closed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat

FIRST_HIGH = 200
"""A script's own files are not expected to get a number from here on."""


def moved_up(descriptor: int) -> int:
    """Duplicates a descriptor to a number from `FIRST_HIGH` on, with close-on-exec, and closes `descriptor`.

    Returns `descriptor` itself where the limit of open files is too low.
    """
    try:
        high = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, FIRST_HIGH)
    except OSError:
        return descriptor
    os.close(descriptor)
    return high


def socket_copy(descriptor: int) -> socket.socket:
    """A copy of a socket: it stays the same one, whatever another thread does with the descriptor.

    Raises:
        OSError: the descriptor is closed, or not of a socket.
    """
    # Closing a copy of a file's descriptor would end all POSIX locks that this process has on the file.
    if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
        raise OSError(errno.ENOTSOCK, "it is no socket")
    copy = os.dup(descriptor)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
