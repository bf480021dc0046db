"""Members that do not come in time: who they are, and what is told of them. Knows no phase of this rank."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from ft_client.inprocess.attribution import Interruption, InterruptionRecord
from rank_monitor.contract.iteration import Iteration
from rank_monitor.contract.roll import Entry, Roll

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


def _tell(iteration: Iteration, members: Iterable[int]) -> None:
    ranks = {entry.member: entry.rank for entry in iteration.start.entries()}
    for member in members:
        logger.warning("rank %d (at entry) did not come in time in iteration %d", member, iteration.number)
        record = InterruptionRecord(ranks.get(member, member), Interruption.UNRESPONSIVE)
        iteration.interrupt(record.to_json())
