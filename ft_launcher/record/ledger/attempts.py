"""One account of a whole job from the launches of its nodes and attempts, which `tools/report/collection.py` finds.
Pure.

Each journal has its node's time in parts, which are the same on all nodes but for fractions of a second. Every moment
is taken from one journal: from a node that trains rather than one that waits, from the lowest node rank, and where that
node was lost, from the next. So no second counts twice and none is lost. What no journal covers is `reschedule` between
two attempts of the job, and `unknown` within one.
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
"""The cycle of what follows the last one."""


class Launched(Protocol):
    """A launch of the launcher on one node: from when until when (seconds since 1970)."""

    since: float
    until: float


_L = TypeVar("_L", bound=Launched)


@dataclass
class LaunchTimes:
    """One launch of the launcher on one node, as its journal has it.

    Attributes:
        since, until: seconds since 1970.
        node_rank: the lowest that it had.
        parts: in the order of time.
    """

    since: float
    until: float
    node_rank: int
    parts: Sequence[CycleTimes]


@dataclass(frozen=True)
class _Stretch:
    """From a moment to the next at which any part begins or ends, with the part that it is taken from."""

    since: float
    until: float
    part: CycleTimes
    stage: tuple[int, int]


def account_of(job: Iterable[LaunchTimes]) -> Account:
    """Returns the account of a job, all its launches on all nodes, from the first one to its last event."""
    stretches = _stretches(by_attempt(job))
    stages = {stage: number for number, stage in enumerate(sorted({stretch.stage for stretch in stretches}))}
    return account(
        [stretch.part for stretch in stretches],
        [stages[stretch.stage] for stretch in stretches],
        [_share(stretch) for stretch in stretches],
    )


def by_attempt(launches: Iterable[_L]) -> dict[int, list[_L]]:
    """Returns the launches of each attempt of a job, from 0, in the order in which they began: those that run at the
    same time, on several nodes, are of one attempt."""
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
    """The stretches of one attempt. A sweep over the moments at which parts begin and end."""
    parts = [(part, launch) for launch in launches for part in launch.parts]
    moments = sorted({since, until, *(moment for part, _ in parts for moment in (part.since, part.until))})
    waiting = sorted(parts, key=lambda item: item[0].since, reverse=True)
    present: list[tuple[bool, int, float, int, CycleTimes]] = []
    number = itertools.count()
    found = []
    for begin, end in itertools.pairwise(moments):
        while waiting and waiting[-1][0].since <= begin:
            part, launch = waiting.pop()
            # The first of these is taken. Their numbers are all different, so parts are not compared.
            heapq.heappush(present, (part.cycle is None, launch.node_rank, launch.since, next(number), part))
        # Others that have ended are left until they are the first: thousands of nodes are not looked through each time.
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
    """How much of its part a stretch is."""
    length_s = stretch.part.until - stretch.part.since
    if length_s <= 0:
        return 0.0
    return (stretch.until - stretch.since) / length_s
