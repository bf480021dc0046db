"""The client as a training calls it, against a monitor that takes every message down."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest

from ft_client import RankMonitorClient, RankMonitorClientError, WorkloadAction, WorkloadControlRequest, process
from ft_client.errors import RankMonitorClientError as TheError
from rank_monitor.contract import env
from rank_monitor.contract.config import MonitorSettings
from rank_monitor.contract.messages import (
    NO_ITERATION,
    Attach,
    ControlRequest,
    Detach,
    Heartbeat,
    Hello,
    IterationReached,
    LimitsSet,
    Sections,
)
from tests.client.fake_monitor import FakeMonitor, wait_until

STATE = {
    "current_timeouts": {
        "heartbeat": {"initial": 40.0, "subsequent": 20.0, "were_calculated": True},
        "section": {
            "section": {"step": 15.0, "setup": 99.0},
            "out_of_section": None,
            "calculated_sections": ["step"],
            "is_out_of_section_calculated": False,
        },
    }
}


@pytest.fixture
def client(monitor: FakeMonitor) -> RankMonitorClient:
    client = RankMonitorClient()
    client.init_workload_monitoring()
    return client


def names(sections: Sections) -> list[str]:
    return [name for name, _ in sections.open]


def connected_anew(monitor: FakeMonitor, client: RankMonitorClient) -> list[str]:
    """Drops the connection; the kinds of what came over the next one until its hello's state was whole."""
    before = len(monitor.received)
    monitor.drop()
    wait_until(lambda: len(monitor.messages(Hello)) > 1, "a second hello")
    client.report_iteration(1000)
    monitor.wait_for(IterationReached)
    return monitor.kinds()[before:-1]


def test_init_attaches_and_takes_the_settings(monitor: FakeMonitor) -> None:
    monitor.settings = MonitorSettings(rank_heartbeat_timeout=33.0, rank_section_timeouts={"step": 5.0})
    client = RankMonitorClient()
    assert (client.is_initialized, client.cfg, client.hb_timeouts, client.section_timeouts) == (False, None, None, None)
    client.init_workload_monitoring(num_warmup_iters=3)
    assert client.is_initialized
    assert client.cfg == monitor.settings
    assert client.hb_timeouts is not None
    assert (client.hb_timeouts.initial, client.hb_timeouts.subsequent) == (3600.0, 33.0)
    assert not client.hb_timeouts.were_calculated
    assert client.section_timeouts is not None
    assert client.section_timeouts.section == {"step": 5.0}
    assert client.section_timeouts.out_of_section is None
    assert monitor.messages(Attach) == [Attach(3)]
    assert not monitor.messages(LimitsSet)


def test_signs_of_life_arrive_in_order_with_their_moments(monitor: FakeMonitor, client: RankMonitorClient) -> None:
    client.send_heartbeat()
    client.start_section("setup")
    client.start_section("load")
    client.report_iteration(12)
    client.end_section("setup")
    client.end_all_sections()
    client.send_heartbeat()
    monitor.wait_for(Heartbeat, 2)
    sections = monitor.messages(Sections)
    assert [names(one) for one in sections] == [["setup"], ["setup", "load"], ["load"], []]
    assert [one.iteration for one in sections] == [NO_ITERATION, NO_ITERATION, 12, 12]
    assert monitor.messages(IterationReached) == [IterationReached(12)]
    order = [one for one in monitor.received if isinstance(one.message, (Heartbeat, Sections, IterationReached))]
    assert [one.sent_ns for one in order] == sorted(one.sent_ns for one in order)
    assert sections[1].open[0][1] < sections[1].open[1][1] == order[2].sent_ns


def test_a_section_as_context_is_closed_by_an_exception(monitor: FakeMonitor, client: RankMonitorClient) -> None:
    with pytest.raises(KeyError, match="mine"), client.section("step"):
        raise KeyError("mine")
    with pytest.raises(KeyError, match="also mine"), client.section("step"):
        client.end_all_sections()
        raise KeyError("also mine")
    assert [names(one) for one in monitor.wait_for(Sections, 4)] == [["step"], [], ["step"], []]


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
    "name too long": (lambda client: client.start_section("ö" * 128), "no text of at most 255 bytes"),
    "name is no text": (lambda client: client.start_section(3), "no text of at most 255 bytes"),  # type: ignore[arg-type]
    "name is no Unicode": (lambda client: client.start_section("\ud800"), "no text of at most 255 bytes"),
    "iteration is no number": (lambda client: client.report_iteration("x"), "no whole number"),  # type: ignore[arg-type]
    "iteration is negative": (lambda client: client.report_iteration(-2), "out of range"),
    "iteration is huge": (lambda client: client.report_iteration(2**63), "out of range"),
    "no interval yet": (lambda client: client.calculate_and_set_hb_timeouts(), "at least two signs of life"),
    "no section yet": (lambda client: client.calculate_and_set_section_timeouts(["x"], False), "has seen any of"),
    "no state": (lambda client: client.load_state_dict({"current_timeouts": 1}), "not a state of this client"),
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


