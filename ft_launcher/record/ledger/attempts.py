"""One account of a whole job from the journals of all its nodes and attempts. Pure.

`tools/report/collection.py` finds the launches in journals and asks `account_of`. Each journal has its node's time in
parts, which are the same on all nodes but for fractions of a second. Adding up all nodes would count each second
several times. So every moment of the job is taken from one journal only:

1. A node that trains goes before a node that waits.
2. The lowest node rank goes first.
3. Where that node was lost, the next one follows.

So no second counts twice and none is lost. Time that no journal covers is `reschedule` between two attempts of the job,
and `unknown` within one attempt.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from ft_launcher.record.ledger.account import Account, Category, CycleTimes, account

_LAST = 1 << 30
"""The number that stands for the cycle of a part after the last cycle, for sorting."""


class Launched(Protocol):
    """A launch of the launcher on one node: from when until when (seconds since 1970)."""

    since: float
    until: float


_L = TypeVar("_L", bound=Launched)


@dataclass
class LaunchTimes:
    """One launch of the launcher on one node, as its journal has it.

    Attributes:
        since, until: begin and end (seconds since 1970).
        node_rank: the lowest rank that the node had in any cycle.
        parts: the parts of its time, in the order of time.
    """

    since: float
    until: float
    node_rank: int
    parts: Sequence[CycleTimes]


@dataclass(frozen=True)
class _Stretch:
    """The time between two moments at which any part of any journal begins or ends, with the part it is taken from.

    Attributes:
        stage: attempt and cycle of the part: all stretches of one cycle have the same, on whatever node.
    """

    since: float
    until: float
    part: CycleTimes
    stage: tuple[int, int]


def account_of(job: Iterable[LaunchTimes]) -> Account:
    """Returns the account of a job from the begin of its first launch to the end of its last one.

    Args:
        job: all launches of the job, on all nodes.
    """
    stretches = _stretches(by_attempt(job))
    stages = {stage: number for number, stage in enumerate(sorted({stretch.stage for stretch in stretches}))}
    return account(
        [stretch.part for stretch in stretches],
        [stages[stretch.stage] for stretch in stretches],
        [_share(stretch) for stretch in stretches],
    )


def by_attempt(launches: Iterable[_L]) -> dict[int, list[_L]]:
    """Returns the launches of each attempt of a job, by the attempt's number from 0, in the order of their begin.

    Launches that run at the same time, on several nodes, are one attempt.
    """
    found: dict[int, list[_L]] = {}
    attempt, until = -1, -math.inf
    for launch in sorted(launches, key=lambda launch: launch.since):
        if launch.since > until:
            attempt += 1
        until = max(until, launch.until)
        found.setdefault(attempt, []).append(launch)
    return found


def _stretches(attempts: Mapping[int, Sequence[LaunchTimes]]) -> list[_Stretch]:
    found: list[_Stretch] = []
    ended = None
    for attempt, of_attempt in attempts.items():
        since = min(launch.since for launch in of_attempt)
        if ended is not None:
            found.append(_gap(ended, since, Category.RESCHEDULE, (attempt, -1)))
        ended = max(launch.until for launch in of_attempt)
        found += _of_attempt(attempt, of_attempt, since, ended)
    return found


def _of_attempt(attempt: int, launches: Sequence[LaunchTimes], since: float, until: float) -> list[_Stretch]:
    """Returns the stretches of one attempt, by a sweep over all moments at which a part begins or ends."""
    parts = [(part, launch) for launch in launches for part in launch.parts]
    moments = sorted({since, until, *(moment for part, _ in parts for moment in (part.since, part.until))})
    waiting = sorted(parts, key=lambda item: item[0].since, reverse=True)
    present: list[tuple[bool, int, float, int, CycleTimes]] = []
    number = itertools.count()
    found = []
    for begin, end in itertools.pairwise(moments):
        while waiting and waiting[-1][0].since <= begin:
            part, launch = waiting.pop()
            # The smallest item of the heap is the part that counts. `number` differs in all items, so that two parts
            # are never compared.
            heapq.heappush(present, (part.cycle is None, launch.node_rank, launch.since, next(number), part))
        # Only the first item is checked for its end. Others that have ended stay until they are the first, so that
        # thousands of nodes are not looked through at each moment.
        while present and present[0][-1].until <= begin:
            heapq.heappop(present)
        if end > until or begin < since:
            continue
        if not present:
            found.append(_gap(begin, end, Category.UNKNOWN, (attempt, -1)))
            continue
        part = present[0][-1]
        found.append(_Stretch(begin, end, part, (attempt, _cycle(part))))
    return found


def _gap(since: float, until: float, category: Category, stage: tuple[int, int]) -> _Stretch:
    return _Stretch(since, until, CycleTimes(None, since, until, {category.value: until - since}), stage)


def _cycle(part: CycleTimes) -> int:
    if part.cycle is None:
        return _LAST
    return part.cycle


def _share(stretch: _Stretch) -> float:
    """Returns how much of its part a stretch is, from 0 to 1."""
    length_s = stretch.part.until - stretch.part.since
    if length_s <= 0:
        return 0.0
    return (stretch.until - stretch.since) / length_s
