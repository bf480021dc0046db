"""In-process restart: a function that is called again, in the same processes, after a fault on any rank.

Everything public by its documented name, loaded when it is used: importing this package imports nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ft_client.inprocess import (
        abort,
        attribution,
        completion,
        exception,
        finalize,
        health_check,
        initialize,
        rank_assignment,
        rank_filter,
        state,
        terminate,
    )
    from ft_client.inprocess.compose import Compose
    from ft_client.inprocess.restart_config import InProcessRestartConfig
    from ft_client.inprocess.state import FrozenState, Mode, State

__all__ = [
    "Compose",
    "FrozenState",
    "InProcessRestartConfig",
    "Mode",
    "State",
    "abort",
    "attribution",
    "completion",
    "exception",
    "finalize",
    "health_check",
    "initialize",
    "rank_assignment",
    "rank_filter",
    "state",
    "terminate",
]

_HOMES = {
    "Compose": "compose",
    "FrozenState": "state",
    "InProcessRestartConfig": "restart_config",
    "Mode": "state",
    "State": "state",
}
"""Class -> the module it lives in; every other public name is a module."""


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f"{__name__}.{_HOMES.get(name, name)}")
    value: object = getattr(module, name) if name in _HOMES else module
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
