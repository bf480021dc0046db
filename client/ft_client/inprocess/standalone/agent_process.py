"""The process of a standalone agent: how it is made of a fork of a rank, or of a new interpreter.

`agent_handle.py` makes a child process, by a fork or by executing an interpreter, in which `become` runs. The child
forks the agent, writes the agent's pid to a file, and ends:

    rank -> child (`become`) -> agent (`_live`): `rank_calls.run`, then the end

So the agent is no child of the rank: a script that reaps every child by itself does not meet it, and it outlives the
rank, whose end it has to report. The agent has a session of its own, none of the rank's descriptors and signal
handlers, and never runs code of the rank again. What it does is in `rank_calls.py`.
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
from ft_client.inprocess.wait_daemon import PROCESS_NAME
from rank_monitor.contract.agent_order import AgentOrder
from rank_monitor.contract.processes import proc, resolver
from rank_monitor.contract.processes.fork import fork
from rank_monitor.contract.wire.json_record import read_record

_IGNORED = {
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2),
    *(signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU, signal.SIGPIPE, signal.SIGXFSZ),
}
"""Signals that the agent ignores. Those of a terminal or a scheduler are meant for the ranks, which end by them: the
agent has to report that. The last two would end the agent for a log that cannot be written."""


def pid_file(folder: str) -> Path:
    """Returns the file with the pid of the agent's process, which is there once `become` has ended the child."""
    return Path(folder, "pid")


def become(order: AgentOrder, make_store: MakeStore | None = None) -> NoReturn:
    """Turns a new child process into the parent of a standalone agent, and ends it. Never returns.

    Called in the child, whose stack may still be the rank's: `os._exit` runs none of the rank's exit functions.

    Args:
        order: the parameters of the agent.
        make_store: of the user's own factory; None: the calls have stores with an address, or this is no fork.
    """
    try:
        os.setsid()
        # Set before the fork, which inherits the name: `ps` shows it from the first moment of the new process.
        proc.name_this_process(PROCESS_NAME)
        pid = fork()
        if pid == 0:
            _live(order, make_store)
        pid_file(order.folder).write_text(str(pid))
    finally:
        os._exit(0)


def main() -> NoReturn:
    """Entry point of a standalone agent in a new interpreter; the last argument is its `AgentOrder` as JSON.

    `agent_handle.py: _execute` has the interpreter call it. A store of the user's own factory is not known here.
    """
    become(read_record(AgentOrder, sys.argv[-1]))


def _live(order: AgentOrder, make_store: MakeStore | None) -> NoReturn:
    """Runs the agent in its process until its work is done. After an error, which the log has, the exit code is 1."""
    code = 1
    try:
        resolver.bound_process()
        # No object of the rank may be finalized in this process: its finalizer would act on what the rank still uses.
        gc.disable()
        gc.freeze()
        _settle(order)
        gc.enable()
        rank_calls.run(order, make_store)
        code = 0
    except BaseException:  # This is the edge of the process: the frames below are the rank's.
        with contextlib.suppress(OSError):
            os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(code)


def _settle(order: AgentOrder) -> None:
    """Frees this process of all that a fork has of its rank: timers, signal handlers, blocked signals, descriptors."""
    faulthandler.cancel_dump_traceback_later()
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        with contextlib.suppress(OSError, ValueError):  # Signals that the C library uses itself cannot be set.
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
    """Closes the rank's descriptors: while a copy is open, the other end of a connection does not see that the rank has
    ended."""
    for descriptor in proc.own_descriptors():
        if descriptor not in kept:
            with contextlib.suppress(OSError):
                os.close(descriptor)
