"""The launcher learns what a training goes on from, and the rank says it only where it could not tell."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import ft_client as ft
from ft_client.memory import progress
from ft_client.memory.agreed_load import NotRestored
from ft_client.memory.background_work import BACKGROUND
from ft_client.rank.monitoring import process
from rank_monitor.contract import env
from rank_monitor.contract.memory_files import StateTier
from rank_monitor.contract.processes import rank_progress
from rank_monitor.contract.wire.messages import StateLoaded
from tests.client.fake_monitor import FakeMonitor
from tests.client.memory.conftest import Loader, Tell


@pytest.fixture
def told(tell: Tell, monitor: FakeMonitor, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeMonitor]:
    """A monitor of this rank, whose launcher has made a folder."""
    monkeypatch.setattr(progress, "opened", {})
    monkeypatch.setenv(env.RANK_MONITOR_SOCKET, str(monitor.path))
    tell(keep=2)
    process.start()
    yield monitor


def run(start: int, end: int, loader: Any = None) -> None:
    keep = ft.MemoryCheckpoint(loader=loader or Loader({}))
    assert keep.load() == start
    for step in range(start + 1, end + 1):
        keep.step(step)
    BACKGROUND.wait()


def test_a_load_is_told_with_the_steps_that_were_reached(told: FakeMonitor, capfd: pytest.CaptureFixture[str]) -> None:
    run(0, 7)
    run(7, 9)
    first, second = told.wait_for(StateLoaded, 2)
    assert (first.tier, first.step, first.series, first.reached) == (StateTier.NONE, 0, "", 0)
    assert (second.tier, second.step, second.reached) == (StateTier.MEMORY, 7, 7)
    assert second.series == first.load != second.load
    assert "the training goes on" not in capfd.readouterr().err


def test_steps_that_were_not_saved_are_reached_too(told: FakeMonitor, tell: Tell) -> None:
    folder = tell(interval=5)
    run(0, 8)
    assert rank_progress.read_all(str(folder), ["progress_rank-0"])[0].step == 8
    run(5, 5)
    *_, last = told.wait_for(StateLoaded, 2)
    assert (last.step, last.reached) == (5, 8)
    run(5, 5)
    *_, last = told.wait_for(StateLoaded, 3)
    assert (last.step, last.reached) == (5, 5), "no step was done since"


def test_a_damaged_file_is_told_with_its_reason(told: FakeMonitor, tell: Tell) -> None:
    folder = tell()
    run(0, 3)
    (newest,) = folder.glob("step-3_*")
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes(content)
    run(2, 2)
    *_, last = told.wait_for(StateLoaded, 2)
    assert last.step == 2
    (refused,) = last.refused
    assert (refused.step, refused.rank) == (3, 0) and newest.name in refused.reason


class Refuses(Loader):
    def load_state_dict(self, state: Any) -> None:
        raise KeyError("another number of workers")


def test_a_load_that_raises_is_told_before(told: FakeMonitor) -> None:
    run(0, 2)
    with pytest.raises(NotRestored):
        ft.MemoryCheckpoint(loader=Refuses({})).load()
    *_, last = told.wait_for(StateLoaded, 2)
    assert (last.tier, last.reached) == (StateTier.NONE, 2)
    assert [refused.step for refused in last.refused] == [2, 1]


def test_a_folder_is_told_and_counted(told: FakeMonitor, tell: Tell, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tell()
    assert ft.latest_memory_folder() is None
    for step in (10, 20):
        with ft.memory_folder(step) as path:
            (path / "file").write_bytes(bytes(5000))
    with ft.memory_folder(30, is_collective=False) as path:
        raise RuntimeError("on purpose")
    found = rank_progress.read_all(str(folder), [path.name for path in folder.iterdir()])[0]
    assert (found.step, found.saves, found.failed) == (30, 2, 1) and found.size >= 5000
    assert ft.latest_memory_folder() is not None
    first, second = told.wait_for(StateLoaded, 2)
    assert (first.tier, first.step, first.reached) == (StateTier.NONE, 0, 0)
    assert (second.tier, second.step, second.reached) == (StateTier.MEMORY, 20, 30)
    assert "the training goes on" not in capfd.readouterr().err


def test_without_a_monitor_the_rank_says_it(tell: Tell, fresh: None, capfd: pytest.CaptureFixture[str]) -> None:
    tell()
    run(0, 3)
    run(3, 3)
    assert "ft_client: the training goes on from step 3 in memory\n" in capfd.readouterr().err
