"""The options of `StragglerManager`: names and defaults of Megatron Bridge's `NVRxStragglerDetectionConfig`. Pure.

Scripts make one. The manager reads it, and `report_text.py` the thresholds in it; neither changes it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from ft_client.argument_checks import check_count, check_seconds
from ft_client.straggler.reporting import check_threshold


@dataclass(frozen=True)
class StragglerOptions:
    """The options: which scores to compute, what to print, when to stop.

    `report_time_interval` is in seconds; `num_gpu_perf_scores_to_print` of the best and as many of the worst (0: none);
    a score below its threshold is a straggler's; `stop_if_detected`: end the training on all ranks then;
    `enable_logging`: a structured record of each report; every `profiling_interval`-th step is timed.
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


def read_options(config: object, options: dict[str, object]) -> StragglerOptions:
    """Returns the options of any object that has attributes of their names, replaced by those in `options`.

    Raises:
        ValueError: a value is wrong.
        TypeError: an option that does not exist.
    """
    names = [field.name for field in fields(StragglerOptions)]
    found: dict[str, object] = {name: getattr(config, name) for name in names if hasattr(config, name)}
    return StragglerOptions(**(found | options))  # type: ignore[arg-type]
