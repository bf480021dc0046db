"""Straggler detection: which rank is slower than the others, and which has become slower than it was.

Everything public by its documented name, loaded when it is used: importing this package imports nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ft_client.straggler.callables import CallableId
    from ft_client.straggler.detector import Detector
    from ft_client.straggler.options import StragglerOptions
    from ft_client.straggler.report import Report, StragglerId
    from ft_client.straggler.samples import Statistic
    from ft_client.straggler.training import NVRxStragglerDetectionManager, StragglerManager

_HOMES = {
    "CallableId": "callables",
    "Detector": "detector",
    "NVRxStragglerDetectionManager": "training",
    "Report": "report",
    "Statistic": "samples",
    "StragglerId": "report",
    "StragglerManager": "training",
    "StragglerOptions": "options",
}
"""Class -> the module it lives in."""

__all__ = [
    "CallableId",
    "Detector",
    "NVRxStragglerDetectionManager",
    "Report",
    "Statistic",
    "StragglerId",
    "StragglerManager",
    "StragglerOptions",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
