"""Durations as people write them."""

from __future__ import annotations

import pytest

from ft_launcher.tools.report.job_findings import as_text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 ms"),
        (0.0314, "31 ms"),
        (0.9999, "1.0 s"),
        (59.94, "59.9 s"),
        (59.99, "1 min"),
        (845, "14 min 5 s"),
        (3599.7, "1 h"),
        (11520, "3 h 12 min"),
        (86399, "1 d"),
        (30 * 86400 + 7200, "30 d 2 h"),
    ],
)
def test_two_units(seconds: float, text: str) -> None:
    assert as_text(seconds) == text
