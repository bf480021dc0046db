"""Members that do not come in time, or not any more: who they are, and what is told of them.

Knows no phase of this rank.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from ft_client.inprocess.attribution import Interruption, InterruptionRecord
from rank_monitor.contract.departure import depart
from rank_monitor.contract.iteration import Iteration, discarded
from rank_monitor.contract.roll import Entry, Roll, Store

logger = logging.getLogger("ft_client.inprocess")


def expel(iteration: Iteration, roll: Roll, all_members: int) -> None:
    """Interrupts an iteration for all who did not sign a roll, and counts them as lost.

    Args:
        iteration: the present one.
        roll: of its start or end.
        all_members: how many there were at entry.
    """
    for member in iteration.missing(roll, iteration.everybody(all_members)):
        _tell(iteration, [member])
        iteration.account(Entry(member, is_well=False))


def interrupt_for_unfinished(iteration: Iteration, active_world_size: int) -> None:
    """Interrupts an iteration for the active members whose function did not return."""
    active = [entry.member for entry in iteration.start.entries() if entry.rank < active_world_size]
    _tell(iteration, iteration.missing(iteration.returned, active))


def discard(store: Store, iteration: Iteration, member: int, all_members: int, record: str) -> None:
    """This member leaves, as all expect: no rank assignment of theirs has a place for it.

    Args:
        store: of the call.
        iteration: the present one.
        member: this rank at entry.
        all_members: how many there were at entry.
        record: why the iteration ends, where nobody is left to come to it.
    """
    discarded(store).sign(Entry(member))
    out = {entry.member for entry in discarded(store).entries()}
    if out.issuperset(iteration.everybody(all_members)):  # nobody comes, so nobody else releases the start
        iteration.interrupt(record)


@contextmanager
def departing(store: Store, member: int, record: str, timeout_s: float, undecided: int) -> Iterator[None]:
    """This member leaves: while the body runs, the others are told, and close the iteration. Arguments of `depart`."""
    telling = threading.Thread(target=_depart, args=(store, member, record, timeout_s, undecided), daemon=True)
    telling.start()
    yield
    telling.join()


def _depart(store: Store, member: int, record: str, timeout_s: float, undecided: int) -> None:
    try:
        depart(store, member, record, timeout_s, undecided, by_itself=True)
    except Exception as problem:
        logger.warning("the others may not know that rank %d leaves: %s", member, problem)


def _tell(iteration: Iteration, members: Iterable[int]) -> None:
    ranks = {entry.member: entry.rank for entry in iteration.start.entries()}
    for member in members:
        logger.warning("rank %d (at entry) did not come in time in iteration %d", member, iteration.number)
        record = InterruptionRecord(ranks.get(member, member), Interruption.UNRESPONSIVE)
        iteration.interrupt(record.to_json())
