"""Readings become one verdict: only what is unhealthy counts against the node."""

from __future__ import annotations

import pytest

from ft_launcher.health.finding import Finding, State, worst
from ft_launcher.health.reading import Reading, judge


def readings(*states: State) -> list[Reading]:
    return [Reading(f"c{number}", state, f"r{number}", 0.0) for number, state in enumerate(states)]


@pytest.mark.parametrize(
    ("states", "healthy", "reason"),
    [
        ((), True, "nothing to check"),
        (("not present",), True, "nothing to check"),
        (("ok", "not present"), True, "c0 ok"),
        (("ok", "unknown"), True, "c0 ok, c1 unknown"),
        (("unknown",), True, "c0 unknown"),
        (("ok", "unhealthy", "unknown"), False, "c1: r1"),
        (("unhealthy", "unhealthy"), False, "c0: r0; c1: r1"),
    ],
)
def test_verdict(states: tuple[State, ...], healthy: bool, reason: str) -> None:
    verdict = judge(readings(*states))
    assert (verdict.healthy, verdict.reason) == (healthy, reason)


@pytest.mark.parametrize(
    ("findings", "found"),
    [
        ([], ("not present", "")),
        ([("ok", ""), ("ok", "b")], ("ok", "b")),
        ([("ok", "a"), ("unknown", "b"), ("unknown", "c")], ("unknown", "b; c")),
        ([("unknown", "b"), ("unhealthy", "c"), ("ok", "a")], ("unhealthy", "c")),
        ([("not present", "a"), ("ok", "")], ("ok", "")),
    ],
)
def test_the_worst_finding_counts(findings: list[Finding], found: Finding) -> None:
    assert worst(findings) == found
