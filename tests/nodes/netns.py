"""A network of nodes on one machine: a namespace of network, host name and /etc/hosts per node, a cable to one switch.

Each namespace is held by a process that ends when its input does, so that a network ends with whoever made it. The
switch is a namespace too: nothing has a name or an address on the machine itself, and networks cannot meet each other.
Knows no launcher.
"""

from __future__ import annotations

import functools
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.faults.job import kill
from tests.patience import patient
from tests.program import run

_PROGRAMS = ("unshare", "nsenter", "mount", "hostname", "ip", "nft")
_PROBE = "ip link add b0 type bridge && ip link add type veth && nft add table inet t"
_HOLD = 'ip link set lo up && hostname "$1" && mount --bind "$2" /etc/hosts && echo up && exec cat'
_LIMIT_S = 10.0


class Network:
    """Nodes that reach each other by name; a context manager.

    Args:
        folder: where the nodes' common /etc/hosts is kept.
        nodes: names of the first nodes; `add` makes more.
    """

    def __init__(self, folder: Path, *nodes: str) -> None:
        self._hosts = folder / "hosts"
        self._first = nodes
        self._nodes: dict[str, _Node] = {}
        self._switch: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Network:
        self._hosts.write_text("127.0.0.1 localhost\n")
        try:
            self._switch = _hold("switch", self._hosts)
            _in_net(self._switch.pid, ["ip", "-batch", "-"], "link add br0 type bridge\nlink set br0 up\n")
            for name in self._first:
                self.add(name)
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._remove()

    def add(self, name: str) -> None:
        """A new node, plugged in, that all others know by name."""
        assert name.isalnum() and name not in self._nodes and self._switch is not None
        number = len(self._nodes) + 1
        node = _Node(_hold(name, self._hosts), f"10.77.0.{number}", f"port{number}")
        self._nodes[name] = node
        with self._hosts.open("a") as hosts:  # the same file, so that each node's mount of it shows the line
            hosts.write(f"{node.address} {name}\n")
        cable = f"link add {node.port} type veth peer name eth0 netns {node.pid}\n"
        _in_net(self._switch.pid, ["ip", "-batch", "-"], f"{cable}link set {node.port} master br0 up\n")
        _in_net(node.pid, ["ip", "-batch", "-"], f"addr add {node.address}/16 dev eth0\nlink set eth0 up\n")

    @property
    def nodes(self) -> tuple[str, ...]:
        """Their names."""
        return tuple(self._nodes)

    def address(self, name: str) -> str:
        """A node's address."""
        return self._nodes[name].address

    def holder(self, name: str) -> int:
        """The pid of the process that keeps a node's namespaces."""
        return self._nodes[name].pid

    def run(self, name: str, argv: Sequence[str | os.PathLike[str]], **popen: Any) -> subprocess.Popen[Any]:
        """Starts a process inside a node; `popen` as for `subprocess.Popen`, whose pid is the program's own."""
        enter = ["nsenter", f"--target={self._nodes[name].pid}", "--net", "--uts", "--mount"]
        folder = popen.pop("cwd", None) or Path.cwd()
        process = subprocess.Popen([*enter, f"--wd={folder}", "--", *argv], **popen)
        self._nodes[name].started.append(process)
        return process

    def proc_net(self, name: str) -> Path:
        """What `/proc/net` is inside a node."""
        return Path(f"/proc/{self._nodes[name].pid}/net")

    def processes(self, name: str) -> set[int]:
        """The pids of all that runs inside a node, or is on its way into it."""
        node = self._nodes[name]
        inside = _namespace(node.pid)
        found = {int(entry.name) for entry in os.scandir("/proc") if entry.name.isdigit()}
        found = {pid for pid in found - {node.pid} if inside and _namespace(pid) == inside}
        return found | {process.pid for process in node.started if process.poll() is None}

    def kill(self, name: str) -> None:
        """SIGKILL to all that runs inside a node, stopped first so that nothing can answer, until nothing runs."""
        deadline = time.monotonic() + patient(_LIMIT_S)
        while pids := self.processes(name):
            assert time.monotonic() < deadline, f"{pids} cannot be killed"
            for number in (signal.SIGSTOP, signal.SIGKILL):
                for pid in pids:
                    kill(pid, number)

    def cut(self, name: str) -> None:
        """Pulls a node's cable at the switch: what is sent gets lost, and nobody is told."""
        self._plug(name, "down")

    def heal(self, name: str) -> None:
        """Plugs the cable in again."""
        self._plug(name, "up")

    def drop(self, name: str, peer: str) -> None:
        """Nothing passes any more between two nodes, without a word to either; each reaches all others."""
        to, by = self.address(peer), "type filter hook"
        rules = (
            f"table inet drop_{peer} {{\n"
            f"chain receive {{\n{by} input priority 0\nip saddr {to} drop\n}}\n"
            f"chain send {{\n{by} output priority 0\nip daddr {to} drop\n}}\n}}\n"
        )
        _in_net(self._nodes[name].pid, ["nft", "-f", "-"], rules)

    def undrop(self, name: str, peer: str) -> None:
        """Takes a `drop` back, given in the same order."""
        _in_net(self._nodes[name].pid, ["nft", "delete", "table", "inet", f"drop_{peer}"])

    def lose_packets(self, name: str, percent: int) -> None:
        """A node loses so many of a hundred packets that come to it."""
        rule = f"numgen random mod 100 < {percent} drop"
        table = (
            f"table inet loss {{\nchain receive {{\ntype filter hook input priority 0\niif lo accept\n{rule}\n}}\n}}\n"
        )
        _in_net(self._nodes[name].pid, ["nft", "-f", "-"], table)

    def _plug(self, name: str, state: str) -> None:
        assert self._switch is not None
        _in_net(self._switch.pid, ["ip", "link", "set", self._nodes[name].port, state])

    def _remove(self) -> None:
        try:
            for name in self._nodes:
                self.kill(name)
        finally:
            for holder in (*(node.holder for node in self._nodes.values()), self._switch):
                if holder is not None:
                    holder.communicate()
            self._nodes.clear()


