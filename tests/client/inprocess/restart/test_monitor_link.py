"""The wrapper's guard: what a monitor is told and asks; with the real one, who is interrupted, killed, left alone."""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ft_client import RankMonitorClient, RankMonitorClientError
from ft_client.inprocess.arguments import Timeouts
from ft_client.inprocess.restart.monitor_link import MonitorLink
from ft_client.rank.monitoring import process
from rank_monitor.contract.settings.config import MonitorSettings
from rank_monitor.contract.wire import codec, messages
from rank_monitor.contract.wire.launcher_messages import Verdict
from rank_monitor.contract.wire.messages import Attach, Heartbeat, Hello, InterruptAsked, Ping, Restarter, Sections
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
RESTARTING, RUNNING, UNGUARDED, OVER = (
    messages.Guard(phase, 1.0, 2.0, 0.1) for phase in ("restarting", "running", "unguarded", "over")
)


class Wrapper:
    """Takes down what the monitor asks for."""

    def __init__(self) -> None:
        self.reasons: list[str] = []
        self.guard = MonitorLink(QUICK, self.reasons.append)


@pytest.fixture
def wrapper(monitor: FakeMonitor) -> Wrapper:
    return Wrapper()


def ask(monitor: FakeMonitor, reason: str, sent_ns: int | None = None) -> None:
    monitor.wait_for(messages.Guard)
    sent_ns = time.monotonic_ns() if sent_ns is None else sent_ns
    monitor.say(codec.encode(InterruptAsked("soft_timeout", reason), 1, sent_ns))


# What a monitor is told.


def test_an_interrupted_function_must_end_whatever_it_says(monitor: FakeMonitor, wrapper: Wrapper) -> None:
    """It may leave a stretch without protection on its way out, or enter one in a loop that swallows everything."""
    guard = wrapper.guard
    guard.ending()
    guard.running()
    guard.unguarded()
    guard.ending()
    guard.guarded_again()
    guard.unguarded()
    guard.restarting()
    guard.ending()
    guard.over()
    told = monitor.wait_for(messages.Guard, 5)
    ending = messages.Guard("finalizing", 1.0, 2.0, 0.1, "the function after its interruption")
    assert told == [RUNNING, UNGUARDED, ending, RESTARTING, OVER]


def test_a_call_is_told_phase_by_phase(monitor: FakeMonitor, wrapper: Wrapper) -> None:
    guard = wrapper.guard
    guard.report("initialized", 3, 0, "p/", 5.0)
    guard.restarting()
    guard.running()
    guard.guarded_again()
    guard.unguarded()
    guard.guarded_again()
    guard.restarting()
    guard.calling("completion", 9.0)
    guard.calling("terminate", 0.5)
    guard.over()
    told = monitor.wait_for(messages.Guard, 8)
    completion = messages.Guard("finalizing", 1.0, 9.0, 0.1, "completion")
    terminate = messages.Guard("finalizing", 1.0, 2.0, 0.1, "terminate")
    assert told == [RESTARTING, RUNNING, UNGUARDED, RUNNING, RESTARTING, completion, terminate, OVER]
    assert monitor.messages(Restarter) == [Restarter("initialized", 3, 0, "p/", 5.0)]


def test_a_new_monitor_learns_the_whole_guard(monitor: FakeMonitor, wrapper: Wrapper) -> None:
    guard = wrapper.guard
    for step in (guard.restarting, guard.running, guard.unguarded, guard.running, guard.unguarded):
        step()
    guard.report("handling_completed", 3, 1, "p/", 0.0)
    monitor.wait_for(Restarter)
    before = [one for one in monitor.received if isinstance(one.message, (messages.Guard, Restarter))]
    known = len(monitor.received)
    monitor.drop()
    monitor.wait_for(Restarter, 2)
    again = [one for one in monitor.received[known:] if not isinstance(one.message, Ping)]
    assert again[0].message == Hello(os.getpid(), guarded=True)
    assert [one.message for one in again[1:5]] == [RESTARTING, RUNNING, UNGUARDED, before[-1].message]
    moments = {one.sent_ns for one in before}
    assert {one.sent_ns for one in again[1:5]} <= moments, "each with the moment it had"


