"""Turns a fork of a rank, or a new interpreter, into a companion: a process that is independent of the rank.

`companion.py` calls it. A companion has its own session, none of the rank's descriptors and signal handlers, and never
runs code of the rank again. What it then watches is in `companion_watch.py`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import os
import signal
import socket
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

from ft_client.inprocess.standalone.companion_watch import CompanionWatch
from ft_client.inprocess.standalone.sidecar import Sidecar
from ft_client.inprocess.standalone.watched_call import MakeStore
from ft_client.inprocess.wait_daemon import COMPANION
from rank_monitor.contract.processes import proc, resolver
from rank_monitor.contract.processes.spawn import Template
from rank_monitor.contract.wire.json_record import read_record
from rank_monitor.contract.wire.launcher_messages import CycleStart

_IGNORED = {
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2),
    *(signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU, signal.SIGPIPE, signal.SIGXFSZ),
}


@dataclass(frozen=True)
class CompanionOrder:
    """The parameters of a companion: its rank, the runtime folder, and open descriptors.

    `tag` marks the template and the monitor, and no rank, so that nothing is killed when the companion is lost. `rank`
    is the rank's pidfd, `connection` the one to it, `listener` where it connects to its monitor, `log` the
    log file, or the null device.
    """

    tag: str
    member: int
    local_rank: int
    rank_pid: int
    started_ns: int
    reconnect: bool
    folder: str
    rank: int
    connection: int
    listener: int
    log: int

    @property
    def descriptors(self) -> tuple[int, ...]:
        """The descriptors that the companion keeps."""
        return self.rank, self.connection, self.listener, self.log

    def to_json(self) -> str:
        """One JSON object."""
        return json.dumps(asdict(self))


def pid_file(folder: str) -> Path:
    """The file with the companion's pid; it is written when `become` has ended its caller."""
    return Path(folder, "pid")


def become(order: CompanionOrder, make_store: MakeStore | None = None) -> NoReturn:
    """Turns a new child process into the parent of a companion, and ends it.

    Args:
        make_store: of the user's own factory.
    """
    try:
        os.setsid()
        proc.name_this_process(COMPANION)  # the fork inherits it: who finds its pid finds it by its name
        pid = os.fork()
        if pid == 0:
            _live(order, make_store)
        pid_file(order.folder).write_text(str(pid))
    finally:
        os._exit(0)


def main() -> NoReturn:
    """Entry point of a companion in a new interpreter; the last argument is its `CompanionOrder` as JSON."""
    become(read_record(CompanionOrder, sys.argv[-1]))


def _live(order: CompanionOrder, make_store: MakeStore | None) -> NoReturn:
    code = 1
    try:
        resolver.bound_process()
        # No object of the rank may be finalized in this process.
        gc.disable()
        gc.freeze()
        _settle(order)
        gc.enable()
        _watch(order, make_store)
        code = 0
    except BaseException:  # the edge of the process: the stack below is the rank's
        with contextlib.suppress(OSError):
            os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(code)


def _settle(order: CompanionOrder) -> None:
    faulthandler.cancel_dump_traceback_later()
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        with contextlib.suppress(OSError, ValueError):  # of the C library's own
            if number in _IGNORED:
                signal.signal(number, signal.SIG_IGN)
            else:
                signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    null = os.open(os.devnull, os.O_RDWR)
    for standard, of in enumerate((null, null, order.log)):
        os.dup2(of, standard)
    _close_all_but({0, 1, 2, *order.descriptors})
    sys.stdin, sys.stdout, sys.stderr = None, open(1, "w"), open(2, "w")  # noqa: SIM115


def _close_all_but(kept: set[int]) -> None:
    for descriptor in proc.own_descriptors():
        if descriptor not in kept:
            with contextlib.suppress(OSError):
                os.close(descriptor)


def _watch(order: CompanionOrder, make_store: MakeStore | None) -> None:
    def say(text: str) -> None:
        line = f"{time.strftime('%Y-%m-%d %H:%M:%S')} companion of rank {order.member}: {text}\n"
        with contextlib.suppress(OSError):
            os.write(2, line.encode())

    def start_sidecar() -> Sidecar:
        start = CycleStart(
            0, order.member, order.rank_pid, order.started_ns, str(folder / "stacks"), reconnect=order.reconnect
        )
        return Sidecar(template, folder, socket.socket(fileno=order.listener), order.local_rank, start, say)

    say(f"watches process {order.rank_pid}; this is process {os.getpid()}")
    folder = Path(order.folder)
    template = Template.start(order.tag, folder)
    import torch.distributed  # noqa: F401  (here: the template starts meanwhile, and threads do not begin with it)

    connection = socket.socket(fileno=order.connection)
    connection.setblocking(False)
    CompanionWatch(order.rank, connection, start_sidecar, make_store, say).run()
    say("ends")
