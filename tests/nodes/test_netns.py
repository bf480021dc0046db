"""The network itself: nodes know each other by name, a cut or a drop is silent, and it all goes away at the end."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.faults.job import lives
from tests.nodes.conftest import require
from tests.nodes.netns import Network, unavailable
from tests.patience import patient, until
from tests.program import ROOT, run

ECHO = """
import socketserver
class Echo(socketserver.StreamRequestHandler):
    def handle(self):
        for line in self.rfile:
            self.wfile.write(line)
server = socketserver.ThreadingTCPServer(("", 99), Echo)
print("listens", flush=True)
server.serve_forever()
"""
CALL = """
import socket, sys
with socket.create_connection((sys.argv[1], 99)) as line:
    print("connected", flush=True)
    for word in sys.stdin:
        line.sendall(word.encode())
        print(line.makefile().readline(), end="", flush=True)
"""
ANSWERS_S = patient(20.0)
SILENT_S = 0.5


class Call:
    """An open connection from one node to another that sends back what it hears."""

    def __init__(self, network: Network, node: str, peer: str) -> None:
        words = [sys.executable, "-S", "-u", "-c", CALL, peer]
        self._process = network.run(node, words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.connected = self.hears() == "connected"

    def say(self, word: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n".encode())
        self._process.stdin.flush()

    def hears(self, limit_s: float = ANSWERS_S) -> str:
        """The next word; empty when none comes in time."""
        assert self._process.stdout is not None
        ready = select.select([self._process.stdout], [], [], limit_s)[0]
        return self._process.stdout.readline().decode().strip() if ready else ""

    def asks(self, word: str) -> str:
        self.say(word)
        return self.hears()

    def end(self) -> None:
        self._process.communicate()


@pytest.fixture
def three(network: Network) -> Network:
    """Three nodes; the first one answers."""
    for name in ("n0", "n1", "n2"):
        network.add(name)
    server = network.run("n0", [sys.executable, "-S", "-u", "-c", ECHO], stdout=subprocess.PIPE)
    assert server.stdout is not None and server.stdout.readline() == b"listens\n"
    return network


@contextmanager
def calls(network: Network, *nodes: str) -> Iterator[list[Call]]:
    """Connections of these nodes to the first."""
    opened = [Call(network, node, "n0") for node in nodes]
    yield opened
    for call in opened:
        call.end()


def test_nodes_have_names_addresses_and_hosts_of_their_own(three: Network, tmp_path: Path) -> None:
    script = 'hostname; pwd; getent hosts n0 | cut -d" " -f1; cat /proc/net/dev | grep -c eth0; echo $MARK'
    process = three.run("n2", ["sh", "-c", script], cwd=tmp_path, env={**os.environ, "MARK": "m"}, stdout=-1, text=True)
    assert process.communicate()[0].split() == ["n2", str(tmp_path), three.address("n0"), "1", "m"]
    assert os.uname().nodename not in three.nodes
    assert "n0" not in Path("/etc/hosts").read_text().split()


def test_nodes_reach_each_other_by_name(three: Network) -> None:
    with calls(three, "n1", "n2") as (one, two):
        assert one.connected and two.connected
        assert (one.asks("one"), two.asks("two")) == ("one", "two")


def test_a_cut_node_hears_nothing_and_all_of_it_once_healed(three: Network) -> None:
    with calls(three, "n1", "n2") as (cut, other):
        three.cut("n1")
        cut.say("late")
        assert cut.hears(SILENT_S) == ""
        assert other.asks("still here") == "still here"
        three.heal("n1")
        assert cut.hears() == "late"


def test_a_drop_parts_two_nodes_and_no_others(three: Network) -> None:
    with calls(three, "n1", "n2") as (parted, other):
        three.drop("n1", "n0")
        parted.say("late")
        assert parted.hears(SILENT_S) == ""
        assert other.asks("still here") == "still here"
        three.undrop("n1", "n0")
        assert parted.hears() == "late"


def interfaces() -> set[str]:
    """The network interfaces of this machine."""
    return {name for _, name in socket.if_nameindex()}


def test_networks_do_not_meet_and_leave_nothing(tmp_path: Path) -> None:
    require(unavailable())
    before = interfaces()
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
    with Network(folders[0], "n0") as one, Network(folders[1], "n0", "n1") as two:
        assert one.address("n0") == two.address("n0")
        sleepers = [network.run("n0", ["sleep", "1000"]) for network in (one, two)]
        assert [len(network.processes("n0")) for network in (one, two)] == [1, 1]
    assert [sleeper.wait(ANSWERS_S) for sleeper in sleepers] == [-9, -9]
    assert interfaces() == before


def test_a_network_ends_with_the_process_that_made_it(tmp_path: Path) -> None:
    require(unavailable())
    maker = f"""
import os, sys
from pathlib import Path
from tests.nodes.netns import Network
network = Network(Path({str(tmp_path)!r}), "n0").__enter__()
print(network.proc_net("n0").parent.name, flush=True)
os.kill(os.getpid(), 9)
"""
    done = run([sys.executable, "-c", maker], folder=ROOT)
    assert done.returncode == -9, done.stderr
    until(lambda: not lives(int(done.stdout)), "the namespaces are still held")
