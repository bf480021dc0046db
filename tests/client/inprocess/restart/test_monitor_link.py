"""The wrapper's link: what a monitor is told and asks; with the real one, who is interrupted, killed, left alone."""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ft_client import RankMonitorClient, RankMonitorClientError
from ft_client.inprocess.arguments import Timeouts
from ft_client.inprocess.restart.monitor_link import MonitorLink
from ft_client.rank.monitoring import process
from rank_monitor.contract.restart_phase import RestartPhase
from rank_monitor.contract.settings.config import MonitorSettings
from rank_monitor.contract.wire import codec
from rank_monitor.contract.wire.launcher_messages import Verdict
from rank_monitor.contract.wire.messages import Attach, Heartbeat, Hello, InterruptAsked, Ping, RestartReport, Sections
from tests.client.agent import Agent, agent_of
from tests.client.fake_monitor import FakeMonitor
from tests.client.rank_of_a_test import started
from tests.patience import until
from tests.program import ended

SHORT = datetime.timedelta(seconds=0.1)
QUICK = Timeouts(
    progress_watchdog_interval=SHORT,
    monitor_process_interval=SHORT,
    monitor_thread_interval=SHORT,
    soft_timeout=10 * SHORT,
    hard_timeout=20 * SHORT,
    termination_grace_time=SHORT,
)
# A phase as the monitor is told it: with the round, whether progress is expected, and the hard timeout.
RESTARTING, RUNNING, UNTIMED, OVER = (
    ("closing", 0, True, 2.0),
    ("running", 0, True, 2.0),
    ("running", 0, False, 2.0),
    ("done", 0, True, 2.0),
)


class Wrapper:
    """Takes down what the monitor asks for."""

    def __init__(self) -> None:
        self.reasons: list[str] = []
        self.link = MonitorLink(QUICK, self.reasons.append, entry_rank=3, call_prefix="p/")

    def restarts(self) -> None:
        """Reports that the rank waits for the others at the end of a round."""
        self.link.report(RestartPhase.CLOSING, 0)


@pytest.fixture
def wrapper(monitor: FakeMonitor) -> Wrapper:
    return Wrapper()


def ask(monitor: FakeMonitor, reason: str, sent_ns: int | None = None) -> None:
    monitor.wait_for(RestartReport)
    sent_ns = time.monotonic_ns() if sent_ns is None else sent_ns
    monitor.say(codec.encode(InterruptAsked("soft_timeout", reason), 1, sent_ns))


# What a monitor is told.


def told(monitor: FakeMonitor, count: int) -> list[tuple[str, int, bool, float]]:
    """The phases of the first reports."""
    reports = monitor.wait_for(RestartReport, count)
    assert {(one.soft_timeout_s, one.grace_s, one.entry_rank, one.call_prefix) for one in reports} == {
        (1.0, 0.1, 3, "p/")
    }
    return [(one.phase.value, one.round, one.is_timed, one.hard_timeout_s) for one in reports]


def test_an_interrupted_function_must_end_whatever_it_says(monitor: FakeMonitor, wrapper: Wrapper) -> None:
    """It may leave a stretch without protection on its way out, or enter one in a loop that swallows everything."""
    link = wrapper.link
    link.interrupting()
    link.running(0)
    link.expect_progress(False)
    link.interrupting()
    link.expect_progress(True)
    link.expect_progress(False)
    wrapper.restarts()
    link.interrupting()
    link.over(RestartPhase.DONE, 0)
    assert told(monitor, 5) == [RUNNING, UNTIMED, ("interrupting", 0, True, 2.0), RESTARTING, OVER]


def test_a_call_is_told_phase_by_phase(monitor: FakeMonitor, wrapper: Wrapper) -> None:
    link = wrapper.link
    link.report(RestartPhase.ASSIGNING, 0)
    link.running(0)
    link.expect_progress(True)
    link.expect_progress(False)
    link.expect_progress(True)
    wrapper.restarts()
    link.report(RestartPhase.COMPLETING, 1, 9.0)
    link.report(RestartPhase.LEAVING, 1, 0.5)
    link.over(RestartPhase.GAVE_UP, 1, "why")
    assert told(monitor, 8) == [
        ("assigning", 0, True, 2.0),
        *(RUNNING, UNTIMED, RUNNING, RESTARTING),
        ("completing", 1, True, 9.0),
        ("leaving", 1, True, 2.0),
        ("gave_up", 1, True, 2.0),
    ]
    reports = monitor.messages(RestartReport)
    assert [one.reason for one in reports if one.reason] == [reports[-1].reason] == ["why"]
    began = [one.began_ns for one in reports]
    assert began[1] == began[2] == began[3], "one call of the function"
    assert len(set(began)) == 6 and began == sorted(began)


