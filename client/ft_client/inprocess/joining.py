"""How a rank that was started again alone comes back: it asks to join, and waits until an iteration closes with it.

The others' iteration goes on meanwhile, unless the launcher was told that it is to be interrupted for this.
"""

from __future__ import annotations

import os

from ft_client.inprocess.attribution import Interruption, InterruptionRecord
from ft_client.inprocess.state import State
from rank_monitor.contract import env
from rank_monitor.contract.departure import closing_of
from rank_monitor.contract.iteration import Closed, Iteration, joining, observing
from rank_monitor.contract.roll import Entry, Store

_NOW = "now"


def join(store: Store, state: State) -> Closed | None:
    """How the iteration closed at whose end this rank was let in; `state` has its numbers then.

    Returns:
        None: the function was done on all ranks before that.
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
