"""The beat of a node in a call: one companion of the node beats, and when it ends another goes on.

Who beats is who listens at an abstract Unix socket; the others are connected to it, and the kernel tells them that it
is gone. A node is a booted machine, or the part of it that has a network of its own.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from ft_client.inprocess.attendance import Attendance

_AGAIN_S = 0.1


def this_node() -> str:
    """A name of this node that no other has."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}-{Path('/proc/self/ns/net').stat().st_ino}"
    except OSError:  # a sandbox that does not tell
        return socket.gethostname()


class NodeBeat(threading.Thread):
    """Comes to a call for one member, then beats or waits for its turn, until the call is finished or the store lost.

    Args:
        attend: the call's attendance over a new connection; it is kept only while this one beats.
        interval_s: between two beats.
        say: called with a line for the log.
    """

    def __init__(
        self, member: int, attend: Callable[[], Attendance], interval_s: float, say: Callable[[str], None]
    ) -> None:
        super().__init__(name="node beat", daemon=True)
        self._member, self._attend, self._interval_s, self._say = member, attend, interval_s, say
        self._node = this_node()

    def run(self) -> None:
        """Ends with a line in the log when the store is lost."""
        try:
            attendance = self._attend()
            attendance.come(self._member, self._node)
            self._take_turns(attendance.token())
        except RuntimeError as lost:
            self._say(f"this rank's node is not vouched for from here: {lost}")

    def _take_turns(self, token: str) -> None:
        name = f"\0ft-beat-{token}"
        while True:
            with socket.socket(socket.AF_UNIX) as end:
                try:
                    end.bind(name)
                except OSError:
                    _wait_for_the_end_of(end, name)
                    continue
                end.listen(socket.SOMAXCONN)
                self._beat()
                return

    def _beat(self) -> None:
        attendance = self._attend()
        for _ in attendance.until_finished(self._interval_s):
            attendance.beat(self._node)


def _wait_for_the_end_of(end: socket.socket, name: str) -> None:
    with contextlib.suppress(ConnectionError):
        end.connect(name)
        end.recv(1)
        return
    time.sleep(_AGAIN_S)
