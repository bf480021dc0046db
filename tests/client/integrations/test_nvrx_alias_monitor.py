"""Monitors that a script starts by itself, at a socket of its choosing: real ones, without our launcher."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ft_client.integrations.nvrx_alias.config import FaultToleranceConfig
from ft_client.integrations.nvrx_alias.rank_monitor_server import RankMonitorServer
from rank_monitor.contract import env
from rank_monitor.contract.errors import ConfigError, FtError
from tests.patience import patient, until
from tests.program import clean_environment, ended, started

PROGRAM = Path(__file__).with_name("own_monitors.py")
MARK = "OWN_MONITORS_TEST"
LIMIT_S = 120


@contextlib.contextmanager
def program(folder: Path, *words: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """The program; whatever of it is left in the end fails the test, and is killed."""
    mark = uuid.uuid4().hex
    environ = clean_environment(**{env.ALIAS_NVRX: "1", MARK: mark, "TMPDIR": str(folder)}, **variables)
    with started([sys.executable, PROGRAM, folder / "socket", *words], env=environ) as process:
        try:
            yield process
            until(lambda: not marked(mark), "everything has ended")
            until(lambda: not list(folder.glob("ft-*")), "the runtime folder is gone")
        finally:
            for one in marked(mark):
                one.kill()


def marked(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def test_ranks_that_come_one_after_the_other_are_each_watched(tmp_path: Path) -> None:
    """A hang is ended by the limit of the configuration; the variables of our settings apply."""
    variables = {env.of_setting("learned_limit_floor"): "3.5", env.of_setting("initial_rank_heartbeat_timeout"): "90"}
    with program(tmp_path, "hangs", "trains", "learns", "hangs", **variables) as process:
        _, out, err = ended(process, limit_s=LIMIT_S)
        assert out.splitlines() == ["hangs -9", "trains 0", "2.0 3.5", "learns 0", "hangs -9", "monitor 0 False"], err
        assert err.count("Did not get subsequent heartbeat. Waited 2.0") == 2, "no limit of a rank before is left"


def test_everything_ends_with_the_program(tmp_path: Path) -> None:
    with program(tmp_path, "waits") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waits\n"
        process.send_signal(signal.SIGKILL)
        process.wait(patient(LIMIT_S))
        until(lambda: not (tmp_path / "socket").exists(), "the socket is gone")


def test_a_place_that_cannot_be_had_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as taken:
        taken.bind(str(path))
        taken.listen()
        with pytest.raises(FtError, match="another monitor listens"):
            RankMonitorServer.run_in_subprocess(FaultToleranceConfig(), str(path))
    with pytest.raises(FtError, match=r"cannot be started: .*No such file"):
        RankMonitorServer.run_in_subprocess(FaultToleranceConfig(), str(tmp_path / "none" / "socket"))
    process = RankMonitorServer.run_in_subprocess(FaultToleranceConfig(), str(path))  # what is left there is no monitor
    process.terminate()
    process.join(patient(LIMIT_S))
    assert process.exitcode == 0 and not path.exists()


def test_a_variable_that_is_wrong_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(env.of_setting("safety_factor"), "little")
    with pytest.raises(ConfigError, match=r"safety_factor='little' \(from FT_SAFETY_FACTOR\)"):
        RankMonitorServer.run_in_subprocess(FaultToleranceConfig(), str(tmp_path / "socket"))
