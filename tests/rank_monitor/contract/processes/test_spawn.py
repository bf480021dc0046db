"""Templates and monitors come and go: told, replaced, ended, and swept up when the launcher is killed."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from rank_monitor import contract
from rank_monitor.contract.processes import spawn
from rank_monitor.contract.processes.spawn import Template
from rank_monitor.contract.processes.sweep import processes_of
from rank_monitor.contract.settings.config import MonitorSettings
from rank_monitor.contract.wire import channel
from rank_monitor.contract.wire.launcher_messages import MonitorChanged, Ready, Snapshot, SnapshotRequest
from tests.program import run
from tests.rank_monitor.node import Node, Puppet, ended, playing

SETTINGS = MonitorSettings()
ROOT = str(Path(contract.__file__).resolve().parents[2])


@pytest.fixture
def node() -> Iterator[Node]:
    """One with a template of its own, to be harmed."""
    with playing() as played:
        yield played


def changes(node: Node, count: int) -> list[MonitorChanged]:
    """The next changes, in their order."""
    found: list[MonitorChanged] = []
    while len(found) < count:
        assert ended(node.template.fileno()), "no change was told"
        found += node.template.changes()
    return found


def lives(node: Node) -> bool:
    node.say(SnapshotRequest(1))
    return node.hear(Snapshot).token == 1


def test_monitors_are_forked_and_say_that_they_are_ready(node: Node) -> None:
    monitors = [node.monitor(SETTINGS, local_rank) for local_rank in range(3)]
    assert len({monitor.pid for monitor in monitors}) == 3
    assert [monitor.local_rank for monitor in monitors] == [0, 1, 2]
    assert lives(node)
    assert Path(f"/proc/{monitors[2].pid}/comm").read_text() == "ft_monitor2\n"
    assert node.template.pid is not None
    assert Path(f"/proc/{node.template.pid}/comm").read_text() == "ft_template\n"
    assert node.template.changes() == []


def test_changes_are_told(node: Node) -> None:
    pid = node.monitor(SETTINGS).pid
    os.kill(pid, signal.SIGSTOP)
    assert changes(node, 1) == [MonitorChanged(pid, "stopped", -signal.SIGSTOP)]
    os.kill(pid, signal.SIGCONT)
    assert changes(node, 1) == [MonitorChanged(pid, "continued", -signal.SIGCONT)]
    os.kill(pid, signal.SIGKILL)
    assert changes(node, 1) == [MonitorChanged(pid, "ended", -signal.SIGKILL)]
    assert ended(node.monitors[-1].pidfd)


def test_a_goodbye_ends_a_monitor_and_nothing_else(node: Node) -> None:
    node.monitor(SETTINGS)
    monitor = node.monitors.pop()
    bystander = node.puppet()
    monitor.close()
    assert changes(node, 1) == [MonitorChanged(monitor.pid, "ended", 0)]
    assert bystander.process.poll() is None
    assert node.folder.is_dir()


def test_a_stopped_monitor_is_ended_all_the_same(node: Node) -> None:
    node.monitor(SETTINGS)
    monitor = node.monitors.pop()
    os.kill(monitor.pid, signal.SIGSTOP)
    assert changes(node, 1)[0].change == "stopped"
    monitor.close(goodbye_s=0.1)
    assert changes(node, 1) == [MonitorChanged(monitor.pid, "ended", -signal.SIGKILL)]


@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2"])
def test_signals_for_others_end_neither_template_nor_monitor(node: Node, number: str) -> None:
    monitor = node.monitor(SETTINGS)
    assert node.template.pid is not None
    for pid in (node.template.pid, monitor.pid):
        os.kill(pid, getattr(signal, number))
    assert lives(node)
    node.monitor(SETTINGS)


def test_a_ctrl_c_does_not_reach_them(node: Node) -> None:
    monitor = node.monitor(SETTINGS)
    assert os.getsid(monitor.pid) != os.getsid(0)


@pytest.mark.parametrize("lost", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_without_a_template_monitors_are_started_by_themselves(
    node: Node, lost: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.monitor(SETTINGS)
    template_pid = node.template.pid
    assert template_pid is not None
    os.kill(template_pid, lost)
    monkeypatch.setattr(spawn, "_ANSWER_S", 0.5)  # not before: on a busy machine a live template may need longer
    assert lives(node), "monitors outlive their template"
    alone = node.monitor(SETTINGS, 7)
    assert not node.template.alive
    assert node.template.pid is None
    assert lives(node)
    assert Path(f"/proc/{alone.pid}/comm").read_text() == "ft_monitor7\n"
    os.kill(alone.pid, signal.SIGKILL)
    assert ended(alone.pidfd)
    assert node.template.changes() == []


def test_settings_that_are_none_are_survived(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """The template says no by saying nothing; it lives, and so does the launcher."""
    monkeypatch.setattr(spawn, "_ANSWER_S", 0.2)
    monkeypatch.setattr(spawn, "to_json", lambda settings: {"rank_heartbeat_timeout": -1})
    monitor = node.template.fork_monitor(node.listener, SETTINGS, 0)
    assert ended(monitor.pidfd), "it ends at once"
    monitor.close()


def test_it_starts_wherever_the_launcher_is(tmp_path: Path) -> None:
    """In a folder that was removed, with files and variables that would mislead an interpreter."""
    script = f"""
        import pathlib, shutil, sys
        sys.path.insert(0, {ROOT!r})
        from rank_monitor.contract.wire import channel
        from rank_monitor.contract.settings.config import MonitorSettings
        from rank_monitor.contract.processes.spawn import Template
        folder = pathlib.Path(sys.argv[1])
        shutil.rmtree(pathlib.Path.cwd())
        template = Template.start("tag-of-nobody", folder)
        monitor = template.fork_monitor(channel.listen(folder / "m0"), MonitorSettings(), 0)
        assert template.alive
        monitor.channel.setblocking(True)
        assert channel.receive(monitor.channel)[0]
        monitor.close()
        template.close()
    """
    misleading, gone = tmp_path / "misleading", tmp_path / "gone"
    misleading.mkdir()
    gone.mkdir()
    for name in ("json.py", "socket.py", "rank_monitor.py"):
        (misleading / name).write_text("raise SystemExit('misled')")
    variables = {"PYTHONPATH": str(misleading), "PYTHONHOME": "/nowhere"}
    command = [sys.executable, "-I", "-c", textwrap.dedent(script), str(tmp_path)]
    done = run(command, folder=gone, environ=os.environ | variables)
    assert (done.returncode, done.stderr) == (0, "")


LAUNCHER = f"""
import pathlib, sys
sys.path.insert(0, {ROOT!r})
from rank_monitor.contract.wire import channel
from rank_monitor.contract.settings.config import MonitorSettings
from rank_monitor.contract.processes.spawn import Template
folder, tag = pathlib.Path(sys.argv[1]), sys.argv[2]
template = Template.start(tag, folder)
monitors = [template.fork_monitor(channel.listen(folder / f"m{{n}}"), MonitorSettings(), n) for n in range(2)]
print(template.pid, *[monitor.pid for monitor in monitors], flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("first", [[], [0], [1], [0, 1]], ids=["all there", "template", "monitor", "both"])
def test_a_launcher_that_is_killed_leaves_nothing(tmp_path: Path, first: list[int], number: int) -> None:
    """No process of its job in whatever session, no monitor, no runtime folder."""
    folder, tag = tmp_path / "runtime", secrets.token_hex(8)
    (folder / "deeper").mkdir(parents=True)
    (folder / "deeper" / "file").touch()
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(folder), tag],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert launcher.stdout is not None
    pids = [int(pid) for pid in launcher.stdout.readline().split()]
    pidfds = [os.pidfd_open(pid) for pid in pids]
    ranks = [Puppet(tag) for _ in range(2)]
    for rank in ranks:
        assert rank.do("close") == "closed"
    os.kill(ranks[1].pid, signal.SIGSTOP)
    for index in first:
        os.kill(pids[index], number)
    launcher.kill()
    launcher.wait()
    for pidfd in pidfds:
        assert ended(pidfd)
        os.close(pidfd)
    assert [rank.wait() for rank in ranks] == [-signal.SIGKILL] * 2
    assert processes_of(tag) == []
    assert not folder.exists()
    for rank in ranks:
        rank.end()
    for pipe in (launcher.stdin, launcher.stdout):
        assert pipe is not None
        pipe.close()


def test_descriptors_are_given_back(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    template = Template.start("tag-of-nobody", tmp_path)
    listener = channel.listen(tmp_path / "m0")
    for _ in range(3):
        template.fork_monitor(listener, SETTINGS, 0).close()
    template.close()
    listener.close()
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def test_a_monitor_holds_only_what_is_its_own(node: Node) -> None:
    """Another's channel held open would hide from it that the launcher was killed."""
    first = node.monitor(SETTINGS)
    last = [node.monitor(SETTINGS, local_rank) for local_rank in range(1, 4)][-1]
    links = [os.readlink(entry) for entry in Path(f"/proc/{last.pid}/fd").iterdir()]  # noqa: PTH115
    assert sum(link.startswith("socket:") for link in links) == 2
    assert len(links) == len(list(Path(f"/proc/{first.pid}/fd").iterdir()))


def test_ready_names_the_pid_of_the_pidfd(node: Node) -> None:
    monitor = node.template.fork_monitor(node.listener, SETTINGS, 0)
    node.monitors.append(monitor)
    assert node.hear(Ready).pid == monitor.pid
    assert f"Pid:\t{monitor.pid}\n" in Path(f"/proc/self/fdinfo/{monitor.pidfd}").read_text()
