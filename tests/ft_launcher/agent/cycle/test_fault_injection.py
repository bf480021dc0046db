"""What the launcher makes of faults on purpose: how it is asked, what it hears from ranks, and what it does."""

from __future__ import annotations

import json
import logging
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ft_launcher.agent.cycle.fault_injection import Injected
from ft_launcher.record.logs.logs import RunFolder
from ft_launcher.record.recorder import Recorder
from ft_launcher.settings import command_line
from rank_monitor.contract.processes.wait import readable
from rank_monitor.contract.settings import injection
from rank_monitor.contract.settings.config import RecordSettings
from rank_monitor.contract.settings.injection import InjectionReport
from rank_monitor.contract.wire import channel
from tests.nodes.conftest import require
from tests.nodes.netns import unavailable
from tests.patience import patient
from tests.program import run

GONE_S = patient(30.0)
FAULTS = ("kind:kill_monitor", "kind:sleep")


class Monitors:
    """A node whose second rank has a monitor: a process of the test's."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(["sleep", "1000"])
        self.local_ranks = range(3)

    def pid(self, local_rank: int) -> int:
        return self.process.pid if local_rank == 1 else 0


class Zygotes:
    """Where ranks start by exec."""

    def pids(self) -> set[int]:
        return set()


@pytest.fixture
def monitors() -> Iterator[Monitors]:
    node = Monitors()
    yield node
    node.process.kill()
    node.process.wait()


@pytest.fixture
def injected(tmp_path: Path) -> Iterator[Injected]:
    one = Injected(FAULTS, tmp_path / "m0", no_python=False)
    yield one
    one.close()


def tell(folder: Path, *data: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as rank:
        for one in data:
            rank.sendto(one, str(injection.socket_beside(folder / "m3")))


def poll(injected: Injected, folder: Path, monitors: Monitors) -> list[dict[str, object]]:
    """What the journal says of faults on purpose after the launcher polled the reports."""
    recorder = Recorder(RunFolder(None, "run"), RecordSettings(journal_dir=str(folder)))
    injected.poll(2, recorder, monitors, Zygotes())  # type: ignore[arg-type]
    assert recorder.journal.flush(patient(30.0)) and recorder.journal.path is not None
    lines = map(json.loads, recorder.journal.path.read_text().splitlines())
    return [line for line in lines if line["event"] == "fault_on_purpose"]


def test_a_flood_is_said_once_and_keeps_the_launcher_from_nothing(
    injected: Injected, tmp_path: Path, monitors: Monitors, caplog: pytest.LogCaptureFixture
) -> None:
    """A rank sends as fast as it can, while the launcher polls: each turn ends, and 5,000 datagrams are 3 lines."""
    flood = subprocess.Popen([sys.executable, "-c", FLOOD, str(injection.socket_beside(tmp_path / "m0"))])
    recorder = Recorder(RunFolder(None, "run"), RecordSettings())
    while flood.poll() is None or readable(injected.descriptors(), 0.0):
        injected.poll(2, recorder, monitors, Zygotes())  # type: ignore[arg-type]
    assert flood.returncode == 0
    lines = [record.getMessage() for record in caplog.records]
    assert len([line for line in lines if "cannot be read" in line]) == 2, lines
    assert len([line for line in lines if "local rank 7, which is not here" in line]) == 1, lines
    assert len(lines) == 3, lines


FLOOD = """
import socket, sys
rank = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
for number in range(5000):
    rank.sendto(b"garbage" if number % 10 else b'{"fault":"kind:sleep","rank":7,"local_rank":7,"at":""}', sys.argv[1])
