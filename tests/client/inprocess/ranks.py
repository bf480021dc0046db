"""All ranks of a job in one process: each with its state and its own instance of a rank assignment."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor

from torch.distributed import HashStore, PrefixStore

from ft_client.inprocess.rank_assignment import RankAssignment, RankAssignmentCtx, RankDiscarded, assign
from ft_client.inprocess.state import Mode, State

WAIT = datetime.timedelta(seconds=60)


class Ranks:
    """The healthy ranks, by their number at entry. Each step runs all of them, in threads over one real store."""

    def __init__(self, world_size: int, assignment: Callable[[], RankAssignment]) -> None:
        self.states = {rank: State(rank, world_size) for rank in range(world_size)}
        self._assignments = {rank: assignment() for rank in self.states}
        self._store = HashStore()
        self._store.set_timeout(WAIT)
        self._steps = 0

    def step(self, terminated: Collection[int] = ()) -> None:
        """One assignment on every rank; `terminated` are present numbers. Discarded ranks are forgotten."""
        self._steps += 1
        store = PrefixStore(str(self._steps), self._store)

        def decide(initial_rank: int, state: State) -> tuple[int, State | None]:
            ctx = RankAssignmentCtx(state, store, set(terminated))
            try:
                return initial_rank, assign(self._assignments[initial_rank], ctx)
            except RankDiscarded:
                return initial_rank, None

        alive = [(initial, state) for initial, state in self.states.items() if state.rank not in terminated]
        with ThreadPoolExecutor(max(len(alive), 1)) as threads:
            decided = list(threads.map(lambda one: decide(*one), alive))
        self.states = {initial: state for initial, state in decided if state is not None}
        for state in self.states.values():
            state.iteration += 1

    def keys_left(self) -> int:
        """How many keys are in the store."""
        return int(self._store.num_keys())

    def picture(self) -> str:
        """Ranks at entry in the order of their numbers: `0 2 3 | 6` says that 6 is a spare."""
        by_rank = sorted(self.states.items(), key=lambda one: one[1].rank or 0)
        active = sorted((one[1].active_rank or 0, one[0]) for one in by_rank if one[1].mode is Mode.ACTIVE)
        spares = [str(initial) for initial, state in by_rank if state.mode is Mode.INACTIVE]
        return " ".join([*(str(initial) for _, initial in active), *(["|", *spares] if spares else [])])


def check_consecutive(states: Collection[State]) -> None:
    """Numbers are consecutive from 0, nobody is active twice, and all agree on how many there are."""
    size = len(states)
    assert sorted(state.rank or 0 for state in states) == list(range(size))
    assert {state.world_size for state in states} <= {size}
    active = [state.active_rank for state in states if state.active_rank is not None]
    assert sorted(active) == list(range(len(active)))
    assert {state.active_world_size for state in states} <= {len(active)}
    assert all((state.mode is Mode.ACTIVE) == (state.active_rank is not None) for state in states)
