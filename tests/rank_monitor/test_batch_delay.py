"""How long a rank may be left unread: as a table, with the limits that cut it short."""

from __future__ import annotations

from typing import Any

import pytest

from rank_monitor.batch_delay import batch_delay_ns
from rank_monitor.hang_detector import DetectorState
from rank_monitor.limits import WatchLimits
from tests.rank_monitor.timeline import STARTED_S, Timeline, limited

MS = 1_000_000


@pytest.mark.parametrize(
    ("beats", "passed_ms", "longest_ms", "expected_ms"),
    [
        pytest.param(0, 250, 250, 0, id="nothing came"),
        pytest.param(1, 100, 250, 250, id="ten a second"),
        pytest.param(3, 250, 250, 250, id="ten a second, read together"),
        pytest.param(1, 250, 250, 0, id="so slow that no two would be read together"),
        pytest.param(1, 1, 250, 16, id="a thousand a second: few wait unread"),
        pytest.param(500, 250, 250, 8, id="came faster than they were expected"),
        pytest.param(1, 0.2, 250, 0, id="a burst"),
        pytest.param(1, 10, 50, 50, id="a short limit"),
        pytest.param(1, 100, 50, 0, id="a limit as short as the interval"),
        pytest.param(1, 100, 0, 0, id="an alarm"),
    ],
)
def test_batch_delay(beats: int, passed_ms: float, longest_ms: int, expected_ms: int) -> None:
    assert batch_delay_ns(beats, round(passed_ms * MS), longest_ms * MS) == expected_ms * MS


@pytest.mark.parametrize(
    ("limits", "expected_ms"),
    [
        ({}, 250),
        ({"rank_heartbeat_timeout": 60.0}, 250),
        ({"rank_heartbeat_timeout": 60.0, "rank_section_timeouts": {"step": 0.4, "setup": None}}, 100),
        ({"initial_rank_heartbeat_timeout": 0.2}, 50),
    ],
)
def test_no_limit_is_missed_by_a_message_that_lies_unread(limits: dict[str, Any], expected_ms: int) -> None:
    assert WatchLimits.configured(limited(**limits)).longest_delay_ns == expected_ms * MS


def test_nothing_lies_unread_during_an_alarm() -> None:
    line = Timeline(limited(initial_rank_heartbeat_timeout=10.0))
    line.attach()
    assert line.detector.longest_delay_ns() > 0
    line.until(STARTED_S + 9.95)
    assert line.detector.state is DetectorState.SUSPECT
    assert line.detector.longest_delay_ns() == 0
