"""The numbers of this rank in each round of a call, and the environment in which the function finds them.

`Assigning` applies the rank assignment to the end of the last round. When a rank that takes part is lost before all
have their numbers, the assignment is abandoned on all ranks: they number themselves without gaps, and an assignment
that keeps a memory of the ranks begins anew in the next round.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

from ft_client.inprocess.assignment.gather import GatherAbandoned, Gathers
from ft_client.inprocess.compose import parts_of
from ft_client.inprocess.rank_assignment import (
    ActivateAllRanks,
    ActiveWorldSizeDivisibleBy,
    FillGaps,
    MaxActiveWorldSize,
    RankAssignmentCtx,
    ShiftRanks,
    assign,
    forget_activity,
)
from ft_client.inprocess.state import State, environment
from ft_client.inprocess.store import PrefixStore
from rank_monitor.contract.rounds.round import Closed
from rank_monitor.contract.rounds.round_stores import variables_of

_NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "TORCHELASTIC_USE_AGENT_STORE")
_IMMEDIATE: frozenset[object] = frozenset(
    {ActivateAllRanks, ActiveWorldSizeDivisibleBy, FillGaps, MaxActiveWorldSize, ShiftRanks}
)
"""They decide from the numbers alone, within microseconds. Others ask other ranks, or are the user's own."""


class Assigning:
    """The rank assignment of one call on this rank.

    Args:
        assignment: of the wrapper.
        store: of the call.
        watched: the same keys through the watcher's connection.

    `undecided`: while the assignment runs, how many ranks may take part; else 0. `may_block`: the assignment may wait
    for other ranks, or runs code of the user.
    """

    def __init__(self, assignment: Callable[[RankAssignmentCtx], object], store: Any, watched: Any) -> None:
        self.undecided = 0
        self.may_block = any(type(part) not in _IMMEDIATE for part in parts_of(assignment))
        self._assignment = assignment
        self._store = store
        self._watched = watched
        self._current: tuple[int, Gathers] | None = None
        self._abandoned = -1

    def assign(self, state: State, closed: Closed | None) -> None:
        """Changes `state` to that of the next round. Blocks while the assignment gathers from other ranks.

        Args:
            state: of this rank; changed in place.
            closed: how the last round ended; None: there was none.

        Raises:
            RankDiscarded: the assignment has no place for this rank.
            GatherAbandoned: another rank is lost; this one has a number, and the round will not begin.
            BaseException: what the assignment raised.
        """
        gone: set[int] = set()
        if closed is not None:
            gone = closed.terminated_ranks
            state.iteration += 1
            if closed.joined:
                state.world_size = closed.world_size + len(closed.joined_members)
                # A rank that joins has no memory of earlier rounds; all must assign by the same.
                forget_activity(state)
        if closed is None:
            self.undecided = state.world_size
        else:
            self.undecided = len(closed.all_members)
        store = PrefixStore(f"{state.iteration}/assign", self._store)
        context = RankAssignmentCtx(dataclasses.replace(state), store, gone)
        self._current = state.iteration, context.gathers
        if self._abandoned >= state.iteration:
            context.gathers.abandon(context.store)
        try:
            decided = assign(self._assignment, context)
        except GatherAbandoned:
            ShiftRanks()(RankAssignmentCtx(state, context.store, gone))
            raise
        vars(state).update(vars(decided))
        self.undecided = 0

    def abandon(self, number: int) -> None:
        """Abandons the assignment of round `number`, in which a rank is lost. Called in the watcher's thread."""
        self._abandoned = number
        if self._current is not None and self._current[0] == number:
            self._current[1].abandon(PrefixStore(f"{number}/assign", self._watched))


class RoundEnvironment:
    """The process's environment while rounds run: `init_process_group()` by `env://` makes a new group each time.

    LOCAL_RANK stays: it selects the device of this rank.
    """

    def __init__(self) -> None:
        self._before = {name: os.environ.get(name) for name in _NAMES}

    def set(self, state: State, note: str) -> None:
        """Sets the variables for the round of `state`, with the store server in `note`.

        Raises:
            RuntimeError: no server could be made.
        """
        os.environ.update(environment(state) | variables_of(note))

    def restore(self) -> None:
        """Restores the variables as they were before the first round."""
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
