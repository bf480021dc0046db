"""`StragglerManager`: straggler detection around a training's step, which reports at an interval and may stop it.

Scripts call it in the training's thread, and so does the callback for Lightning. The class has the documented methods
of NVIDIA's class; the names and defaults of its options are those of Megatron Bridge's `NVRxStragglerDetectionConfig`.
`detector.py` measures. No rank is ended unless the options say so.
"""

from __future__ import annotations

import functools
import json
import logging
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from ft_client.rank.agreement import group
from ft_client.rank.argument_checks import check_count, check_exit_code, check_save, check_seconds
from ft_client.straggler.detector import INDIVIDUAL, RELATIVE, Detector
from ft_client.straggler.reporting import STEP_SECTION, RankScores, check_threshold, findings

T = TypeVar("T")


@dataclass(frozen=True)
class StragglerOptions:
    """The options: which scores to compute, what to print, when to stop.

    Attributes:
        enabled: whether anything is measured at all.
        report_time_interval: seconds between two reports.
        calc_relative_gpu_perf: whether to compare ranks with each other.
        calc_individual_gpu_perf: whether to compare each rank with its own best.
        num_gpu_perf_scores_to_print: how many of the best and of the worst scores to print; 0: none, only warnings.
        gpu_relative_perf_threshold, gpu_individual_perf_threshold: a rank with a lower score is a straggler.
        stop_if_detected: whether to end the training on all ranks if there is a straggler.
        enable_logging: whether to log a structured record of each report, as JSON.
        profiling_interval: one in so many steps is timed.
        logger_name: the logger of all that is printed.
    """

    enabled: bool = True
    report_time_interval: float = 300.0
    calc_relative_gpu_perf: bool = True
    calc_individual_gpu_perf: bool = True
    num_gpu_perf_scores_to_print: int = 5
    gpu_relative_perf_threshold: float = 0.7
    gpu_individual_perf_threshold: float = 0.7
    stop_if_detected: bool = False
    enable_logging: bool = True
    profiling_interval: int = 1
    logger_name: str = "ft_client.straggler"

    def __post_init__(self) -> None:
        """Checks every value.

        Raises:
            ValueError: naming the option.
        """
        check_seconds("report_time_interval", self.report_time_interval)
        check_count("profiling_interval", self.profiling_interval, 1)
        check_count("num_gpu_perf_scores_to_print", self.num_gpu_perf_scores_to_print)
        check_threshold("gpu_relative_perf_threshold", self.gpu_relative_perf_threshold)
        check_threshold("gpu_individual_perf_threshold", self.gpu_individual_perf_threshold)
        if self.enabled and not (self.calc_relative_gpu_perf or self.calc_individual_gpu_perf):
            raise ValueError("calc_relative_gpu_perf=False, calc_individual_gpu_perf=False: nothing is left to compute")

    @property
    def thresholds(self) -> dict[str, float]:
        """The kinds of scores that are asked for, each with its threshold."""
        found = {}
        if self.calc_relative_gpu_perf:
            found["relative"] = self.gpu_relative_perf_threshold
        if self.calc_individual_gpu_perf:
            found["individual"] = self.gpu_individual_perf_threshold
        return found


def _read_options(config: object, options: dict[str, object]) -> StragglerOptions:
    """Returns the options of any object that has attributes of their names; those in `options` take precedence.

    Raises:
        ValueError: a value is wrong.
        TypeError: an option that does not exist.
    """
    names = [field.name for field in fields(StragglerOptions)]
    found: dict[str, object] = {name: getattr(config, name) for name in names if hasattr(config, name)}
    return StragglerOptions(**(found | options))  # type: ignore[arg-type]


