"""Findings of a check become one."""

from __future__ import annotations

import pytest

from ft_launcher.decide.health.check import Finding, worst


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
