"""Which checks are repeated while ranks run, and what counts as a change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ft_launcher.decide.health.check import State
from ft_launcher.decide.health.reading import HealthChange, Reading, changes
from ft_launcher.node.health.node_health import NodeHealth, Places, repeated
from rank_monitor.contract.processes.wait import readable
from rank_monitor.contract.settings.config import HealthSettings


@pytest.mark.parametrize(
    ("asked", "interval_s"),
    [
        ({}, None),
        ({"health": "off", "enable_nic_monitor": True, "node_health_check_interval": 3.0}, None),
        ({"enable_nic_monitor": True}, 5.0),
        ({"node_health_check_interval": 3.0}, 3.0),
        ({"enable_nic_monitor": True, "node_health_check_interval": 3.0}, 3.0),
    ],
)
def test_nothing_is_repeated_unless_it_is_asked_for(asked: dict[str, Any], interval_s: float | None) -> None:
    found = repeated(HealthSettings(**asked))
    assert (found and found.node_health_check_interval) == interval_s


ALL = HealthSettings(
    node_check="true",
    node_health_check_endpoint="line:///x",
    storage_health_check_path=("/x",),
    enable_dist_storage_healthcheck=True,
    check_remaining_processes=True,
    enable_nic_healthcheck=False,
    enable_nic_monitor=True,
    pci_topo_file="/topology",
    health_timeout=7.0,
)


def test_the_nics_alone() -> None:
    asked = repeated(ALL)
    assert asked is not None
    assert asked.enable_nic_healthcheck and asked.pci_topo_file == "/topology" and asked.health_timeout == 7.0
    assert not (asked.enable_gpu_health_check or asked.enable_dist_storage_healthcheck)
    assert not (asked.check_remaining_processes or asked.storage_health_check_path)
    assert asked.node_check is None and asked.node_health_check_endpoint is None


def test_all_checks_but_that_of_the_processes_which_are_the_ranks() -> None:
    found = repeated(HealthSettings(**(vars(ALL) | {"node_health_check_interval": 60.0})))
    assert found is not None
    same = vars(ALL) | {"node_health_check_interval": 60.0}
    assert vars(found) == same | {"enable_nic_healthcheck": True, "check_remaining_processes": False}


def reading(state: State, check: str = "nic", reason: str = "why") -> Reading:
    return Reading(check, state, reason, 0.1)


@pytest.mark.parametrize(
    ("before", "state", "changed"),
    [
        (None, "ok", False),
        (None, "not present", False),
        (None, "unhealthy", True),
        (None, "unknown", True),
        ("ok", "not present", False),
        ("ok", "unhealthy", True),
        ("unhealthy", "unhealthy", False),
        ("unhealthy", "unknown", True),
        ("unhealthy", "ok", True),
        ("unhealthy", "not present", True),
        ("warning", "unhealthy", True),
    ],
)
def test_a_change(before: State | None, state: State, changed: bool) -> None:
    known: dict[str, State] = {"nic": before} if before else {}
    found, after = changes(known, [reading(state)])
    assert found == ([HealthChange("nic", before or "ok", state, "why")] if changed else [])
    assert after == {"nic": state}


def test_two_readings_of_one_check_are_one() -> None:
    found, after = changes({}, [reading("ok", "space", ""), reading("warning", "space", "full"), reading("ok", "gpu")])
    assert found == [HealthChange("space", "ok", "warning", "full")]
    assert after == {"space": "warning", "gpu": "ok"}


def test_a_round_is_taken_piece_by_piece(places: Places) -> None:
    health = NodeHealth(HealthSettings(node_check="sleep 0.2; exit 3", health_timeout=60.0), places=places)
    assert health.next_check() is None and health.descriptors() == set()
    health.begin()
    assert not health.poll(set()) and health.next_check() is not None and len(health.pids()) == 1
    while not health.poll(readable(health.descriptors(), 60.0)):
        pass
    assert {found.check: found.state for found in health.pop()}["node_check"] == "unhealthy"
    assert health.pop() == [] and health.next_check() is None


def test_a_round_that_is_stopped_leaves_nothing(places: Places) -> None:
    health = NodeHealth(HealthSettings(node_check="sleep 3600", health_timeout=60.0), places=places)
    health.begin()
    health.stop()
    assert health.pids() == set() and health.pop() == [] and health.next_check() is None
    health.begin()
    assert len(health.pids()) == 1, "the next round does not take it for one that hangs"
    health.stop()


def test_the_repeated_checks_have_a_memory_of_their_own(places: Places) -> None:
    health = NodeHealth(HealthSettings(node_health_check_interval=2.0), places=places)
    again = health.repeated()
    assert again is not None and again is not health and again.interval_s == 2.0
    assert {found.state for found in again.check()} <= {"ok", "not present"}
    assert NodeHealth(HealthSettings(), places=places).repeated() is None


@pytest.mark.parametrize("asked", [{"enable_nic_monitor": True}, {"node_health_check_interval": 2.0}])
def test_the_launchers_folders_are_read_with_all_checks_and_not_with_the_nics_alone(
    places: Places, tmp_path: Path, asked: dict[str, Any]
) -> None:
    (tmp_path / "logs").mkdir()
    again = NodeHealth(HealthSettings(**asked), [str(tmp_path / "logs")], places=places).repeated()
    assert again is not None
    (space,) = [found for found in again.check() if found.check == "space"]
    assert (f"{tmp_path}/logs" in space.reason) == ("node_health_check_interval" in asked)