def test_a_new_monitor_learns_the_last_report(monitor: FakeMonitor, wrapper: Wrapper) -> None:
    wrapper.restarts()
    wrapper.link.running(1)
    wrapper.link.expect_progress(False)
    monitor.wait_for(RestartReport, 3)
    last = [one for one in monitor.received if isinstance(one.message, RestartReport)][-1]
    known = len(monitor.received)
    monitor.drop()
    monitor.wait_for(RestartReport, 4)
    hello, *others = [one for one in monitor.received[known:] if not isinstance(one.message, Ping)]
    assert isinstance(last.message, RestartReport)
    assert hello.message == Hello(os.getpid(), restart=last.message)
    assert [(one.message, one.sent_ns) for one in others[:1]] == [(last.message, last.sent_ns)], "with its moment"


def test_pings_go_with_the_stamps_and_carry_their_moment(monitor: FakeMonitor, wrapper: Wrapper) -> None:
    wrapper.link.running(0)
    before_ns = time.monotonic_ns()
    for _ in range(10_000):
        wrapper.link.ping()
    after_ns = time.monotonic_ns()
    monitor.wait_for(Ping)
    until(lambda: sent_pings(monitor)[-1] > after_ns - 10_000_000, "the last one")
    assert before_ns < sent_pings(monitor)[0]
    assert sent_pings(monitor)[-1] <= after_ns
    assert len(sent_pings(monitor)) < 1000
    wrapper.restarts()
    wrapper.link.running(0)
    count = len(sent_pings(monitor))
    stamps = len(monitor.progress)
    until(lambda: len(monitor.progress) > stamps + 3, "stamps of the next call")
    assert len(sent_pings(monitor)) == count, "none was made in this call"


def sent_pings(monitor: FakeMonitor) -> list[int]:
    return [one.sent_ns for one in list(monitor.received) if isinstance(one.message, Ping)]


def test_without_a_monitor_nothing_happens(fresh: None) -> None:
    link = MonitorLink(QUICK, print)
    link.report(RestartPhase.ASSIGNING, 0)
    link.running(0)
    link.ping()
    link.expect_progress(False)
    link.over(RestartPhase.DONE, 0)
    assert process.current() is None


def test_a_forked_child_tells_nothing(monitor: FakeMonitor, wrapper: Wrapper) -> None:
    wrapper.restarts()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            wrapper.link.running(0)
            wrapper.link.tick()
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    wrapper.link.over(RestartPhase.DONE, 0)
    assert told(monitor, 2) == [RESTARTING, OVER]


# What it is asked.


def test_what_the_monitor_asks_is_passed_on(monitor: FakeMonitor, wrapper: Wrapper) -> None:
    wrapper.link.running(0)
    ask(monitor, "why")
    until(lambda: wrapper.reasons == ["why"], "the reason")


def test_nothing_is_passed_on_that_is_of_another_call_or_of_none(monitor: FakeMonitor, wrapper: Wrapper) -> None:
    early_ns = time.monotonic_ns()
    wrapper.link.running(0)
    ask_is_taken(monitor, "of the call before", early_ns)
    wrapper.restarts()
    ask_is_taken(monitor, "while restarting")
    wrapper.link.over(RestartPhase.DONE, 0)
    ask_is_taken(monitor, "after the call")
    assert wrapper.reasons == []


def ask_is_taken(monitor: FakeMonitor, reason: str, sent_ns: int | None = None) -> None:
    """Asks, and waits until what comes after it was taken by the client."""
    link = process.current()
    assert link is not None
    losses = link.losses
    ask(monitor, reason, sent_ns)
    monitor.say(b"no message")
    until(lambda: link.losses == losses + 1, "taken")


def test_a_wrapper_that_fails_ends_no_watchdog(
    monitor: FakeMonitor, wrapper: Wrapper, caplog: pytest.LogCaptureFixture
) -> None:
    failing = MonitorLink(QUICK, lambda reason: print({}[reason]))
    failing.running(0)
    ask_is_taken(monitor, "why")
    until(lambda: "KeyError" in caplog.text, "the error in the log")
    wrapper.link.running(0)
    ask_is_taken(monitor, "again")
    until(lambda: wrapper.reasons == ["again"], "the reason")


