"""Notifies the other ranks over their store that a rank is gone, then ends the processes that the rank left.

For a rank that cannot do so itself any more. `in_process.py` calls it when `recovery_level.py` has decided so, and
`agent/standalone.py` for a rank without a launcher, whose leftovers are not touched. The contract writes the keys
(`depart`, `withdraw`). Nothing is decided here.

Threads: each report has one of its own, since a report waits in the store until the other ranks took note. The outcome
goes to the agent's thread by `notified`.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable

from ft_launcher.agent.in_process.recovery_steps import LossNotified, NotifyLoss
from ft_launcher.agent.in_process.store_threads import EventQueue, Keys, StoreThreads
from rank_monitor.contract.rounds.round import depart, withdraw

TERMINATED = "TERMINATED"
"""The name of `Interruption.TERMINATED`, as in the records that ranks write."""


class RankLossNotifier:
    """Writes to the ranks' store that a rank is gone, in a thread for each, and waits there until the others took note.

    Args:
        threads: at the cycle's store; close them before `notified`.
        stop_s: from SIGTERM to SIGKILL for processes that a dead rank left in its session (seconds); None: these are
            left alone.
        on_reaped: called with the pid of each such process whose exit code was taken, in the thread of the report: it
            must be safe to call from any thread.

    Attributes:
        notified: the notifications that ended.
    """

    def __init__(
        self, threads: StoreThreads, stop_s: float | None, on_reaped: Callable[[int], None] = lambda pid: None
    ) -> None:
        self._threads, self._stop_s, self._on_reaped = threads, stop_s, on_reaped
        self.notified: EventQueue[LossNotified] = EventQueue()

    def notify(self, order: NotifyLoss, pid: int, interruption: str = TERMINATED) -> None:
        """Starts a thread that notifies the others, then ends what the rank's process `pid` left. Returns at once.

        Where the notice fails, what the rank left ends with the cycle. Where nothing is to be ended, `pid` may be any
        number that is unique among the reports.
        """

        def report(keys: Keys) -> None:
            record = json.dumps({"rank": order.member, "interruption": interruption})
            if order.joins:
                withdraw(keys, order.member, record, order.limit_s)
            else:
                depart(keys, order.member, record, order.limit_s)
            if self._stop_s is not None:
                from ft_launcher.node.processes.process_tree import SessionTree  # here: not needed without a launcher

                # After the notice: the others must not wait while a data loader of the dead rank takes its time.
                SessionTree(pid, self._on_reaped).stop(signal.SIGTERM, self._stop_s)

        def end(problem: str) -> None:
            self.notified.put(LossNotified(order.local_rank, problem))

        self._threads.start(f"ft_departure{pid}", order.prefix, report, end)
