"""Waiting for the memory of GPUs: the rule by a table, and real readings of a recorded driver."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ft_launcher.node.health.memory_reclaim import MemoryReclaim, Step, next_step
from ft_launcher.node.health.node_health import Places
from rank_monitor.contract.settings.config import StopSettings
from tests.ft_launcher.node.health.conftest import Record, row
from tests.ft_launcher.node.health.hanging_mount import hanging
from tests.patience import patient, until
from tests.program import started

SETTINGS = StopSettings(gpu_memory_reclaim_timeout=50, gpu_memory_tolerance_mb=512, gpu_memory_poll_interval=2)
LIMIT_S = patient(60.0)


@pytest.mark.parametrize(
    ("before", "now", "waited_s", "step"),
    [
        ({"GPU 0": 900}, {"GPU 0": 400}, 0, Step(None)),
        ({"GPU 0": 900}, {"GPU 0": 1412}, 0, Step(None)),
        ({"GPU 0": 900}, {"GPU 0": 1413}, 0, Step(0.1)),
        ({"GPU 0": 900}, {"GPU 0": 1413}, 0.5, Step(0.5)),
        ({"GPU 0": 900}, {"GPU 0": 1413}, 7, Step(2)),
        ({"GPU 0": 900}, {"GPU 0": 1413}, 49.5, Step(0.5)),
        ({"GPU 0": 900}, {"GPU 0": 1412}, 70, Step(None)),
        ({"GPU 0": 0, "GPU 3": 0}, {"GPU 0": 0, "GPU 3": 600}, 1, Step(1)),
        ({"GPU 0": 0}, {"GPU 1": 70000}, 1, Step(None)),
        ({"GPU 0": 0, "GPU 1": 0}, {"GPU 0": 0}, 1, Step(None)),
        ({}, {}, 0, Step(None)),
    ],
)
def test_a_reading(before: dict[str, float], now: dict[str, float], waited_s: float, step: Step) -> None:
    assert next_step(before, now, SETTINGS, waited_s) == step


def test_giving_up_names_gpu_and_memory() -> None:
    step = next_step({"GPU 0": 1, "GPU 3": 2}, {"GPU 0": 9001, "GPU 3": 802}, SETTINGS, 50.2)
    words = "50 s after the ranks ended, more is in use than before the first cycle: GPU 0 9000 MiB, GPU 3 800 MiB"
    assert step == Step(None, words)


@pytest.fixture
def in_use(tmp_path: Path) -> Path:
    """The file with the MiB in use of each GPU."""
    return tmp_path / "recorded.memory"


def memory_of(places: Places, **settings: float) -> MemoryReclaim:
    limits = {"gpu_memory_reclaim_timeout": LIMIT_S, "gpu_memory_poll_interval": 0.1, **settings}
    return MemoryReclaim(dataclasses.replace(SETTINGS, **limits), places=places)


def before_a_cycle(memory: MemoryReclaim) -> str:
    memory.begin()
    said = memory.wait()
    memory.close()
    assert not memory.pids()
    return said


def test_without_a_driver_nothing_is_started(places: Places) -> None:
    memory = memory_of(places)
    memory.begin()
    assert (memory.pids(), memory.wait()) == (set(), "")


def test_a_limit_of_nothing_starts_nothing(recorded: Record) -> None:
    memory = memory_of(recorded(row(0)), gpu_memory_reclaim_timeout=0)
    memory.begin()
    assert (memory.pids(), memory.wait()) == (set(), "")


def test_memory_that_is_back_is_not_waited_for(recorded: Record, in_use: Path) -> None:
    memory = memory_of(recorded(row(0), row(1)))
    for mib in ("100 5000", "100 5000", "600 5500"):
        in_use.write_text(mib)
        assert before_a_cycle(memory) == ""


def test_memory_is_waited_for(recorded: Record, in_use: Path) -> None:
    """A reading is made while it is in use; when it is free the wait ends, and before that it does not."""
    memory = memory_of(recorded(row(0), row(1)))
    in_use.write_text("100 100")
    assert before_a_cycle(memory) == ""
    in_use.write_text("100 70100")
    memory.begin()
    said: list[str] = []
    waiter = threading.Thread(target=lambda: said.append(memory.wait()))
    waiter.start()
    first = memory.pids()
    until_another_reading(memory, first)
    assert waiter.is_alive()
    in_use.write_text("100 100")
    waiter.join(LIMIT_S)
    assert said == [""]


def until_another_reading(memory: MemoryReclaim, first: set[int]) -> None:
    until(lambda: memory.pids() - first, "another reading", 60)


def test_memory_that_stays_in_use(recorded: Record, in_use: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")
    memory = memory_of(recorded(row(0), row(1), row(2)), gpu_memory_reclaim_timeout=0.5)
    in_use.write_text("100 100 100")
    assert before_a_cycle(memory) == ""
    in_use.write_text("70000 100 40100")
    assert before_a_cycle(memory).endswith("more is in use than before the first cycle: GPU 2 40000 MiB")


def test_the_launcher_is_told_to_end_while_it_waits(recorded: Record, in_use: Path) -> None:
    memory = memory_of(recorded(row(0)), gpu_memory_poll_interval=LIMIT_S)
    in_use.write_text("0")
    assert before_a_cycle(memory) == ""
    in_use.write_text("70000")
    memory.begin()
    waiter = threading.Thread(target=memory.wait)
    waiter.start()
    memory.close()
    waiter.join(LIMIT_S)
    assert not waiter.is_alive()


def test_a_node_that_leaves_ends_its_reading(recorded: Record) -> None:
    memory = memory_of(recorded(row(0)))
    memory.begin()
    assert memory.pids()
    memory.close()
    assert not memory.pids()


def test_a_driver_that_does_not_tell_is_asked_once(recorded: Record) -> None:
    memory = memory_of(recorded(row(0)))
    assert "GPU 0: the driver does not say how much" in before_a_cycle(memory)
    memory.begin()
    assert (memory.pids(), memory.wait()) == (set(), "")


def test_a_reading_that_fails_later_delays_nothing(recorded: Record, in_use: Path) -> None:
    memory = memory_of(recorded(row(0)))
    in_use.write_text("0")
    assert before_a_cycle(memory) == ""
    recorded(init=999)
    assert "NVML does not start" in before_a_cycle(memory)
    recorded(row(0))
    assert before_a_cycle(memory) == ""


def test_without_the_package_it_is_said_once(recorded: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = memory_of(recorded(row(0)))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "needs the package nvidia-ml-py" in before_a_cycle(memory)
    assert before_a_cycle(memory) == ""


def test_no_process_can_be_started(recorded: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = memory_of(recorded(row(0)))

    def refuse(*args: object, **more: object) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    assert "no process can be started (no more processes)" in before_a_cycle(memory)


@pytest.fixture
def hangs(tmp_path: Path) -> Iterator[str]:
    with hanging(tmp_path / "hanging"):
        yield str(tmp_path / "hanging")


def test_a_wedged_driver_is_asked_once(recorded: Record, in_use: Path, hangs: str) -> None:
    memory = memory_of(recorded(row(0)), gpu_memory_reclaim_timeout=1.0)
    in_use.write_text("0")
    assert before_a_cycle(memory) == ""
    recorded(row(0, opened=hangs))
    memory.begin()
    assert "hangs in the kernel" in memory.wait()
    (pid,) = memory.pids()
    memory.begin()
    assert f"process {pid} hangs in the kernel" in memory.wait()
    assert memory.pids() == {pid}


LAUNCHER = """
import functools, sys
from ft_launcher import composition
from ft_launcher.cli import program
from ft_launcher.node.health.memory_reclaim import MemoryReclaim
from ft_launcher.node.health.node_health import Places
composition.MemoryReclaim = functools.partial(MemoryReclaim, places=Places(nvidia=(sys.executable,)))
program()
"""
TRAIN = """
import os, pathlib, sys
cycle, in_use = os.environ["TORCHELASTIC_RESTART_COUNT"], pathlib.Path(sys.argv[1])
pathlib.Path("seen." + cycle).write_text(in_use.read_text())
if cycle == "0":
    in_use.write_text("40100")
    sys.exit(1)
"""


@pytest.mark.parametrize(("limit", "seen"), [("60", "100"), ("0.4", "40100")], ids=["given back", "kept"])
def test_a_job_whose_rank_leaves_memory_in_use(
    recorded: Record, in_use: Path, tmp_path: Path, limit: str, seen: str
) -> None:
    """The next cycle starts once the memory is given back; if it never is, after the limit, with one warning."""
    recorded(row(0))
    in_use.write_text("100")
    (tmp_path / "train.py").write_text(TRAIN)
    words = ["--max-restarts=1", f"--ft-gpu-memory-reclaim-timeout={limit}", "train.py", str(in_use)]
    output = tmp_path / "output"
    command = [sys.executable, "-c", LAUNCHER, *words]
    with output.open("wb") as file, started(command, cwd=tmp_path, stdout=file, stderr=file) as job:
        until(lambda: "next: restart" in output.read_text() or job.poll() is not None, output.read_text, 60)
        if seen == "100":
            in_use.write_text("100")
        assert job.wait(LIMIT_S) == 0, output.read_text()
    assert (tmp_path / "seen.1").read_text() == seen
    assert output.read_text().count("more is in use than before the first cycle: GPU 0 40000 MiB") == (seen != "100")
