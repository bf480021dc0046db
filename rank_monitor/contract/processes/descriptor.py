"""Moves our descriptors to high numbers, so that a script gets the same numbers as without us; and copies sockets.

The client moves its socket, its stack file and the socket to its standalone agent; the zygote moves the channel of a
rank. For files of ours only: the old number is closed. In-process restart looks at the sockets of this process by
copies, so that none is closed under it.
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
    """Moves a descriptor to a number from `FIRST_HIGH` on, with close-on-exec. Returns the new number.

    The old number is closed. Returns `descriptor` itself, unmoved, where the limit of open files is too low.
    """
    try:
        high = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, FIRST_HIGH)
    except OSError:
        return descriptor
    os.close(descriptor)
    return high


def socket_copy(descriptor: int) -> socket.socket:
    """Returns a copy of a socket. The copy stays the same socket, whatever another thread does with the descriptor: it
    may close the descriptor, and the number may be given to another file.

    Raises:
        OSError: the descriptor is closed, or not of a socket.
    """
    # Files are not copied: to close a copy would end all POSIX locks that this process has on the file (fcntl(2)).
    if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
        raise OSError(errno.ENOTSOCK, "it is no socket")
    copy = os.dup(descriptor)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
