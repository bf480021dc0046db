"""A client that nobody watches: no launcher, no answer, a refusal, a forked child. The training goes on."""

from __future__ import annotations

import logging
import os
import threading

import pytest

from ft_client import RankMonitorClient, RankMonitorClientError, WorkloadAction, WorkloadControlRequest
from ft_client.errors import RankMonitorClientError as TheError
from ft_client.rank.monitoring import process
from ft_client.rank_monitor_client import SettingsInForce
from rank_monitor.contract.wire.messages import Attach, Hello, LimitsSet, Sections
from tests.client.fake_monitor import FakeMonitor
from tests.client.story import STATE, connected_anew


def test_without_a_launcher_every_call_does_nothing_and_one_line_says_so(
    fresh: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ft_client.rank_monitor_client._warned_unwatched", False)
    for _ in range(2):
        client = RankMonitorClient()
        client.init_workload_monitoring()
        client.send_heartbeat()
        client.start_section("a")
        client.start_section("a")
        client.end_section("b")
        client.end_all_sections()
        client.report_iteration(1)
        client.send_workload_control_request(WorkloadControlRequest(WorkloadAction.Continue))
        assert not client.calculate_and_set_hb_timeouts()
        assert not client.calculate_and_set_section_timeouts()
        client.load_state_dict(STATE)
        assert client.state_dict()["current_timeouts"]["heartbeat"]["subsequent"] == 20.0
        assert client.cfg == SettingsInForce()
        client.shutdown_workload_monitoring()
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert process.current() is None


def test_a_monitor_that_does_not_answer_is_a_warning(
    monitor: FakeMonitor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("ft_client.rank_monitor_client._WELCOME_WAIT_S", 0.05)
    monitor.silent = True
    client = RankMonitorClient()
    client.load_state_dict(STATE)
    client.init_workload_monitoring()
    assert "no answer of the monitor within 0.05 s" in caplog.text
    client.start_section("step")
    monitor.wait_for(Sections)
    assert client.cfg == SettingsInForce()
    assert not monitor.messages(LimitsSet), "the monitor's own limits are not known, so they stay in force"
    assert connected_anew(monitor, client) == ["Hello", "Sections"]
    assert monitor.messages(Hello)[1].attached


def test_init_outlives_a_monitor_that_is_replaced_meanwhile(monitor: FakeMonitor) -> None:
    monitor.silent = True
    client = RankMonitorClient()
    starting = threading.Thread(target=client.init_workload_monitoring)
    starting.start()
    monitor.wait_for(Attach)
    monitor.silent = False
    monitor.drop()
    starting.join()
    assert client.cfg is not None and vars(client.cfg) == vars(monitor.settings)
    assert client.is_initialized
    assert monitor.kinds()[:4] == ["Hello", "Attach", "Hello", "Attach"]


def test_a_process_that_is_refused_is_told_once_and_goes_on(
    monitor: FakeMonitor, caplog: pytest.LogCaptureFixture
) -> None:
    monitor.refusal = "the rank is connected already"
    client = RankMonitorClient()
    client.init_workload_monitoring()
    assert "the monitor refused this process, which is not watched: the rank is connected already" in caplog.text
    client.start_section("step")
    client.start_section("step")
    client.shutdown_workload_monitoring()
    client.init_workload_monitoring()
    assert monitor.connections == 1


def test_in_a_forked_child_every_call_does_nothing(monitor: FakeMonitor, client: RankMonitorClient) -> None:
    client.start_section("step")
    monitor.wait_for(Sections)
    before = len(monitor.received)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            client.send_heartbeat()
            client.start_section("step")
            client.end_all_sections()
            assert not client.calculate_and_set_hb_timeouts()
            fresh = RankMonitorClient()
            fresh.init_workload_monitoring()
            fresh.start_section("x")
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    client.end_section("step")
    assert len(monitor.wait_for(Sections, 2)) == 2
    assert len(monitor.received) == before + 1
    assert monitor.connections == 1


def test_the_public_names_are_the_classes_themselves() -> None:
    assert RankMonitorClientError is TheError
