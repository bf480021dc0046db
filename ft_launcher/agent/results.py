"""torch's result of a cycle that ended the job, and the background processes that successful ranks leave behind.

Called by the membership when the job ends, on the agent's thread. torch makes the result itself, of the exit codes and
error files in its process context. This file chooses which ranks it sees: the ranks that failed by themselves, and not
those that were stopped because of these. Filters the line of torch's log for which the launcher prints a block with the
cause instead.
"""

from __future__ import annotations

import logging
import math
import signal
import time
from collections.abc import Callable
from pathlib import Path

from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.multiprocessing import api as multiprocessing
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from ft_launcher.agent.ending_signal import EndingSignal
from ft_launcher.agent.ranks import Ranks
from ft_launcher.decide.attribution import Fault, FaultKind
from ft_launcher.node.processes.orphans import SAMPLE_S
from ft_launcher.node.processes.process_tree import Background, command_of
from ft_launcher.record.journal.contained import contained

NO_FILE = "<N/A>"
"""The path that torch gives for an error file that does not exist."""


def _is_no_failure_line(record: logging.LogRecord) -> bool:
    """Returns whether a log record is any other than torch's line about the first failed process. For a logging filter.

    The launcher's own block and summary show that process with the cause of its failure.
    """
    # The beginning of the format string in `_poll` of torch's process contexts.
    return not str(record.msg).startswith("failed (exitcode")


class Results:
    """Makes torch's results of this node's ranks.

    Args:
        ranks: of this node.
        ending: the signal that ends the launcher, which ends the wait for background processes.
        torchs_result: called when all ranks have ended; returns torch's result of the cycle.
    """

    def __init__(self, ranks: Ranks, ending: EndingSignal, torchs_result: Callable[[], RunResult]) -> None:
        self._ranks = ranks
        self._parts = ranks.parts
        self._ending = ending
        self._torchs_result = torchs_result
        self._background = Background(())
        self._done_at = 0.0
        self.hidden: set[int] = set()
        """Global ranks that failed and whose stderr is not on the console: the summary names their log files."""

    def stopped(self) -> RunResult:
        """Returns the result of a node that ends without failed ranks."""
        return RunResult(WorkerState.STOPPED, dict.fromkeys(self._ranks.global_ranks()))

    # Success.

    def succeeded(self) -> RunResult:
        """Returns the ranks' results after a cycle that succeeded.

        Stops ranks that were started again in the cycle and never took part. Background processes of the ranks go on:
        `linger` waits for them, or a stop ends them.
        """
        ranks = self._ranks
        lost = ranks.in_process.finish()
        processes = ranks.processes
        self._background = Background({*processes.pids().values()}, processes.succeeded_since(lost))
        if ranks.running():
            self._stop_finished()
        processes.ignore(lost)
        result = self._torchs_result()
        self._stop_finished()
        self._done_at = time.monotonic()
        return result

    def _stop_finished(self) -> None:
        """Ends what ranks that succeeded left running, except background processes where these may linger."""
        limit_s = self._parts.settings.stop.linger
        # `--ft-linger=0` ends background processes at once; None: they may go on for ever.
        lingers = limit_s is None or limit_s > 0
        self._ranks.stop(
            tree=self._ranks.tree(lambda pid, session: not (lingers and self._background.has(pid, session)))
        )

    def linger(self) -> None:
        """Waits up to `--ft-linger` for background processes of ranks that succeeded, then ends those that are left.

        A signal to the launcher ends the wait. The training is complete, so neither is a failure of the job.
        """
        limit_s = self._parts.settings.stop.linger
        if limit_s == 0:
            return
        deadline = math.inf
        if limit_s is not None:
            deadline = self._done_at + limit_s
        tree = self._ranks.tree(self._background.has)
        left = tree.search()
        if not left:
            return
        cycle, recorder = self._ranks.cycle, self._parts.recorder
        recorder.lingers(cycle, {pid: command_of(pid) for pid in left}, limit_s)
        while self._ending.number is None and left and time.monotonic() < deadline:
            left = tree.wait(min(deadline, time.monotonic() + SAMPLE_S), self._ending.signals.fileno())
            self._ranks.reap_orphans()
            self._ending.poll(set())
        if left:
            commands = {pid: command_of(pid) for pid in left}
            recorder.ends_background(cycle, commands, self._ending.number)
            self._ranks.stop(tree=tree)

    # Failure.

    def failed(self, fault: Fault | None) -> RunResult:
        """Returns the result of a job that is given up: the ranks that failed by themselves, the root cause first.

        Args:
            fault: of this node; None: no rank of it failed by itself.
        """
        result = None
        if fault is not None:
            # The exit code is decided. An error of torch while it describes the failure must not replace the code.
            with contained("the result of the ranks that failed cannot be made"):
                result = self._failed(fault)
        return result or self.stopped()

    def _failed(self, fault: Fault) -> RunResult:
        """Returns torch's result with the ranks that failed by themselves, and mends what torch cannot know."""
        ranks = self._ranks
        local_ranks = {rank: local_rank for local_rank, rank in enumerate(ranks.global_ranks())}
        failed = {fault.local_rank, *(local_ranks[rank] for rank in fault.failed if rank in local_ranks)}
        ranks.processes.name_failed(fault.local_rank, failed)
        # torch logs while it collects the failures, and offers no switch for it.
        torchs = logging.getLogger(multiprocessing.__name__)
        torchs.addFilter(_is_no_failure_line)
        try:
            result = self._torchs_result()
        finally:
            torchs.removeFilter(_is_no_failure_line)
        for rank, failure in result.failures.items():
            failure.error_file = self._keep_error_file(failure)
            if failure.exitcode == -signal.SIGTERM and isinstance(failure.message, dict):
                # The rank was on its way out with an exception when the SIGTERM of the stop reached it.
                failure.exitcode = 1
            if ranks.processes.hides_errors(failure.local_rank):
                self.hidden.add(rank)
        first = result.failures.get(fault.rank)
        if first is not None and fault.kind is FaultKind.HANG and isinstance(first.message, str):
            # torch says only that a signal ended the rank: the launcher did that, and it is not what went wrong.
            first.message = f"{fault.what}; the launcher ended it"
        return result if result.failures else self.stopped()

    def _keep_error_file(self, failure: ProcessFailure) -> str:
        """Copies an error file out of the runtime folder, which is removed at the job's end; returns the copy's path.

        Files elsewhere stay where they are. Without a folder of logs there is no copy: `NO_FILE`.
        """
        if not Path(failure.error_file).is_relative_to(self._parts.runtime.folder):
            return str(failure.error_file)
        files = self._parts.recorder.files
        kept = files.copy(self._ranks.cycle, failure.local_rank, Path(failure.error_file), "error.json")
        return kept or NO_FILE
