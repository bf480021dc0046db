"""Adds up what journals say of the training's state in memory. Pure.

All ranks of a job go on from the same state, so of several nodes the lowest node rank of a cycle tells what was loaded,
and how long saves took. The bytes of all nodes add up.
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
    last = [launch.memory[max(launch.memory)] for launch in of_attempt[max(of_attempt)] if launch.memory]
    return MemoryFindings(
        loads=dict(tiers),
        steps_lost=sum(cycle.steps_lost or 0 for cycle in cycles),
        refused=sum(cycle.refused for cycle in cycles),
        saves=sum(cycle.saves for cycle in cycles),
        failed=sum(cycle.failed for cycle in cycles),
        cost_s=sum(cycle.cost_s for cycle in cycles),
        share=max(shares, default=None),
        size=sum(cycle.size for cycle in last),
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


def _cycles(launches: Sequence[Launch]) -> dict[int, MemoryCycle]:
    """Returns the cycles of an attempt, each as its lowest node rank has it."""
    found: dict[int, MemoryCycle] = {}
    for launch in sorted(launches, key=lambda launch: launch.node_rank):
        for number, cycle in launch.memory.items():
            found.setdefault(number, cycle)
    return found
