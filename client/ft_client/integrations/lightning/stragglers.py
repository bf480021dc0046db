"""`StragglerDetectionCallback`: the straggler detection of `ft_client.straggler` around Lightning's training step.

Lightning calls the hooks on every rank, after each batch. A report is a collective, at the same batch on all ranks.
Which rank is slow is decided in `ft_client.straggler`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ft_client.integrations.lightning.framework import Callback
from ft_client.straggler import CallableId, Detector, StragglerManager

_METRICS = {"min": "min", "med": "median", "max": "max"}
"""Key of `RankScores.spread` -> the name that the trainer's loggers get."""


class StragglerDetectionCallback(Callback):
    """Times the forward pass of each training step on every rank, and reports ranks that are slow.

    Args:
        report_time_interval: seconds between two reports.
        calc_relative_gpu_perf: whether to compare ranks with each other.
        calc_individual_gpu_perf: whether to compare each rank with its own best.
        num_gpu_perf_scores_to_print: how many of the best and of the worst to print; 0: none, only warnings.
        gpu_relative_perf_threshold: a rank with a lower relative score is a straggler.
        gpu_individual_perf_threshold: a rank with a lower individual score is a straggler.
        stop_if_detected: whether to end `fit` on all ranks if there is a straggler, after a checkpoint is saved where
            `ckpt_path="last"` finds it.
        enable_ptl_logging: whether to send the lowest, median and highest scores to the trainer's loggers, as
            `gpu_relative_perf/min` and so on; without CUDA as `section_relative_perf/min`.
        profiling_interval: one in so many steps is timed.
        logger_name: the name of the logger for the reports.

    Raises:
        ValueError: an argument is invalid; the text names it.
    """

    def __init__(
        self,
        report_time_interval: float,
        calc_relative_gpu_perf: bool,
        calc_individual_gpu_perf: bool,
        num_gpu_perf_scores_to_print: int,
        gpu_relative_perf_threshold: float,
        gpu_individual_perf_threshold: float,
        stop_if_detected: bool,
        enable_ptl_logging: bool,
        profiling_interval: int = 1,
        logger_name: str | None = "nemo_logger.StragglerDetectionCallback",
    ) -> None:
        super().__init__()
        self._manager = StragglerManager(
            report_time_interval=report_time_interval,
            calc_relative_gpu_perf=calc_relative_gpu_perf,
            calc_individual_gpu_perf=calc_individual_gpu_perf,
            num_gpu_perf_scores_to_print=num_gpu_perf_scores_to_print,
            gpu_relative_perf_threshold=gpu_relative_perf_threshold,
            gpu_individual_perf_threshold=gpu_individual_perf_threshold,
            stop_if_detected=stop_if_detected,
            enable_logging=False,
            profiling_interval=profiling_interval,
            logger_name=logger_name,
        )
        self._logs_scores = enable_ptl_logging

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit":
            self._manager.initialize()
            Detector.wrap_callables([CallableId(trainer.strategy, "training_step")])

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit":
            self._manager.shutdown()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._manager.shutdown()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *batch: Any) -> None:
        stop = self._manager.check_stragglers()
        scores: dict[str, float] = {}
        for finding in self._manager.found:
            name = f"{finding.subject.lower()}_{finding.kind}_perf"
            scores |= {f"{name}/{_METRICS[of]}": score for of, score in finding.spread().items()}
        if self._logs_scores and scores:
            for logger in trainer.loggers:
                logger.log_metrics(scores, step=trainer.global_step)
        if stop:
            self._stop(trainer)

    def _stop(self, trainer: Any) -> None:
        """Asks Lightning to end `fit`, and saves a checkpoint under the name of the last one. Collective."""
        self._manager.logger.error("Detected stragglers. Terminating training...")
        trainer.should_stop = True
        keeper = trainer.checkpoint_callback
        if keeper is not None and getattr(keeper, "dirpath", None):
            name = f"{keeper.CHECKPOINT_NAME_LAST}{keeper.FILE_EXTENSION}"
            trainer.save_checkpoint(Path(keeper.dirpath) / name)
