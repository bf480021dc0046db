"""`StragglerManager`: the detector around a training's step: reports at an interval, says what it finds, stops.

The name is the peer's, whose documented methods it has.
"""

from __future__ import annotations

import functools
import json
import logging
import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

from ft_client import group
from ft_client.given import check_exit_code, check_save
from ft_client.straggler.detector import INDIVIDUAL, RELATIVE, Detector
from ft_client.straggler.findings import STEP_SECTION, findings
from ft_client.straggler.options import read_options
from ft_client.straggler.report import Report

T = TypeVar("T")


class StragglerManager:
    """Straggler detection for one training.

    Args:
        config: any object with the options as attributes, `StragglerOptions` or a peer's; None: the defaults.
        save: with `stop_if_detected`, called on every rank before it leaves.
        exit_code: with `stop_if_detected`, every rank leaves with it (0 when only `save` is given). When neither is
            given, `check_stragglers` returns True on every rank and the caller ends the training.
        options: single options, in place of the config's.

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
        self.options = read_options(config, options)
        self.logger = logging.getLogger(self.options.logger_name)
        check_save(save)
        if exit_code is not None:
            check_exit_code(exit_code)
        self._save, self._exit_code = save, exit_code
        self._running = False

    def initialize(self) -> None:
        """Begins, on every rank.

        Raises:
            RuntimeError: it has begun already.
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
        """The step as a function that is timed, while detection runs."""

        @functools.wraps(train_step_func)
        def step(*args: Any, **kwargs: Any) -> T:
            if not self._running:
                return train_step_func(*args, **kwargs)
            with Detector.detection_section(STEP_SECTION):
                return train_step_func(*args, **kwargs)

        return step if self.options.enabled else train_step_func

    def check_stragglers(self, global_rank: int | None = None) -> bool:
        """To be called once per step, on every rank: reports when the interval has passed, and stops if it must.

        Args:
            global_rank: this rank; accepted for compatibility.

        Returns:
            Whether a straggler was found and the training is to stop; the same on every rank. With `save` or
            `exit_code` it does not return then.

        Raises:
            SystemExit: with the code asked for.
        """
        if not self._running:
            return False
        start_s = time.perf_counter()
        report = Detector.generate_report_if_interval_elapsed()
        if not Detector.is_interval_elapsed():
            return False
        found = report is not None and self._say(report, start_s)
        if not self.options.stop_if_detected or not group.from_rank0(float(found)):
            return False
        if self._save is None and self._exit_code is None:
            return True
        if self._save is not None:
            self._save()
        self.shutdown()
        sys.exit(self._exit_code or 0)

    def shutdown(self) -> None:
        """Ends; it may begin again. May be called twice."""
        if self._running:
            self._running = False
            Detector.shutdown()

    def _say(self, report: Report, start_s: float) -> bool:
        """Prints what was found; returns whether any rank is flagged."""
        found = findings(report, self.options)
        for line in (line for one in found for line in one.lines(self.options.num_gpu_perf_scores_to_print)):
            self.logger.info(line)
        elapsed_s = time.perf_counter() - start_s
        self.logger.info("Straggler report processing time: %.3f sec.", elapsed_s)
        if self.options.enable_logging:
            record = {"event": "straggler_report", "elapsed_s": elapsed_s, "scores": [one.record() for one in found]}
            self.logger.info(json.dumps(record), extra={"straggler_report": record})
        for warning in (one.warning() for one in found):
            if warning:
                self.logger.warning(warning)
        return any(one.flagged for one in found)


class NVRxStragglerDetectionManager(StragglerManager):
    """The same by the peer's name, with the peer's logger."""

    _LOGGER_NAME = "megatron.bridge.NVRxStragglerDetection"
