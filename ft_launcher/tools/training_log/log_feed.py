"""Passes on what the ranks print of their steps (`--ft-watch-log`): to their monitors, to the journal, and as a fault.

`LogFeed` is a source of events of the agent's loop. `composition.py` makes it only where the option is given. A step
that is overdue ends a rank through its monitor, as every other limit does, so that the verdict has the rank's stacks.

Threads: the agent's thread calls all methods here. None of them blocks, except `_end`, which waits up to a second for
the thread of `log_watch.py`. That thread reads the files.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Set
from contextlib import contextmanager

from ft_launcher.agent.cycle.cycle import CyclePhase, Event
from ft_launcher.agent.event_source import EventSource
from ft_launcher.agent.parts import NodeParts
from ft_launcher.agent.ranks import Ranks
from ft_launcher.decide.attribution import BAD_LOSS
from ft_launcher.record.journal.contained import contained
from ft_launcher.tools.training_log.log_watch import LogWatch
from ft_launcher.tools.training_log.rank_log import BadLoss, News, StepsMissing
from rank_monitor.contract.wire.messages import NO_ITERATION, RankException

_FAULT, _OFF = "fault", "off"


class LogFeed(EventSource):
    """Hands each finding about printed lines to the part that needs it, in every cycle of this node.

    A `LogStep` or `LogOverdue` goes to the rank's monitor. A `BadLoss` goes to the journal and, with
    `--ft-watch-log-nan fault`, fails the cycle. A `StepsMissing` becomes one warning.

    Args:
        parts: the launcher's parts; the recorder and the settings are used. `watch_log` must be set.
        ranks: the ranks of this node.
    """

    def __init__(self, parts: NodeParts, ranks: Ranks) -> None:
        self._recorder, self._ranks = parts.recorder, ranks
        assert parts.settings.record.watch_log is not None, "nothing is to be read"
        self._watch_log = parts.settings.record.watch_log
        self._on_bad_loss = parts.settings.record.watch_log_nan
        self._limit_s = parts.settings.monitor.watch_log_timeout
        self._watch: LogWatch | None = None
        self._has_failed = False
        self._several_nodes = parts.several_nodes
        self._may_warn = True

    @contextmanager
    def during_cycle(self) -> Iterator[None]:
        """Returns the context in which output is read. When the context ends, the monitors know all that was printed.

        An error here must not end the training, so each of the two ends of the context contains its own errors.
        """
        with contained("what the ranks print cannot be read"):
            self._begin()
        try:
            yield
        finally:
            with contained("the last lines of the ranks cannot be read"):
                self._end()

    def _begin(self) -> None:
        """Starts a new `LogWatch` on the output files of the ranks that have just been started."""
        self._has_failed = False
        processes = self._ranks.processes
        self._watch = LogWatch(self._watch_log, self._limit_s, processes.printed_to(), processes.spools)
        self._watch.start()

    def _end(self) -> None:
        """Ends the reading of this cycle: passes on the last findings, records the intervals, warns where no step was
        read."""
        watch, self._watch = self._watch, None
        if watch is None:
            return
        # The cycle has ended already, either well or for another reason. A bad loss that is read only now no longer
        # changes how the cycle ended.
        for local_rank, item in watch.stop():
            self._pass_on(local_rank, item, may_fail=False)
        intervals = watch.intervals()
        if intervals is not None:
            local_rank, durations = intervals
            self._recorder.steps_printed(self._ranks.cycle, self._ranks.global_rank(local_rank), durations)
        missing = watch.steps_missing()
        if missing is not None:
            self._warn(*missing)
        self._may_warn = self._may_warn and not watch.has_steps

    def descriptors(self) -> set[int]:
        """Returns the descriptor that is readable when the reading thread has findings; empty between cycles."""
        if self._watch is None:
            return set()
        return {self._watch.fileno()}

    def poll(self, ready: Set[int]) -> list[Event]:
        """Passes on the findings since the last call. Returns `[CyclePhase.FAILED]` when a bad loss fails the cycle,
        else `[]`.

        Called by the agent's loop with the descriptors that are readable. Does not block.
        """
        if self._watch is None or self._watch.fileno() not in ready:
            return []
        for local_rank, item in self._watch.drain():
            self._pass_on(local_rank, item, may_fail=self._on_bad_loss == _FAULT)
        if self._has_failed:
            return [CyclePhase.FAILED]
        return []

    def _pass_on(self, local_rank: int, item: News, may_fail: bool) -> None:
        """Passes on one finding about the rank `local_rank`.

        Args:
            item: the finding.
            may_fail: whether a bad loss fails the cycle. False for what is read after the cycle's end.
        """
        if self._has_failed:
            # Steps after a bad loss are no progress. The monitor must not hear of them: the iteration of the fault is
            # the one that the bad loss was printed with.
            return
        if isinstance(item, StepsMissing):
            self._warn(local_rank, item)
            return
        if not isinstance(item, BadLoss):
            self._ranks.monitors.printed(local_rank, item)
            return
        if self._on_bad_loss == _OFF:
            return
        rank = self._ranks.global_rank(local_rank)
        self._recorder.bad_loss(self._ranks.cycle, rank, item.iteration, item.loss, may_fail)
        if may_fail:
            self._has_failed = True
            self._ranks.monitors.fail(local_rank, RankException(BAD_LOSS, _printed(item), "", time.time()))

    def _warn(self, local_rank: int, missing: StepsMissing) -> None:
        """Warns that no line was read as a step, so that neither the limit nor the check of the loss protects the job.

        A launcher warns once. On several nodes it warns only where a preset would find steps: usually one rank prints
        the steps, so on most of the nodes no rank prints any.
        """
        if not self._may_warn or (self._several_nodes and not missing.preset):
            return
        self._may_warn = False
        rank = self._ranks.global_rank(local_rank)
        self._recorder.no_steps_printed(rank, self._watch_log, missing.line, missing.preset)


def _printed(bad: BadLoss) -> str:
    """Returns the text of the fault: which loss was printed, at which iteration, and which option makes it a fault."""
    at = ""
    if bad.iteration != NO_ITERATION:
        at = f" at iteration {bad.iteration}"
    return f"printed a loss of {bad.loss}{at}, which is a fault by --ft-watch-log-nan"
