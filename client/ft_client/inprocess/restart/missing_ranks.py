"""Reports members that do not arrive in time, and this rank's own departure, to the store. `call.py` calls it.

The phase of this rank is not known here.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from ft_client.inprocess.attribution import Interruption, InterruptionRecord
from rank_monitor.contract.iterations.barrier import Arrivals, Entry, Store
from rank_monitor.contract.iterations.iteration import Iteration, discarded
from rank_monitor.contract.iterations.rank_departure import depart

logger = logging.getLogger("ft_client.inprocess")


def expel(iteration: Iteration, roll: Arrivals, all_members: int) -> None:
    """Interrupts an iteration for all members that have not arrived at a barrier, and reports them as lost.

    Args:
        iteration: the present one.
        roll: the arrivals at its start or end.
        all_members: how many there were at entry.
    """
    for member in iteration.missing(roll, iteration.everybody(all_members)):
        _tell(iteration, [member])
        iteration.account(Entry(member, is_well=False))


def interrupt_for_unfinished(iteration: Iteration, active_world_size: int) -> None:
    """Interrupts an iteration for the active members whose function has not returned."""
    active = [entry.member for entry in iteration.start.entries() if entry.rank < active_world_size]
    _tell(iteration, iteration.missing(iteration.returned, active))


def discard(store: Store, iteration: Iteration, member: int, all_members: int, record: str) -> None:
    """Reports that this member leaves because the rank assignment has no place for it, which all ranks know.

    Args:
        store: of the call.
        iteration: the present one.
        member: this rank at entry.
        all_members: how many there were at entry.
        record: why the iteration ends, if no member is left for it.
    """
    discarded(store).sign(Entry(member))
    out = {entry.member for entry in discarded(store).entries()}
    if out.issuperset(iteration.everybody(all_members)):  # nobody comes, so nobody else releases the start
        iteration.interrupt(record)


@contextmanager
def departing(store: Store, member: int, record: str, timeout_s: float, undecided: int) -> Iterator[None]:
    """A context in which this member leaves: a thread reports it to the others meanwhile. Arguments as of `depart`."""
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
