"""Faults on purpose on this node: hears from the ranks which one strikes, has it written down, and carries out what is
of the system. When a fault is due, only the rank knows.
"""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import socket
import struct
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ft_launcher.attribution import Fault
from ft_launcher.monitors import NodeMonitors
from ft_launcher.recorder import Recorder
from ft_launcher.zygote_pool import ZygotePool
from rank_monitor.contract import channel, injection
from rank_monitor.contract.injection import Injection, Told

logger = logging.getLogger(__name__)

_MAX_BYTES = 65536
_NAME_BYTES = 16
_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 0x1  # SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP of Linux
_REQUEST = f"{_NAME_BYTES}sh22x"  # struct ifreq with its flags


class Injected:
    """The faults on purpose of this node's ranks, whether `--ft-inject`, a variable or the training asked for them.

    Args:
        faults: of `--ft-inject`, as text, one each.
        monitor_socket: where the first rank finds its monitor; the ranks tell of faults beside it.
        no_python: the ranks are no Python scripts, where nothing of ours runs.
    """

    def __init__(self, faults: Collection[str], monitor_socket: Path, no_python: bool) -> None:
        self._socket: socket.socket | None = None
        self._struck: dict[tuple[int, int], str] = {}
        if no_python and faults:
            logger.warning("--ft-inject does nothing: the ranks are no Python scripts")
        if not no_python:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
            path = injection.socket_beside(monitor_socket)
            with channel.short_address(path) as name:
                self._socket.bind(name)
            path.chmod(0o600)

    def descriptors(self) -> set[int]:
        """Readable when a rank told something."""
        return set() if self._socket is None else {self._socket.fileno()}

    def attend(self, cycle: int, recorder: Recorder, monitors: NodeMonitors, zygotes: ZygotePool) -> None:
        """Takes what ranks told since the last call, and does what is for the launcher to do. Does not block."""
        for told, fault in self._heard():
            if told.local_rank not in monitors.local_ranks:
                logger.warning(
                    "a fault on purpose was reported for local rank %d, which this node has not", told.local_rank
                )
                continue
            self._struck[cycle, told.local_rank] = f"a fault on purpose, {told.at}: {told.fault}"
            recorder.on_purpose(cycle, told)
            _carry_out(fault, monitors.pid(told.local_rank), zygotes.pids())

    def explain(self, fault: Fault, cycle: int) -> Fault:
        """The fault, with the likely cause where its rank was struck on purpose in this cycle."""
        return replace(fault, hint=self._struck.get((cycle, fault.local_rank), fault.hint))

    def close(self) -> None:
        """Hears no more."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _heard(self) -> Iterator[tuple[Told, Injection]]:
        while self._socket is not None:
            try:
                told = Told.decode(self._socket.recv(_MAX_BYTES))
                yield told, injection.parse(told.fault)
            except ValueError as error:
                logger.warning("what is no fault on purpose was told: %s", error)
            except OSError:
                return


def _carry_out(fault: Injection, monitor: int, zygotes: Collection[int]) -> None:
    """Does what a fault of the system is, given the pids of the rank's monitor and of the zygotes."""
    match fault.kind:
        case "kill_monitor":
            _kill(monitor)
        case "kill_zygote":
            if not zygotes:
                logger.warning("there is no zygote to kill: the ranks start by exec")
            for pid in zygotes:
                _kill(pid)
        case "kill_agent":
            _kill(os.getpid())
        case "cut_network":
            _set_link_down(fault.interface)


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _set_link_down(interface: str) -> None:
    """As `ip link set INTERFACE down` does it."""
    name = interface.encode()[: _NAME_BYTES - 1]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            _, flags = struct.unpack(_REQUEST, fcntl.ioctl(any_socket, _GET_FLAGS, struct.pack(_REQUEST, name, 0)))
            fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack(_REQUEST, name, flags & ~_UP))
        except OSError as error:
            logger.warning("the network was not cut: interface %s: %s", interface, error.strerror)
