"""The client as a training calls it, against a monitor that takes every message down."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ft_client import RankMonitorClient, RankMonitorClientError, WorkloadAction, WorkloadControlRequest
from rank_monitor.contract.settings.config import MonitorSettings
from rank_monitor.contract.wire.messages import Attach, ControlRequest, Detach, LimitsSet, Sections
from tests.client.fake_monitor import FakeMonitor
from tests.client.story import names


def test_init_attaches_and_takes_the_settings(monitor: FakeMonitor) -> None:
    monitor.settings = MonitorSettings(rank_heartbeat_timeout=33.0, rank_section_timeouts={"step": 5.0})
    client = RankMonitorClient()
    assert (client.is_initialized, client.cfg, client.hb_timeouts, client.section_timeouts) == (False, None, None, None)
    client.init_workload_monitoring(num_warmup_iters=3)
    assert client.is_initialized
    assert vars(client.cfg) == vars(monitor.settings)
    assert client.hb_timeouts is not None
    assert (client.hb_timeouts.initial, client.hb_timeouts.subsequent) == (3600.0, 33.0)
    assert not client.hb_timeouts.were_calculated
    assert client.section_timeouts is not None
    assert client.section_timeouts.section == {"step": 5.0}
    assert client.section_timeouts.out_of_section is None
    assert monitor.messages(Attach) == [Attach(3)]
    assert not monitor.messages(LimitsSet)


BEFORE_INIT: dict[str, Callable[[RankMonitorClient], object]] = {
    "send_heartbeat": lambda client: client.send_heartbeat(),
    "start_section": lambda client: client.start_section("a"),
    "end_section": lambda client: client.end_section("a"),
    "end_all_sections": lambda client: client.end_all_sections(),
    "report_iteration": lambda client: client.report_iteration(1),
    "calculate_and_set_hb_timeouts": lambda client: client.calculate_and_set_hb_timeouts(),
    "calculate_and_set_section_timeouts": lambda client: client.calculate_and_set_section_timeouts(),
    "send_workload_control_request": lambda client: client.send_workload_control_request(
        WorkloadControlRequest(WorkloadAction.ShutdownWorkload)
    ),
}


@pytest.mark.parametrize("call", BEFORE_INIT)
def test_calls_before_init_are_misuse(fresh: None, call: str) -> None:
    with pytest.raises(RankMonitorClientError, match=rf"^{call}\(\) needs init_workload_monitoring"):
        BEFORE_INIT[call](RankMonitorClient())


MISUSE: dict[str, tuple[Callable[[RankMonitorClient], object], str]] = {
    "init twice": (lambda client: client.init_workload_monitoring(), "called twice"),
    "open an open one": (lambda client: client.start_section("open"), "section 'open' is open already"),
    "close a closed one": (lambda client: client.end_section("closed"), "section 'closed' is not open"),
    "name too long": (lambda client: client.start_section("ö" * 128), "not text of at most 255 bytes"),
    "name is not text": (lambda client: client.start_section(3), "not text of at most 255 bytes"),  # type: ignore[arg-type]
    "name is not Unicode": (lambda client: client.start_section("\ud800"), "not text of at most 255 bytes"),
    "iteration is not a number": (lambda client: client.report_iteration("x"), "not a whole number"),  # type: ignore[arg-type]
    "iteration is negative": (lambda client: client.report_iteration(-2), "out of range"),
    "iteration is huge": (lambda client: client.report_iteration(2**63), "out of range"),
    "no interval yet": (lambda client: client.calculate_and_set_hb_timeouts(), "at least two signs of life"),
    "no section yet": (lambda client: client.calculate_and_set_section_timeouts(["x"], False), "has seen any of"),
    "no state": (lambda client: client.load_state_dict([]), "not a state of this client"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("case", MISUSE)
def test_misuse_is_raised_and_nothing_is_sent(monitor: FakeMonitor, client: RankMonitorClient, case: str) -> None:
    client.start_section("open")
    monitor.wait_for(Sections)
    before = monitor.kinds()
    call, problem = MISUSE[case]
    with pytest.raises(RankMonitorClientError, match=problem):
        call(client)
    assert monitor.kinds() == before
    client.end_section("open")
    assert [names(one) for one in monitor.wait_for(Sections, 2)] == [["open"], []]


@pytest.mark.parametrize("count", [-1, 1.5, "3"])
def test_a_warm_up_that_is_no_count_is_misuse(monitor: FakeMonitor, count: Any) -> None:
    with pytest.raises(RankMonitorClientError, match="is not a count"):
        RankMonitorClient().init_workload_monitoring(count)


def test_shutdown_detaches_once_and_the_watch_can_begin_again(monitor: FakeMonitor, client: RankMonitorClient) -> None:
    client.start_section("step")
    client.shutdown_workload_monitoring()
    client.shutdown_workload_monitoring()
    assert not client.is_initialized
    with pytest.raises(RankMonitorClientError):
        client.send_heartbeat()
    client.init_workload_monitoring()
    client.start_section("step")
    monitor.wait_for(Sections, 2)
    assert monitor.kinds() == ["Hello", "Attach", "Sections", "Detach", "Attach", "Sections"]
    assert len(monitor.messages(Detach)) == 1


def test_another_client_takes_over_and_the_first_falls_silent(monitor: FakeMonitor, client: RankMonitorClient) -> None:
    client.start_section("mine")
    other = RankMonitorClient()
    other.init_workload_monitoring()
    client.start_section("also mine")
    client.send_heartbeat()
    client.shutdown_workload_monitoring()
    other.start_section("other's")
    monitor.wait_for(Sections, 2)
    assert monitor.kinds() == ["Hello", "Attach", "Sections", "Attach", "Sections"]
    assert names(monitor.messages(Sections)[-1]) == ["other's"]


def test_a_request_to_the_launcher(monitor: FakeMonitor, client: RankMonitorClient) -> None:
    client.send_workload_control_request(WorkloadControlRequest(WorkloadAction.ExcludeThisNode, "bad memory"))
    client.send_workload_control_request(WorkloadControlRequest(WorkloadAction.ShutdownWorkload))
    client.send_workload_control_request(WorkloadControlRequest(WorkloadAction.Continue, "x" * 100_000))
    requests = monitor.wait_for(ControlRequest, 3)
    assert requests[0] == ControlRequest("exclude_this_node", "bad memory")
    assert [one.action for one in requests[1:]] == ["stop_job", "restart"]
