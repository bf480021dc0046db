"""Straggler detection: which rank is slower than the others, and which has become slower than it was.

    from ft_client.straggler import Detector

    Detector.initialize(report_time_interval=300.0)
    for batch in data:
        with Detector.detection_section("step"):
            train_step(batch)
        report = Detector.generate_report_if_interval_elapsed()
        if report is not None:
            print(report.identify_stragglers())

`StragglerManager` does the same around a training's step, prints the report, and may end the training. Every public
name is here, and loaded when it is used: importing this package loads none of its modules. docs/straggler.md is the
user's guide; `reporting.py` has the formula of a score.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ft_client.rank.lazy_names import lazy_names

if TYPE_CHECKING:
    from ft_client.straggler.callables import CallableId as CallableId
    from ft_client.straggler.detector import Detector as Detector
    from ft_client.straggler.reporting import Report as Report
    from ft_client.straggler.reporting import StragglerId as StragglerId
    from ft_client.straggler.samples import Statistic as Statistic
    from ft_client.straggler.straggler_manager import NVRxStragglerDetectionManager as NVRxStragglerDetectionManager
    from ft_client.straggler.straggler_manager import StragglerManager as StragglerManager
    from ft_client.straggler.straggler_manager import StragglerOptions as StragglerOptions

_HOMES = {
    "CallableId": ".callables",
    "Detector": ".detector",
    "NVRxStragglerDetectionManager": ".straggler_manager",
    "Report": ".reporting",
    "Statistic": ".samples",
    "StragglerId": ".reporting",
    "StragglerManager": ".straggler_manager",
    "StragglerOptions": ".straggler_manager",
}
"""Class -> the module it lives in."""

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
