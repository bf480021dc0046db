"""Ranks that are to end by themselves: told so once, and waited for. It acts; who must end is decided above."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from contextlib import suppress

from ft_launcher.process_tree import catches
from ft_launcher.rank_context import RankContext
from ft_launcher.signals import RankSignal, SignalPipe
from rank_monitor.contract.wait import readable


def tell(ranks: RankContext, asked: RankSignal) -> None:
    """Sends each rank's main process, not its tree, the signal once; SIGTERM where it needs a handler and has none."""
    pids = ranks.pids()
    for local_rank, pidfd in ranks.pidfds.items():
        handled = asked.always or catches(pids[local_rank], asked.number)
        with suppress(ProcessLookupError):  # it has just ended, and another process took its end
            signal.pidfd_send_signal(pidfd, asked.number if handled else signal.SIGTERM)
            signal.pidfd_send_signal(pidfd, signal.SIGCONT)


def wait(ranks: RankContext, limit_s: float, signals: SignalPipe, heed: Callable[[int], float]) -> bool:
    """Waits until all ranks have ended, at most `limit_s`; returns whether they have.

    Args:
        heed: takes a signal that came to the launcher meanwhile; how long to wait from then on, at most (seconds).
    """
    deadline = time.monotonic() + limit_s
    while ranks.pidfds and (left := deadline - time.monotonic()) > 0:
        readable([*ranks.pidfds.values(), signals.fileno()], left)
        for number in signals.read():
            deadline = min(deadline, time.monotonic() + heed(number))
        ranks.reap_all()
    return not ranks.pidfds
