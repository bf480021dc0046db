"""Members of a call that join it, leave it, or do not arrive in time, as reported through its store.

`wrapper.py` and `call.py` call it. The phase of this rank is not known here.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable

from ft_client.inprocess.attribution import Interruption, InterruptionRecord
from ft_client.inprocess.state import State
from rank_monitor.contract import env
from rank_monitor.contract.iterations.barrier import Arrivals, Entry, Store
from rank_monitor.contract.iterations.iteration import (
    Closed,
    Iteration,
    closing_of,
    current,
    depart,
    discarded,
    joining,
)

logger = logging.getLogger("ft_client.inprocess")
_NOW = "now"
"""The value of `--ft-rejoin` with which a rank that was started again interrupts the others' iteration."""


def join(store: Store, state: State) -> Closed | None:
    """Joins a rank that was started again alone: waits until an iteration closes that lets it in. Blocks.

    The others' iteration goes on meanwhile, unless `--ft-rejoin now` asks to interrupt it. Sets the numbers in `state`.

    Returns:
        How that iteration closed; None: the function was done on all ranks before.
    """
    member, number = state.rank or 0, current(store)
    while Iteration(store, number).closing() is not None:  # let others in, and perhaps this member's former process
        number += 1
    joining(store).sign(Entry(member))
    if os.environ.get(env.REJOIN) == _NOW:
        record = InterruptionRecord(member, Interruption.JOINING, member)
        Iteration(store, number).interrupt(record.to_json())
    closed = closing_of(store, number)
    while closed is not None and member not in closed.joined_members:
        number += 1
        closed = closing_of(store, number)
    os.environ.pop(env.REJOIN, None)  # it takes part in the next call like the others
    if closed is None:
        return None
    state.initial_rank, state.initial_world_size = member, state.world_size
    state.rank, state.iteration = closed.world_size + closed.joined_members.index(member), number
    state.world_size = closed.world_size
    return closed


def expel(iteration: Iteration, arrivals: Arrivals, all_members: int) -> None:
    """Interrupts an iteration for all members that have not arrived at a barrier, and reports them as lost.

    Args:
        iteration: the present one.
        arrivals: the arrivals at its start or end.
        all_members: how many there were at entry.
    """
    for member in iteration.missing(arrivals, iteration.everybody(all_members)):
        _interrupt_for(iteration, [member])
        iteration.account(Entry(member, is_well=False))


def interrupt_for_unfinished(iteration: Iteration, active_world_size: int) -> None:
    """Interrupts an iteration for the active members whose function has not returned."""
    active = [entry.member for entry in iteration.start.entries() if entry.rank < active_world_size]
    _interrupt_for(iteration, iteration.missing(iteration.returned, active))


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


def report_departure(store: Store, member: int, record: str, timeout_s: float, undecided: int) -> None:
    """Reports that this member leaves, as `depart`; logs it where that fails."""
    try:
        depart(store, member, record, timeout_s, undecided)
    except Exception as problem:
        logger.warning("the others may not know that rank %d leaves: %s", member, problem)


def _interrupt_for(iteration: Iteration, members: Iterable[int]) -> None:
    ranks = {entry.member: entry.rank for entry in iteration.start.entries()}
    for member in members:
        logger.warning("rank %d (at entry) did not come in time in iteration %d", member, iteration.number)
        record = InterruptionRecord(ranks.get(member, member), Interruption.UNRESPONSIVE)
        iteration.interrupt(record.to_json())
