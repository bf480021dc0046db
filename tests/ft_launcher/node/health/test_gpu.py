"""GPUs and their NVLinks: recorded states, through the pure rules and through nvidia-ml-py in the real process."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path

import pytest

from ft_launcher.decide.health.reading import Reading, node_state
from ft_launcher.node.health.gpu import Gpu, Links, finding_on_gpu, finding_on_processes, findings_on_links
from ft_launcher.node.health.node_health import NodeHealth, Places
from rank_monitor.contract.settings.config import HealthSettings
from tests.ft_launcher.node.health.conftest import Record, row
from tests.ft_launcher.node.health.hanging_mount import hanging
from tests.program import run


@pytest.mark.parametrize(
    ("gpu", "state", "reason"),
    [
        (Gpu(0, 0, 0, None, 0), "ok", ""),
        (Gpu(None, None, None, 0, None), "ok", ""),
        (Gpu(), "unknown", "GPU 3: the driver says nothing of its state"),
        (Gpu(recovery_action=1), "unhealthy", "GPU 3 needs a reset"),
        (Gpu(recovery_action=2), "unhealthy", "GPU 3 needs a reboot of the node"),
        (Gpu(recovery_action=4), "unhealthy", "GPU 3 needs to be drained and reset"),
        (Gpu(recovery_action=99), "unhealthy", "GPU 3 needs action 99"),
        (Gpu(0, remapping_failed=1), "unhealthy", "GPU 3 could not remap a row of its memory"),
        (Gpu(None, 0, 1, None, 0), "unhealthy", "in use until its next reset"),
        (Gpu(None, None, None, 1, 0), "unhealthy", "in use until its next reset"),
        (Gpu(None, 0, 0, 0, 2), "unhealthy", "counts 2 uncorrected memory errors"),
        (Gpu(0, 0, 0, None, 2), "ok", "counts 2 uncorrected memory errors"),
        (Gpu(0, 0, 1, None, 0), "ok", "in use until its next reset"),
    ],
)
def test_the_state_of_a_gpu(gpu: Gpu, state: str, reason: str) -> None:
    found, said = finding_on_gpu("GPU 3", gpu)
    assert found == state
    assert reason in said


def links(kind: str, *active: int) -> Links:
    return Links(kind, frozenset(active))


@pytest.mark.parametrize(
    ("gpus", "before", "found"),
    [
        ({}, {}, []),
        ({"a": links("x", 0, 1), "b": links("x", 0, 1)}, {}, ["ok", "ok"]),
        ({"a": links("x", 0, 1), "b": links("x", 1)}, {}, ["ok", "unhealthy: b has 1 active NVLinks, others of its"]),
        ({"a": links("x", 0, 1), "b": links("y", 1)}, {}, ["ok", "ok"]),
        ({"a": links("x", 0), "b": links("x")}, {}, ["ok"]),
        ({"a": links("x"), "b": links("x")}, {}, []),
        ({"a": links("x", 0)}, {"a": frozenset({0, 3, 5})}, ["unhealthy: a: NVLink 3, 5 went down"]),
        ({"a": links("x")}, {"a": frozenset({2})}, ["unhealthy: a: NVLink 2 went down"]),
        ({"a": links("x", 0, 1)}, {"a": frozenset({0}), "b": frozenset({0})}, ["ok"]),
    ],
)
def test_links(gpus: dict[str, Links], before: dict[str, frozenset[int]], found: list[str]) -> None:
    said = [f"{state}: {reason}" for state, reason in findings_on_links(gpus, before)]
    assert [one.startswith(expected) for one, expected in zip(said, found, strict=True)] == [True] * len(found)


@pytest.mark.parametrize(
    ("commands", "state", "reason"),
    [
        ({}, "ok", ""),
        ({71: "python", 9: ""}, "warning", "GPU 0 is in use by processes that are not of this job: 9, 71 (python)"),
        (dict.fromkeys(range(7), "x"), "warning", "0 (x), 1 (x), 2 (x), 3 (x), 3 more"),
    ],
)
def test_processes_on_a_gpu(commands: dict[int, str], state: str, reason: str) -> None:
    found, said = finding_on_processes("GPU 0", commands)
    assert found == state and said.endswith(reason)


def test_processes_of_others_are_a_warning(recorded: Record, tmp_path: Path) -> None:
    places = recorded(row(0), row(1))
    asked = HealthSettings(check_remaining_processes=True, health_timeout=60.0)

    def reading() -> Reading:
        (found,) = (one for one in NodeHealth(asked, places=places).check() if one.check == "gpu_processes")
        return found

    assert (reading().state, "does not say" in reading().reason) == ("unknown", True)
    processes = tmp_path / "recorded.processes"
    processes.write_text(f"0 {os.getpid()}\n")
    assert reading().state == "ok", "the launcher's own"
    processes.write_text("1 4294967295\n1 1\n")
    found = reading()
    assert found.state == "warning" and re.search(r"GPU 1 is in use .*: 1 \(.+\), 4294967295$", found.reason)
    assert node_state([found]).healthy


def gpu_readings(health: NodeHealth) -> dict[str, Reading]:
    return {reading.check: reading for reading in health.check() if reading.check in ("gpu", "nvlink")}


def states(places: Places, **settings: float) -> list[tuple[str, str]]:
    found = gpu_readings(NodeHealth(HealthSettings(**{"health_timeout": 60.0, **settings}), places=places))  # type: ignore[arg-type]
    return [(found[check].state, found[check].reason) for check in ("gpu", "nvlink")]


def test_healthy_gpus(recorded: Record) -> None:
    assert states(recorded(row(0), row(1))) == [("ok", ""), ("ok", "")]


def test_an_old_driver_without_links(recorded: Record) -> None:
    old = row(0, state="-1 -1 -1 0 0", active="------")
    assert states(recorded(old)) == [("ok", ""), ("not present", "no active NVLink")]


def test_a_gpu_that_needs_a_reset(recorded: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    places = recorded(row(0), row(1, state="1 0 0 -1 3", active="1101--"))
    bad = [("unhealthy", "GPU 1 needs a reset"), ("unhealthy", "GPU 1 has 3 active NVLinks, others of its kind 4")]
    assert states(places) == bad
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert states(places) == [("ok", ""), ("ok", "")]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-11")
    assert states(places) == [bad[0], ("ok", "")]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,5")
    assert states(places)[0] == ("unknown", "CUDA_VISIBLE_DEVICES says 5, which names no GPU that NVML lists")


def test_a_gpu_that_fell_off_the_bus(recorded: Record) -> None:
    assert states(recorded(row(0), row(1, opened="15")))[0] == ("unhealthy", "GPU 1: the driver has lost it")
    lost_later = row(1).replace("GPU-11", "lost")
    assert states(recorded(row(0), lost_later))[0] == ("unhealthy", "GPU 1: the driver has lost it")


def test_a_link_that_went_down(recorded: Record) -> None:
    health = NodeHealth(HealthSettings(health_timeout=60.0), places=recorded(row(0), row(1)))
    assert gpu_readings(health)["nvlink"].state == "ok"
    recorded(row(0, active="1110--"), row(1, active="1110--"))
    for _ in range(2):
        found = gpu_readings(health)["nvlink"]
        assert (found.state, found.reason) == ("unhealthy", "GPU 0: NVLink 3 went down; GPU 1: NVLink 3 went down")
    recorded(row(0), row(1))
    assert gpu_readings(health)["nvlink"].state == "ok"


@pytest.mark.parametrize(("init", "state"), [(9, "not present"), (18, "unknown"), (999, "unknown")])
def test_nvml_that_does_not_start(recorded: Record, init: int, state: str) -> None:
    assert [found for found, _ in states(recorded(init=init))] == [state, state]


def test_a_wedged_driver(recorded: Record, tmp_path: Path) -> None:
    """Its check hangs in the kernel, which says enough; the agent does not."""
    with hanging(tmp_path / "hanging") as hangs:
        places = recorded(row(0), row(1, opened=str(tmp_path / "hanging")))
        gpu, nvlink = states(places, health_timeout=3.0)
        assert hangs.is_set()
    for state, reason in (gpu, nvlink):
        assert state == "unhealthy"
        assert "the last it said: opening GPU 1; process" in reason


def test_a_driver_without_its_library(places: Places, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pynvml")
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    if run(["ldconfig", "-p"]).stdout.count("libnvidia-ml"):
        pytest.skip("there is a driver here")
    found = states(dataclasses.replace(places, nvidia=(str(tmp_path),)))
    assert [state for state, _ in found] == ["unknown", "unknown"]
    assert "NVML does not start" in found[0][1]


def test_without_the_package(places: Places, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    found = NodeHealth(HealthSettings(), places=dataclasses.replace(places, nvidia=(str(tmp_path),))).check()
    assert [(one.state, one.reason) for one in found if one.check in ("gpu", "nvlink")] == [
        ("unknown", "needs the package nvidia-ml-py, which is not installed")
    ] * 2


def test_switched_off(places: Places, tmp_path: Path) -> None:
    settings = HealthSettings(enable_gpu_health_check=False, enable_nic_healthcheck=False)
    found = NodeHealth(settings, places=dataclasses.replace(places, nvidia=(str(tmp_path),))).check()
    assert [one.check for one in found] == ["space"]
