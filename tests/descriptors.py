"""Which descriptors of this process belong to something of which a test knows the name only."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from rank_monitor.contract.processes import proc
from rank_monitor.contract.processes.descriptor import socket_copy


def open_at(path: Path) -> int:
    """Returns the one descriptor under which this process has the file open."""
    (found,) = (one for one in proc.own_descriptors() if _target(one) == str(path.resolve()))
    return found


def connected_to(path: Path) -> int:
    """Returns the descriptor of the one socket of this process that is connected to the Unix socket at this path."""
    (found,) = (one for one in proc.own_descriptors() if _peer(one) == str(path))
    return found


def _target(descriptor: int) -> str:
    with suppress(OSError):
        return str(Path(f"/proc/self/fd/{descriptor}").readlink())
    return ""


def _peer(descriptor: int) -> object:
    with suppress(OSError), socket_copy(descriptor) as found:
        return found.getpeername()
    return None
