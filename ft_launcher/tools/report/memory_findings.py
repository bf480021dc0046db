"""Adds up what journals say of the training's state in memory. Pure.

All ranks of a job go on from the same state, so of several nodes the lowest node rank of a cycle tells what was loaded,
and how long saves took. The bytes of the nodes of the last cycle add up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from ft_launcher.tools.report.collection import Launch, MemoryCycle
from ft_launcher.tools.report.job_findings import MemoryFindings


def find_memory(of_attempt: Mapping[int, Sequence[Launch]]) -> MemoryFindings | None:
    """Returns the findings; None: no rank looked for state in memory.

    Args:
        of_attempt: attempt (from 0) -> its launches.
    """
    cycles = [found for launches in of_attempt.values() for _, found in sorted(_cycles(launches).items())]
    if not cycles:
        return None
    tiers = Counter(cycle.tier for cycle in cycles if cycle.tier)
    shares = [cycle.share for cycle in cycles if cycle.share is not None]
    return MemoryFindings(
        loads=dict(tiers),
        steps_lost=sum(cycle.steps_lost or 0 for cycle in cycles),
        refused=sum(cycle.refused for cycle in cycles),
        saves=sum(cycle.saves for cycle in cycles),
        failed=sum(cycle.failed for cycle in cycles),
        cost_s=sum(cycle.cost_s for cycle in cycles),
        share=max(shares, default=None),
        size=_size(of_attempt[max(of_attempt)]),
    )


def cycle_after(of_attempt: Mapping[int, Sequence[Launch]], attempt: int, cycle: int | None) -> MemoryCycle | None:
    """Returns the first cycle after another one whose ranks looked for state in memory; None: there is none in that
    attempt, nor at the beginning of the next one where the attempt was killed.

    Args:
        of_attempt: attempt (from 0) -> its launches.
        attempt: of the other cycle.
        cycle: None: the attempt was killed.
    """
    if cycle is None:
        found = _cycles(of_attempt.get(attempt + 1, ()))
        return found.get(min(found, default=-1))
    found = _cycles(of_attempt.get(attempt, ()))
    return found.get(min((number for number in found if number > cycle), default=-1))


def _size(launches: Sequence[Launch]) -> int:
    """Returns how many bytes the last save of all nodes has; 0: there was none.

    A node that is in no later cycle, since it was lost or its launcher was replaced, has no part in the last save. Of a
    node that is in the last cycle and has not told its saves yet, the cycle before counts.

    Args:
        launches: of one attempt.
    """
    newest = max((max(launch.memory) for launch in launches if launch.memory), default=-1)
    size = 0
    for launch in launches:
        if newest in launch.memory:
            sizes = [cycle.size for _, cycle in sorted(launch.memory.items()) if cycle.size]
            size += sum(sizes[-1:])
    return size


def _cycles(launches: Sequence[Launch]) -> dict[int, MemoryCycle]:
    """Returns the cycles of an attempt, each as its lowest node rank has it."""
    found: dict[int, MemoryCycle] = {}
    for launch in sorted(launches, key=lambda launch: launch.node_rank):
        for number, cycle in launch.memory.items():
            found.setdefault(number, cycle)
    return found
