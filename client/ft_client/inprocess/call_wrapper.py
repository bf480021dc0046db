"""What the user's function gets of the wrapper: how far it is, and how to tell or ask for something."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ft_client.inprocess.guard import Guard
from ft_client.inprocess.state import FrozenState, State


class CallWrapper:
    """Handed to each parameter of the wrapped function that asks for it. For the thread that runs the function.

    Args:
        state: of this rank; changes from iteration to iteration.
        guard: the link to the monitor.
    """

    def __init__(self, state: State, guard: Guard) -> None:
        self._state, self._guard = state, guard
        self._atomic = threading.RLock()
        self._unguarded = 0

    @property
    def iteration(self) -> int:
        """How many times the function was called again, on any rank."""
        return self._state.iteration

    @property
    def state(self) -> FrozenState:
        """The numbers of this rank in this iteration."""
        return self._state.freeze()

    def ping(self) -> None:
        """Tells that the training makes progress. After the first one of an iteration, further ones are expected."""
        self._guard.ping()

    @contextmanager
    def atomic(self) -> Iterator[None]:
        """No restart begins while its body runs; once one has begun, it is not entered any more. Re-entrant.

        The hard timeout still applies.
        """
        with self._atomic:
            yield

    @contextmanager
    def disable_hang_protection(self) -> Iterator[None]:
        """While its body runs, the absence of progress is no fault. Re-entrant."""
        iteration, self._unguarded = self._state.iteration, self._unguarded + 1
        try:
            if self._unguarded == 1:
                self._guard.unguarded()
            yield
        finally:
            if iteration == self._state.iteration and self._unguarded:
                self._unguarded -= 1
                if self._unguarded == 0:
                    self._guard.running()

    def begin(self) -> None:
        """A new iteration: what an interrupted one left open is closed."""
        self._unguarded = 0
