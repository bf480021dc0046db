"""Callbacks that run at the start of every round, before the health check and the function.

Users give one to the wrapper as `initialize`. `restart/user_function.py` calls it in the main thread, after all ranks
have arrived at the start of the round, so it knows how many ranks there are. What it may raise is in `exception.py`.
"""

from __future__ import annotations

from ft_client.inprocess.callback import Callback
from ft_client.inprocess.exception import RestartAbort
from ft_client.inprocess.state import FrozenState


class Initialize(Callback):
    """Runs first in every round. An `Exception` is a fault, and all ranks restart; a `BaseException` ends this rank."""


class RetryController(Initialize):
    """Ends the restarts when there were too many rounds, or when too few ranks are left.

    The numbers are the same on all ranks, so all ranks end. Where `max_iterations` is given, the wrapper's own limits
    have no default (`restart/escalating.py: limits_of`).

    Args:
        max_iterations: how many of our rounds may run, the first included; None: no limit.
        min_world_size: ranks that must be there, spares included.
        min_active_world_size: ranks that must be active.
    """

    def __init__(
        self, max_iterations: int | None = None, min_world_size: int = 1, min_active_world_size: int = 1
    ) -> None:
        self.max_iterations = max_iterations
        self.min_world_size = min_world_size
        self.min_active_world_size = min_active_world_size

    def __call__(self, state: FrozenState) -> FrozenState:
        """Returns `state`.

        Raises:
            RestartAbort: naming the limit and the value.
        """
        active = state.active_world_size or 0
        if self.max_iterations is not None and state.iteration >= self.max_iterations:
            raise RestartAbort(f"iteration={state.iteration} is beyond max_iterations={self.max_iterations}")
        if state.world_size < self.min_world_size:
            raise RestartAbort(f"{state.world_size} ranks are left, below min_world_size={self.min_world_size}")
        if active < self.min_active_world_size:
            raise RestartAbort(f"{active} ranks are active, below min_active_world_size={self.min_active_world_size}")
        return state
