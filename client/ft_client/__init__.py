"""A training seen from the inside: `import ft_client as ft`; `ft.init()`, `ft.section(name)`, `ft.steps(loader)`.

The whole public API, loaded when it is used: importing this package costs nothing and imports nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ft_client.control import WorkloadAction, WorkloadControlRequest
    from ft_client.errors import RankMonitorClientError
    from ft_client.rank_monitor_client import RankMonitorClient
    from ft_client.short_forms import init, monitored, report_iteration, section, shutdown, steps

__all__ = [
    "RankMonitorClient",
    "RankMonitorClientError",
    "WorkloadAction",
    "WorkloadControlRequest",
    "init",
    "monitored",
    "report_iteration",
    "section",
    "shutdown",
    "steps",
]

_HOMES = {
    "RankMonitorClient": "rank_monitor_client",
    "RankMonitorClientError": "errors",
    "WorkloadAction": "control",
    "WorkloadControlRequest": "control",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value: object = getattr(import_module(f"{__name__}.{_HOMES.get(name, 'short_forms')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
