"""In-process restart: a function that is called again, in the same processes, after a fault on any rank.

Everything public by its documented name, loaded when it is used: importing this package loads none of its rooms.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ft_client.lazy_names import lazy_names

if TYPE_CHECKING:
    from ft_client.inprocess import (
        abort,
        attribution,
        completion,
        compose,
        exception,
        finalize,
        health_check,
        initialize,
        nested_restarter,
        rank_assignment,
        rank_filter,
        state,
        store,
        terminate,
    )
    from ft_client.inprocess.call_wrapper import CallWrapper
    from ft_client.inprocess.compose import Compose
    from ft_client.inprocess.restart_config import InProcessRestartConfig
    from ft_client.inprocess.state import FrozenState, Mode, State
    from ft_client.inprocess.wrapper import Wrapper

__all__ = [
    "CallWrapper",
    "Compose",
    "FrozenState",
    "InProcessRestartConfig",
    "Mode",
    "State",
    "Wrapper",
    "abort",
    "attribution",
    "completion",
    "compose",
    "exception",
    "finalize",
    "health_check",
    "initialize",
    "nested_restarter",
    "rank_assignment",
    "rank_filter",
    "state",
    "store",
    "terminate",
]

_HOMES = {
    "CallWrapper": ".call_wrapper",
    "Compose": ".compose",
    "FrozenState": ".state",
    "InProcessRestartConfig": ".restart_config",
    "Mode": ".state",
    "State": ".state",
    "Wrapper": ".wrapper",
}
"""Class -> the module it lives in; every other public name is a module."""

__getattr__, __dir__ = lazy_names(__name__, _HOMES, tuple(name for name in __all__ if name not in _HOMES))