def test_too_many_open_sections_are_misuse(monitor: FakeMonitor, client: RankMonitorClient) -> None:
    for number in range(64):
        client.start_section(f"s{number}")
    with pytest.raises(RankMonitorClientError, match="at most 64 sections"):
        client.start_section("s64")
    client.end_section("s3")
    client.start_section("s64")
    assert len(monitor.wait_for(Sections, 66)[-1].open) == 64


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


def test_a_new_monitor_learns_the_whole_state(monitor: FakeMonitor) -> None:
    client = RankMonitorClient()
    client.load_state_dict(STATE)
    client.init_workload_monitoring(num_warmup_iters=2)
    client.report_iteration(8)
    client.start_section("step")
    monitor.wait_for(Sections)
    last = monitor.received[-1]
    monitor.drop()
    monitor.wait_for(Sections, 2)
    assert monitor.kinds()[-3:] == ["Hello", "LimitsSet", "Sections"]
    hello = monitor.messages(Hello)[1]
    assert hello == Hello(os.getpid(), True, last.sent_ns, True, 2)
    assert monitor.messages(Sections)[1] == last.message
    assert monitor.received[-1].sent_ns == last.sent_ns, "what is said again is no new sign of life"
    assert monitor.messages(LimitsSet)[1] == monitor.messages(LimitsSet)[0]


def test_a_training_that_showed_no_life_does_not_seem_to_on_reconnection(
    monitor: FakeMonitor, client: RankMonitorClient
) -> None:
    assert connected_anew(monitor, client) == ["Hello"]
    assert not monitor.messages(Hello)[1].got_first_sign
    assert monitor.messages(Hello)[1].last_sign_ns == monitor.received[1].sent_ns, "the moment of the attach"


def test_a_lost_section_message_is_healed_by_the_next_heartbeat(
    monitor: FakeMonitor, client: RankMonitorClient
) -> None:
    monitor.pause()
    link = process.current()
    assert link is not None
    while not link.losses:
        client.send_heartbeat()
    client.start_section("step")
    client.start_section("inner")
    client.end_section("step")
    monitor.resume()

    def healed() -> bool:
        client.send_heartbeat()
        return bool(monitor.messages(Sections))

    wait_until(healed, "a message with the whole set")
    assert names(monitor.messages(Sections)[-1]) == ["inner"]


def test_limits_lost_in_a_full_queue_are_said_again(monitor: FakeMonitor, client: RankMonitorClient) -> None:
    monitor.pause()
    link = process.current()
    assert link is not None
    while not link.losses:
        client.send_heartbeat()
    client.load_state_dict(STATE)
    assert link.stale
    monitor.resume()
    wait_until(lambda: monitor.kinds()[-1:] == ["Heartbeat"], "all was read")
    link.restate()
    assert monitor.wait_for(LimitsSet)[0].subsequent == 20.0


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


