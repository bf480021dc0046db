"""`Detector`: the calls of a training, and the detection of this process from `initialize` to `shutdown`.

Scripts call `Detector`, and so does `straggler_manager.py`. All calls come from the training's thread. How a report is
made:

1. The training runs its sections; `section_timers.py` and `kernels.py` take samples.
2. After each step the training calls `generate_report_if_interval_elapsed`. `interval.py` says, alike on all ranks,
   after how many steps a report is due.
3. `exchange.py` finds the smallest median of each section and kernel over all ranks: one collective, as a rule.
4. `reporting.py` computes this rank's scores from its own medians and these.
5. The scores go to the monitor, for the launcher's journal. Where rank 0 reports on all ranks, one gather brings them
   there.

Measuring and exchanging is done here. Who is slow is decided in `reporting.py`, and what follows by the training.
"""

from __future__ import annotations

import logging
import socket
import sys
import time
from collections.abc import Collection, Iterable
from itertools import islice
from typing import ClassVar

from ft_client.rank.agreement import group
from ft_client.rank.argument_checks import check_count, check_seconds
from ft_client.rank.monitoring import process
from ft_client.straggler.callables import CallableId, Wrapped
from ft_client.straggler.exchange import Exchange
from ft_client.straggler.interval import IntervalTracker
from ft_client.straggler.kernels import MAX_KERNELS, Kernels
from ft_client.straggler.reporting import (
    References,
    Report,
    Scores,
    best_medians,
    medians,
    row_of,
    scores_of,
    section_times,
    tables_of,
)
from ft_client.straggler.section_timers import SectionTimer, SectionTimers

logger = logging.getLogger(__name__)

RELATIVE, INDIVIDUAL = "relative_perf_scores", "individual_perf_scores"


class Detection:
    """One detection in this process: its sections and kernels, and the best medians so far.

    All arguments but `node` must be alike on all ranks: the ranks make collectives by them.

    Args:
        wanted: the scores to compute: RELATIVE, INDIVIDUAL or both.
        gathers: whether rank 0 reports on all ranks.
        profiling_interval: one in so many entries of a section is timed.
        interval_s: seconds between two reports.
        node: the name of this rank's node, in reports.
    """

    def __init__(
        self, wanted: Collection[str], gathers: bool, profiling_interval: int, interval_s: float, node: str
    ) -> None:
        self.kernels = Kernels()
        self.sections = SectionTimers(profiling_interval, self.kernels)
        self.wrapped = Wrapped()
        self.tracker = IntervalTracker(interval_s)
        self._wanted = wanted
        self._gathers = gathers
        self._needs_other_ranks = gathers or RELATIVE in wanted
        self._node = node
        self._exchange: Exchange | None = None
        """Made at the first report: the process group may be made after the detection was started."""
        self._best = References({}, {})

    def close(self) -> None:
        """Restores wrapped callables and stops a recording of kernels."""
        self.wrapped.restore()
        self.kernels.stop(keep=False)

    def step(self) -> bool:
        """Counts a step. Returns whether a report is due, alike on all ranks.

        Collective at some of the steps, the same on all ranks, where a report needs other ranks: the ranks then agree
        on the duration of a step.
        """
        if self.tracker.step(time.monotonic()):
            median_s = self.tracker.median_s
            if self._needs_other_ranks:
                (median_s,) = group.max_over_ranks([median_s])
            self.tracker.agree(median_s)
        return self.tracker.elapsed

    def report(self) -> Report | None:
        """Returns the report on everything since the last report; None on a rank that gets none. Collective.

        This rank's times and scores go to the monitor as well, without waiting, where there is a launcher.
        """
        start_s = time.perf_counter()
        exchange = self._exchange or Exchange(self._node)
        self._exchange = exchange
        sections = self.sections.drain()
        kernels = self.kernels.drain()
        scores: dict[str, Scores] = {}
        if self._needs_other_ranks:
            lowest = exchange.references(medians(kernels), medians(sections))
            if RELATIVE in self._wanted:
                scores["relative"] = scores_of(lowest, sections, kernels)
        if INDIVIDUAL in self._wanted:
            of_kernels = islice(best_medians(self._best.kernels, kernels).items(), MAX_KERNELS)
            self._best = References(dict(of_kernels), best_medians(self._best.sections, sections))
            scores["individual"] = scores_of(self._best, sections, kernels)
        link = process.current()
        if link is not None:
            link.post(section_times(sections, scores), time.monotonic_ns())
        agreed = exchange.names
        if self._gathers:
            names = list(agreed.sections)
            gathered = group.gather_on_rank0(row_of(scores, names))
            if gathered is None:
                return None
            rows = dict(enumerate(gathered))
        else:
            names = list(sections)
            rows = {exchange.rank: row_of(scores, names)}
        tables = tables_of(rows, scores, names)
        return Report(
            *tables.get("relative", ({}, {})),
            *tables.get("individual", ({}, {})),
            rank_to_node={rank: agreed.nodes.get(rank, self._node) for rank in rows},
            local_section_summaries=sections,
            local_kernel_summaries=kernels,
            generate_report_elapsed_time=time.perf_counter() - start_s,
            gather_on_rank0=self._gathers,
            rank=exchange.rank,
        )