def test_a_request_leaves_no_thread_that_the_script_sees(
    monitor: FakeMonitor, caplog: pytest.LogCaptureFixture
) -> None:
    """What the wrapper does then logs, and a thread that logs is known to `threading` from then on."""
    before = set(threading.enumerate())
    link = MonitorLink(QUICK, lambda reason: logging.getLogger(__name__).warning("asked: %s", reason))
    link.running(0)
    ask(monitor, "why")
    until(lambda: "asked: why" in caplog.text, "the log")
    until(lambda: set(threading.enumerate()) <= before, "no thread more than before")


def test_a_request_about_a_round_that_ends_before_it_is_carried_out_interrupts_nothing(monitor: FakeMonitor) -> None:
    class LinkOfTheNextRound(MonitorLink):
        """The next round begins when the request has been received, and before its thread runs."""

        def fault_seen(self) -> None:
            super().fault_seen()
            self.running(1)

    before, reasons = set(threading.enumerate()), list[str]()
    LinkOfTheNextRound(QUICK, reasons.append).running(0)
    ask_is_taken(monitor, "why")
    until(lambda: set(threading.enumerate()) <= before, "the end of its thread")
    assert reasons == []


# The training's own client, called again.


def test_a_client_may_be_initialised_again_in_each_call(monitor: FakeMonitor, wrapper: Wrapper) -> None:
    client = RankMonitorClient()
    for call in range(1, 4):
        wrapper.restarts()
        wrapper.link.running(0)
        client.init_workload_monitoring()
        client.start_section("step")
        with pytest.raises(RankMonitorClientError, match="called twice"):
            client.init_workload_monitoring()
        assert len(monitor.wait_for(Attach, call)) == call
    assert RankMonitorClient.active is client


@pytest.mark.usefixtures("fresh")
def test_that_holds_where_nobody_watches() -> None:
    link, client = MonitorLink(QUICK, print), RankMonitorClient()
    for number in range(2):
        link.report(RestartPhase.CLOSING, number)
        link.running(number)
        client.init_workload_monitoring()
        assert client.is_initialized and RankMonitorClient.active is client


def test_a_client_that_is_not_initialised_again_goes_on_with_nothing_open(
    monitor: FakeMonitor, client: RankMonitorClient, wrapper: Wrapper
) -> None:
    client.start_section("step")
    client.start_section("data")
    wrapper.restarts()
    wrapper.link.running(0)
    assert not client.is_open("step")
    client.end_section("data")
    client.start_section("step")
    assert [name for name, _ in monitor.wait_for(Sections, 3)[-1].open] == ["step"]
    client.end_section("step")
    client.send_heartbeat()
    monitor.wait_for(Heartbeat)