def test_pings_go_with_the_stamps_and_carry_their_moment(monitor: FakeMonitor, wrapper: Wrapper) -> None:
    wrapper.guard.running()
    before_ns = time.monotonic_ns()
    for _ in range(10_000):
        wrapper.guard.ping()
    after_ns = time.monotonic_ns()
    monitor.wait_for(Ping)
    until(lambda: sent_pings(monitor)[-1] > after_ns - 10_000_000, "the last one")
    assert before_ns < sent_pings(monitor)[0]
    assert sent_pings(monitor)[-1] <= after_ns
    assert len(sent_pings(monitor)) < 1000
    wrapper.guard.restarting()
    wrapper.guard.running()
    count = len(sent_pings(monitor))
    stamps = len(monitor.progress)
    until(lambda: len(monitor.progress) > stamps + 3, "stamps of the next call")
    assert len(sent_pings(monitor)) == count, "none was made in this call"


def sent_pings(monitor: FakeMonitor) -> list[int]:
    return [one.sent_ns for one in list(monitor.received) if isinstance(one.message, Ping)]


def test_without_a_monitor_nothing_happens(fresh: None) -> None:
    guard = MonitorLink(QUICK, print)
    guard.report("initialized", 3, 0, "", 5.0)
    for step in (guard.restarting, guard.running, guard.ping, guard.unguarded, guard.running, guard.over):
        step()
    assert process.current() is None


def test_a_forked_child_tells_nothing(monitor: FakeMonitor, wrapper: Wrapper) -> None:
    wrapper.guard.restarting()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            wrapper.guard.running()
            wrapper.guard.tick()
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    wrapper.guard.over()
    assert monitor.wait_for(messages.Guard, 2) == [RESTARTING, OVER]


# What it is asked.


def test_what_the_monitor_asks_is_passed_on(monitor: FakeMonitor, wrapper: Wrapper) -> None:
    wrapper.guard.running()
    ask(monitor, "why")
    until(lambda: wrapper.reasons == ["why"], "the reason")


def test_nothing_is_passed_on_that_is_of_another_call_or_of_none(monitor: FakeMonitor, wrapper: Wrapper) -> None:
    early_ns = time.monotonic_ns()
    wrapper.guard.running()
    ask_is_taken(monitor, "of the call before", early_ns)
    wrapper.guard.restarting()
    ask_is_taken(monitor, "while restarting")
    wrapper.guard.over()
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
    failing.running()
    ask_is_taken(monitor, "why")
    assert "KeyError" in caplog.text
    wrapper.guard.running()
    ask_is_taken(monitor, "again")
    assert wrapper.reasons == ["again"]


# The training's own client, called again.


def test_a_client_may_be_initialised_again_in_each_call(monitor: FakeMonitor, wrapper: Wrapper) -> None:
    client = RankMonitorClient()
    for call in range(1, 4):
        wrapper.guard.restarting()
        wrapper.guard.running()
        client.init_workload_monitoring()
        client.start_section("step")
        with pytest.raises(RankMonitorClientError, match="called twice"):
            client.init_workload_monitoring()
        assert len(monitor.wait_for(Attach, call)) == call
    assert RankMonitorClient.active is client


@pytest.mark.usefixtures("fresh")
def test_that_holds_where_nobody_watches() -> None:
    guard, client = MonitorLink(QUICK, print), RankMonitorClient()
    for _ in range(2):
        guard.restarting()
        guard.running()
        client.init_workload_monitoring()
        assert client.is_initialized and RankMonitorClient.active is client


def test_a_client_that_is_not_initialised_again_goes_on_with_nothing_open(
    monitor: FakeMonitor, client: RankMonitorClient, wrapper: Wrapper
) -> None:
    client.start_section("step")
    client.start_section("data")
    wrapper.guard.restarting()
    wrapper.guard.running()
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

    wrapper.guard.running()
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
    wrapper.guard.fault_seen()
    after(50)
    client.end_section("step")
    client.send_heartbeat()
    wrapper.guard.restarting()
    after(500)
    wrapper.guard.running()
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

def interrupted(reason):
    print(reason, flush=True)
    os._exit(7)

