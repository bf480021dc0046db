"""The arguments of `Wrapper`, checked when it is created. Pure: files and stores are opened elsewhere.

`wrapper.py` makes them; what runs a call (`restart/`) reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ft_client.inprocess.abort import Abort
from ft_client.inprocess.assignment.base import RankAssignment, RankAssignmentCtx
from ft_client.inprocess.callback import Callback
from ft_client.inprocess.completion import Completion
from ft_client.inprocess.compose import Compose
from ft_client.inprocess.finalize import Finalize
from ft_client.inprocess.health_check import HealthCheck
from ft_client.inprocess.initialize import Initialize
from ft_client.inprocess.rank_assignment import ActivateAllRanks, ShiftRanks
from ft_client.inprocess.rank_filter import FilteredAssignment, RankFilter
from ft_client.inprocess.state import FrozenState, State
from ft_client.inprocess.terminate import Terminate
from ft_client.inprocess.timeouts import Timeouts

OnState = Callable[[FrozenState], FrozenState]

_KINDS: Mapping[str, type] = {
    "initialize": Initialize,
    "abort": Abort,
    "finalize": Finalize,
    "health_check": HealthCheck,
    "completion": Completion,
    "terminate": Terminate,
    "rank_assignment": RankAssignment,
    "rank_filter": RankFilter,
}


def _default_assignment() -> Callable[[RankAssignmentCtx], RankAssignmentCtx]:
    return Compose(ActivateAllRanks(), ShiftRanks())


@dataclass(frozen=True, kw_only=True)
class Arguments(Timeouts):
    """The arguments of `Wrapper`. Store and abort have no default here: what they need does not belong in this room.

    The three limits end the restarts; 0: never. None: what the launcher says, else the defaults of its options.

    A callback is an instance of its class, a `Compose` of such, or any other function; never a class.

    Raises:
        TypeError: an argument has the wrong type; the text names it.
        ValueError: as `Timeouts`; a path of the monitor process is relative, or a limit below 0.
    """

    store_factory: Callable[..., Any]
    abort: OnState | None
    store_kwargs: Mapping[str, Any] = field(default_factory=dict)
    initialize: OnState | None = None
    finalize: OnState | None = None
    health_check: OnState | None = None
    completion: OnState | None = None
    terminate: OnState | None = None
    rank_assignment: Callable[[RankAssignmentCtx], RankAssignmentCtx] = field(default_factory=_default_assignment)
    rank_filter: Callable[[State], State] | None = None
    monitor_process_logfile: str | None = None
    monitor_process_pidfile: str | None = None
    same_error_limit: int | None = None
    no_progress_limit: int | None = None
    soft_timeout_limit: int | None = None
    enabled: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not callable(self.store_factory):
            raise TypeError(f"store_factory={self.store_factory!r} cannot be called")
        if not isinstance(self.store_kwargs, Mapping):
            raise TypeError(f"store_kwargs={self.store_kwargs!r} is not a mapping")
        if not isinstance(self.enabled, bool):
            raise TypeError(f"enabled={self.enabled!r} is not a bool")
        for name, kind in _KINDS.items():
            _check_callback(name, kind, getattr(self, name))
        for name in ("same_error_limit", "no_progress_limit", "soft_timeout_limit"):
            _check_limit(name, getattr(self, name))
        for name in ("monitor_process_logfile", "monitor_process_pidfile"):
            _check_path(name, getattr(self, name))

    @property
    def assignment(self) -> Callable[[RankAssignmentCtx], RankAssignmentCtx]:
        """The rank assignment, followed by the rank filter where there is one."""
        if self.rank_filter is None:
            return self.rank_assignment
        return FilteredAssignment(self.rank_assignment, self.rank_filter)


def path_of(path: str, initial_rank: int) -> Path:
    """A path of the monitor process for one rank: `{rank}` is its number at entry."""
    return Path(path.replace("{rank}", str(initial_rank)))


def _check_callback(name: str, kind: type, value: object) -> None:
    if value is None and name != "rank_assignment":
        return
    is_other_kind = isinstance(value, (Callback, RankAssignment, RankFilter)) and not isinstance(value, kind)
    if not callable(value) or isinstance(value, type) or is_other_kind:
        raise TypeError(f"{name}={value!r} is not an instance of {kind.__name__}")


def _check_limit(name: str, value: object) -> None:
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}={value!r} is not a whole number")
    if value < 0:
        raise ValueError(f"{name}={value!r} is below 0")


def _check_path(name: str, value: object) -> None:
    if value is None:
        return
    if not isinstance(value, str):
        raise TypeError(f"{name}={value!r} is not a text")
    if not Path(value).is_absolute():
        raise ValueError(f"{name}={value!r} is not an absolute path")
