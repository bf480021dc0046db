"""What is called again and again while ranks run."""

from __future__ import annotations

import time

import pytest

from ft_launcher.agent import periodic
from ft_launcher.agent.periodic import Periodic


def test_it_is_called_at_once_and_then_once_in_each_period(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.monotonic()
    clock = [now]
    monkeypatch.setattr(periodic.time, "monotonic", lambda: clock[0])
    calls: list[float] = []
    source = Periodic(lambda: calls.append(clock[0]), 30.0)
    assert source.next_check() == now
    for ahead_s in (0.0, 0.1, 29.9, 30.0, 31.0, 100.0, 129.0, 130.0):
        clock[0] = now + ahead_s
        assert list(source.poll(set())) == []
    assert [moment - now for moment in calls] == [0.0, 30.0, 100.0, 130.0]
    assert source.next_check() == now + 160.0
    assert not source.descriptors()
