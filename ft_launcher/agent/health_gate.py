"""Checks this node before each cycle: an unhealthy node must not take part."""

from __future__ import annotations

from ft_launcher.agent.ending_signal import EndingSignal
from ft_launcher.agent.parts import NodeParts
from ft_launcher.health.reading import judge


class Unhealthy(Exception):
    """A health check found that this node must not take part in a further cycle; the text says why."""


def check_node(parts: NodeParts, cycle: int, ending: EndingSignal) -> None:
    """Checks the health of this node; then waits, within bounds, until the memory of its GPUs is free again.

    Args:
        cycle: the last one, under which the readings are recorded.

    Raises:
        Unhealthy: a check found this node unfit.
        EndedBySignal: the launcher got a signal meanwhile.
    """
    try:
        parts.memory.begin()
        readings = ending.call(parts.health.check)
        verdict = judge(readings)
        parts.recorder.checked(cycle, readings, verdict)
        if not verdict.healthy:
            raise Unhealthy(verdict.reason)
        parts.recorder.memory_kept(cycle, ending.call(parts.memory.wait))
    finally:
        parts.health.close()
        parts.memory.close()
