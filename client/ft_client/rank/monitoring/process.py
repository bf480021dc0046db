"""The client's state of this process: stack dump, link and watchdog. Made once; removed in a forked child.

On a signal of the monitor, faulthandler appends this process's stacks to a file. It works in C, so also while the GIL
is held.
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


def start(own: bool = False, environment: Mapping[str, str] | None = None, tells_modules: bool = False) -> Link | None:
    """Returns the link of this process; the first call connects it, if the environment names a monitor.

    Args:
        own: whether the launcher started this very process for the rank.
        environment: names the socket and the stack file of a monitor that was started for this very process, which may
            be a forked child. None: the variables of this process name the rank's monitor.
        tells_modules: whether the rank is to send which modules its program has imported.

    Returns:
        None without a monitor. With the rank's: None in a forked child of a process that had a link.
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
        Watchdog(_link, tells_modules).start(stack_signal)
    return _link


def current() -> Link | None:
    """The link of this process; None if it was not started."""
    return _link


def is_forked() -> bool:
    """Whether this is a forked child of a process that had a link. Such a child does not count as the rank."""
    return _forked


def _in_child() -> None:
    global _link, _forked
    _forked = True
    if _link is not None:
        _link.close_in_child()
        _link = None


def _register_stack_dump(environment: Mapping[str, str]) -> int | None:
    """Registers the signal and the file that the environment names. Returns the signal; None if it could not."""
    path, number = environment.get(env.STACK_FILE), environment.get(env.STACK_SIGNAL)
    if not path or not number:
        return None
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        descriptor = moved_up(_opened(path))
        faulthandler.register(int(number), file=descriptor, all_threads=True, chain=False)
        return int(number)
    return None


def _opened(path: str) -> int:
    """A descriptor that appends to a regular file. A rank of an earlier cycle may have put a FIFO or a link there."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
    with contextlib.suppress(OSError):
        if not stat.S_ISREG(os.lstat(path).st_mode):
            os.unlink(path)  # noqa: PTH108  (pathlib costs each rank 4 ms at its start)
    return os.open(path, flags, 0o600)