class Detector:
    """Straggler detection of this process. Every rank initialises it alike and asks for reports at the same steps.

    A class that is never made: its methods are the documented calls. The example is in the package's docstring.

    `initialized`: whether the detection runs.
    """

    initialized: ClassVar[bool] = False
    _now: ClassVar[Detection | None] = None

    @classmethod
    def initialize(
        cls,
        scores_to_compute: str | Collection[str] = "all",
        gather_on_rank0: bool = True,
        profiling_interval: int = 1,
        report_time_interval: float = 60.0,
        node_name: str | None = None,
    ) -> None:
        """Starts the detection. A detection that was started before, as in the last round of an in-process restart, is
        discarded.

        Args:
            scores_to_compute: "all", or any of "relative_perf_scores" and "individual_perf_scores".
            gather_on_rank0: rank 0 reports on all ranks; else each on itself. Individual scores that are not gathered
                need no communication at all.
            profiling_interval: one in so many entries of a section is timed.
            report_time_interval: seconds between two reports of `generate_report_if_interval_elapsed`.
            node_name: None: the host's name.

        Raises:
            ValueError: naming the argument.
        """
        wanted = _scores_of(scores_to_compute)
        check_count("profiling_interval", profiling_interval, 1)
        check_seconds("report_time_interval", report_time_interval)
        if node_name is not None and not isinstance(node_name, str):
            raise ValueError(f"node_name={node_name!r}: give a text")
        cls.shutdown()
        if node_name is None:
            node = socket.gethostname()
        else:
            node = node_name
        cls._now = Detection(wanted, gather_on_rank0, profiling_interval, report_time_interval, node)
        cls.initialized = True

    @classmethod
    def detection_section(cls, name: str | None = None, profile_cuda: bool = True) -> SectionTimer:
        """Returns a context manager whose body is timed.

        Args:
            name: None: file and line of this call.
            profile_cuda: time the CUDA kernels of the body too.

        Raises:
            RuntimeError: not initialised; on entry, when the section is open already.
            ValueError: the name is no text, or empty.
        """
        now = cls._now
        if now is None:
            raise _not_initialized("detection_section")
        if name is None:
            caller = sys._getframe(1)
            name = f"{caller.f_code.co_filename}:{caller.f_lineno}"
        section = now.sections[name]
        section.profile_cuda = profile_cuda
        return section

    @classmethod
    def wrap_callables(cls, callable_ids: Iterable[CallableId], profile_cuda: bool = True) -> None:
        """Opens a section named `OWNER.NAME` in every call of these callables, until `restore_original_callables`.

        Example: `Detector.wrap_callables([CallableId(model, "forward"), CallableId(optimizer, "step")])`

        Raises:
            RuntimeError: not initialised.
            ValueError: one of them does not exist or is wrapped already; then none was wrapped.
        """
        now = cls._detection("wrap_callables")
        wanted = list(callable_ids)
        now.wrapped.check(wanted)
        for target in wanted:
            section = now.sections[str(target)]
            section.profile_cuda = profile_cuda
            now.wrapped.wrap(target, section)

    @classmethod
    def restore_original_callables(cls) -> None:
        """Restores every callable that `wrap_callables` has replaced."""
        if cls._now is not None:
            cls._now.wrapped.restore()

    @classmethod
    def generate_report(cls) -> Report | None:
        """Returns the report on what was timed since the last one. Collective.

        Returns:
            None on other ranks than 0 where scores are gathered.

        Raises:
            RuntimeError: not initialised.
        """
        return cls._detection("generate_report").report()

    @classmethod
    def generate_report_if_interval_elapsed(cls) -> Report | None:
        """Returns a report when the interval has passed, on all ranks at the same step. To be called once per step.

        Raises:
            RuntimeError: not initialised.
        """
        now = cls._detection("generate_report_if_interval_elapsed")
        if now.step():
            return now.report()
        return None

    @classmethod
    def is_interval_elapsed(cls) -> bool:
        """Returns whether the last `generate_report_if_interval_elapsed` made a report; the same on every rank."""
        return cls._detection("is_interval_elapsed").tracker.elapsed

    @classmethod
    def shutdown(cls) -> None:
        """Ends the detection and restores wrapped callables. May be called at any time, and twice."""
        now = cls._now
        cls._now = None
        cls.initialized = False
        if now is not None:
            now.close()

    @classmethod
    def _detection(cls, call: str) -> Detection:
        if cls._now is None:
            raise _not_initialized(call)
        return cls._now


def _not_initialized(call: str) -> RuntimeError:
    return RuntimeError(f"Detector.{call}: call Detector.initialize() first")


def _scores_of(scores_to_compute: object) -> set[str]:
    """Returns the names of the scores that the user asked for.

    Raises:
        ValueError: a name is unknown, or there is none.
    """
    known = {RELATIVE, INDIVIDUAL}
    if scores_to_compute == "all":
        return known
    requested = scores_to_compute
    if isinstance(scores_to_compute, str):
        requested = [scores_to_compute]
    wanted: set[str] = set()
    if isinstance(requested, Collection) and all(isinstance(name, str) for name in requested):
        wanted = set(requested)
    if not wanted or wanted - known:
        raise ValueError(f'scores_to_compute={scores_to_compute!r}: give "all", or some of {sorted(known)}')
    return wanted
