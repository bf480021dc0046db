"""The numbers of this rank in each round of a call, and the environment in which the function finds them.

`call.py` makes one `Assigning` and one `RoundEnvironment` for each call. `Assigning` applies the user's rank assignment
to what is left of the last round. Every rank computes the numbers for itself, from the same record of how the round
closed, so that no messages are needed; an assignment that depends on more gathers values from the other ranks.

When a rank that takes part is lost before all ranks have their numbers, the assignment is abandoned on all ranks. They
then number themselves without gaps, only to close the round properly. An assignment that keeps a memory of the ranks
(`Tree`) begins anew in the next round.

Threads: the main thread calls `assign`, which may block in a gather. The watcher's thread calls `abandon`, over its own
connection to the store, since the main thread's connection may be blocked in that gather.
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
    reset_activity,
)
from ft_client.inprocess.state import State, environment
from ft_client.inprocess.store import PrefixStore
from rank_monitor.contract.rounds.round import Closed
from rank_monitor.contract.rounds.round_stores import variables_of

_NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "TORCHELASTIC_USE_AGENT_STORE")
_IMMEDIATE: frozenset[object] = frozenset(
    {ActivateAllRanks, ActiveWorldSizeDivisibleBy, FillGaps, MaxActiveWorldSize, ShiftRanks}
)
"""Assignments that decide from the numbers alone, within microseconds. All others ask other ranks, or are the user's
own."""


class Assigning:
    """The rank assignment of one call on this rank.

    Args:
        assignment: the wrapper's rank assignment, with its rank filter.
        store: the keys of the call.
        watched: the same keys through the watcher's connection.

    Attributes:
        undecided: how many ranks may take part, while the assignment runs; else 0. A rank that leaves at that time
            says so in its report, since no rank knows the size of the round yet.
        may_block: whether the assignment may wait for other ranks, or runs code of the user.
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
                # A rank that joins has no memory of earlier rounds. All ranks must assign by the same memory, so all
                # begin without one.
                reset_activity(state)
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
    """The process's environment while rounds run.

    `init_process_group()` by `env://` makes a new group in each round, over the store server of that round. The
    variables of `_NAMES` are restored after the call. LOCAL_RANK stays as it is in all rounds: it selects the device of
    this rank.
    """

    def __init__(self) -> None:
        self._before = {name: os.environ.get(name) for name in _NAMES}

    def set(self, state: State, store_address: str) -> None:
        """Sets the variables for the round of `state`, with the store server at `store_address`.

        Raises:
            RuntimeError: no server could be made.
        """
        os.environ.update(environment(state) | variables_of(store_address))

    def restore(self) -> None:
        """Restores the variables as they were before the first round."""
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
