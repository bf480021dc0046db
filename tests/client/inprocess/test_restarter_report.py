"""The one sink of reported states."""

from __future__ import annotations

from ft_client.inprocess import restarter_report


def test_the_last_sink_counts() -> None:
    first: list[str] = []
    second: list[str] = []
    restarter_report.report("nobody hears this")
    restarter_report.send_to(first.append)
    restarter_report.send_to(second.append)
    restarter_report.report("any")
    restarter_report.send_to(None)
    restarter_report.report("nobody hears this")
    assert (first, second) == ([], ["any"])
