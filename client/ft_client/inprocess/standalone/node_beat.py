"""The beat of a node in a call: one companion of the node beats, and when it ends another takes over.

`companion_process.py` runs it; it decides nothing about ranks. The one that listens at an abstract Unix socket beats;
the others are connected to it, and the kernel reports that it is gone. Any user of the machine can take such a name, so
only a listener of this user is waited for: where another has the name, each companion beats, which costs operations on
the store and harms nobody.

A node is a booted machine, or the part of it that has a network of its own.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from ft_client.inprocess.standalone.watched_call import CallMembers
from rank_monitor.contract.processes import proc
from rank_monitor.contract.wire import channel

_AGAIN_S = 0.1
_TRIES = 10
"""Within this second a companion of ours listens, which it does microseconds after it has bound the name; a process of
another user may never listen."""


def this_node() -> str:
    """A unique name of this node."""
    boot = proc.boot_id().decode().strip()
    with contextlib.suppress(OSError):
        if boot:
            return f"{boot}-{Path('/proc/self/ns/net').stat().st_ino}"
    return socket.gethostname()  # in a sandbox that shows neither


class NodeBeat(threading.Thread):
    """A thread that adds one member to a call, then beats or waits for its turn, until the call is finished.

    Args:
        open_members: the call's members over a new connection; it is kept only while this one beats.
        interval_s: between two beats.
        say: called with a line for the log.
    """

    def __init__(
        self, member: int, open_members: Callable[[], CallMembers], interval_s: float, say: Callable[[str], None]
    ) -> None:
        super().__init__(name="node beat", daemon=True)
        self._member, self._open_members, self._interval_s, self._say = member, open_members, interval_s, say
        self._node = this_node()

    def run(self) -> None:
        """Ends with a line in the log when the store is lost."""
        try:
            call_members = self._open_members()
            call_members.join(self._member, self._node)
            self._take_turns(call_members.token())
        except RuntimeError as lost:
            self._say(f"this companion does not beat for its node any more: {lost}")

    def _take_turns(self, token: str) -> None:
        name, failed = f"\0ft-beat-{token}", 0
        while failed < _TRIES:
            with socket.socket(socket.AF_UNIX) as end:
                if _takes(end, name):
                    end.listen(socket.SOMAXCONN)
                    self._beat()
                    return
                if _has_waited_for_the_end_of(end, name):
                    failed = 0
                else:
                    failed = failed + 1
        self._say("another user has the name by which companions of this node take turns: each of them beats")
        self._beat()

    def _beat(self) -> None:
        call_members = self._open_members()
        for _ in call_members.until_finished(self._interval_s):
            call_members.beat(self._node)


def _takes(end: socket.socket, name: str) -> bool:
    try:
        end.bind(name)
    except OSError:
        return False
    return True


def _has_waited_for_the_end_of(end: socket.socket, name: str) -> bool:
    """Blocks until the companion with this name is gone. Returns False after 0.1 s if this user has none."""
    try:
        end.setblocking(False)  # connect() to a stranger whose queue is full would block
        end.connect(name)
        is_ours = channel.peer(end).uid == os.geteuid()
    except OSError:
        is_ours = False
    if not is_ours:
        time.sleep(_AGAIN_S)
        return False
    end.setblocking(True)
    with contextlib.suppress(ConnectionError):
        end.recv(1)
    return True
