"""The process of a standalone agent: how it is made of a fork of a rank, or of a new interpreter.

`companion.py` starts it. It is independent of its rank: it has its own session, none of the rank's descriptors and
signal handlers, and never runs code of the rank again. What it does is in `rank_calls.py`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import NoReturn

from ft_client.inprocess.standalone import rank_calls
from ft_client.inprocess.standalone.watched_call import MakeStore
from ft_client.inprocess.wait_daemon import COMPANION
from rank_monitor.contract.agent_order import AgentOrder
from rank_monitor.contract.processes import proc, resolver
from rank_monitor.contract.processes.fork import fork
from rank_monitor.contract.wire.json_record import read_record

_IGNORED = {
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2),
    *(signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU, signal.SIGPIPE, signal.SIGXFSZ),
}


def pid_file(folder: str) -> Path:
    """The file with the pid of the agent's process; it is written when `become` has ended its caller."""
    return Path(folder, "pid")


def become(order: AgentOrder, make_store: MakeStore | None = None) -> NoReturn:
    """Turns a new child process into the parent of a standalone agent, and ends it.

    Args:
        make_store: of the user's own factory.
    """
    try:
        os.setsid()
        proc.name_this_process(COMPANION)  # the fork inherits it: who finds its pid finds it by its name
        pid = fork()
        if pid == 0:
            _live(order, make_store)
        pid_file(order.folder).write_text(str(pid))
    finally:
        os._exit(0)


def main() -> NoReturn:
    """Entry point of a standalone agent in a new interpreter; the last argument is its `AgentOrder` as JSON."""
    become(read_record(AgentOrder, sys.argv[-1]))


def _live(order: AgentOrder, make_store: MakeStore | None) -> NoReturn:
    code = 1
    try:
        resolver.bound_process()
        # No object of the rank may be finalized in this process.
        gc.disable()
        gc.freeze()
        _settle(order)
        gc.enable()
        rank_calls.run(order, make_store)
        code = 0
    except BaseException:  # the edge of the process: the stack below is the rank's
        with contextlib.suppress(OSError):
            os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(code)


def _settle(order: AgentOrder) -> None:
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
