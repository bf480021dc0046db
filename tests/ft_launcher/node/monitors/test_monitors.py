"""The monitors of a node with a real template: told of a cycle, asked, killed, stopped, replaced."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator

import pytest

from ft_launcher.node.monitors.monitors import STOPPED_GRACE_S, NodeMonitors
from ft_launcher.node.monitors.rank_report import Replaced
from ft_launcher.node.ranks.runtime import Runtime
from rank_monitor.contract.processes.wait import readable
from rank_monitor.contract.settings.config import MonitorSettings
from rank_monitor.contract.wire import channel, codec
from rank_monitor.contract.wire.launcher_messages import LogOverdue, LogStep, Snapshot, Verdict
from rank_monitor.contract.wire.messages import Attach, ControlRequest, Hello, Message, RankException, Sections
from rank_monitor.contract.wire.rank_times import RankTimes
from tests.patience import patient

DEADLINE_S = patient(20.0)


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    runtime = Runtime.start()
    yield runtime
    runtime.close()
    assert not runtime.folder.exists()


@pytest.fixture
def rank() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


def until(monitors: NodeMonitors, wanted: Callable[[object], bool], within_s: float = DEADLINE_S) -> object:
    """Handles what comes until something wanted is told."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        check = monitors.next_check()
        readable(monitors.descriptors(), 1.0 if check is None else min(1.0, check - time.monotonic()))
        for _, event in monitors.handle():
            if wanted(event):
                return event
    raise AssertionError("it was never told")


def snapshot(monitors: NodeMonitors, wanted: Callable[[Snapshot], bool] = lambda one: True) -> Snapshot:
    """What a monitor says of its rank, once it is as wanted; a slow monitor is asked again."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        monitors.snapshots()
        if (found := monitors.report(0).snapshot) and wanted(found):
            return found
    raise AssertionError("no such snapshot came")


def say(monitors: NodeMonitors, *messages: Message) -> socket.socket:
    connection = channel.connect(monitors.socket_path(0))
    for message in messages:
        channel.send(connection, codec.encode(message, 0, time.monotonic_ns()))
    return connection


def begin(monitors: NodeMonitors, pid: int) -> None:
    monitors.begin_rank(3, 0, 5, pid, time.monotonic_ns())


def test_what_a_rank_says_arrives_and_is_kept(runtime: Runtime) -> None:
    monitors = NodeMonitors(runtime, MonitorSettings(rank_heartbeat_timeout=60.0), 1)
    begin(monitors, os.getpid())
    connection = say(monitors, Hello(os.getpid()), Attach(), RankException("ValueError", "bad", "tb", 1.0))
    until(monitors, lambda event: isinstance(event, RankException))
    assert snapshot(monitors).attached
    found = monitors.report(0)
    assert found.exception is not None and found.exception.message == "bad"
    monitors.end_cycle()
    del connection
    monitors.close()


def test_what_comes_beside_a_snapshot_is_told_later(runtime: Runtime) -> None:
    monitors = NodeMonitors(runtime, MonitorSettings(), 1)
    begin(monitors, os.getpid())
    connection = say(monitors, Hello(os.getpid()), Attach())
    snapshot(monitors, lambda one: one.attached)
    request = ControlRequest("stop_job", "enough")
    channel.send(connection, codec.encode(request, 0, time.monotonic_ns()))
    deadline = time.monotonic() + DEADLINE_S
    told: list[tuple[int, object]] = []
    while not told and time.monotonic() < deadline:
        monitors.snapshots()
        told += monitors.handle()
    assert told == [(0, request)]
    assert monitors.handle() == []
    monitors.close()


def test_a_late_word_of_the_last_cycle_is_not_heard(runtime: Runtime) -> None:
    monitors = NodeMonitors(runtime, MonitorSettings(), 1)
    earlier_ns = time.monotonic_ns()
    begin(monitors, os.getpid())
    connection = say(monitors, Hello(os.getpid()), Attach())
    for words, sent_ns in (("old", earlier_ns), ("new", time.monotonic_ns())):
        channel.send(connection, codec.encode(ControlRequest("restart", words), 0, sent_ns))
    assert until(monitors, lambda event: isinstance(event, ControlRequest)) == ControlRequest("restart", "new")
    monitors.close()


def test_a_verdict_that_crosses_the_end_of_its_cycle_explains_the_death(
    runtime: Runtime, rank: subprocess.Popen[bytes]
) -> None:
    """All ranks of a hang pass their limit at nearly one moment: the first verdict ends the cycle, the others cross."""
    monitors = NodeMonitors(runtime, MonitorSettings(connect_timeout=0.3), 1)
    begin(monitors, rank.pid)
    assert rank.wait(DEADLINE_S) == -signal.SIGKILL  # by its monitor, whose verdict waits unread
    monitors.end_cycle()
    assert [type(event) for _, event in monitors.handle()] == [Verdict]
    assert monitors.report(0).verdict is not None
    begin(monitors, os.getpid())
    assert monitors.report(0).verdict is None
    monitors.close()


def test_a_hang_is_told_before_the_rank_dies(runtime: Runtime, rank: subprocess.Popen[bytes]) -> None:
    monitors = NodeMonitors(runtime, MonitorSettings(connect_timeout=0.3), 1)
    begin(monitors, rank.pid)
    verdict = until(monitors, lambda event: isinstance(event, Verdict))
    assert isinstance(verdict, Verdict) and verdict.limit == "connect" and verdict.rank == 5
    assert rank.wait(DEADLINE_S) == -signal.SIGKILL
    monitors.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_monitor_is_replaced(runtime: Runtime, rank: subprocess.Popen[bytes], number: int) -> None:
    monitors = NodeMonitors(runtime, MonitorSettings(), 1)
    begin(monitors, rank.pid)
    before = monitors.pid(0)
    os.kill(before, number)
    until(monitors, lambda event: isinstance(event, Replaced))
    assert before not in monitors.pids()
    assert snapshot(monitors)
    monitors.close()


def test_a_monitor_that_takes_over_knows_of_a_silence(runtime: Runtime, rank: subprocess.Popen[bytes]) -> None:
    monitors = NodeMonitors(runtime, MonitorSettings(watch_log_timeout=1.0), 1)
    begin(monitors, rank.pid)
    os.kill(monitors.pid(0), signal.SIGSTOP)
    step_ns = time.monotonic_ns()
    monitors.printed(0, LogStep(7, 0, 0, step_ns))
    monitors.printed(0, LogOverdue(step_ns))
    os.kill(monitors.pid(0), signal.SIGKILL)
    found = until(monitors, lambda event: isinstance(event, Verdict))
    assert isinstance(found, Verdict) and found.limit == "log"
    monitors.close()


def test_a_monitor_stopped_together_with_its_rank_is_left_alone(
    runtime: Runtime, rank: subprocess.Popen[bytes]
) -> None:
    monitors = NodeMonitors(runtime, MonitorSettings(), 1)
    begin(monitors, rank.pid)
    monitor = monitors.pid(0)
    os.kill(rank.pid, signal.SIGSTOP)
    os.kill(monitor, signal.SIGSTOP)
    with pytest.raises(AssertionError, match="never told"):
        until(monitors, lambda event: isinstance(event, Replaced), within_s=2 * STOPPED_GRACE_S)
    assert monitor in monitors.pids()
    os.kill(monitor, signal.SIGCONT)
    os.kill(rank.pid, signal.SIGCONT)
    assert snapshot(monitors)
    monitors.close()


def test_the_template_is_not_needed_for_a_replacement(runtime: Runtime, rank: subprocess.Popen[bytes]) -> None:
    monitors = NodeMonitors(runtime, MonitorSettings(), 1)
    begin(monitors, rank.pid)
    template = runtime.template.pid
    assert template is not None
    monitor = monitors.pid(0)
    os.kill(template, signal.SIGKILL)
    os.kill(monitor, signal.SIGKILL)
    until(monitors, lambda event: isinstance(event, Replaced))
    assert snapshot(monitors)
    monitors.close()


def times(monitors: NodeMonitors, wanted: Callable[[RankTimes], bool]) -> RankTimes:
    """The time ledger of the rank, once it is as wanted; a slow monitor is asked again."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        monitors.ask_times()
        readable(monitors.descriptors(), 1.0)
        monitors.handle()
        if (found := monitors.report(0).times) and wanted(found):
            return found
    raise AssertionError("no such ledger came")


