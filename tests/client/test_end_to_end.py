"""Client and monitor as they are, without a launcher: this test stands in for the agent."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from rank_monitor.contract.settings.config import MonitorSettings
from rank_monitor.contract.wire.launcher_messages import Connected, Times, Verdict
from rank_monitor.contract.wire.messages import ControlRequest, LimitsSet, RankException, Returned
from tests.client.agent import agent_of
from tests.client.rank_of_a_test import started
from tests.patience import patient, until

SLEEPS = "import ft_client as ft, time\nclient = ft.init()\nft.report_iteration(7)\nclient.start_section('step')\n"
SLEEPS += "def hang():\n    time.sleep(60)\nhang()\n"


def test_a_hang_in_a_section_is_seen_with_its_place(tmp_path: Path) -> None:
    settings = MonitorSettings(rank_section_timeouts={"step": 0.6})
    with agent_of(tmp_path, settings) as agent, started(SLEEPS, tmp_path, agent.path) as rank:
        agent.begin(rank)
        (verdict,) = agent.wait_for(Verdict)
        assert (verdict.limit, verdict.iteration, verdict.condemned) == ("section:step", 7, True)
        assert verdict.frames[0] == "script.py:6 in hang"
        assert rank.wait(patient(20)) == -signal.SIGKILL


def test_a_learned_limit_is_in_force(tmp_path: Path) -> None:
    script = """
import ft_client as ft, time
client = ft.init()
for _ in range(3):
    client.send_heartbeat()
assert client.calculate_and_set_hb_timeouts()
client.send_heartbeat()
time.sleep(60)
"""
    settings = MonitorSettings(learned_limit_floor=0.5)
    with agent_of(tmp_path, settings) as agent, started(script, tmp_path, agent.path) as rank:
        agent.begin(rank)
        (verdict,) = agent.wait_for(Verdict)
        assert (verdict.limit, verdict.limit_s, verdict.learned) == ("subsequent", 0.5, True)
        assert agent.wait_for(LimitsSet)[0].learned == ["initial", "subsequent"]


def test_a_replaced_monitor_knows_all_of_a_hang(tmp_path: Path) -> None:
    settings = MonitorSettings(rank_section_timeouts={"step": 2.0})
    with agent_of(tmp_path, settings) as agent, started(SLEEPS, tmp_path, agent.path) as rank:
        agent.begin(rank)
        until(lambda: agent.wait_for(Connected)[-1].attached, "attached")
        agent.replace_monitor(rank, attached=True)
        (verdict,) = agent.wait_for(Verdict)
        assert (verdict.limit, verdict.iteration) == ("section:step", 7)
        assert list(verdict.sections) == ["step"]


def test_a_main_thread_that_stands_still_is_reported_and_lives(tmp_path: Path) -> None:
    settings = MonitorSettings(stall_warning=0.6)
    with agent_of(tmp_path, settings) as agent, started(SLEEPS, tmp_path, agent.path) as rank:
        agent.begin(rank)
        (verdict,) = agent.wait_for(Verdict)
        assert (verdict.limit, verdict.condemned) == ("stall", False)
        assert rank.poll() is None


def test_a_rank_that_shows_life_lives_and_its_exception_is_told(tmp_path: Path) -> None:
    script = """
import ft_client as ft, time
for _ in ft.steps(range(20)):
    time.sleep(0.05)
ft.init().send_workload_control_request(ft.WorkloadControlRequest(ft.WorkloadAction.ExcludeThisNode, "why"))
raise ValueError("in the end")
"""
    limits = MonitorSettings(
        rank_section_timeouts={"step": 9.0}, rank_heartbeat_timeout=9.0, rank_out_of_section_timeout=9.0
    )
    with agent_of(tmp_path, limits) as agent, started(script, tmp_path, agent.path) as rank:
        agent.begin(rank)
        (error,) = agent.wait_for(RankException)
        assert (error.type, error.message) == ("ValueError", "in the end")
        assert agent.wait_for(ControlRequest) == [ControlRequest("exclude_this_node", "why")]
        assert rank.wait(patient(20)) == 1
        assert not [one for one in agent.heard if isinstance(one, Verdict)]


@pytest.mark.parametrize(
    ("script", "code", "returns"),
    [
        ("pass", 0, True),
        ("raise SystemExit", 0, True),
        ("raise SystemExit(0)", 0, True),
        ("raise SystemExit(False)", 0, True),
        ("raise SystemExit('')", 1, False),
        ("raise SystemExit(256)", 0, True),
        ("raise SystemExit(3)", 3, False),
        ("raise ValueError", 1, False),
        ("import os; os._exit(0)", 0, False),
        ("import os, sys; os.fork() or sys.exit(0); os.wait(); raise ValueError", 1, False),
    ],
)
def test_a_rank_says_that_it_returned(tmp_path: Path, script: str, code: int, returns: bool) -> None:
    """Its connections to other ranks end before its process does, and they may fail first."""
    with agent_of(tmp_path, MonitorSettings()) as agent, started(script, tmp_path, agent.path) as rank:
        agent.begin(rank)
        assert rank.wait(patient(20)) == code
        agent.wait_for(Times)  # what the monitor says at the end of a rank, after its last words
        assert any(isinstance(one, Returned) for one in agent.heard) is returns


def test_a_rank_may_end_before_its_monitor_begins(tmp_path: Path) -> None:
    with agent_of(tmp_path, MonitorSettings()) as agent, started("pass", tmp_path, agent.path) as rank:
        assert rank.wait(patient(20)) == 0
        agent.begin(rank)
        agent.wait_for(Times)


@pytest.mark.parametrize(
    "last",
    ["threading.Thread(target=work).start()", "atexit.register(work)"],
    ids=["thread", "exit function"],
)
def test_a_rank_that_still_works_has_not_returned(tmp_path: Path, last: str) -> None:
    script = f"""
import atexit, threading
import ft_client as ft
def work():
    if threading.current_thread() is not threading.main_thread():
        threading.main_thread().join()
    ft.init().send_workload_control_request(ft.WorkloadControlRequest(ft.WorkloadAction.Continue, "why"))
{last}
"""
    with agent_of(tmp_path, MonitorSettings()) as agent, started(script, tmp_path, agent.path) as rank:
        agent.begin(rank)
        assert rank.wait(patient(20)) == 0
        agent.wait_for(Times)
        assert [type(one) for one in agent.heard if isinstance(one, Returned | ControlRequest)] == [
            ControlRequest,
            Returned,
        ]


def test_the_launcher_says_how_often_to_save(tmp_path: Path) -> None:
    script = """
import ft_client as ft
assert any(ft.should_save() for _ in range(1_000_000_000))
raise ValueError("saved")
"""
    with agent_of(tmp_path, MonitorSettings(save_interval=0.2)) as agent, started(script, tmp_path, agent.path) as rank:
        agent.begin(rank)
        (error,) = agent.wait_for(RankException)
        assert (error.type, error.message) == ("ValueError", "saved")
        assert rank.wait(patient(20)) == 1
