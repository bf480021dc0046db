"""`Detector`: what a training calls. Checks what it is given; everything else is the detection's of this process."""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Collection, Iterable
from typing import ClassVar

from ft_client.given import check_count, check_seconds
from ft_client.straggler.callables import CallableId
from ft_client.straggler.detection import Detection, Plan
from ft_client.straggler.report import Report
from ft_client.straggler.sections import Section

logger = logging.getLogger(__name__)

RELATIVE, INDIVIDUAL = "relative_perf_scores", "individual_perf_scores"


class Detector:
    """Straggler detection of this process. Every rank initialises it alike and asks for reports at the same steps."""

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
        """Begins. When it had begun already (as after a restart in process) everything begins anew.

        Args:
            scores_to_compute: "all", or any of "relative_perf_scores" and "individual_perf_scores".
            gather_on_rank0: rank 0 reports on all ranks; else each on itself. Individual scores that are not gathered
                need no communication at all.
            profiling_interval: every so-manieth entry of a section is timed.
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
        node = socket.gethostname() if node_name is None else node_name
        plan = Plan(
            RELATIVE in wanted, INDIVIDUAL in wanted, gather_on_rank0, profiling_interval, report_time_interval, node
        )
        cls._now = Detection(plan)
        cls.initialized = True

    @classmethod
    def detection_section(cls, name: str | None = None, profile_cuda: bool = True) -> Section:
        """A context manager whose body is timed.

        Args:
            name: None: file and line of this call.
            profile_cuda: time the CUDA kernels of the body too.

        Raises:
            RuntimeError: not initialised; on entry, when the section is open already.
            ValueError: that is no name.
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

        Raises:
            RuntimeError: not initialised.
            ValueError: one of them does not exist or is wrapped already; then none was wrapped.
        """
        now = cls._detection("wrap_callables")
        wanted = list(callable_ids)
        now.wrapped.check(wanted)
        for one in wanted:
            section = now.sections[str(one)]
            section.profile_cuda = profile_cuda
            now.wrapped.wrap(one, section)

    @classmethod
    def restore_original_callables(cls) -> None:
        """Takes every wrapper away."""
        if cls._now is not None:
            cls._now.wrapped.restore()

    @classmethod
    def generate_report(cls) -> Report | None:
        """The report on what was timed since the last one. Collective.

        Returns:
            None on other ranks than 0 where scores are gathered.

        Raises:
            RuntimeError: not initialised.
        """
        return cls._detection("generate_report").report()

    @classmethod
    def generate_report_if_interval_elapsed(cls) -> Report | None:
        """To be called once per step: a report when the interval has passed, on all ranks at the same step.

        Raises:
            RuntimeError: not initialised.
        """
        now = cls._detection("generate_report_if_interval_elapsed")
        return now.report() if now.step() else None

    @classmethod
    def is_interval_elapsed(cls) -> bool:
        """Whether the last `generate_report_if_interval_elapsed` made a report; the same on every rank."""
        return cls._detection("is_interval_elapsed").tracker.elapsed

    @classmethod
    def shutdown(cls) -> None:
        """Ends; wrapped callables are themselves again. May be called at any time, and twice."""
        now, cls._now, cls.initialized = cls._now, None, False
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
    known = {RELATIVE, INDIVIDUAL}
    if scores_to_compute == "all":
        return known
    given = [scores_to_compute] if isinstance(scores_to_compute, str) else scores_to_compute
    wanted = set(given) if isinstance(given, Collection) and all(isinstance(one, str) for one in given) else set()
    if not wanted or wanted - known:
        raise ValueError(f'scores_to_compute={scores_to_compute!r}: give "all", or some of {sorted(known)}')
    return wanted
