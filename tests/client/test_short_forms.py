"""The two-line form against a monitor that takes every message down."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

import ft_client as ft
from rank_monitor.contract.wire.messages import Attach, Detach, IterationReached, Sections
from tests.client.fake_monitor import FakeMonitor
from tests.program import python


def opened(monitor: FakeMonitor, count: int) -> list[list[str]]:
    return [[name for name, _ in one.open] for one in monitor.wait_for(Sections, count)]


def test_importing_the_package_loads_none_of_its_rooms() -> None:
    code = "import sys; before = set(sys.modules); import ft_client as ft; print(sorted(set(sys.modules) - before))"
    code += "; assert 'RankMonitorClient' in dir(ft)"
    loaded = set(ast.literal_eval(python(code).stdout))
    assert {name for name in loaded if name.startswith("ft_client")} == {
        "ft_client",
        "ft_client.rank",
        "ft_client.rank.lazy_names",
    }
    assert not loaded & {"rank_monitor", "socket", "dataclasses", "torch"}


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = ft.nothing


def test_init_is_idempotent_and_uses_the_scripts_own_client(monitor: FakeMonitor) -> None:
    own = ft.RankMonitorClient()
    own.init_workload_monitoring()
    assert ft.init() is own
    assert ft.init() is own
    assert len(monitor.messages(Attach)) == 1


def test_a_section_starts_the_watch_by_itself(monitor: FakeMonitor) -> None:
    with ft.section("setup"), ft.section("load"):
        pass
    assert opened(monitor, 4) == [["setup"], ["setup", "load"], ["setup"], []]


def test_steps_are_open_while_fetched_and_while_the_body_runs(monitor: FakeMonitor) -> None:
    fetched = []

    def loader() -> Iterator[str]:
        for item in "ab":
            fetched.append(ft.init().is_open("step"))
            yield item

    bodies = [(item, ft.init().is_open("step")) for item in ft.steps(loader(), start=7)]
    assert bodies == [("a", True), ("b", True)]
    assert fetched == [True, True]
    assert monitor.wait_for(IterationReached, 2) == [IterationReached(7), IterationReached(8)]
    assert opened(monitor, 6) == [["step"], []] * 3


def test_steps_count_on_from_the_last_iteration(monitor: FakeMonitor) -> None:
    list(ft.steps([0, 0]))  # counted from nowhere: not reported
    ft.report_iteration(100)
    list(ft.steps([0]))
    for _ in range(2):
        for _ in ft.steps([0, 0]):
            pass
    reached = [one.iteration for one in monitor.wait_for(IterationReached, 6)]
    assert reached == [100, 101, 102, 103, 104, 105]


def test_a_break_and_an_exception_close_the_step(monitor: FakeMonitor) -> None:
    for _ in ft.steps([1, 2]):
        break
    assert not ft.init().is_open("step")
    with pytest.raises(KeyError):
        for _ in ft.steps([1, 2]):
            raise KeyError
    assert not ft.init().is_open("step")
    assert opened(monitor, 4) == [["step"], []] * 2
    assert not monitor.messages(IterationReached)


def test_a_loop_in_the_body_of_another_is_part_of_its_step(monitor: FakeMonitor) -> None:
    for _ in ft.steps([1], start=0):
        assert list(ft.steps([1, 2, 3])) == [1, 2, 3]
    assert opened(monitor, 4) == [["step"], []] * 2
    assert monitor.wait_for(IterationReached) == [IterationReached(0)]


def test_monitored_is_the_whole_protocol(monitor: FakeMonitor) -> None:
    assert list(ft.monitored("ab", start=3)) == ["a", "b"]
    ft.shutdown()
    with ft.monitored() as client:
        assert client.is_initialized
    ft.shutdown()
    monitor.wait_for(Detach, 2)
    assert monitor.wait_for(IterationReached, 2)[0] == IterationReached(3)
    assert len(monitor.messages(Attach)) == 2


def test_without_a_launcher_all_of_it_does_nothing(fresh: None) -> None:
    ft.init()
    with ft.section("a"):
        pass
    assert list(ft.steps("ab")) == ["a", "b"]
    assert list(ft.monitored("ab")) == ["a", "b"]
    ft.report_iteration(3)
    ft.shutdown()