@dataclass(frozen=True)
class _Node:
    holder: subprocess.Popen[bytes]
    address: str
    port: str
    started: list[subprocess.Popen[Any]] = field(default_factory=list)

    @property
    def pid(self) -> int:
        return self.holder.pid


@functools.cache
def unavailable() -> str:
    """Why no network can be made here; empty when one can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if missing := [program for program in _PROGRAMS if shutil.which(program) is None]:
        return f"not installed: {', '.join(missing)}"
    words = ["unshare", "--net", "--uts", "--mount", "sh", "-c", _PROBE]
    probe = run(words)
    return f"namespaces cannot be made: {probe.stderr.strip()}" if probe.returncode else ""


def _hold(name: str, hosts: Path) -> subprocess.Popen[bytes]:
    """A process that keeps new namespaces alive until its input ends."""
    words = ["unshare", "--net", "--uts", "--mount", "sh", "-ec", _HOLD, "sh", name, str(hosts)]
    holder = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    assert holder.stdout is not None
    if holder.stdout.readline() != b"up\n":
        holder.communicate()
        raise OSError(f"the namespaces of {name} could not be made")
    return holder


def _in_net(pid: int, argv: Sequence[str], text: str = "") -> None:
    words = ["nsenter", f"--target={pid}", "--net", "--", *argv]
    done = run(words, input=text, limit_s=_LIMIT_S)
    assert done.returncode == 0, f"{' '.join(argv)}: {done.stderr}\n{text}"


def _namespace(pid: int) -> str:
    """The network namespace of a process; empty when it has ended, a zombie too."""
    try:
        return str(Path(f"/proc/{pid}/ns/net").readlink())
    except OSError:
        return ""
