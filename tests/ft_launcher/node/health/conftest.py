"""What every test of the checks wants: no process of theirs is left, and a node with nothing to check."""

from __future__ import annotations

import dataclasses
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from ft_launcher.decide.health.reading import Reading
from ft_launcher.node.health.node_health import NodeHealth, Places
from rank_monitor.contract.settings.config import HealthSettings
from tests.program import run

Record = Callable[..., Places]
"""Rows of GPUs -> a node with a driver that says so."""

_SOURCE = Path(__file__).with_name("recorded_nvml.c")
_GONE_S = 20.0


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No process that a check started is there after the test."""
    before = set(psutil.Process().children(recursive=True))
    yield
    deadline = time.monotonic() + _GONE_S
    while left := [child for child in set(psutil.Process().children(recursive=True)) - before if _lives(child)]:
        assert time.monotonic() < deadline, f"left over: {left}"
        time.sleep(0.02)


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def places(tmp_path: Path) -> Places:
    """A node without driver, InfiniBand and mounts."""
    (tmp_path / "mountinfo").write_text("")
    nowhere = str(tmp_path / "nowhere")
    return Places((nowhere,), nowhere, nowhere, str(tmp_path / "mountinfo"), str(tmp_path))


@pytest.fixture
def reading_of(places: Places) -> Callable[..., Reading]:
    """Settings -> the reading of the one check that they ask for."""

    def check(name: str, places: Places = places, **settings: Any) -> Reading:
        health = NodeHealth(HealthSettings(**{"health_timeout": 60.0, **settings}), places=places)
        (found,) = [reading for reading in health.check() if reading.check == name]
        return found

    return check


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a library that answers as the driver's does."""
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler for the library that answers with recorded readings")
    folder = tmp_path_factory.mktemp("nvml")
    command = ["cc", "-shared", "-fPIC", "-o", str(folder / "libnvidia-ml.so.1"), str(_SOURCE)]
    run(command, limit_s=120, check=True)
    return folder


@pytest.fixture
def recorded(library: Path, places: Places, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Record:
    """Rows of GPUs -> a node with a driver that says so."""
    pytest.importorskip("pynvml")
    record = tmp_path / "recorded"
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{library}:{os.environ.get('LD_LIBRARY_PATH', '')}")
    monkeypatch.setenv("RECORDED_NVML", str(record))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def write(*gpus: str, init: int = 0) -> Places:
        record.write_text("\n".join([str(init), *gpus]))
        return dataclasses.replace(places, nvidia=(str(record),))

    return write


def row(number: int, opened: str = "0", state: str = "0 0 0 -1 0", active: str = "1111--") -> str:
    return f"GPU-{number}{number} H100 {opened} {state} {active}"


def descriptors() -> int:
    """How many files this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))
