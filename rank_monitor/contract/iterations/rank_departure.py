"""Reports through the ranks' store that a member leaves.

Called by the node agent or the companion that saw the member's process end, or by the rank itself on its way out. A
second report does no harm. Knows iterations (`iteration.py`) and no process.
"""

from __future__ import annotations

import datetime

from rank_monitor.contract.iterations.barrier import EVER, Entry, Store
from rank_monitor.contract.iterations.iteration import DONE, Closed, Iteration, joining, observing


def depart(
    store: Store, member: int, record: str, timeout_s: float, undecided: int = 0, by_itself: bool = False
) -> None:
    """Reports that a member is gone. Blocks until the iteration has ended on all other ranks.

    A member that was counted as well in an iteration that is just closing is accounted for in the next one.

    Args:
        store: of the call.
        member: its rank at entry.
        record: why, as `InterruptionRecord.to_json` writes it.
        timeout_s: how long the others may take to arrive at an iteration's end.
        undecided: the number of members that may take part, where the member itself leaves before it got a rank;
            otherwise 0.
        by_itself: whether the member itself calls this, and not a process that found it dead.

    Raises:
        RuntimeError: the store is lost, or the others did not arrive in time.
    """
    with observing(store, member, not by_itself) as number:
        _depart_from(store, number, member, record, timeout_s, undecided)


def withdraw(store: Store, member: int, record: str, timeout_s: float) -> None:
    """Cancels the request of a dead member to join. If it was just let in, reports its departure as `depart` does.

    Blocks until an iteration has closed that took this into account, or the call is done.
    """
    with observing(store, member, is_dead=True) as first:
        wishes = joining(store)
        wishes.sign(Entry(member, is_well=False))
        wish_count = len(wishes.entries())
        number = first
        while True:
            closed = closing_of(store, number)
            if closed is None:
                return
            number += 1
            if member in closed.joined_members:
                _depart_from(store, number, member, record, timeout_s)
            if closed.taken >= wish_count:
                return


def closing_of(store: Store, number: int) -> Closed | None:
    """Waits until an iteration ends; None: the function is done on all ranks."""
    iteration = Iteration(store, number)
    store.wait([iteration.outcome], EVER)
    if store.get(iteration.outcome) == DONE.encode():
        return None
    store.wait([iteration.closed], EVER)
    return Closed.read(store.get(iteration.closed))


def _depart_from(store: Store, number: int, member: int, record: str, timeout_s: float, undecided: int = 0) -> None:
    while True:
        iteration = Iteration(store, number)
        if not iteration.may_have(member):
            if iteration.closing() is None:
                return
            number += 1  # it may have been let in since
            continue
        iteration.interrupt(record)
        if store.get(iteration.outcome) == DONE.encode():
            return
        iteration.account(Entry(member, world_size=undecided, is_well=False))
        store.wait([iteration.closed], datetime.timedelta(seconds=timeout_s))
        number += 1
