"""A member leaves: what whoever speaks for it tells the others through the ranks' store.

Speaks for it: the node agent or the companion that saw its process end, or the rank itself on its way out. Telling
twice does no harm. Knows iterations (`iteration.py`) and no process.
"""

from __future__ import annotations

import datetime

from rank_monitor.contract.iteration import DONE, Closed, Iteration, joining, observing
from rank_monitor.contract.roll import Entry, Store

_EVER = datetime.timedelta(days=3650)


def depart(
    store: Store, member: int, record: str, timeout_s: float, undecided: int = 0, by_itself: bool = False
) -> None:
    """Tells the others that a member is gone. Returns when they have taken note: the iteration ended everywhere.

    One that was counted as well in an iteration that closes just now is accounted for in the next.

    Args:
        store: of the call.
        member: its rank at entry.
        record: why, as `InterruptionRecord.to_json` writes it.
        timeout_s: how long the others may take to come to an iteration's end.
        undecided: how many may take part, where the member itself says that it leaves before it was given a rank; 0:
            somebody else says it, or it has one.
        by_itself: it is the member that tells, and not somebody who found it dead.

    Raises:
        RuntimeError: what the store raises when it is lost, or when the others did not come in time.
    """
    with observing(store, member, not by_itself) as number:
        _depart_from(store, number, member, record, timeout_s, undecided)


def withdraw(store: Store, member: int, record: str, timeout_s: float) -> None:
    """Tells the others that a member that asked to join is gone before it was let in; when it just was, it departs.

    Blocks until an iteration closes that took note, or the call is done.
    """
    with observing(store, member, is_dead=True) as first:
        wishes = joining(store)
        wishes.sign(Entry(member, is_well=False))
        told, number = len(wishes.entries()), first
        while (closed := closing_of(store, number)) is not None:
            number += 1
            if member in closed.joined_members:
                _depart_from(store, number, member, record, timeout_s)
            if closed.taken >= told:
                return


def closing_of(store: Store, number: int) -> Closed | None:
    """Waits until an iteration ends; None: the function is done on all ranks."""
    iteration = Iteration(store, number)
    store.wait([iteration.outcome], _EVER)
    if store.get(iteration.outcome) == DONE.encode():
        return None
    store.wait([iteration.closed], _EVER)
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
