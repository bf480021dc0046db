"""Injected faults (`--ft-inject`) on this node: receives the ranks' reports, records them, and does the launcher's
part.

Only the rank knows when a fault is due, for example at a step of its training. So the client in the rank decides, and
reports to the launcher right before the fault. The rank itself does what concerns the rank (a signal, a hang). The
launcher does what concerns the system: it kills a monitor, the zygote or itself, or cuts a network interface.

Made by `composition.py`, polled by `agent/ranks.py` on the agent's thread.
"""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import socket
import struct
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

from ft_launcher.node.monitors.monitors import NodeMonitors
from ft_launcher.node.zygote.pool import ZygotePool
from ft_launcher.record.recorder import Recorder
from rank_monitor.contract.errors import ProtocolError
from rank_monitor.contract.settings import injection
from rank_monitor.contract.settings.injection import Injection, InjectionReport
from rank_monitor.contract.wire import channel
from rank_monitor.contract.wire.complaints import Complaints

logger = logging.getLogger(__name__)

_MAX_BYTES = 65536
"""Of one report, which is one short line of JSON. The kernel cuts a longer datagram, which is then refused."""
_MAX_AT_ONCE = 64
"""Reports that are received in one poll: more than the ranks of a node send at once. A rank that sends without end must
not keep the launcher from all else."""
_MAX_REPORTS = 1000
"""Reports of one rank that are recorded in a job: each is a line on the console and in the journal."""
# IFNAMSIZ of Linux, with the zero at the end.
_NAME_BYTES = 16
_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 0x1  # SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP of Linux
# It has 40 bytes on 64-bit Linux: name, flags, and the rest of the union. See netdevice(7).
_REQUEST = f"{_NAME_BYTES}sh22x"  # struct ifreq with its flags


class Injected:
    """The injected faults of this node's ranks: from `--ft-inject`, from a variable, or from the training itself.

    Args:
        faults: the texts of `--ft-inject`, one for each fault.
        monitor_socket: the first rank's socket to its monitor. The socket for reports lies beside it, where the client
            finds it without a variable of its own.
        no_python: whether the ranks are no Python scripts, so that no client runs in them and nothing can be injected.
    """

    def __init__(self, faults: Collection[str], monitor_socket: Path, no_python: bool) -> None:
        self._socket: socket.socket | None = None
        self._injected: dict[tuple[int, int], str] = {}
        self._reports: Counter[int] = Counter()
        self._complaints = Complaints(logger.warning)
        if no_python and faults:
            logger.warning("--ft-inject does nothing: the ranks are no Python scripts")
        if not no_python:
            # Datagrams: a rank that dies of SIGKILL next has sent all of its report, and connects to nothing.
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
            path = injection.socket_beside(monitor_socket)
            # A socket's address has 108 bytes at most, and TMPDIR may be long.
            with channel.short_address(path) as name:
                self._socket.bind(name)
            # Other users must not have the launcher kill its processes.
            path.chmod(0o600)

    def descriptors(self) -> set[int]:
        """Readable when a rank reported a fault."""
        if self._socket is None:
            return set()
        return {self._socket.fileno()}

    def poll(self, cycle: int, recorder: Recorder, monitors: NodeMonitors, zygotes: ZygotePool) -> None:
        """Records the ranks' reports since the last call, and does the launcher's part of each. Does not block.

        Args:
            cycle: the present one.
            recorder: writes the reports to journal and console.
            monitors: of this node, for a fault that kills one.
            zygotes: of this node, for a fault that kills the zygote.
        """
        for report, fault in self._receive():
            # The report comes from a rank: any number may be in it.
            if report.local_rank not in monitors.local_ranks:
                self._complaints.about(
                    "no rank", f"a fault on purpose was reported for local rank {report.local_rank}, which is not here"
                )
                continue
            if self._reports[report.local_rank] >= _MAX_REPORTS:
                self._complaints.about(
                    "too many", f"local rank {report.local_rank} reports too many faults on purpose: they are left out"
                )
                continue
            self._reports[report.local_rank] += 1
            self._injected[cycle, report.local_rank] = f"a fault on purpose, {report.at}: {report.fault}"
            recorder.fault_injected(cycle, report)
            _carry_out(fault, monitors.pid(report.local_rank), zygotes.pids())

    def during(self, cycle: int) -> dict[int, str]:
        """Returns the faults that were injected in a cycle: local rank -> the last one, in words.

        For the attribution: such a fault must not be taken for one of the hardware.
        """
        return {local_rank: text for (in_cycle, local_rank), text in self._injected.items() if in_cycle == cycle}

    def close(self) -> None:
        """Closes the socket; later reports are lost."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _receive(self) -> Iterator[tuple[InjectionReport, Injection]]:
        """Yields the readable reports that have arrived, each with the fault that it names."""
        for _ in range(_MAX_AT_ONCE):
            if self._socket is None:
                return
            try:
                report = InjectionReport.decode(self._socket.recv(_MAX_BYTES))
                yield report, injection.parse(report.fault)
            except (ProtocolError, ValueError) as error:
                self._complaints.about("unreadable", f"a report of a fault on purpose cannot be read: {error}")
            except OSError:
                return


def _carry_out(fault: Injection, monitor: int, zygotes: Collection[int]) -> None:
    """Does the launcher's part of a fault. Does nothing for a fault that concerns the rank alone.

    Args:
        fault: as the rank has reported it.
        monitor: pid of the rank's monitor.
        zygotes: pids of this node's zygotes.
    """
    match fault.kind:
        case "kill_monitor":
            _kill(monitor)
        case "kill_zygote":
            if not zygotes:
                logger.warning("there is no zygote to kill: the ranks start by exec")
            for pid in zygotes:
                _kill(pid)
        # The report was recorded before: this process does nothing after this line.
        case "kill_agent":
            _kill(os.getpid())
        case "cut_network":
            _set_link_down(fault.interface)


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _set_link_down(interface: str) -> None:
    """Does what `ip link set INTERFACE down` does; needs CAP_NET_ADMIN."""
    name = interface.encode()[: _NAME_BYTES - 1]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            _, flags = struct.unpack(_REQUEST, fcntl.ioctl(any_socket, _GET_FLAGS, struct.pack(_REQUEST, name, 0)))
            fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack(_REQUEST, name, flags & ~_UP))
        except OSError as error:
            logger.warning("the network was not cut: interface %s: %s", interface, error.strerror)