def test_threads_at_the_same_time_corrupt_nothing(monitor: FakeMonitor, client: RankMonitorClient) -> None:
    def work(name: str) -> None:
        for _ in range(200):
            with client.section(name):
                client.send_heartbeat()

    threads = [threading.Thread(target=work, args=(f"thread {number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    def settled() -> bool:
        client.send_heartbeat()
        return names(monitor.messages(Sections)[-1]) == []

    wait_until(settled, "nothing is open in the end")


def test_a_change_overtaken_by_another_thread_is_followed_by_the_set_as_it_is(
    monitor: FakeMonitor, client: RankMonitorClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other thread's message is made to go out after ours was packed and before it is sent."""
    link = process.current()
    assert link is not None
    send, overtaking = link.send, [True]

    def overtaken(data: bytes) -> bool:
        if overtaking:
            overtaking.pop()
            client.end_section("theirs")
        return send(data)

    client.start_section("theirs")
    monkeypatch.setattr(link, "send", overtaken)
    client.start_section("ours")
    monkeypatch.undo()
    sections = monitor.wait_for(Sections, 4)
    assert [names(one) for one in sections] == [["theirs"], ["ours"], ["theirs", "ours"], ["ours"]]


# Limits.


def test_loaded_limits_are_in_force_before_and_after_init(monitor: FakeMonitor) -> None:
    monitor.settings = MonitorSettings(rank_section_timeouts={"step": 180.0, "setup": 600.0})
    client = RankMonitorClient()
    client.load_state_dict(STATE)
    assert client.state_dict()["current_timeouts"]["heartbeat"] == STATE["current_timeouts"]["heartbeat"]
    client.init_workload_monitoring()
    (limits,) = monitor.wait_for(LimitsSet)
    assert (limits.initial, limits.subsequent) == (40.0, 20.0)
    assert limits.sections == {"step": 15.0, "setup": 600.0}
    assert limits.learned == ["initial", "section:step", "subsequent"]
    assert limits.state == client.state_dict()
    client.load_state_dict(
        {"current_timeouts": {"section": {"section": {"new": 50.0}, "calculated_sections": ["new"]}}}
    )
    assert monitor.wait_for(LimitsSet, 2)[1].sections == {"step": 15.0, "setup": 600.0, "new": 50.0}
    assert json.loads(json.dumps(client.state_dict())) == client.state_dict()


def test_a_learned_limit_that_killed_is_doubled_and_the_log_says_so(
    monitor: FakeMonitor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(env.LIMIT_MULTIPLIERS, json.dumps({"subsequent": 2, "section:step": 3}))
    client = RankMonitorClient()
    client.load_state_dict(STATE)
    client.init_workload_monitoring()
    assert client.hb_timeouts is not None
    assert client.section_timeouts is not None
    assert (client.hb_timeouts.initial, client.hb_timeouts.subsequent) == (40.0, 40.0)
    assert client.section_timeouts.section["step"] == 45.0
    assert "limit subsequent is 40 s instead of 20 s" in caplog.text
    client.shutdown_workload_monitoring()
    client.init_workload_monitoring()
    assert client.hb_timeouts.subsequent == 40.0, "once"


@pytest.mark.parametrize("text", ["no json", "[1]", '{"subsequent": "2"}', '{"subsequent": -1}'])
def test_multipliers_that_make_no_sense_are_reported_and_ignored(
    monitor: FakeMonitor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    monkeypatch.setenv(env.LIMIT_MULTIPLIERS, text)
    client = RankMonitorClient()
    client.load_state_dict(STATE)
    client.init_workload_monitoring()
    assert client.hb_timeouts is not None
    assert client.hb_timeouts.subsequent == 20.0
    assert f"{env.LIMIT_MULTIPLIERS} is not used" in caplog.text


def test_limits_are_learned_locally_without_a_group(monitor: FakeMonitor, client: RankMonitorClient) -> None:
    assert not client.calculate_and_set_hb_timeouts(skip_if_not_ready=True)
    for _ in range(3):
        client.send_heartbeat()
    assert client.calculate_and_set_timeouts()
    assert client.hb_timeouts is not None
    assert (client.hb_timeouts.initial, client.hb_timeouts.subsequent) == (10.0, 10.0), "the floor"
    assert client.hb_timeouts.were_calculated
    (limits,) = monitor.wait_for(LimitsSet)
    assert limits.learned == ["initial", "subsequent"]


def test_sections_never_seen_are_left_out_with_a_warning(
    monitor: FakeMonitor, client: RankMonitorClient, caplog: pytest.LogCaptureFixture
) -> None:
    with client.section("setup"):
        pass
    assert not client.calculate_and_set_section_timeouts(["setup", "never"], skip_if_not_ready=True)
    assert client.calculate_and_set_section_timeouts(["setup", "never"], calc_out_of_section=False)
    assert "section:never" in caplog.text
    assert client.section_timeouts is not None
    assert client.section_timeouts.calculated_sections == ("setup",)
    assert not client.section_timeouts.is_out_of_section_calculated
    with client.section("step"):
        pass
    assert client.calculate_and_set_section_timeouts()
    assert client.section_timeouts.section == {"setup": 10.0, "step": 10.0}
    assert client.section_timeouts.out_of_section == 10.0
    assert monitor.wait_for(LimitsSet, 2)[1].learned == ["out_of_section", "section:setup", "section:step"]


def test_more_limits_than_a_message_holds_are_a_warning(
    monitor: FakeMonitor, client: RankMonitorClient, caplog: pytest.LogCaptureFixture
) -> None:
    many = [f"section number {number}" for number in range(3000)]
    section = {"section": dict.fromkeys(many, 50.0), "calculated_sections": many}
    client.load_state_dict({"current_timeouts": {"section": section}})
    assert "the monitor keeps its limits" in caplog.text
    assert connected_anew(monitor, client) == ["Hello"]


def test_a_request_to_the_launcher(monitor: FakeMonitor, client: RankMonitorClient) -> None:
    client.send_workload_control_request(WorkloadControlRequest(WorkloadAction.ExcludeThisNode, "bad memory"))
    client.send_workload_control_request(WorkloadControlRequest(WorkloadAction.ShutdownWorkload))
    client.send_workload_control_request(WorkloadControlRequest(WorkloadAction.Continue, "x" * 100_000))
    requests = monitor.wait_for(ControlRequest, 3)
    assert requests[0] == ControlRequest("exclude_this_node", "bad memory")
    assert [one.action for one in requests[1:]] == ["stop_job", "restart"]


# Where nobody watches.


def test_without_a_launcher_every_call_does_nothing_and_one_line_says_so(
    fresh: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ft_client.rank_monitor_client._said_that_nobody_watches", False)
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
        assert client.cfg == MonitorSettings()
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
    assert client.cfg == MonitorSettings()
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
    assert client.cfg == monitor.settings
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
