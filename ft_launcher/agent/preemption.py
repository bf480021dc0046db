"""Waits for ranks that save before they end: after a signal to a launcher, and where ranks have agreed to exit.

Called by the memberships, which know which of these it is. The signal may have come to the launcher of another node.
"""

from __future__ import annotations

import signal

from torch.distributed.elastic.multiprocessing import SignalException

from ft_launcher.agent.ending_signal import EndingSignal
from ft_launcher.agent.ranks import Ranks
from ft_launcher.cycle import stop_wait
from ft_launcher.processes.signals import rank_signal
from rank_monitor.contract.exit_codes import ExitCode


def preempt(ranks: Ranks, ending: EndingSignal, number: int) -> int:
    """Sends the ranks the signal that stands for `number` once, and waits while they save. No limit is judged.

    Returns:
        The launcher's exit code.
    """
    stop = ranks.parts.settings.stop
    ranks.monitors.end_cycle()
    # To main processes only: data loaders must not end while their rank saves.
    stop_wait.tell(ranks.processes, rank_signal(number, ranks.parts.named_signals, stop.preemption_signal))
    # `stop_wait` reads the launcher's signals, so a second one is noticed during the grace.
    by_themselves = stop_wait.wait(ranks.processes, stop.preemption_grace, ending.signals, ending.note_and_limit)
    if by_themselves:
        ranks.stop()
        return int(ExitCode.PREEMPTED)
    ranks.stop(limit_s=0.0)
    return int(ExitCode.PREEMPTED_KILLED)


def end_ranks(ranks: Ranks, ending: EndingSignal) -> SignalException:
    """Ends the ranks after a signal to this launcher; returns the exception with which the launcher ends."""
    assert ending.number is not None
    number = ending.number
    ranks.parts.recorder.told(number)
    if number == signal.SIGINT:
        # Ctrl-C reaches the ranks as SIGINT, as it would from the terminal: they are in sessions of their own.
        ranks.stop(signal.SIGINT)
        return ending.error_without_ranks(number)
    return ending.error(number, preempt(ranks, ending, number))


def await_agreed_exits(ranks: Ranks, ending: EndingSignal) -> None:
    """Waits until ranks that have agreed to exit have saved and ended, for `--workers-stop-timeout` at most.

    A signal to the launcher meanwhile is noted in `ending`.
    """
    limit_s = ranks.parts.settings.stop.workers_stop_timeout
    stop_wait.wait(ranks.processes, limit_s, ending.signals, ending.note_and_limit)
