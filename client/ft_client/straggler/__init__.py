"""Straggler detection: which rank is slower than the others, and which has become slower than it was.

Everything public by its documented name, loaded when it is used: importing this package loads none of its rooms.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ft_client.lazy_names import lazy_names

if TYPE_CHECKING:
    from ft_client.straggler.callables import CallableId as CallableId
    from ft_client.straggler.detector import Detector as Detector
    from ft_client.straggler.options import StragglerOptions as StragglerOptions
    from ft_client.straggler.report import Report as Report
    from ft_client.straggler.report import StragglerId as StragglerId
    from ft_client.straggler.samples import Statistic as Statistic
    from ft_client.straggler.training import NVRxStragglerDetectionManager as NVRxStragglerDetectionManager
    from ft_client.straggler.training import StragglerManager as StragglerManager

_HOMES = {
    "CallableId": ".callables",
    "Detector": ".detector",
    "NVRxStragglerDetectionManager": ".training",
    "Report": ".report",
    "Statistic": ".samples",
    "StragglerId": ".report",
    "StragglerManager": ".training",
    "StragglerOptions": ".options",
}
"""Class -> the module it lives in."""

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
