"""One fault strikes: it is said on the console and to the launcher, then it happens; now, or later from a thread.

What happens to the training's code must happen in the main thread: a signal of our own, with a handler that strikes,
brings it there.
"""

from __future__ import annotations

import _thread
import contextlib
import functools
import os
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from ft_client import unseen_thread
from ft_client.inject.place import Place
from ft_client.inject.strikes import STRIKES
from rank_monitor.contract import channel, env, injection
from rank_monitor.contract.injection import IN_MAIN_THREAD, OF_SYSTEM, Injection

_TO_MAIN_THREAD = signal.SIGRTMIN + 9
_PATIENCE_S = 1.0
_due: deque[Callable[[], None]] = deque()


@dataclass(frozen=True)
class Strike:
    """A fault, the rank it is for, and what is called before it happens. Where the module `unless` is loaded, nothing
    does."""

    fault: Injection
    place: Place
    callback: Callable[[], object] | None = None
    unless: str = ""

    def now(self, at: str = "") -> None:
        """Strikes in this thread.

        Raises:
            FaultOnPurpose, BaseFaultOnPurpose, MemoryError, RuntimeError: the fault itself, of some kinds.
        """
        if self.unless in sys.modules:
            return
        kind = self.place.kind_of(self.fault)
        if self.callback is not None:
            self.callback()
        where = f"; {at}" if at else ""
        line = f"FT: Simulating fault: {self.fault.name_of(kind)}; rank to fail: {self.place.rank}{where}"
        print(line, file=sys.stderr, flush=True)
        told = self._tell(at)
        if kind in OF_SYSTEM:
            if not told:
                print(f"FT: {kind} needs ft_launcher; nothing happens", file=sys.stderr, flush=True)
        else:
            STRIKES[kind](self.fault)

    def later(self, delay_s: float) -> None:
        """Strikes after so many seconds, wherever the training is then.

        Raises:
            ValueError: a kind that happens to the main thread was asked for in another.
        """
        in_main, main = self.place.kind_of(self.fault) in IN_MAIN_THREAD, _thread.get_ident()
        if in_main:
            signal.signal(_TO_MAIN_THREAD, _strike_due)

        def strike() -> None:
            time.sleep(delay_s)
            now = functools.partial(self.now, f"after {delay_s:.3g} s")
            if in_main:
                _due.append(now)
                signal.pthread_kill(main, _TO_MAIN_THREAD)
            else:
                now()

        unseen_thread.start(strike)

    def _tell(self, at: str) -> bool:
        """Tells the launcher; returns whether there is one that listens."""
        monitor_socket = os.environ.get(env.RANK_MONITOR_SOCKET)
        if not monitor_socket:
            return False
        told = injection.Told(str(self.fault), self.place.rank, self.place.local_rank, at)
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as one_way:
            one_way.settimeout(_PATIENCE_S)
            with channel.short_address(injection.socket_beside(Path(monitor_socket))) as name:
                one_way.sendto(told.encode(), name)
            return True
        return False


def _strike_due(number: int, frame: FrameType | None) -> None:
    """The handler, in the main thread."""
    while _due:
        _due.popleft()()