"""


def test_reports_of_one_rank_are_bounded(
    injected: Injected, tmp_path: Path, monitors: Monitors, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ft_launcher.agent.cycle.fault_injection._MAX_REPORTS", 2)
    tell(tmp_path, *[InjectionReport("kind:sleep", 1, 1, "").encode()] * 5)
    assert len(poll(injected, tmp_path, monitors)) == 2


def test_a_long_runtime_folder(tmp_path: Path, monitors: Monitors) -> None:
    """A path of a Unix socket has at most 107 bytes, and TMPDIR may be longer than that."""
    folder = tmp_path / ("d" * 150)
    folder.mkdir()
    injected = Injected(FAULTS, folder / "m0", no_python=False)
    address = channel.short_address(injection.socket_beside(folder / "m3"))
    with address as name, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as rank:
        rank.sendto(InjectionReport("kind:sleep", 1, 1, "").encode(), name)
    assert [line["rank"] for line in poll(injected, tmp_path, monitors)] == [1]
    injected.close()


def test_options_add_up() -> None:
    words = ["--ft-inject", "kind:sleep", "--ft_inject=kind:nan", "--ft-param-inject", "kind:oom;kind:exit", "x.py"]
    assert command_line.parse(words).texts == {"inject": "kind:sleep;kind:nan;kind:oom;kind:exit"}


def test_a_monitor_is_killed_and_the_journal_says_so(injected: Injected, tmp_path: Path, monitors: Monitors) -> None:
    told = InjectionReport("kind:kill_monitor", 5, 1, "at step 3")
    tell(tmp_path, told.encode())
    (line,) = poll(injected, tmp_path, monitors)
    assert {"cycle": 2, **vars(told)}.items() <= line.items()
    assert monitors.process.wait(GONE_S) == -signal.SIGKILL


def test_a_fault_of_the_rank_is_only_written_down(injected: Injected, tmp_path: Path, monitors: Monitors) -> None:
    tell(tmp_path, *(InjectionReport("kind:sleep", rank, rank, "").encode() for rank in range(3)))
    assert [line["rank"] for line in poll(injected, tmp_path, monitors)] == [0, 1, 2]
    assert monitors.process.poll() is None


def test_what_cannot_be_done_is_said(
    injected: Injected, tmp_path: Path, monitors: Monitors, caplog: pytest.LogCaptureFixture
) -> None:
    cut = InjectionReport("kind:cut_network,interface:nosuch", 0, 0, "")
    nonsense = (b"\xff", b"{}", InjectionReport("kind:x", 0, 0, "").encode())
    tell(tmp_path, *nonsense, InjectionReport("kind:kill_zygote", 0, 0, "").encode(), cut.encode())
    with caplog.at_level(logging.WARNING, "ft_launcher"):
        logging.getLogger("ft_launcher").propagate = True
        assert len(poll(injected, tmp_path, monitors)) == 2
    assert caplog.text.count("a report of a fault on purpose cannot be read") == 1, "said once"
    assert "there is no zygote to kill" in caplog.text
    assert "the network was not cut: interface nosuch: No such device" in caplog.text


@pytest.mark.parametrize("local_rank", [-1, -2, 3, 1 << 40])
def test_a_local_rank_that_this_node_has_not_harms_no_monitor(
    injected: Injected, tmp_path: Path, monitors: Monitors, local_rank: int
) -> None:
    tell(tmp_path, InjectionReport("kind:kill_monitor", 1, local_rank, "").encode())
    assert poll(injected, tmp_path, monitors) == []
    assert monitors.process.poll() is None


def test_a_training_may_ask_for_faults_itself_unless_it_is_no_python(tmp_path: Path) -> None:
    assert Injected(FAULTS, tmp_path / "m0", no_python=True).descriptors() == set()
    assert list(tmp_path.iterdir()) == []
    one = Injected((), tmp_path / "m0", no_python=False)
    assert len(one.descriptors()) == 1
    one.close()


CUT = """
import subprocess
from ft_launcher.agent.cycle import fault_injection
from rank_monitor.contract.settings.injection import parse
up = lambda: "UP" in subprocess.run(["ip", "-o", "link", "show", "lo"], capture_output=True, text=True).stdout
before = up()
fault_injection._carry_out(parse("kind:cut_network,interface:lo"), 0, ())
print(before, up())
"""


def test_a_network_is_cut() -> None:
    """The loopback of a namespace of its own."""
    require(unavailable())
    words = ["unshare", "--net", "sh", "-ec", 'ip link set lo up; exec "$@"', "sh", sys.executable, "-c", CUT]
    done = run(words, limit_s=120)
    assert done.stdout == "True False\n", done.stderr
