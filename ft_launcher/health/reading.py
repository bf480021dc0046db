"""The results of the checks, and what all of them together say of the node. Pure; knows no check by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ft_launcher.health.finding import State, worst


@dataclass(frozen=True)
class Reading:
    """The result of one check.

    Attributes:
        state: `unknown` is what could not be read, `warning` what the training can do without; only `unhealthy` says
            something against the node.
        took_s: seconds from the start of its process; 0 for what was read without one.
    """

    check: str
    state: State
    reason: str
    took_s: float


@dataclass(frozen=True)
class NodeVerdict:
    """Whether the node may take part in the next cycle, and why."""

    healthy: bool
    reason: str


def judge(readings: Sequence[Reading]) -> NodeVerdict:
    """The verdict over the readings of one node: unhealthy when one of them is, and by nothing else."""
    state, reason = worst((reading.state, f"{reading.check}: {reading.reason}") for reading in readings)
    if state == "unhealthy":
        return NodeVerdict(False, reason)
    said = [f"{reading.check} {reading.state}" for reading in readings if reading.state != "not present"]
    return NodeVerdict(True, ", ".join(said) or "nothing to check")
