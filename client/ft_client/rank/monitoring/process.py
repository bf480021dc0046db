"""The client's state of this process: stack dump, link and watchdog. Made once; removed in a forked child.

`bootstrap.py` calls `start` before the script begins, so a rank is connected even if its program never asks to be
watched. `RankMonitorClient` calls it again, and gets the same link.

On a signal of the monitor, faulthandler appends this process's stacks to a file: in C, so also while the GIL
is held.

A forked child of a rank, such as a worker of a data loader, is not the rank: it must not speak for it, nor keep its
connection open. So the child gives up the link, and gets no other (`is_forked`).
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from ft_client.rank.monitoring import fork_warning
from ft_client.rank.monitoring.link import Link
from ft_client.rank.monitoring.watchdog import Watchdog
from rank_monitor.contract import env
from rank_monitor.contract.processes.descriptor import moved_up

_link: Link | None = None
_forked = False


def start(
    own: bool = False, environment: Mapping[str, str] | None = None, reports_modules: bool = False
) -> Link | None:
    """Returns the link of this process; the first call connects it, if the environment names a monitor.

    Args:
        own: whether the launcher started this very process for the rank.
        environment: names the socket and the stack file of a monitor that was started for this very process, which may
            be a forked child (a standalone agent does so). None: the variables of this process name the rank's monitor.
        reports_modules: whether the rank is to send which modules its program has imported.

    Returns:
        The link; None where there is no monitor, or where this is a forked child of a process that had a link.
    """
    global _link, _forked
    if environment is None:
        environment = os.environ
    else:
        _forked = False
    path = environment.get(env.RANK_MONITOR_SOCKET)
    if _link is not None or _forked or not path:
        return _link
    stack_signal = _register_stack_dump(environment)
    _link = Link(Path(path), own)
    os.register_at_fork(after_in_child=_in_child)
    fork_warning.keep_away()
    _link.reconnect()
    with contextlib.suppress(OSError, AttributeError, RuntimeError):
        Watchdog(_link, reports_modules).start(stack_signal)
    return _link


def current() -> Link | None:
    """Returns the link of this process; None if there is none."""
    return _link


def is_forked() -> bool:
    """Whether this is a forked child of a process that had a link. Such a child does not count as the rank."""
    return _forked


def _in_child() -> None:
    """Runs in each forked child, right after the fork."""
    global _link, _forked
    _forked = True
    if _link is not None:
        _link.close_in_child()
        _link = None


def _register_stack_dump(environment: Mapping[str, str]) -> int | None:
    """Has faulthandler write the stacks to the file, on the signal, that the environment names.

    Returns the number of the signal; None where nothing was registered: then there are no stacks of this rank.
    """
    path, number = environment.get(env.STACK_FILE), environment.get(env.STACK_SIGNAL)
    if not path or not number:
        return None
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        descriptor = moved_up(_opened(path))
        faulthandler.register(int(number), file=descriptor, all_threads=True, chain=False)
        return int(number)
    return None


def _opened(path: str) -> int:
    """Returns a descriptor that appends to a regular file, which is made if it is missing.

    A rank of an earlier cycle may have put a FIFO or a link there, which is removed.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
    with contextlib.suppress(OSError):
        if not stat.S_ISREG(os.lstat(path).st_mode):
            os.unlink(path)  # noqa: PTH108  (pathlib costs each rank 4 ms at its start)
    return os.open(path, flags, 0o600)