SHORT = timedelta(seconds=0.1)
intervals = dict.fromkeys(["progress_watchdog_interval", "monitor_process_interval", "monitor_thread_interval"], SHORT)
guard = MonitorLink(
    Timeouts(soft_timeout=10 * SHORT, hard_timeout=20 * SHORT, termination_grace_time=SHORT, **intervals), interrupted
)
guard.report("initialized", 3, 0, "p/", 5.0)
guard.restarting()
"""


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    with agent_of(tmp_path, MonitorSettings(stall_warning=0.5)) as agent:
        yield agent


def found(agent: Agent) -> list[tuple[str, bool]]:
    return [(one.limit, one.condemned) for one in agent.heard if isinstance(one, Verdict)]


def test_who_restarts_is_left_alone_and_who_sleeps_is_interrupted(agent: Agent, tmp_path: Path) -> None:
    script = BEGIN + "time.sleep(3)\nguard.running()\ntime.sleep(60)\n"
    with started(script, tmp_path, agent.path) as rank:
        agent.begin(rank)
        assert agent.wait_for(Restarter) == [Restarter("initialized", 3, 0, "p/", 5.0)]
        code, reason, _ = ended(rank)
        assert (code, reason[:31]) == (7, "no progress of the main thread ")
        agent.wait_for(Verdict, 2)
        assert found(agent) == [("stall", False), ("soft_timeout", False)]


def test_who_holds_the_interpreter_is_killed(agent: Agent, tmp_path: Path) -> None:
    script = BEGIN + "guard.running()\nsum(itertools.repeat(0))\n"
    with started(script, tmp_path, agent.path) as rank:
        agent.begin(rank)
        assert ended(rank)[:2] == (-signal.SIGTERM, "")
        agent.wait_for(Verdict, 3)
        assert found(agent) == [("stall", False), ("soft_timeout", False), ("hard_timeout", True)]


def test_a_livelock_that_stopped_its_pings_is_interrupted(agent: Agent, tmp_path: Path) -> None:
    script = BEGIN + "guard.running()\nguard.ping()\nwhile True:\n    time.sleep(0.01)\n"
    with started(script, tmp_path, agent.path) as rank:
        agent.begin(rank)
        code, reason, _ = ended(rank)
        assert (code, reason[:10]) == (7, "no ping() ")
        assert found(agent) == [] or found(agent) == [("soft_timeout", False)]


def test_a_monitor_that_was_replaced_meanwhile_interrupts(agent: Agent, tmp_path: Path) -> None:
    script = BEGIN + "guard.running()\nguard.report('handling_completed', 3, 1, 'p/', 0.0)\ntime.sleep(60)\n"
    with started(script, tmp_path, agent.path) as rank:
        agent.begin(rank)
        agent.wait_for(Restarter, 2)
        agent.replace_monitor(rank, attached=False)
        assert agent.wait_for(Restarter, 3)[-1].state == "handling_completed"
        assert ended(rank)[0] == 7


def test_a_rank_that_works_is_left_alone(agent: Agent, tmp_path: Path) -> None:
    """Two calls, each longer than the hard timeout, with pings, an unguarded stretch and a client of its own."""
    script = BEGIN + (
        "import ft_client\n"
        "def work(seconds):\n    end = time.monotonic() + seconds\n    while time.monotonic() < end:\n"
        "        guard.ping()\n        time.sleep(0.01)\n"
        "client = ft_client.RankMonitorClient()\n"
        "for call in range(2):\n    guard.running()\n    client.init_workload_monitoring()\n    work(0.5)\n"
        "    client.report_iteration(call)\n    guard.unguarded()\n    time.sleep(1.2)\n    guard.running()\n"
        "    client.start_section('step')\n    work(0.5)\n    guard.restarting()\n"
        "guard.report('finalized', 3, 3, 'p/', 0.0)\nguard.over()\ntime.sleep(1.2)\n"
    )
    with started(script, tmp_path, agent.path) as rank:
        agent.begin(rank)
        code, _, err = ended(rank)
        assert code == 0, err
        agent.wait_for(Restarter, 2)
        assert {limit for limit, _ in found(agent)} <= {"stall"}
