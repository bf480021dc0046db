"""The runner with real processes: in time, late, stopped, crashing, and hanging where SIGKILL does not reach."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from ft_launcher.decide.health.check import CHECKS
from ft_launcher.decide.health.reading import Reading, node_state
from ft_launcher.node.health.node_health import NodeHealth, Places
from rank_monitor.contract import env
from rank_monitor.contract.settings.config import HealthSettings
from tests.ft_launcher.node.health.conftest import descriptors
from tests.ft_launcher.node.health.hanging_mount import hanging
from tests.patience import until
from tests.program import run

ROOT = Path(__file__).resolve().parents[4]
Check = Callable[..., Reading]


def test_nothing_is_started_where_there_is_nothing_to_check(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ft_launcher.node.health.check_process.CheckProcess", None)
    found = NodeHealth(HealthSettings(), places=places).check()
    assert {reading.check: reading.state for reading in found} == {
        "gpu": "not present",
        "nvlink": "not present",
        "nic": "not present",
        "space": "ok",
    }
    assert node_state(found).healthy


def test_off_means_off(places: Places) -> None:
    assert NodeHealth(HealthSettings(health="off", node_check="exit 1"), places=places).check() == []


@pytest.mark.parametrize(
    ("command", "state", "reason"),
    [
        ("true", "ok", ""),
        ("echo all fine", "ok", "all fine"),
        ("echo fan 3 stands >&2; exit 4", "unhealthy", "exit code 4: fan 3 stands"),
        ("kill -SEGV $$", "unhealthy", "died of SIGSEGV"),
        ("no-such-command-of-ours", "unhealthy", "exit code 127: "),
        ("head -c 3000000 /dev/zero | tr '\\0' 'x'; echo; echo end", "ok", "end"),
        ("read line; exit 0", "ok", ""),
        ("sleep 3600 & exit 0", "ok", ""),
        ("(sleep 3600 >/dev/null 2>&1) & echo started; exit 3", "unhealthy", "exit code 3: started"),
    ],
)
def test_own_command(reading_of: Check, command: str, state: str, reason: str) -> None:
    reading = reading_of("node_check", node_check=command)
    assert reading.state == state
    assert reading.reason.startswith(reason)


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("echo still here; sleep 3600", "no answer within"),
        ("trap '' TERM INT HUP; sleep 3600 & wait; sleep 3600", "no answer within"),
        ("kill -STOP $$", "no answer within"),
        ("yes", "the last it said: y"),
    ],
)
def test_own_command_that_does_not_end(reading_of: Check, command: str, reason: str) -> None:
    reading = reading_of("node_check", node_check=command, health_timeout=1.0)
    assert reading.state == "unhealthy"
    assert reason in reading.reason


def test_a_command_that_cannot_be_started(reading_of: Check) -> None:
    reading = reading_of("node_check", node_check="a\0b")
    assert (reading.state, reading.took_s) == ("unknown", 0.0)
    assert reading.reason.startswith("no process can be started")


def test_all_run_at_the_same_time(places: Places, tmp_path: Path) -> None:
    """The command ends only once the storage check's file was seen, and the other way round it would never be."""
    seen = f"cd {tmp_path}; until ls -A | grep -q ft_health; do :; done; exit 0"
    settings = HealthSettings(node_check=seen, storage_health_check_path=(str(tmp_path),), health_timeout=60.0)
    (tmp_path / ".ft_health_of_this_test").touch()
    assert node_state(NodeHealth(settings, places=places).check()).healthy


def test_processes_carry_the_tag_and_leave_no_descriptor(places: Places) -> None:
    settings = HealthSettings(node_check=f'test "${env.JOB_TAG}" = abc', health_timeout=60.0)
    health = NodeHealth(settings, tag="abc", places=places)
    before = descriptors()
    for _ in range(3):
        assert node_state(health.check()).healthy
    assert descriptors() <= before, "what an earlier test left to the garbage collector may have gone meanwhile"
    assert health.pids() == set()


def test_close_ends_a_check_that_runs(places: Places) -> None:
    health = NodeHealth(HealthSettings(node_check="echo; sleep 3600", health_timeout=600.0), places=places)
    found: list[Reading] = []
    aside = threading.Thread(target=lambda: found.extend(health.check()))
    aside.start()
    until(health.pids, "the process of the check")
    health.close()
    aside.join(60)
    assert [reading.reason for reading in found if reading.check == "node_check"] == ["died of SIGKILL"]


def test_a_check_that_hangs_in_the_kernel_is_left_behind(places: Places, tmp_path: Path) -> None:
    """It is reported and not waited for; the next round starts no second one; when it is let go, all is well again."""
    point = tmp_path / "hanging"
    settings = HealthSettings(storage_health_check_path=(str(point),), node_check="true", health_timeout=3.0)
    health = NodeHealth(settings, places=places)
    with hanging(point) as hangs:
        first = {reading.check: reading for reading in health.check()}
        assert hangs.is_set()
        (pid,) = health.pids()
        assert psutil.Process(pid).status() == psutil.STATUS_DISK_SLEEP
        assert first["storage"].state == "unhealthy"
        assert f"the last it said: {point}; process {pid} hangs in the kernel" in first["storage"].reason
        assert first["node_check"].state == "ok"
        again = {reading.check: reading for reading in health.check()}
        assert again["storage"].state == "unhealthy"
        assert health.pids() == {pid}
    until(lambda: psutil.Process(pid).status() == psutil.STATUS_ZOMBIE, "the end of the process that hung")
    assert node_state(health.check()).healthy
    assert health.pids() == set()


def test_the_process_of_a_check_is_lean() -> None:
    """It loads its own file and that of the check, and neither the runner nor anything outside the standard library."""
    defined = {
        (f"ft_launcher.node.health.{file.stem}", function)
        for file in (ROOT / "ft_launcher/node/health").glob("*.py")
        for function in re.findall(r"^def (check\w*)\(task: Task", file.read_text(), re.MULTILINE)
    }
    assert set(CHECKS.values()) == defined
    for module in {module for module, _ in CHECKS.values()}:
        packages = {"ft_launcher", "ft_launcher.decide", "ft_launcher.node"}
        packages |= {"ft_launcher.decide.health", "ft_launcher.node.health"}
        ours = {*packages, "ft_launcher.decide.health.check", module}
        code = (
            f"import sys; sys.path.append({str(ROOT)!r}); import ft_launcher.decide.health.check, {module}\n"
            "found = {name for name in sys.modules if name.startswith(('ft_launcher', 'rank_monitor'))}\n"
            f"assert found == {ours!r}, found\n"
            "assert not {'torch', 'numpy', 'subprocess', 'asyncio'} & set(sys.modules)"
        )
        run([sys.executable, "-I", "-S", "-c", code], check=True)