def test_a_monitor_that_takes_over_goes_on_with_the_time_ledger(runtime: Runtime) -> None:
    monitors = NodeMonitors(runtime, MonitorSettings(), 1)
    begin(monitors, os.getpid())
    opened = time.monotonic_ns()
    connection = say(monitors, Hello(os.getpid()), Attach(), Sections((("data", opened),)), Sections(()))
    before = times(monitors, lambda found: "data" in found.sections)
    os.kill(monitors.pid(0), signal.SIGKILL)
    until(monitors, lambda news: isinstance(news, Replaced))
    monitors.report(0).times = None
    after = times(monitors, lambda found: True)
    assert (after.since_ns, after.sections) == (before.since_ns, before.sections)
    del connection
    monitors.close()


def test_the_last_time_ledger_comes_with_the_monitors_end(runtime: Runtime) -> None:
    """Nobody waits for it: it is taken where it has come."""
    monitors = NodeMonitors(runtime, MonitorSettings(), 1)
    begin(monitors, os.getpid())
    connection = say(monitors, Hello(os.getpid()), Attach(), Sections((("data", time.monotonic_ns()),)))
    snapshot(monitors, lambda one: "data" in one.sections)
    monitors.end_cycle()
    monitors.close()
    last = monitors.report(0).times
    assert last is not None and last.tail == "data"
    del connection


def test_a_time_ledger_of_another_process_is_not_taken(runtime: Runtime, rank: subprocess.Popen[bytes]) -> None:
    """It may be on its way while the rank is started again."""
    monitors = NodeMonitors(runtime, MonitorSettings(), 1)
    begin(monitors, os.getpid())
    monitors.ask_times()
    assert readable(monitors.descriptors(), DEADLINE_S)
    began = time.monotonic_ns()
    monitors.begin_rank(3, 0, 5, rank.pid, began)
    snapshot(monitors)
    monitors.handle()
    assert monitors.report(0).times is None
    monitors.close()
