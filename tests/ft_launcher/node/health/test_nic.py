"""NICs, on trees of files as the kernel shows them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from ft_launcher.decide.health.reading import Reading
from ft_launcher.node.health.nic import findings_on_drops, findings_on_states
from ft_launcher.node.health.node_health import NodeHealth, Places
from rank_monitor.contract.settings.config import HealthSettings

TOPOLOGY = """<?xml version="1.0"?>
<system version="1"><cpu numaid="0"><pci busid="FFFF:FF:01.0">
  <pci busid="0000:19:00.0" class="0x030200"/><pci busid="0000:1A:00.0" class="0x020700"/>
  <pci busid="0000:29:00.0" class="0x030200"/><pci busid="0000:2A:00.0" class="0x020700"/>
</pci></cpu></system>
"""


class Node:
    """NICs mlx5_0 and mlx5_1 at buses 1a and 2a, and GPUs at 19 and 29."""

    def __init__(self, root: Path, places: Places) -> None:
        self.infiniband = root / "infiniband"
        self.places = dataclasses.replace(places, infiniband=str(self.infiniband), gpus=str(root / "gpus"))
        for number, bus in enumerate(("0000:1a:00.0", "0000:2a:00.0")):
            (root / "pci" / bus).mkdir(parents=True)
            (self.port(number) / "counters").mkdir(parents=True)
            (self.infiniband / f"mlx5_{number}" / "device").symlink_to(root / "pci" / bus)
            self.set(number, "4: ACTIVE", 0)
        for bus, uuid in (("0000:19:00.0", "GPU-aa"), ("0000:29:00.0", "GPU-bb")):
            (root / "gpus" / bus).mkdir(parents=True)
            (root / "gpus" / bus / "information").write_text(
                f"Model: \t H100\nGPU UUID: \t {uuid}\nBus Type: \t PCIe\n"
            )

    def port(self, number: int) -> Path:
        return self.infiniband / f"mlx5_{number}" / "ports" / "1"

    def set(self, number: int, state: str, downed: int) -> None:
        (self.port(number) / "state").write_text(f"{state}\n")
        (self.port(number) / "counters" / "link_downed").write_text(f"{downed}\n")

    def health(self, **settings: str) -> NodeHealth:
        return NodeHealth(HealthSettings(health_timeout=60.0, **settings), places=self.places)  # type: ignore[arg-type]


@pytest.fixture
def node(tmp_path: Path, places: Places, monkeypatch: pytest.MonkeyPatch) -> Node:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return Node(tmp_path, places)


def nic(health: NodeHealth) -> Reading:
    (found,) = [reading for reading in health.check() if reading.check == "nic"]
    return found


@pytest.mark.parametrize(
    ("states", "known", "needed", "found"),
    [
        ({"a": "ACTIVE", "b": "up"}, [], {}, ["ok", "ok"]),
        ({"a": "DOWN"}, [], {}, []),
        ({"a": "DOWN"}, ["a"], {}, ["unhealthy"]),
        ({"a": "INIT"}, [], {"a": "serves GPU x"}, ["unhealthy"]),
        ({"a": None}, ["a"], {}, ["unknown"]),
        ({}, ["a"], {}, ["unhealthy"]),
    ],
)
def test_states(states: dict[str, str | None], known: list[str], needed: dict[str, str], found: list[str]) -> None:
    assert [state for state, _ in findings_on_states(states, known, needed)] == found


def test_drops() -> None:
    findings, memory = findings_on_drops({"a": 3}, {})
    assert (findings, memory) == ([], {"a": [3, 0]})
    findings, memory = findings_on_drops({"a": 4}, memory)
    assert findings == [("ok", "a rose from 3 to 4")]
    assert findings_on_drops({"a": 4}, memory) == ([], {"a": [4, 0]})
    findings, memory = findings_on_drops({"a": 6}, memory)
    assert findings == [("unhealthy", "a rose from 4 to 6, 2 checks in a row")]
    assert findings_on_drops({"a": 0}, memory) == ([], {"a": [0, 0]})


def test_ports_that_stay_active(node: Node) -> None:
    health = node.health()
    assert [nic(health).state for _ in range(2)] == ["ok", "ok"]


def test_a_port_that_goes_down_and_comes_back(node: Node) -> None:
    health = node.health()
    assert nic(health).state == "ok"
    node.set(1, "1: DOWN", 1)
    found = nic(health)
    assert (found.state, found.reason) == ("unhealthy", f"{node.port(1)}/state is DOWN; it was active before")
    node.set(1, "4: ACTIVE", 1)
    assert nic(health).state == "ok"


def test_a_port_that_flaps(node: Node) -> None:
    health = node.health()
    assert nic(health).state == "ok"
    node.set(0, "4: ACTIVE", 1)
    found = nic(health)
    assert (found.state, found.reason) == ("ok", f"{node.port(0)}/counters/link_downed rose from 0 to 1")
    node.set(0, "4: ACTIVE", 2)
    assert nic(health).state == "unhealthy"


def test_a_port_without_a_cable(node: Node) -> None:
    node.set(1, "1: DOWN", 0)
    assert nic(node.health()).state == "ok"


def test_a_nic_that_is_gone(node: Node) -> None:
    health = node.health()
    assert nic(health).state == "ok"
    node.infiniband.rename(node.infiniband.with_name("away"))
    node.infiniband.mkdir()
    found = nic(health)
    assert found.state == "unhealthy"
    assert "is gone; it was active before" in found.reason


def test_a_nic_that_serves_a_gpu_must_be_active(node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "topo.xml").write_text(TOPOLOGY)
    node.set(1, "1: DOWN", 0)
    health = node.health(pci_topo_file=str(tmp_path / "topo.xml"))
    found = nic(health)
    assert (found.state, found.reason) == ("unhealthy", f"{node.port(1)}/state is DOWN; it serves GPU 0000:29:00.0")
    for of_the_other in ("0", "GPU-aa"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", of_the_other)
        assert nic(health).state == "ok"


@pytest.mark.parametrize("text", [None, "<cpu", "GPU0 NIC0"])
def test_a_topology_that_cannot_be_read(node: Node, tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "topo.xml").write_text(text)
    found = nic(node.health(pci_topo_file=str(tmp_path / "topo.xml")))
    assert found.state == "unknown"
    assert "pci_topo_file" in found.reason


def test_templates(node: Node, tmp_path: Path) -> None:
    for number, (state, downed) in enumerate((("up", "0"), ("up", "5"))):
        (tmp_path / f"state.mlx5_{number}").write_text(state)
        (tmp_path / f"downed.mlx5_{number}").write_text(downed)
    node.set(0, "1: DOWN", 0)
    health = node.health(
        link_state_path_template=f"{tmp_path}/state.{{nic}}", link_down_path_template=f"{tmp_path}/downed.{{nic}}"
    )
    assert nic(health).state == "ok"
    (tmp_path / "state.mlx5_1").write_text("down")
    (tmp_path / "downed.mlx5_0").write_text("not a number")
    found = nic(health)
    assert (found.state, found.reason) == ("unhealthy", f"{tmp_path}/state.mlx5_1 is down; it was active before")
