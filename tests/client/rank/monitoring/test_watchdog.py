"""Stamps of progress: they come while the main thread executes Python, and only then."""

from __future__ import annotations

import datetime
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from ft_client import RankMonitorClient
from ft_client.inprocess.arguments import Timeouts
from ft_client.inprocess.restart.monitor_link import MonitorLink
from ft_client.rank.monitoring import process
from ft_client.rank.monitoring.link import Link
from ft_client.rank.monitoring.watchdog import Stamp, Watchdog, megatron_iteration
from rank_monitor.contract.restart_phase import RestartPhase
from rank_monitor.contract.settings.config import MonitorSettings
from rank_monitor.contract.wire.messages import Hello, IterationReached, LimitsSet, Progress, Sections
from tests.client.fake_monitor import FakeMonitor
from tests.client.rank_of_a_test import started
from tests.patience import until
from tests.ports import free_port
from tests.program import ended, python

QUICK = MonitorSettings(stall_warning=0.2)
HANG = MonitorSettings(hang_timeout=40.0)
BUSY = (
    "import time\ndeadline = time.monotonic() + {seconds}\nwhile time.monotonic() < deadline:\n    time.sleep(0.001)\n"
)
INIT = "import ft_client as ft\nclient = ft.init()\n"


def stamps(monitor: FakeMonitor) -> list[int]:
    return [one.message.stamp_ns for one in monitor.progress if isinstance(one.message, Progress)]


def test_a_stamp_is_the_moment_it_was_asked_for_once_the_main_thread_ran() -> None:
    stamp = Stamp(5)
    assert stamp.renew(10) == 5, "asked for only now"
    until(lambda: stamp.renew(20) == 10, "the interpreter makes the call")
    until(lambda: stamp.renew(30) == 20, "and the next one")


@pytest.mark.parametrize(
    ("settings", "period_s"),
    [(None, 5.0), (MonitorSettings(), 15.0), (MonitorSettings(stall_warning=None), 30.0), (QUICK, 0.05), (HANG, 2.0)],
)
def test_the_period_is_a_quarter_of_a_stall_and_a_twentieth_of_a_hang(
    tmp_path: Path, settings: MonitorSettings | None, period_s: float
) -> None:
    link = Link(tmp_path / "m0", own=True)
    link.settings = settings
    watchdog = Watchdog(link)
    assert watchdog.period_s() == min(5.0, period_s), "nothing is known of the training yet"
    link.source = RankMonitorClient()
    assert watchdog.period_s() == period_s


def test_the_period_of_a_wrapped_rank_is_the_wrappers_while_that_is_shorter(monitor: FakeMonitor) -> None:
    second = datetime.timedelta(seconds=1)
    wrapper = MonitorLink(Timeouts(progress_watchdog_interval=second / 2, soft_timeout=8 * second), print)
    link = process.current()
    assert link is not None
    watchdog = Watchdog(link)
    assert watchdog.period_s() > 1
    wrapper.running(0)
    assert watchdog.period_s() == 0.5
    wrapper.over(RestartPhase.DONE, 0)
    assert watchdog.period_s() > 1


def test_a_main_thread_that_runs_renews_its_stamp(monitor: FakeMonitor, tmp_path: Path) -> None:
    monitor.settings = QUICK
    with started(INIT + BUSY.format(seconds=60), tmp_path, monitor.path):
        until(lambda: len(set(stamps(monitor))) > 4, "new stamps")


def test_a_main_thread_that_sleeps_does_not_and_the_watchdog_goes_on(monitor: FakeMonitor, tmp_path: Path) -> None:
    monitor.settings = QUICK
    with started(INIT + "import time\ntime.sleep(60)\n", tmp_path, monitor.path):
        until(lambda: len(stamps(monitor)) > 10, "messages")
        assert len(set(stamps(monitor)[4:])) == 1


def test_a_main_thread_that_holds_the_lock_stops_the_watchdog_too(monitor: FakeMonitor, tmp_path: Path) -> None:
    monitor.settings = QUICK
    script = INIT + "import ctypes\nhold = ctypes.PyDLL(None).sleep\nfrom time import monotonic_ns\n"
    script += "start = monotonic_ns()\nhold(1)\nend = monotonic_ns()\nprint(start, end)\n"
    with started(script, tmp_path, monitor.path) as rank:
        start, end = map(int, ended(rank)[1].split())
    assert len([one for one in monitor.progress if start < one.sent_ns < end]) <= 1, "one may be on its way"


def test_a_new_monitor_learns_the_whole_state_while_the_main_thread_hangs(monitor: FakeMonitor, tmp_path: Path) -> None:
    limits = {"heartbeat": {"initial": 40.0, "subsequent": 20.0, "were_calculated": True}}
    script = INIT + f"client.load_state_dict({{'current_timeouts': {limits}}})\nft.report_iteration(5)\n"
    script += "client.start_section('step')\nimport time\ntime.sleep(60)\n"
    with started(script, tmp_path, monitor.path) as rank:
        (before,) = monitor.wait_for(Sections)
        monitor.drop()
        assert monitor.wait_for(Sections, 2)[1] == before
        assert monitor.kinds()[-3:] == ["Hello", "LimitsSet", "Sections"]
        hello = monitor.messages(Hello)[-1]
        assert (hello.pid, hello.attached, hello.got_first_sign) == (rank.pid, True, True)
        assert monitor.messages(LimitsSet)[-1].subsequent == 20.0


def test_a_megatron_training_reports_its_iteration_by_itself(
    monitor: FakeMonitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = SimpleNamespace()
    module = SimpleNamespace(_GLOBAL_ARGS=None)
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", module)
    assert megatron_iteration() is None
    module._GLOBAL_ARGS = arguments
    assert megatron_iteration() is None
    arguments.curr_iteration = 12
    link = Link(monitor.path, own=True)
    link.reconnect()
    watchdog = Watchdog(link)
    watchdog.start()
    assert monitor.wait_for(IterationReached) == [IterationReached(12)]
    link.close_in_child()


GROUP_MADE = """
import sys, torch.distributed as dist
from ft_client.rank.monitoring.watchdog import has_made_no_group
def tell(): print(has_made_no_group(), file=sys.stderr)
tell()
dist.init_process_group("gloo", init_method="tcp://127.0.0.1:%d", rank=0, world_size=1)
tell()
dist.destroy_process_group()
tell()
"""


def test_a_group_that_was_destroyed_was_made() -> None:
    said = python(GROUP_MADE % free_port()).stderr.split()
    assert [word for word in said if word in ("True", "False")] == ["True", "False", "False"], said
