"""Writes to the ranks' store that a rank is gone, in a thread for each, and waits there until the others took note.

Called by `in_process.py`; `rungs.py` decides what is written and the contract how. The threads end with the cycle.
"""

from __future__ import annotations

import json
import signal

from ft_launcher.cycle.rung_steps import LossNotified, NotifyLoss
from ft_launcher.cycle.store_threads import Keys, StoreThreads
from ft_launcher.processes.mailbox import Mailbox
from ft_launcher.processes.process_tree import SessionTree
from rank_monitor.contract.iterations.rank_departure import depart, withdraw

# The name of `Interruption.TERMINATED`, as in the records that ranks write.
_TERMINATED = "TERMINATED"


class RankLossNotifier:
    """Notifies the others of lost ranks in one cycle.

    Args:
        threads: at the cycle's store; close them before `notified`.
        stop_s: from SIGTERM to SIGKILL for processes that a dead rank left (seconds).

    Attributes:
        notified: the notifications that ended.
    """

    def __init__(self, threads: StoreThreads, stop_s: float) -> None:
        self._threads, self._stop_s = threads, stop_s
        self.notified: Mailbox[LossNotified] = Mailbox()

    def notify(self, order: NotifyLoss, pid: int) -> None:
        """Starts a thread that notifies the others, then ends what the rank's process `pid` left. Returns at once."""

        def speak(keys: Keys) -> None:
            record = json.dumps({"rank": order.member, "interruption": _TERMINATED})
            if order.joins:
                withdraw(keys, order.member, record, order.limit_s)
            else:
                depart(keys, order.member, record, order.limit_s)
            # After the notice: the others must not wait while a data loader of the dead rank takes its time.
            SessionTree(pid).stop(signal.SIGTERM, self._stop_s)

        def end(problem: str) -> None:
            self.notified.put(LossNotified(order.local_rank, problem))

        self._threads.start(f"ft_departure{pid}", order.prefix, speak, end)
