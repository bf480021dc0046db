"""The numbers of this rank in each iteration of one call: applies the rank assignment to how the last iteration closed.

When a rank that takes part is gone before all have their numbers, the assignment is abandoned on all of them: they
count themselves without gaps, and whatever assignment keeps a memory of the ranks begins anew in the next iteration.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from ft_client.inprocess.assignment import RankAssignmentCtx, assign, forget_activity
from ft_client.inprocess.gather import GatherAbandoned, Gathers
from ft_client.inprocess.rank_assignment import ShiftRanks
from ft_client.inprocess.state import State
from ft_client.inprocess.store import PrefixStore
from rank_monitor.contract.iteration import Closed


class Assigning:
    """Of one call on this rank.

    Args:
        assignment: of the wrapper.
        store: of the call.
        watched: the same keys through the watcher's connection.

    `undecided`: while the assignment decides, how many may take part; else 0.
    """

    def __init__(self, assignment: Callable[[RankAssignmentCtx], object], store: Any, watched: Any) -> None:
        self.undecided = 0
        self._assignment, self._store, self._watched = assignment, store, watched
        self._keys: list[str] = []
        self._own_keys: list[str] = []
        self._current: tuple[int, Gathers] | None = None
        self._abandoned = -1

    def assign(self, state: State, closed: Closed | None) -> None:
        """Makes `state` that of the next iteration.

        Args:
            state: of this rank; changed in place.
            closed: how the last iteration ended; None: there was none.

        Raises:
            RankDiscarded: this rank is out.
            GatherAbandoned: another rank is gone; this one has a number, and the iteration will not begin.
            BaseException: what the assignment raised.
        """
        gone: set[int] = set()
        if closed is not None:
            gone = closed.terminated_ranks
            state.iteration += 1
            if closed.joined:
                state.world_size = closed.world_size + len(closed.joined_members)
                forget_activity(state)  # whoever keeps a memory of the ranks begins anew, on all of them
        self.undecided = state.world_size if closed is None else len(closed.all_members)
        prefix = f"{state.iteration}/assign"
        context = RankAssignmentCtx(dataclasses.replace(state), PrefixStore(prefix, self._store), gone)
        self._current = state.iteration, context.gathers
        if self._abandoned >= state.iteration:
            context.gathers.abandon(context.store)
        try:
            decided = assign(self._assignment, context)
        except GatherAbandoned:
            ShiftRanks()(RankAssignmentCtx(state, context.store, gone))
            raise
        finally:
            self._keys += [f"{prefix}/{key}" for key in context.gathers.keys_left()]
            self._own_keys += [f"{prefix}/{key}" for key in context.gathers.left_here]
        vars(state).update(vars(decided))
        self.undecided = 0

    def abandon(self, number: int) -> None:
        """A rank is gone that takes part in iteration `number`. Called in the watcher's thread."""
        self._abandoned = number
        if self._current is not None and self._current[0] == number:
            self._current[1].abandon(PrefixStore(f"{number}/assign", self._watched))

    def tidy(self, deletes: bool) -> None:
        """All have their numbers: nobody reads what the gathers left. One rank `deletes` what is of all."""
        keys = self._own_keys + (self._keys if deletes else [])
        self._keys, self._own_keys = [], []
        for key in keys:
            self._store.delete_key(key)