def test_no_interval_across_a_restart_is_learned(
    monitor: FakeMonitor, client: RankMonitorClient, wrapper: Wrapper, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [time.monotonic_ns()]
    for module in ("ft_client.rank.monitoring.signs_of_life", "ft_client.inprocess.restart.monitor_link"):
        monkeypatch.setattr(f"{module}.monotonic_ns", lambda: now[0])

    def after(seconds: float) -> None:
        now[0] += int(seconds * 1e9)

    wrapper.link.running(0)
    client.send_heartbeat()
    after(1)
    client.start_section("step")
    after(2)
    client.end_section("step")
    client.start_section("step")
    client.start_section("data")
    after(50)
    with pytest.raises(KeyError), client.section("left by the fault"):
        after(50)
        raise KeyError
    wrapper.link.fault_seen()
    after(50)
    client.end_section("step")
    client.send_heartbeat()
    wrapper.restarts()
    after(500)
    wrapper.link.running(0)
    client.send_heartbeat()
    after(3)
    client.start_section("step")
    longest = client._observed.longest()
    assert longest["section:step"] == 2.0
    assert "section:left by the fault" not in longest
    assert longest["subsequent"] == 50.0, "from a heartbeat to the opening of a section, before the fault"
    assert max(longest["out_of_section"], longest.get("initial", 0.0)) < 10


# With the real monitor.

BEGIN = """
import ctypes, itertools, os, time
from datetime import timedelta
from ft_client.inprocess.restart.monitor_link import MonitorLink
from ft_client.inprocess.arguments import Timeouts
from rank_monitor.contract.restart_phase import RestartPhase

def interrupted(reason):
    print(reason, flush=True)
    os._exit(7)

SHORT = timedelta(seconds=0.1)
intervals = dict.fromkeys(["progress_watchdog_interval", "monitor_process_interval", "monitor_thread_interval"], SHORT)
link = MonitorLink(
    Timeouts(soft_timeout=10 * SHORT, hard_timeout=20 * SHORT, termination_grace_time=SHORT, **intervals), interrupted
)
link.report(RestartPhase.ARRIVING, 0)
"""


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    with agent_of(tmp_path, MonitorSettings(stall_warning=0.5)) as agent:
        yield agent


def found(agent: Agent) -> list[tuple[str, bool]]:
    return [(one.limit, one.condemned) for one in agent.heard if isinstance(one, Verdict)]


def test_who_restarts_is_left_alone_and_who_sleeps_is_interrupted(agent: Agent, tmp_path: Path) -> None:
    script = BEGIN + "time.sleep(3)\nlink.running(0)\ntime.sleep(60)\n"
    with started(script, tmp_path, agent.path) as rank:
        agent.begin(rank)
        assert agent.wait_for(RestartReport)[0].phase is RestartPhase.ARRIVING
        code, reason, _ = ended(rank)
        assert (code, reason[:31]) == (7, "no progress of the main thread ")
        agent.wait_for(Verdict, 2)
        assert found(agent) == [("stall", False), ("soft_timeout", False)]


def test_who_holds_the_interpreter_is_killed(agent: Agent, tmp_path: Path) -> None:
    script = BEGIN + "link.running(0)\nsum(itertools.repeat(0))\n"
    with started(script, tmp_path, agent.path) as rank:
        agent.begin(rank)
        assert ended(rank)[:2] == (-signal.SIGTERM, "")
        agent.wait_for(Verdict, 3)
        assert found(agent) == [("stall", False), ("soft_timeout", False), ("hard_timeout", True)]


def test_a_livelock_that_stopped_its_pings_is_interrupted(agent: Agent, tmp_path: Path) -> None:
    script = BEGIN + "link.running(0)\nlink.ping()\nwhile True:\n    time.sleep(0.01)\n"
    with started(script, tmp_path, agent.path) as rank:
        agent.begin(rank)
        code, reason, _ = ended(rank)
        assert (code, reason[:10]) == (7, "no ping() ")
        assert found(agent) == [] or found(agent) == [("soft_timeout", False)]


def test_a_monitor_that_was_replaced_meanwhile_interrupts(agent: Agent, tmp_path: Path) -> None:
    script = BEGIN + "link.running(0)\ntime.sleep(60)\n"
    with started(script, tmp_path, agent.path) as rank:
        agent.begin(rank)
        agent.wait_for(RestartReport, 2)
        agent.replace_monitor(rank, attached=False)
        assert agent.wait_for(RestartReport, 3)[-1].phase is RestartPhase.RUNNING
        assert ended(rank)[0] == 7


def test_a_rank_that_works_is_left_alone(agent: Agent, tmp_path: Path) -> None:
    """Two calls, each longer than the hard timeout, with pings, a stretch without protection, a client."""
    script = BEGIN + (
        "import ft_client\n"
        "def work(seconds):\n    end = time.monotonic() + seconds\n    while time.monotonic() < end:\n"
        "        link.ping()\n        time.sleep(0.01)\n"
        "client = ft_client.RankMonitorClient()\n"
        "for call in range(2):\n    link.running(0)\n    client.init_workload_monitoring()\n    work(0.5)\n"
        "    client.report_iteration(call)\n    link.expect_progress(False)\n    time.sleep(1.2)\n"
        "    link.expect_progress(True)\n"
        "    client.start_section('step')\n    work(0.5)\n    link.report(RestartPhase.CLOSING, 0)\n"
        "link.over(RestartPhase.DONE, 1)\ntime.sleep(1.2)\n"
    )
    with started(script, tmp_path, agent.path) as rank:
        agent.begin(rank)
        code, _, err = ended(rank)
        assert code == 0, err
        agent.wait_for(RestartReport, 10)
        assert {limit for limit, _ in found(agent)} <= {"stall"}
