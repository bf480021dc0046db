"""Limits loaded, learned and multiplied: what the client shows, and what the monitor is told."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from ft_client import RankMonitorClient, RankMonitorClientError
from rank_monitor.contract import env
from rank_monitor.contract.settings.config import MonitorSettings
from rank_monitor.contract.wire.messages import LimitsSet
from tests.client.fake_monitor import FakeMonitor
from tests.client.story import STATE, connected_anew


def learned_step(limit: float) -> dict[str, Any]:
    """A state in which the limit of section `step` was learned."""
    return {"current_timeouts": {"section": {"section": {"step": limit}, "calculated_sections": ["step"]}}}


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


BAD_STATES = {
    "another version": ({"version": 9, "limits": {"step": 1}}, "it has no current_timeouts"),
    "another form": ({"current_timeouts": 1}, "current_timeouts is not a mapping"),
    "negative": (learned_step(-1.0), "section:step is -1.0, not a finite number above zero"),
    "huge": (learned_step(1e300), "section:step is 1e\\+300, not a finite number above zero, at most 1e\\+08"),
}


@pytest.mark.parametrize("case", BAD_STATES)
def test_a_state_that_makes_no_sense_is_left_out_with_one_warning(
    monitor: FakeMonitor, caplog: pytest.LogCaptureFixture, case: str
) -> None:
    monitor.settings = MonitorSettings(rank_section_timeouts={"step": 180.0})
    state, problem = BAD_STATES[case]
    client = RankMonitorClient()
    client.load_state_dict(state)
    client.init_workload_monitoring()
    assert client.section_timeouts is not None
    assert client.section_timeouts.section == {"step": 180.0}
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert re.search(problem, said)


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


def test_an_empty_state_is_no_warning(monitor: FakeMonitor, caplog: pytest.LogCaptureFixture) -> None:
    client = RankMonitorClient()
    client.load_state_dict({})
    client.init_workload_monitoring()
    assert not caplog.records


def test_limits_are_not_learned_while_a_section_waits_for_its_first_end(
    monitor: FakeMonitor, client: RankMonitorClient
) -> None:
    """As the peer: afterwards, the intervals that have ended count, also while it is open again."""
    client.start_section("one")
    with client.section("two"):
        pass
    for selected in (None, ["one"], ["one", "two"]):
        with pytest.raises(RankMonitorClientError, match="still open are section:one"):
            client.calculate_and_set_section_timeouts(selected)
        assert not client.calculate_and_set_section_timeouts(selected, skip_if_not_ready=True)
    assert client.section_timeouts is not None
    assert not client.section_timeouts.calculated_sections
    assert client.calculate_and_set_section_timeouts(["two"], calc_out_of_section=False)
    client.end_section("one")
    client.start_section("one")
    assert client.calculate_and_set_section_timeouts()
    assert client.section_timeouts.calculated_sections == ("one", "two")


def test_more_limits_than_a_message_holds_are_a_warning(
    monitor: FakeMonitor, client: RankMonitorClient, caplog: pytest.LogCaptureFixture
) -> None:
    many = [f"section number {number}" for number in range(3000)]
    section = {"section": dict.fromkeys(many, 50.0), "calculated_sections": many}
    client.load_state_dict({"current_timeouts": {"section": section}})
    assert "the monitor keeps its limits" in caplog.text
    assert connected_anew(monitor, client) == ["Hello"]