class StragglerManager:
    """Straggler detection for one training.

    Example:

        manager = StragglerManager(report_time_interval=60.0, stop_if_detected=True, exit_code=3)
        manager.initialize()
        train_step = manager.wrap_train_step_function(train_step)
        for batch in data:
            train_step(batch)
            manager.check_stragglers()
        manager.shutdown()

    Args:
        config: any object with the options as attributes, `StragglerOptions` or a peer's; None: the defaults.
        save: with `stop_if_detected`, called on every rank before it leaves.
        exit_code: with `stop_if_detected`, every rank leaves with it (0 when only `save` is given). When neither is
            given, `check_stragglers` returns True on every rank and the caller ends the training.
        options: single options, in place of the config's.

    Attributes:
        found: what the last `check_stragglers` found, on rank 0; empty where it made no report.

    Raises:
        ValueError: an option or argument has a value that makes no sense.
        TypeError: an option that does not exist.
    """

    _LOGGER_NAME = ""

    def __init__(
        self,
        config: object = None,
        *,
        save: Callable[[], object] | None = None,
        exit_code: int | None = None,
        **options: object,
    ) -> None:
        if self._LOGGER_NAME and not hasattr(config, "logger_name"):
            options.setdefault("logger_name", self._LOGGER_NAME)
        self.options = _read_options(config, options)
        self.logger = logging.getLogger(self.options.logger_name)
        check_save(save)
        if exit_code is not None:
            check_exit_code(exit_code)
        self._save = save
        self._exit_code = exit_code
        self._running = False
        self.found: list[RankScores] = []

    def initialize(self) -> None:
        """Starts the detection, on every rank.

        Raises:
            RuntimeError: it has been started already.
        """
        if self._running:
            raise RuntimeError("straggler detection is initialized already; call shutdown() first")
        if not self.options.enabled:
            return
        options = self.options
        wanted = [(RELATIVE, options.calc_relative_gpu_perf), (INDIVIDUAL, options.calc_individual_gpu_perf)]
        Detector.initialize(
            scores_to_compute=[name for name, asked in wanted if asked],
            gather_on_rank0=True,
            profiling_interval=options.profiling_interval,
            report_time_interval=options.report_time_interval,
        )
        self._running = True

    def wrap_train_step_function(self, train_step_func: Callable[..., T]) -> Callable[..., T]:
        """Returns a function that calls the step, and times it while the detection runs."""

        @functools.wraps(train_step_func)
        def step(*args: Any, **kwargs: Any) -> T:
            if not self._running:
                return train_step_func(*args, **kwargs)
            with Detector.detection_section(STEP_SECTION):
                return train_step_func(*args, **kwargs)

        if self.options.enabled:
            return step
        return train_step_func

    def check_stragglers(self, global_rank: int | None = None) -> bool:
        """Reports when the interval has passed, and stops the training if that was asked for.

        Called once for each step, on every rank. A report is a collective, at the same step on all ranks.

        Args:
            global_rank: this rank; accepted for compatibility.

        Returns:
            Whether a straggler was found and the training is to stop; the same on every rank. With `save` or
            `exit_code` it does not return then.

        Raises:
            SystemExit: with the code asked for.
        """
        self.found = []
        if not self._running:
            return False
        start_s = time.perf_counter()
        report = Detector.generate_report_if_interval_elapsed()
        if not Detector.is_interval_elapsed():
            return False
        if report is not None:
            self.found = findings(report, self.options.thresholds)
            self._log(start_s)
        is_flagged = any(finding.flagged for finding in self.found)
        if not self.options.stop_if_detected or not group.from_rank0(float(is_flagged)):
            return False
        if self._save is None and self._exit_code is None:
            return True
        if self._save is not None:
            self._save()
        self.shutdown()
        sys.exit(self._exit_code or 0)

    def shutdown(self) -> None:
        """Ends the detection, which may be started again. May be called twice."""
        if self._running:
            self._running = False
            Detector.shutdown()

    def _log(self, start_s: float) -> None:
        """Logs what was found: scores, the structured record, and a warning for each kind with a straggler."""
        for finding in self.found:
            for line in finding.lines(self.options.num_gpu_perf_scores_to_print):
                self.logger.info(line)
        elapsed_s = time.perf_counter() - start_s
        self.logger.info("Straggler report processing time: %.3f sec.", elapsed_s)
        if self.options.enable_logging:
            record = {
                "event": "straggler_report",
                "elapsed_s": elapsed_s,
                "scores": [finding.record() for finding in self.found],
            }
            self.logger.info(json.dumps(record), extra={"straggler_report": record})
        for finding in self.found:
            warning = finding.warning()
            if warning:
                self.logger.warning(warning)


class NVRxStragglerDetectionManager(StragglerManager):
    """`StragglerManager` by the name of Megatron Bridge's class, with the logger of that class."""

    _LOGGER_NAME = "megatron.bridge.NVRxStragglerDetection"
