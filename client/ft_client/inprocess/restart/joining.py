"""Joins a rank that was started again alone: it asks to join, and waits until an iteration closes that lets it in.

The others' iteration goes on meanwhile, unless `--ft-rejoin now` asks to interrupt it.
"""

from __future__ import annotations

import os

from ft_client.inprocess.attribution import Interruption, InterruptionRecord
from ft_client.inprocess.state import State
from rank_monitor.contract import env
from rank_monitor.contract.iterations.barrier import Entry, Store
from rank_monitor.contract.iterations.iteration import Closed, Iteration, joining, observing
from rank_monitor.contract.iterations.rank_departure import closing_of

_NOW = "now"


def join(store: Store, state: State) -> Closed | None:
    """Waits until this rank is let in at the end of an iteration, and sets its numbers in `state`. Blocks.

    Returns:
        How that iteration closed; None: the function was done on all ranks before.
    """
    member = state.rank or 0
    with observing(store, member, is_dead=False) as current:
        number = current
        while Iteration(store, number).closing() is not None:  # let others in, and perhaps this member's former process
            number += 1
        joining(store).sign(Entry(member))
        if os.environ.get(env.REJOIN) == _NOW:
            record = InterruptionRecord(member, Interruption.JOINING, member)
            Iteration(store, number).interrupt(record.to_json())
        while True:
            closed = closing_of(store, number)
            if closed is None or member in closed.joined_members:
                break
            number += 1
    os.environ.pop(env.REJOIN, None)  # it takes part in the next call like the others
    if closed is None:
        return None
    state.initial_rank, state.initial_world_size = member, state.world_size
    state.rank, state.iteration = closed.world_size + closed.joined_members.index(member), number
    state.world_size = closed.world_size
    return closed
