"""Checks this node before each cycle, since an unhealthy node must not take part. Called by the memberships.

Decides nothing about the job: the caller leaves it.
"""

from __future__ import annotations

from ft_launcher.agent.ending_signal import EndingSignal
from ft_launcher.agent.parts import NodeParts
from ft_launcher.health.reading import node_state
from ft_launcher.ledger.categories import Category


def check_node(parts: NodeParts, cycle: int, ending: EndingSignal) -> str:
    """Checks the health of this node; then waits, within bounds, until the memory of its GPUs is free again.

    Args:
        cycle: the last one, under which the readings are recorded.

    Returns:
        Why this node must not take part in a further cycle; empty: it may.

    Raises:
        SignalException: the launcher got a signal meanwhile.
    """
    parts.times.begins(Category.HEALTH)
    try:
        parts.memory.begin()
        readings = ending.call(parts.health.check)
        state = node_state(readings)
        parts.recorder.checked(cycle, readings, state)
        if not state.healthy:
            return state.reason
        parts.recorder.memory_kept(cycle, ending.call(parts.memory.wait))
        return ""
    finally:
        parts.health.close()
        parts.memory.close()
        parts.times.begins(Category.RENDEZVOUS)
