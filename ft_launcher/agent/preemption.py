"""Waits for ranks that save before they end: after a signal to a launcher, and where ranks have agreed to exit.

Called by the memberships, which know which of these it is. The signal may have come to the launcher of another node.
"""

from __future__ import annotations

import signal
import time
from contextlib import suppress

from torch.distributed.elastic.multiprocessing import SignalException

from ft_launcher.agent.ending_signal import EndingSignal
from ft_launcher.agent.ranks import Ranks
from ft_launcher.processes.signals import RankSignal, rank_signal
from ft_launcher.ranks.rank_context import RankContext
from rank_monitor.contract.exit_codes import ExitCode
from rank_monitor.contract.processes import proc
from rank_monitor.contract.processes.wait import readable


def preempt(ranks: Ranks, ending: EndingSignal, number: int) -> int:
    """Sends the ranks the signal that stands for `number` once, and waits while they save. No limit is judged.

    Returns:
        The launcher's exit code.
    """
    stop = ranks.parts.settings.stop
    ranks.monitors.end_cycle()
    _signal_ranks(ranks.processes, rank_signal(number, ranks.parts.named_signals, stop.preemption_signal))
    if _wait_for_exits(ranks.processes, stop.preemption_grace, ending):
        ranks.stop()
        return int(ExitCode.PREEMPTED)
    ranks.stop(limit_s=0.0)
    return int(ExitCode.PREEMPTED_KILLED)


def end_ranks(ranks: Ranks, ending: EndingSignal) -> SignalException:
    """Ends the ranks after a signal to this launcher; returns the exception with which the launcher ends."""
    assert ending.number is not None
    number = ending.number
    ranks.parts.recorder.signalled(number)
    if number == signal.SIGINT:
        # Ctrl-C reaches the ranks as SIGINT, as it would from the terminal: they are in sessions of their own.
        ranks.stop(signal.SIGINT)
        return ending.error_without_ranks(number)
    return ending.error(number, preempt(ranks, ending, number))


def await_agreed_exits(ranks: Ranks, ending: EndingSignal) -> None:
    """Waits until ranks that have agreed to exit have saved and ended, for `--workers-stop-timeout` at most.

    A signal to the launcher meanwhile is noted in `ending`.
    """
    _wait_for_exits(ranks.processes, ranks.parts.settings.stop.workers_stop_timeout, ending)


def _signal_ranks(processes: RankContext, asked: RankSignal) -> None:
    """Sends each rank's main process the signal; SIGTERM if the rank has no handler and needs one.

    Not to its tree: data loaders must not end while their rank saves.
    """
    pids = processes.pids()
    for local_rank, pidfd in processes.pidfds.items():
        handled = asked.always or proc.catches(proc.status(pids[local_rank]), asked.number)
        with suppress(OSError):  # it has just ended, and another process took its end
            signal.pidfd_send_signal(pidfd, asked.number if handled else signal.SIGTERM)
            # A stopped process handles the signal only when it runs again.
            signal.pidfd_send_signal(pidfd, signal.SIGCONT)


def _wait_for_exits(processes: RankContext, limit_s: float, ending: EndingSignal) -> bool:
    """Waits until all ranks have ended, at most `limit_s`; returns whether they have.

    A signal to the launcher meanwhile is noted in `ending`, which says how long to wait from then on.
    """
    deadline = time.monotonic() + limit_s
    while processes.pidfds and (left := deadline - time.monotonic()) > 0:
        readable([*processes.pidfds.values(), *ending.descriptors()], left)
        for number in ending.signals.read():
            # A signal never lengthens the wait.
            deadline = min(deadline, time.monotonic() + ending.note_and_limit(number))
        processes.reap_all()
    return not processes.pidfds
