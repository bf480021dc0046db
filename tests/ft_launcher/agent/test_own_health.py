"""The readings while ranks run: begun when due, never waited for, killed at the end of the cycle."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from ft_launcher.agent.own_health import HealthWatch
from ft_launcher.decide.health.reading import HealthChange
from ft_launcher.node.health.node_health import NodeHealth, Places
from rank_monitor.contract.processes.wait import readable
from rank_monitor.contract.settings.config import HealthSettings
from tests.patience import patient


class Recorder:
    def __init__(self) -> None:
        self.found: list[tuple[int, HealthChange]] = []

    def health_changed(self, cycle: int, change: HealthChange) -> None:
        self.found.append((cycle, change))


@pytest.fixture
def places(tmp_path: Path) -> Places:
    (tmp_path / "mountinfo").write_text("")
    nowhere = str(tmp_path / "nowhere")
    return Places((nowhere,), nowhere, nowhere, str(tmp_path / "mountinfo"), str(tmp_path))


def watch(places: Places, command: str, interval_s: float = 0.0, **settings: Any) -> tuple[HealthWatch, Recorder]:
    health = NodeHealth(HealthSettings(**{"node_check": command, "health_timeout": 60.0, **settings}), places=places)
    recorder = Recorder()
    health.interval_s = interval_s
    parts: Any = SimpleNamespace(recorder=recorder, health_watch=health)
    return HealthWatch(parts, lambda: 7), recorder


def turns(source: HealthWatch) -> Iterator[None]:
    """The cycle loop with this source alone."""
    deadline = time.monotonic() + patient(30.0)
    while time.monotonic() < deadline:
        due = source.next_check()
        wait_s = None if due is None else max(0.0, due - time.monotonic())
        assert source.poll(readable(source.descriptors(), wait_s)) == []
        yield
    raise AssertionError("no change was found")


def test_a_change_is_recorded_once_and_so_is_its_end(places: Places, tmp_path: Path) -> None:
    sick = tmp_path / "sick"
    sick.touch()
    source, recorder = watch(places, f"! test -e {sick}")
    with source.during_cycle():
        for _ in turns(source):
            if recorder.found:
                sick.unlink(missing_ok=True)
            if len(recorder.found) == 2:
                break
    assert [(cycle, one.check, one.before, one.state) for cycle, one in recorder.found] == [
        (7, "node_check", "ok", "unhealthy"),
        (7, "node_check", "unhealthy", "ok"),
    ]


def test_a_check_that_is_late_is_reported(places: Places) -> None:
    source, recorder = watch(places, "sleep 3600", health_timeout=0.2)
    with source.during_cycle():
        for _ in turns(source):
            if recorder.found:
                break
    assert recorder.found[0][1].state == "unhealthy" and "no answer within" in recorder.found[0][1].reason


def test_the_end_of_a_cycle_ends_a_running_check(places: Places) -> None:
    source, recorder = watch(places, "sleep 3600")
    before = set(psutil.Process().children())
    with source.during_cycle():
        for _ in turns(source):
            if source.descriptors():
                break
        assert set(psutil.Process().children()) - before
    assert set(psutil.Process().children()) == before
    assert (source.descriptors(), source.next_check(), recorder.found) == (set(), None, [])


def test_nothing_is_due_before_its_time(places: Places) -> None:
    source, _ = watch(places, "exit 1", interval_s=3600.0)
    with source.during_cycle():
        assert source.poll(set()) == [] and source.descriptors() == set()
        due = source.next_check()
        assert due is not None and due > time.monotonic()


def test_an_error_of_the_checks_costs_a_reading_and_no_training(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, recorder = watch(places, "true", interval_s=60.0)
    monkeypatch.setattr(time, "monotonic", lambda: 1000.0)

    def fails() -> None:
        raise RecursionError("a list of mounts without end")

    with source.during_cycle():
        monkeypatch.setattr(NodeHealth, "begin", lambda health: fails())
        monkeypatch.setattr(time, "monotonic", lambda: 1061.0)
        assert source.poll(set()) == []
        assert source.next_check() == 1121.0
    assert recorder.found == []
