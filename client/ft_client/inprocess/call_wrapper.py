"""The wrapper's interface for the user's function: state of the restarts, `ping()`, atomic and unguarded sections.

`restart/call.py` makes one for each call. It only reports: when a restart begins is decided elsewhere.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from ft_client.inprocess.attribution import LastInterruption
from ft_client.inprocess.state import FrozenState, State


class HangProtection(Protocol):
    """The methods of the link to the monitor that are used here."""

    def ping(self) -> None:
        """Reports progress of the function."""

    def unguarded(self) -> None:
        """Reports that no progress is expected from now on."""

    def running(self) -> None:
        """Reports that progress is expected again."""


class CallWrapper:
    """Handed to each parameter of the wrapped function that asks for it. For the thread that runs the function.

    Args:
        state: of this rank; changes from iteration to iteration.
        link: the link to the monitor.
        why: returns why an iteration ended.
    """

    def __init__(
        self,
        state: State,
        link: HangProtection,
        why: Callable[[int], LastInterruption],
    ) -> None:
        self._state, self._link, self._why = state, link, why
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

    @property
    def last_interruption(self) -> LastInterruption | None:
        """Why the function is called again: who is to blame, and what happened; None in the first call.

        Where ranks made no progress, the launchers say who held up the others, a moment after the interruption at the
        latest; without them only who made no progress is known. Takes a few operations in the store.
        """
        if self._state.iteration == 0:
            return None
        return self._why(self._state.iteration - 1)

    def ping(self) -> None:
        """Reports progress of the training. After the first one of an iteration, further ones are expected."""
        self._link.ping()

    @contextmanager
    def atomic(self) -> Iterator[None]:
        """A context in whose body no restart begins; once one has begun, it cannot be entered. Re-entrant.

        The hard timeout still applies.
        """
        with self._atomic:
            yield

    @contextmanager
    def disable_hang_protection(self) -> Iterator[None]:
        """A context in whose body a lack of progress is not a fault. Re-entrant."""
        iteration, self._unguarded = self._state.iteration, self._unguarded + 1
        try:
            if self._unguarded == 1:
                self._link.unguarded()
            yield
        finally:
            if iteration == self._state.iteration and self._unguarded:
                self._unguarded -= 1
                if self._unguarded == 0:
                    self._link.running()

    def close(self) -> None:
        """Ends the call: the store is not asked any more, and not kept by who keeps this object."""
        self._why = lambda _iteration: LastInterruption()

    def begin(self) -> None:
        """Begins an iteration: contexts that an interrupted one left open are closed."""
        self._unguarded = 0
