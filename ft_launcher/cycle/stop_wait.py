"""Signals ranks once that they should end by themselves, and waits until they have.

Called by the node agent, which decides who must end; nothing is killed here.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from contextlib import suppress

from ft_launcher.processes.process_tree import catches
from ft_launcher.processes.signals import RankSignal, SignalPipe
from ft_launcher.ranks.rank_context import RankContext
from rank_monitor.contract.processes.wait import readable


def tell(ranks: RankContext, asked: RankSignal) -> None:
    """Sends each rank's main process, not its tree, the signal; SIGTERM if the rank has no handler and needs one."""
    pids = ranks.pids()
    for local_rank, pidfd in ranks.pidfds.items():
        handled = asked.always or catches(pids[local_rank], asked.number)
        with suppress(ProcessLookupError):  # it has just ended, and another process took its end
            signal.pidfd_send_signal(pidfd, asked.number if handled else signal.SIGTERM)
            # A stopped process handles the signal only when it runs again.
            signal.pidfd_send_signal(pidfd, signal.SIGCONT)


def wait(ranks: RankContext, limit_s: float, signals: SignalPipe, heed: Callable[[int], float]) -> bool:
    """Waits until all ranks have ended, at most `limit_s`; returns whether they have.

    Args:
        heed: called with a signal that the launcher got meanwhile; returns how long to wait from then on (seconds).
    """
    deadline = time.monotonic() + limit_s
    while ranks.pidfds and (left := deadline - time.monotonic()) > 0:
        readable([*ranks.pidfds.values(), signals.fileno()], left)
        for number in signals.read():
            # A signal never lengthens the wait.
            deadline = min(deadline, time.monotonic() + heed(number))
        ranks.reap_all()
    return not ranks.pidfds
