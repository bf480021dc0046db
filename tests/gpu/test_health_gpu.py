"""The checks of GPUs before a cycle, with the driver of this machine."""

from __future__ import annotations

import pytest

from ft_launcher.node.health.memory_reclaim import MemoryReclaim
from ft_launcher.node.health.node_health import NodeHealth
from rank_monitor.contract.settings.config import HealthSettings, StopSettings

pytestmark = pytest.mark.gpu


def test_the_driver_answers_every_check() -> None:
    pytest.importorskip("pynvml", reason="needs nvidia-ml-py")
    readings = {reading.check: reading for reading in NodeHealth(HealthSettings()).check()}
    for check in ("gpu", "nvlink"):
        reading = readings[check]
        print(f"{check}: {reading.state} {reading.reason} after {reading.took_s:.2f} s")
    assert readings["gpu"].state == "ok"
    assert readings["nvlink"].state in ("ok", "not present")


def test_the_memory_in_use_can_be_read() -> None:
    pytest.importorskip("pynvml", reason="needs nvidia-ml-py")
    memory = MemoryReclaim(StopSettings())
    for _ in range(2):
        memory.begin()
        assert memory.pids()
        assert memory.wait() == ""
